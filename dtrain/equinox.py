"""Models written with Equinox: a function that builds a module for one example.

    # my_net.py                                      model: {kind: custom, target: "my_net:model"}
    def model(classes):
        return Equinox(lambda key: Net(classes, key))

The module is called for each example, with `key=` from that example where its `__call__` has such an argument, so that
dropout is the same on every mesh and engine. In evaluations it is in inference mode.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import equinox as eqx
import jax

from dtrain.core.errors import RecipeError
from dtrain.data.batch import Batch
from dtrain.models.adapter import Adapter
from dtrain.models.nn.context import Context
from dtrain.models.nn.param import Tree


@dataclass(frozen=True)
class Equinox(Adapter):
    """An Equinox module, built by `build(key)` and called with the arrays of one example."""

    build: Callable[[jax.Array], Any]

    @cached_property
    def _static(self) -> Any:
        """What of the module is no parameter. RecipeError if it keeps state, such as `eqx.nn.BatchNorm`."""
        module = eqx.filter_eval_shape(self.build, jax.random.key(0))
        stateful = [part for part in jax.tree.leaves(module, is_leaf=_is_index) if _is_index(part)]
        if stateful or isinstance(module, tuple):
            hint = "use a normalisation without state, such as eqx.nn.GroupNorm, or flax.BatchNorm"
            raise RecipeError("the module keeps state (eqx.nn.State), which dtrain does not carry", hint)
        return eqx.filter(module, _is_parameter, inverse=True)

    def init(self, key: jax.Array, example: Batch) -> Tree:
        assert self._static is not None
        return eqx.filter(self.build(key), eqx.is_inexact_array)

    def outputs(self, params: Tree, batch: Batch, ctx: Context) -> Any:
        module, inputs = eqx.combine(params, self._static), self.arrays(batch)
        if not ctx.train or "key" not in inspect.signature(type(module).__call__).parameters:
            module = eqx.nn.inference_mode(module, not ctx.train)
            return jax.vmap(module)(*inputs)
        return jax.vmap(lambda key, *values: module(*values, key=key))(ctx.keys(batch), *inputs)


def _is_parameter(leaf: object) -> bool:
    return eqx.is_inexact_array(leaf) or (
        isinstance(leaf, jax.ShapeDtypeStruct) and jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact)
    )


def _is_index(leaf: object) -> bool:
    return isinstance(leaf, eqx.nn.StateIndex)
