"""Two small decoders on a CPU: dtrain's step, the same step written by hand in JAX, and PyTorch's.

`small` is the model of recipes/decoder-shakespeare.yaml (4 layers of width 128, 4 heads, 64 tokens, batch 12), `wide`
has 6 layers of width 384, 6 heads, 256 tokens, batch 8. All train the same shape on the same batch with AdamW and
clipping by global norm; dtrain's side is the step that `dtrain run` compiles. Each side is a process of its own: JAX by
hand has JAX's own flags, dtrain the one that it sets, and a third side dtrain's step with another value of that flag.
They alternate in segments; the medians of the paired ratios are printed, by CPU time, which load on the machine affects
least, and by wall time. PyTorch is left out if it is not installed, else the last two rows of each shape are the
products with matrices of parameters alone: how far the libraries are apart before anything is trained. `--compile` adds
torch.compile, which takes minutes.

    python benchmarks/decoder_cpu.py [--compile] [SHAPE]     target: 1.0x JAX by hand; PyTorch: small 1.1x, wide 1.0x
"""

import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rivals import NAME, REDUCE, Costs, Rival, clocked, duel, serve

from dtrain.assembly.assemble import assemble
from dtrain.data.windows import row_example
from dtrain.recipe.load import load

RECIPE = Path(__file__).parents[1] / "recipes" / "decoder-shakespeare.yaml"
VOCAB = 256
Segment = Callable[[], None]


@dataclass(frozen=True)
class Shape:
    """A decoder, its batch, and how long it is measured."""

    layers: int
    width: int
    heads: int
    context: int
    batch: int
    steps: int
    rounds: int

    @property
    def tokens(self) -> np.ndarray:
        """A batch of random tokens, one more than the context."""
        drawn = np.random.default_rng(0).integers(0, VOCAB, (self.batch, self.context + 1))
        return drawn.astype(np.int32)


SHAPES = {"small": Shape(4, 128, 4, 64, 12, 20, 15), "wide": Shape(6, 384, 6, 256, 8, 2, 9)}


def dtrain_step(shape: Shape) -> Segment:
    """The compiled step of `dtrain run`."""
    from timing import run_step  # sets dtrain's flags, which the others must not have

    model = {"layers": shape.layers, "width": shape.width, "heads": shape.heads, "hidden": 4 * shape.width}
    model |= {"context": shape.context, "unroll": shape.layers}
    sizes = [*(f"model.{key}={value}" for key, value in model.items()), f"data.length={shape.context}"]
    recipe = load(RECIPE, [*sizes, f"batch={shape.batch}"])
    made = assemble(recipe, jax.devices()[:1], row_example(shape.context, packed=False), 2000)
    return run_step(made, {"token": shape.tokens[:, :-1], "target": shape.tokens[:, 1:]}, shape.steps)


def jax_step(shape: Shape) -> Segment:
    """What a user of JAX and optax writes: a jitted step with donated state."""
    width, heads = shape.width, shape.heads
    causal = np.tril(np.ones((shape.context, shape.context), bool))
    keys = iter(jax.random.split(jax.random.key(0), 64))

    def draw(*sizes: int) -> jax.Array:
        return 0.02 * jax.random.normal(next(keys), sizes)

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        centred = x - x.mean(-1, keepdims=True)
        return centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5) * scale

    def layer(x: jax.Array, p: dict[str, jax.Array]) -> jax.Array:
        parts = jnp.split(norm(x, p["norm1"]) @ p["qkv"], 3, -1)
        q, k, v = (part.reshape(shape.batch, shape.context, heads, -1).transpose(0, 2, 1, 3) for part in parts)
        scores = jnp.where(causal, q @ k.transpose(0, 1, 3, 2) / math.sqrt(width // heads), -1e30)
        y = (jax.nn.softmax(scores) @ v).transpose(0, 2, 1, 3).reshape(-1, width)
        x = x + y @ p["out"]
        return x + jax.nn.gelu(norm(x, p["norm2"]) @ p["up"], approximate=False) @ p["down"]

    def loss(p: Any, token: jax.Array, target: jax.Array) -> jax.Array:
        x = (p["token"][token] + p["position"]).reshape(-1, width)
        for one in p["layers"]:
            x = layer(x, one)
        logits = norm(x, p["norm"]) @ p["token"].T
        return optax.softmax_cross_entropy_with_integer_labels(logits, target.reshape(-1)).mean()

    def one_layer() -> dict[str, jax.Array]:
        ones = {"norm1": jnp.ones(width), "norm2": jnp.ones(width)}
        matrices = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width)}
        return ones | {name: draw(*sizes) for name, sizes in (matrices | {"down": (4 * width, width)}).items()}

    params = {"token": draw(VOCAB, width), "position": draw(shape.context, width), "norm": jnp.ones(width)}
    params["layers"] = [one_layer() for _ in range(shape.layers)]
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, b2=0.99, weight_decay=0.1))

    def train(params: Any, state: Any, token: jax.Array, target: jax.Array) -> tuple[Any, Any, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(params, token, target)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    step, state = jax.jit(train, donate_argnums=(0, 1)), [params, optimizer.init(params)]
    token, target = jnp.asarray(shape.tokens[:, :-1]), jnp.asarray(shape.tokens[:, 1:])

    def segment() -> None:
        for _ in range(shape.steps):
            state[0], state[1], value = step(*state, token, target)
        value.block_until_ready()

    return segment


def torch_step(shape: Shape, compiled: bool) -> Segment:
    """PyTorch with its fastest optimizer, eager or compiled."""
    import torch
    from torch import nn

    width = shape.width

    class Layer(nn.Module):
        """Attention and feed-forward, each added to its input."""

        def __init__(self) -> None:
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
            self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
            self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (
                part.view(shape.batch, shape.context, shape.heads, -1).transpose(1, 2)
                for part in self.qkv(self.norm1(x)).split(width, 2)
            )
            y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).reshape(x.shape))
            return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))

    class Model(nn.Module):
        """The decoder, its head tied to its embedding."""

        def __init__(self) -> None:
            super().__init__()
            self.token, self.position = nn.Embedding(VOCAB, width), nn.Embedding(shape.context, width)
            self.layers = nn.Sequential(*(Layer() for _ in range(shape.layers)))
            self.norm, self.head = nn.LayerNorm(width, bias=False), nn.Linear(width, VOCAB, bias=False)
            self.head.weight = self.token.weight

        def forward(self, token: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            x = self.layers(self.token(token) + self.position(torch.arange(shape.context)))
            return nn.functional.cross_entropy(self.head(self.norm(x)).view(-1, VOCAB), target.reshape(-1))

    model = Model()
    forward: Any = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1, fused=True)
    token, target = (torch.from_numpy(part.astype(np.int64)) for part in (shape.tokens[:, :-1], shape.tokens[:, 1:]))

    def segment() -> None:
        for _ in range(shape.steps):
            optimizer.zero_grad(set_to_none=True)
            forward(token, target).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    return segment


def matrices(shape: Shape) -> list[tuple[int, int, int]]:
    """(rows, inputs, outputs) of every product of a step's forward pass with a matrix of parameters."""
    rows, width = shape.batch * shape.context, shape.width
    layer = [(width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)]
    return [(rows, *sizes) for sizes in layer] * shape.layers + [(rows, width, VOCAB)]


def products(shape: Shape, library: str) -> Segment:
    """These products and the two of each gradient, nothing else: what the library makes of the step's main work."""
    draw = np.random.default_rng(0)
    drawn = [
        [draw.standard_normal(size, np.float32) for size in ((m, k), (k, n), (m, n))] for m, k, n in matrices(shape)
    ]
    if library == "torch":
        import torch

        tensors = [[torch.from_numpy(part) for part in parts] for parts in drawn]

        def by_torch() -> None:
            for _ in range(shape.steps):
                for x, w, g in tensors:
                    _ = x @ w, g @ w.T, x.T @ g

        return by_torch
    arrays = jax.device_put(drawn)
    step = jax.jit(lambda arrays: [(x @ w, g @ w.T, x.T @ g) for x, w, g in arrays])

    def by_jax() -> None:
        for _ in range(shape.steps):
            jax.block_until_ready(step(arrays))

    return by_jax


def side(name: str) -> Segment:
    """The work of "SHAPE: SIDE"."""
    shape, _, what = name.partition(": ")
    made: dict[str, Callable[[Shape], Segment]] = {
        "dtrain": dtrain_step,
        f"dtrain{REDUCE}": dtrain_step,
        "JAX by hand": jax_step,
        "PyTorch": lambda shape: torch_step(shape, compiled=False),
        "torch.compile": lambda shape: torch_step(shape, compiled=True),
        "products, JAX": lambda shape: products(shape, "jax"),
        "products, torch": lambda shape: products(shape, "torch"),
    }
    return made[what](SHAPES[shape])


def rivals(shape: str, *sides: str) -> dict[str, Rival]:
    """A process for each side; only the name decides what is set for it."""
    return {what: Rival(f"{shape}: {what}") for what in sides}


def main() -> None:
    chosen = [name for name in SHAPES if not (set(sys.argv[1:]) & SHAPES.keys()) or name in sys.argv]
    for name in chosen:
        more = ["torch.compile"] if "--compile" in sys.argv else []
        sides = rivals(name, "dtrain", f"dtrain{REDUCE}", "JAX by hand", "PyTorch", *more)
        report(name, SHAPES[name], duel(sides, SHAPES[name].rounds), "dtrain")
        alone = rivals(name, "products, JAX", "products, torch")
        report(name, SHAPES[name], duel(alone, SHAPES[name].rounds), "products, JAX")


def report(name: str, shape: Shape, found: dict[str, list[Costs]], own: str) -> None:
    """Print the median step of each side, and its ratios to the first."""
    from timing import median_ratio

    for side, times in found.items():
        wall, cpu = (1e3 * statistics.median(part) / shape.steps for part in zip(*times, strict=True))
        ratios = [median_ratio(found, own, side, clock) for clock in (1, 0)]
        against = f"  {own} takes {ratios[0]:.2f}x of its CPU time, {ratios[1]:.2f}x of its wall time"
        print(f"{name:<6} {side:<16} {wall:8.2f} ms  CPU {cpu:8.2f} ms{against * (side != own)}", flush=True)


if __name__ == "__main__":
    if NAME:
        serve(lambda: clocked(side(NAME)))
    else:
        main()
