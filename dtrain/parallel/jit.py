"""The engine in which the compiler places: shardings go in, collectives come out."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
from jax.sharding import NamedSharding

from dtrain.batch import Batch
from dtrain.context import Block, dense_attention, scan_layers
from dtrain.model import Loss
from dtrain.parallel.engine import Grads, LossFn, Sums, accumulate
from dtrain.parallel.rules import Layout
from dtrain.params import Tree


@dataclass(frozen=True, kw_only=True)
class Jit:
    """The compiler places every collective."""

    kind: Literal["jit"] = "jit"

    def refusal(self, layout: Layout, processes: int) -> str:
        return ""

    def place(self, layout: Layout, shape: tuple[int, ...]) -> tuple[tuple[int, ...], NamedSharding]:
        return shape, layout.sharding(layout.spec(("batch",)))

    def grads(self, layout: Layout, loss: LossFn, microbatches: int) -> Grads:
        ctx = Constrained(layout)

        def grads(params: Tree, batch: Batch) -> tuple[Loss, Tree]:
            found, gradients = accumulate(lambda p, rows: loss(p, rows, ctx), params, batch, microbatches)
            constrain = jax.lax.with_sharding_constraint
            return found, jax.tree.map(lambda g, s: constrain(g, layout.sharding(s)), gradients, layout.specs())

        return grads

    def sums(self, layout: Layout, loss: LossFn) -> Sums:
        ctx = Constrained(layout)
        return lambda params, batch: loss(params, batch, ctx)

    def trace(
        self, layout: Layout, function: Callable[..., Any], *args: Any, out: Any, donate: bool
    ) -> jax.stages.Traced:
        return jax.jit(function, donate_argnums=(0,) if donate else (), out_shardings=out).trace(*args)


@dataclass(frozen=True)
class Constrained:
    """The verbs as hints to the compiler."""

    layout: Layout
    loss_dtype: str = "float32"

    def shard(self, x: jax.Array, *dims: str | None) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, self.layout.sharding(self.layout.spec(dims)))

    def gather(self, params: Tree) -> Tree:
        return params

    def reduce(self, x: jax.Array, dim: str) -> jax.Array:
        return x

    def attend(self, q_BTHD: jax.Array, k_BTHD: jax.Array, v_BTHD: jax.Array) -> jax.Array:
        return dense_attention(q_BTHD, k_BTHD, v_BTHD)

    def stack(self, block: Block, params: Tree, x: jax.Array) -> jax.Array:
        return scan_layers(block, params, x)
