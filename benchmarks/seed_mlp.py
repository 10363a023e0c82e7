"""The 784-512-256-10 MLP, batch 128, plain SGD: jitted JAX compared with op-by-op JAX, NumPy and PyTorch.

One training step each. CPU time is compared, since load on the machine affects it least: the variants alternate in
segments, and the median of the paired ratios is printed. dtrain's side is the step that `dtrain run` compiles. If
PyTorch is not installed, it is left out with a message.

    python benchmarks/seed_mlp.py     targets: 4x faster than op-by-op JAX, 2.5x NumPy, 1.8x PyTorch
"""

import importlib.util
import itertools
import statistics
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from timing import alternate, median_ratio, run_step

from dtrain.assembly.assemble import assemble
from dtrain.data.arrays import image_example
from dtrain.recipe.load import load

SIZES, BATCH, LR, SEGMENT, ROUNDS = (784, 512, 256, 10), 128, 0.1, 20, 15
RECIPE = Path(__file__).parents[1] / "recipes" / "mlp-mnist.yaml"
DRAW = np.random.default_rng(0)
IMAGE = DRAW.integers(0, 256, (BATCH, 28, 28, 1), np.uint8)
LABEL = DRAW.integers(0, 10, BATCH).astype(np.int32)
X = (IMAGE.reshape(BATCH, -1) / 255).astype(np.float32)
HOT = np.eye(10, dtype=np.float32)[LABEL]
WEIGHTS = [(DRAW.normal(size=(a, b)) * np.sqrt(2 / a)).astype(np.float32) for a, b in itertools.pairwise(SIZES)]


def dtrain_step() -> Callable[[], None]:
    """The compiled step of `dtrain run`."""
    overrides = [f"optimizer={{kind: sgd, lr: {LR}, momentum: 0.0}}", "steps=100", "epochs=~"]
    made = assemble(load(RECIPE, overrides), jax.devices()[:1], image_example((28, 28, 1), 10), 100)
    return run_step(made, {"image": IMAGE, "label": LABEL}, SEGMENT)


def eager_step() -> Callable[[], None]:
    """JAX, one operation at a time."""
    params = [[jnp.asarray(w), jnp.zeros(w.shape[1])] for w in WEIGHTS]
    x, label = jnp.asarray(X), jnp.asarray(LABEL)

    def loss(params: list[list[jax.Array]]) -> jax.Array:
        h = x
        for i, (w, b) in enumerate(params):
            h = h @ w + b
            h = jnp.maximum(h, 0) if i < 2 else h
        logp = jax.nn.log_softmax(h)
        return -jnp.take_along_axis(logp, label[:, None], axis=1).mean()

    def segment() -> None:
        nonlocal params
        with jax.disable_jit():
            for _ in range(SEGMENT):
                _, gradients = jax.value_and_grad(loss)(params)
                params = jax.tree.map(lambda p, g: p - LR * g, params, gradients)
        jax.block_until_ready(params)

    return segment


def numpy_step() -> Callable[[], None]:
    """NumPy, with a hand-written gradient."""
    weights, biases = [w.copy() for w in WEIGHTS], [np.zeros(w.shape[1], np.float32) for w in WEIGHTS]

    def segment() -> None:
        for _ in range(SEGMENT):
            layers = [X]
            for i in range(3):
                h = layers[-1] @ weights[i] + biases[i]
                layers.append(np.maximum(h, 0) if i < 2 else h)
            exp = np.exp(layers[-1] - layers[-1].max(1, keepdims=True))
            delta = (exp / exp.sum(1, keepdims=True) - HOT) / BATCH
            for i in reversed(range(3)):
                weight, bias = layers[i].T @ delta, delta.sum(0)
                delta = (delta @ weights[i].T) * (layers[i] > 0)
                weights[i] -= LR * weight
                biases[i] -= LR * bias

    return segment


def torch_step() -> Callable[[], None]:
    """PyTorch, eager."""
    import torch

    shapes = itertools.pairwise(SIZES)
    layers = [part for a, b in shapes for part in (torch.nn.Linear(a, b), torch.nn.ReLU())][:-1]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    x, label = torch.from_numpy(X), torch.from_numpy(LABEL.astype(np.int64))

    def segment() -> None:
        for _ in range(SEGMENT):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), label).backward()
            optimizer.step()

    return segment


def main() -> None:
    variants = {"dtrain": dtrain_step(), "op-by-op JAX": eager_step(), "NumPy": numpy_step()}
    if importlib.util.find_spec("torch"):
        variants["PyTorch"] = torch_step()
    else:
        print("PyTorch is not installed: left out")
    found = alternate(variants, ROUNDS)
    for name, times in found.items():
        cpu = statistics.median(cpu for _, cpu in times) / SEGMENT
        print(f"{name:<13} {cpu * 1e6:8.0f} us/step CPU   {median_ratio(found, name, 'dtrain', 1):5.2f}x dtrain")


if __name__ == "__main__":
    main()
