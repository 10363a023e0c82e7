"""The verbs that all contexts share: random keys, sums and gathers over examples, and what a row has before it."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state

from dtrain.core.errors import RecipeError
from dtrain.data.batch import ROW, Batch
from dtrain.models.nn.vma import vary

Purpose = Literal["evaluation", "prediction", "samples"]


@dataclass(frozen=True, kw_only=True)
class ExampleVerbs:
    """What every context has: the kind of step, and the verbs about its examples."""

    loss_dtype: str = "float32"
    train: bool = False
    purpose: Purpose = "evaluation"
    """What a step that does not train is for; its random keys are its own."""
    step: Any = 0
    """The number of updates before this step: a scalar, traced, in the step of a run."""
    seed: int = 0
    named: list[tuple[str, Any]] = field(default_factory=list, compare=False)
    """The names of keys that were asked for, each with JAX's trace state."""
    mixed: list[str] = field(default_factory=list, compare=False)
    """What compared examples with each other in a way that is the same on every mesh."""

    @property
    def keeps_keys(self) -> bool:
        """Whether keys and values are kept for tokens that follow."""
        return False

    @property
    def example_axes(self) -> tuple[str, ...]:
        """The mesh axes that split the examples, where collectives are explicit."""
        return ()

    def for_later(self, k_BTGD: jax.Array, v_BTGD: jax.Array) -> tuple[jax.Array, jax.Array]:
        return k_BTGD, v_BTGD

    def of_tokens(self, x: jax.Array) -> jax.Array:
        return x

    def preceding(self, x: jax.Array, count: int, name: str) -> jax.Array:
        del name
        return jnp.pad(x, ((0, 0), (count, 0), *[(0, 0)] * (x.ndim - 2)))

    def recurrent(self, step: Callable[[jax.Array], tuple[jax.Array, jax.Array]], state: jax.Array) -> jax.Array:
        return step(state)[0]

    def keys(self, batch: Batch, name: str = "") -> jax.Array:
        if ROW not in batch:
            raise RecipeError(f"ctx.keys needs the array {ROW!r}", "pass the batch that loss() received")
        use = (name, get_opaque_trace_state(convention="flax"))
        if use in self.named:  # a scan traces its body again, in another state
            hint = f"give each call a name of its own: ctx.keys(batch, 'layer0'); this one is {name!r}"
            raise RecipeError("ctx.keys is called twice with one name: both calls would draw the same numbers", hint)
        self.named.append(use)
        stream = f"{'keys' if self.train else self.purpose} {name}"
        key = jax.random.fold_in(jax.random.key(self.seed), zlib.crc32(stream.encode()))
        return jax.vmap(jax.random.fold_in, (None, 0))(key, batch[ROW])

    def sum_over_examples(self, x: jax.Array) -> jax.Array:
        self.mixed.append("sum_over_examples")
        return jax.lax.psum(vary(x, self.example_axes), self.example_axes) if self.example_axes else x

    def gather_examples(self, x: jax.Array) -> jax.Array:
        self.mixed.append("gather_examples")
        for axis in reversed(self.example_axes):
            x = jax.lax.all_gather(x, axis, axis=0, tiled=True)
        return x
