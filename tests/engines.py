"""What the contract tests over engines, meshes and models share."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from dtrain.batch import Batch
from dtrain.models.cnn import CNN
from dtrain.models.mlp import MLP
from dtrain.models.vit import ViT
from dtrain.optim.optimizer import AdamW
from dtrain.optim.update import learning_rate, transformation
from dtrain.parallel.engine import Engine, put
from dtrain.parallel.jit import Jit
from dtrain.parallel.mesh import Mesh, build
from dtrain.parallel.pmap import Pmap
from dtrain.parallel.rules import Layout
from dtrain.parallel.shard_map import ShardMap
from dtrain.params import initial
from dtrain.precision import Precision
from dtrain.train import state, step

EXAMPLES = 16
MODELS = {
    "mlp": MLP(sizes=(64, 32, 16, 10)),
    "cnn": CNN(image=(8, 8, 1), classes=10, stages=(16, 32)),
    "vit": ViT(image=(8, 8, 1), classes=10, width=32, heads=4, hidden=64, layers=2),
}
MESHES = {
    "data8": Mesh(data=8),
    "fsdp8": Mesh(data=1, fsdp=8),
    "data2-fsdp2-tensor2": Mesh(data=2, fsdp=2, tensor=2),
}
ENGINES: dict[str, Engine] = {"jit": Jit(), "shard_map": ShardMap(), "pmap": Pmap()}
ADAM = AdamW(lr=1e-3, decay=0.1, clip=1.0)


def random_batch(examples: int = EXAMPLES) -> Batch:
    """Images and labels that mean nothing."""
    draw = np.random.default_rng(0)
    image = draw.normal(size=(examples, 8, 8, 1)).astype(np.float32)
    return {"image": image, "label": draw.integers(0, 10, examples).astype(np.int32)}


@dataclass
class Trained:
    """What a few steps came to."""

    losses: list[float]
    params: Any
    state: Any
    compiled: jax.stages.Compiled


@dataclass
class Placed:
    """A model's first state, a batch, and what makes gradients of them, on one engine and mesh."""

    engine: Engine
    layout: Layout
    update: Any
    shapes: Any
    now: Any
    rows: Batch
    grads: Any


@cache
def first_params(model: Any) -> Any:
    """The model's parameters at birth, on the host: compiled once for all engines and meshes."""
    return jax.device_get(jax.jit(lambda: initial(model.params(), jax.random.key(0), "float32"))())


def place(model: Any, engine: Engine, mesh: Mesh, *, parts: int = 1, optimizer: Any = ADAM) -> Placed:
    """Everything up to the first step."""
    sizes = mesh.sizes(mesh.least)
    layout = Layout(sizes, mesh.table(), model.params(), build(sizes, jax.devices()[: mesh.least]))
    layout.check()
    update = transformation(optimizer, layout.declared, 100)
    shapes = state.abstract(state.maker(layout.declared, update, "float32", 0), update, layout)
    params = jax.device_put(first_params(model), state.placement(shapes.params))
    make = jax.jit(
        lambda params: state.State(np.int32(0), params, update.init(params)), out_shardings=state.placement(shapes)
    )
    grads = engine.grads(layout, step.loss_of(model, lambda rows: rows, Precision()), parts)
    rows = put(engine, layout, random_batch(), EXAMPLES)
    return Placed(engine, layout, update, shapes, make(params), rows, grads)


def gradients(on: Placed) -> tuple[float, Any]:
    """The mean loss and its gradients at the first state."""
    traced = on.engine.trace(on.layout, on.grads, on.now.params, on.rows, out=None, donate=False)
    found, sums = jax.device_get(jax.block_until_ready(traced.lower().compile()(on.now.params, on.rows)))
    return float(found.sum / found.weight), jax.tree.map(lambda g: g / found.weight, sums)


def train(on: Placed, optimizer: Any = ADAM, steps: int = 2) -> Trained:
    """A few steps."""
    one = step.train_step(on.grads, on.update, learning_rate(optimizer, 100))
    out = (state.placement(on.shapes), on.layout.sharding(PartitionSpec()))
    compiled = on.engine.trace(on.layout, one, on.now, on.rows, out=out, donate=True).lower().compile()
    now, losses = on.now, []
    for _ in range(steps):
        now, metrics = compiled(now, on.rows)
        losses.append(float(jax.block_until_ready(metrics)["loss"]))
    return Trained(losses, jax.device_get(now.params), now, compiled)


def worst(found: Any, reference: Any) -> float:
    """The largest difference between two trees, relative to the largest value of each leaf."""

    def one(a: np.ndarray, b: np.ndarray) -> float:
        return float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-12))

    return max(jax.tree.leaves(jax.tree.map(one, found, reference)))
