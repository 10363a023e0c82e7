"""An MLP trained by `dtrain run` and by the tools that a user would pick instead, each as its guide writes it.

The MLP 784-512-256-10 with AdamW at batch 128 on 60,000 images of noise in memory, shuffled in every epoch. Each tool
is a process of its own, with the environment that its users have: JAX's own flags for all but dtrain, which sets one
for itself (the last column). An epoch of each alternates with the others, after one that is not counted, so compilation
and start are left out:

- `dtrain` is a whole `dtrain run` with its defaults: data read and prefetched, metrics logged, heartbeats, guards;
  `dtrain x 32` runs 32 steps in one call (`engine.steps_per_call`), as the recipe mlp-mnist does, and once more with
  another value of dtrain's flag;
- `bare` is a loop over one jitted step of JAX and optax, which prints the loss every 50 steps;
- `careful` is the same with batches of uint8, normalised on the device, and the state donated; `careful x 32` runs 32
  of its steps in one `lax.scan`;
- `nnx` is Flax NNX with `nnx.jit` and `nnx.Optimizer`; `nnx cached` uses `nnx.cached_partial`;
- `keras` is `model.fit` of Keras on JAX; `keras x 32` runs 32 steps in one call (`steps_per_execution`);
- `torch` slices tensors in memory; `torch loader` reads them with a DataLoader; `torch compile` (`--compile`) takes
  minutes to start;
- `lightning` is a Trainer with a CSV logger.

Tools that are not installed are left out. Medians over rounds, per step; with words, only tools whose names have one:

    python benchmarks/mlp_frameworks.py [--compile] [WORD ...]
"""

import io
import itertools
import os
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console as Rich
from rivals import NAME, REDUCE, Costs, Rival, clocked, duel, serve

ROUNDS, BATCH, ROWS, CALL = 9, 128, 60_000, 32
SIZES = (784, 512, 256, 10)
NOTHING = Path(os.devnull).open("w")  # noqa: SIM115 - where losses are printed
RECIPE = Path(__file__).parents[1] / "recipes" / "mlp-mnist.yaml"
STEPS = ROWS // BATCH
Epoch = Callable[[], Costs]
"""Trains for about an epoch; returns (wall, CPU) seconds per step."""


def images() -> tuple[np.ndarray, np.ndarray]:
    """Images of noise and labels, uint8."""
    draw = np.random.default_rng(0)
    return draw.integers(0, 256, (ROWS, 28, 28), np.uint8), draw.integers(0, 10, ROWS, np.uint8)


def normalised() -> tuple[np.ndarray, np.ndarray]:
    """The same as rows of float32, and labels of int32."""
    image, label = images()
    return ((image.reshape(ROWS, -1) / np.float32(255)) - np.float32(0.1307)) / np.float32(0.3081), label.astype("i4")


def timed(epoch: Callable[[], object]) -> Epoch:
    work = clocked(epoch)

    def run() -> Costs:
        wall, cpu = work()
        return wall / STEPS, cpu / STEPS

    return run


def dtrain(folder: Path, at_once: int = 1) -> Epoch:
    from dtrain.recipe.load import load
    from dtrain.runtime.bench import Marks
    from dtrain.train.run import run

    image, label = images()
    for name, values in (("train-images-idx3", image), ("train-labels-idx1", label)):
        header = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape)
        (folder / f"{name}-ubyte").write_bytes(header + values.tobytes())
    for name, values in (("t10k-images-idx3", image[:1000]), ("t10k-labels-idx1", label[:1000])):
        header = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape)
        (folder / f"{name}-ubyte").write_bytes(header + values.tobytes())
    count = iter(range(1000))

    def epoch() -> Costs:
        asked = [f"data.root={folder}", "epochs=null", f"steps={STEPS}", "evaluate.every=0"]
        asked += [f"engine.steps_per_call={at_once}", f"track.every={64 if at_once > 1 else 50}"]
        asked += ["optimizer.schedule={kind: constant}", "checkpoint={every: 0, minutes: 0}", "track.to=[tensorboard]"]
        console = Marks(rich=Rich(file=io.StringIO()))
        run(load(RECIPE, [*asked, f"name=round-{next(count)}"]), folder, console)
        return console.cost.ms / 1e3, console.cost.cpu_ms / 1e3

    return epoch


def shuffled(image: Any, label: Any, draw: np.random.Generator) -> Iterator[tuple[Any, Any]]:
    order = draw.permutation(ROWS)
    for first in range(0, STEPS * BATCH, BATCH):
        rows = order[first : first + BATCH]
        yield image[rows], label[rows]


def bare(_: Path) -> Epoch:
    image, label = normalised()
    draw, optimizer = np.random.default_rng(1), optax.adamw(1e-3, weight_decay=0.01)
    keys = jax.random.split(jax.random.key(0), 3)
    params = [
        (jax.random.normal(key, (m, n)) * (2 / m) ** 0.5, jnp.zeros(n))
        for key, (m, n) in zip(keys, itertools.pairwise(SIZES), strict=True)
    ]

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        for weight, bias in params[:-1]:
            x = jax.nn.relu(x @ weight + bias)
        logits = x @ params[-1][0] + params[-1][1]
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    @jax.jit
    def step(params: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, x, y)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    held = [params, optimizer.init(params)]

    def epoch() -> None:
        for number, (x, y) in enumerate(shuffled(image, label, draw), 1):
            held[0], held[1], value = step(held[0], held[1], x, y)
            if number % 50 == 0:
                print(f"step {number}: loss {float(value):.4f}", file=NOTHING)
        jax.block_until_ready(held)

    return timed(epoch)


def careful(_: Path, at_once: int = 1) -> Epoch:
    (image, label), draw, optimizer = images(), np.random.default_rng(1), optax.adamw(1e-3, weight_decay=0.01)
    image = image.reshape(ROWS, -1)
    keys = jax.random.split(jax.random.key(0), 3)
    params = [
        (jax.random.normal(key, (m, n)) * (2 / m) ** 0.5, jnp.zeros(n))
        for key, (m, n) in zip(keys, itertools.pairwise(SIZES), strict=True)
    ]

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        x = (x.astype(jnp.float32) / 255 - 0.1307) / 0.3081
        for weight, bias in params[:-1]:
            x = jax.nn.relu(x @ weight + bias)
        logits = x @ params[-1][0] + params[-1][1]
        return optax.softmax_cross_entropy_with_integer_labels(logits, y.astype(jnp.int32)).mean()

    def step(held: Any, batch: Any) -> Any:
        params, state = held
        value, gradients = jax.value_and_grad(loss)(params, *batch)
        updates, state = optimizer.update(gradients, state, params)
        return (optax.apply_updates(params, updates), state), value

    several = step if at_once == 1 else lambda held, batches: jax.lax.scan(step, held, batches)
    call, held = jax.jit(several, donate_argnums=0), [(params, optimizer.init(params))]

    def batches() -> Iterator[tuple[Any, Any]]:
        order = draw.permutation(ROWS)
        for first in range(0, STEPS * BATCH, BATCH * at_once):
            rows = order[first : min(first + BATCH * at_once, STEPS * BATCH)]
            shape = (BATCH,) if at_once == 1 else (-1, BATCH)
            yield image[rows].reshape(*shape, image.shape[1]), label[rows].reshape(shape)

    def epoch() -> None:
        for number, batch in enumerate(batches(), 1):
            held[0], value = call(held[0], batch)
            if number * at_once % (2 * CALL) < at_once:
                print(f"step {number * at_once}: loss {float(np.asarray(value).reshape(-1)[-1]):.4f}", file=NOTHING)
        jax.block_until_ready(held)

    return timed(epoch)


def nnx(_: Path, cached: bool = False) -> Epoch:
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.layers = nnx.List([nnx.Linear(m, n, rngs=rngs) for m, n in itertools.pairwise(SIZES)])

        def __call__(self, x: jax.Array) -> jax.Array:
            for layer in self.layers[:-1]:
                x = nnx.relu(layer(x))
            return self.layers[-1](x)

    image, label = normalised()
    draw, model = np.random.default_rng(1), Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3, weight_decay=0.01), wrt=nnx.Param)

    def loss(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()

    @nnx.jit
    def step(model: Any, optimizer: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        value, gradients = nnx.value_and_grad(loss)(model, x, y)
        optimizer.update(model, gradients)
        return value

    call: Any = nnx.cached_partial(step, model, optimizer) if cached else lambda x, y: step(model, optimizer, x, y)

    def epoch() -> None:
        for number, (x, y) in enumerate(shuffled(image, label, draw), 1):
            value = call(x, y)
            if number % 50 == 0:
                print(f"step {number}: loss {float(value):.4f}", file=NOTHING)
        jax.block_until_ready(nnx.state(model))

    return timed(epoch)


def keras(_: Path, at_once: int = 1) -> Epoch:
    import keras as k

    image, label = normalised()
    model = k.Sequential([k.layers.Dense(n, activation="relu") for n in SIZES[1:-1]] + [k.layers.Dense(SIZES[-1])])
    model.compile(
        optimizer=k.optimizers.AdamW(1e-3, weight_decay=0.01),
        loss=k.losses.SparseCategoricalCrossentropy(from_logits=True),
        steps_per_execution=at_once,
    )
    rows = STEPS * BATCH
    return timed(lambda: model.fit(image[:rows], label[:rows], batch_size=BATCH, epochs=1, verbose=0))


def torch_net() -> Any:
    import torch

    layers: list[Any] = []
    for m, n in itertools.pairwise(SIZES):
        layers += [torch.nn.Linear(m, n), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])


def torch(_: Path, loader: bool = False, compiled: bool = False) -> Epoch:
    import torch as t

    image, label = normalised()
    x_all, y_all = t.from_numpy(image), t.from_numpy(label).long()
    model = torch_net()
    optimizer = t.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    called: Any = t.compile(model) if compiled else model
    data = t.utils.data.DataLoader(t.utils.data.TensorDataset(x_all, y_all), BATCH, shuffle=True, drop_last=True)

    def sliced() -> Iterator[Any]:
        order = t.randperm(ROWS)
        for first in range(0, STEPS * BATCH, BATCH):
            rows = order[first : first + BATCH]
            yield x_all[rows], y_all[rows]

    def epoch() -> None:
        for number, (x, y) in enumerate(data if loader else sliced(), 1):
            optimizer.zero_grad()
            value = t.nn.functional.cross_entropy(called(x), y)
            value.backward()
            optimizer.step()
            if number % 50 == 0:
                print(f"step {number}: loss {value.item():.4f}", file=NOTHING)

    return timed(epoch)


def lightning(folder: Path) -> Epoch:
    import logging
    import signal
    import warnings

    import lightning as li
    import torch as t
    from lightning.pytorch.loggers import CSVLogger

    signal.signal(signal.SIGPROF, signal.SIG_IGN)  # Lightning removes the handler of libtpu's timer, not the timer
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    marks: list[Costs] = []

    class Net(li.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch_net()

        def training_step(self, batch: Any, _: int) -> Any:
            value = t.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", value)
            return value

        def configure_optimizers(self) -> Any:
            return t.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.01)

        def on_train_batch_end(self, _out: Any, _batch: Any, index: int) -> None:
            if index in (49, STEPS - 1):
                marks.append((time.perf_counter(), time.process_time()))

    image, label = normalised()
    data = t.utils.data.TensorDataset(t.from_numpy(image), t.from_numpy(label).long())
    loader = t.utils.data.DataLoader(data, BATCH, shuffle=True, drop_last=True)
    net = Net()

    def epoch() -> Costs:
        trainer = li.Trainer(
            max_epochs=1,
            accelerator="cpu",
            enable_progress_bar=False,
            enable_checkpointing=False,
            enable_model_summary=False,
            logger=CSVLogger(folder),
        )
        marks.clear()
        trainer.fit(net, loader)
        (wall, cpu), (wall_end, cpu_end) = marks
        return (wall_end - wall) / (STEPS - 50), (cpu_end - cpu) / (STEPS - 50)

    return epoch


TOOLS: dict[str, Callable[[Path], Epoch]] = {
    "dtrain": dtrain,
    "dtrain x 32": lambda folder: dtrain(folder, at_once=CALL),
    f"dtrain x 32{REDUCE}": lambda folder: dtrain(folder, at_once=CALL),
    "bare": bare,
    "careful": careful,
    "careful x 32": lambda folder: careful(folder, at_once=CALL),
    "nnx": nnx,
    "nnx cached": lambda folder: nnx(folder, cached=True),
    "keras": keras,
    "keras x 32": lambda folder: keras(folder, at_once=CALL),
    "torch": torch,
    "torch loader": lambda folder: torch(folder, loader=True),
    "lightning": lightning,
    "torch compile": lambda folder: torch(folder, compiled=True),
}


def main() -> None:
    words = [word for word in sys.argv[1:] if not word.startswith("--")]
    chosen = [tool for tool in TOOLS if not words or any(word in tool for word in words) or tool.startswith("dtrain")]
    rivals = {tool: Rival(tool) for tool in chosen if tool != "torch compile" or "--compile" in sys.argv}
    found = duel(rivals, ROUNDS)
    for tool, costs in found.items():
        wall, cpu = (1e3 * statistics.median(cost[clock] for cost in costs) for clock in (0, 1))
        shown = []
        for mine in ("dtrain", "dtrain x 32"):
            pairs = list(zip(found[mine], costs, strict=True))
            ratios = [statistics.median(a[i] / b[i] for a, b in pairs) for i in (0, 1)]
            shown.append(f"{mine} takes {ratios[0]:.3f}x wall, {ratios[1]:.3f}x CPU")
        flags = f"XLA flags: {rivals[tool].flags}"
        print(f"{tool:<20} {wall:6.3f} ms/step wall  {cpu:6.3f} ms CPU   {'; '.join(shown)}; {flags}", flush=True)


if __name__ == "__main__":
    if NAME:
        with tempfile.TemporaryDirectory() as name:
            serve(lambda: TOOLS[NAME](Path(name)))
    else:
        main()
