"""Low-rank adapters around any model (LoRA, Hu et al. 2021): the model's own parameters are frozen."""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp

from dtrain.core.errors import RecipeError
from dtrain.core.types import Positive, PositiveFloat
from dtrain.data.batch import Batch, Example
from dtrain.models.nn import param as declare
from dtrain.models.nn import quantised
from dtrain.models.nn.context import Context
from dtrain.models.nn.low_rank import LowRank, inner_dims
from dtrain.models.nn.model import Flops, Loss, Wrapped
from dtrain.models.nn.param import Param, Tree, dotted, paths
from dtrain.models.nn.patterns import matched
from dtrain.models.nn.quantised import Quantised, Width, in_full, is_quantised

Kept = Literal["float32", "bfloat16"] | Width
"""In what frozen parameters are kept."""
BASE, ADAPTERS = "base", "lora"
"""Where the model's own parameters are in the tree, and the adapters."""
TABLES = {"vocab": "a table of tokens", "experts": "a matrix of experts"}
"""Dims of parameters that have no adapters."""


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Train low-rank adapters in place of a model's parameters, which come from another run (`init`)."""

    rank: Positive
    """Rows of the small matrices: more learn more, and take more memory."""
    alpha: PositiveFloat | None = None
    """The product of the two matrices is multiplied by alpha / rank; default: alpha = rank."""
    targets: tuple[str, ...]
    """Patterns of the paths of the matrices that get an adapter: ["blocks.query*", "blocks.mlp.*"]. What else they
    match, such as biases, gets none."""
    train: tuple[str, ...] = ()
    """Patterns of parameters that are trained in full, such as a new head: ["head.*"]."""
    dtype: Kept | None = None
    """In which the frozen parameters are kept; default: `precision.params`. bfloat16 takes half the memory, and where
    `precision.compute` is bfloat16 the results are the same bits. int8 and nf4 (QLoRA): matrices with 8 or 4 bits for
    each value and a scale for each block of 16 to 64; tables of tokens, biases and output heads in bfloat16."""

    @property
    def scale(self) -> float:
        """The factor of the product of the two matrices."""
        return (self.alpha or self.rank) / self.rank


@dataclass(frozen=True)
class Adapted(Wrapped):
    """A model whose chosen matrices are each W + scale x A B, with W frozen; B starts at zero."""

    lora: Lora

    def params(self) -> Tree:
        """{"base": the model's parameters, "lora": {path: {"a": A, "b": B}}}.

        RecipeError if a pattern matches no parameter, or one that can have no adapter.
        """
        own, kept, arrays = self.model.params(), self.lora.dtype, bool(self.model.user_code)
        leaves_by_path = dict(zip(jax.tree.leaves(paths(own)), jax.tree.leaves(own), strict=True))
        targets = matched(self.lora.targets, list(leaves_by_path), "lora.targets")
        full = matched(self.lora.train, list(leaves_by_path), "lora.train")
        if targets.keys() & full.keys():
            name = min(targets.keys() & full.keys())
            raise RecipeError(f"lora: {name} is both in targets and in train", "leave it out of one of them")
        if untrained := next((name for name in full if not leaves_by_path[name].trained), None):
            raise RecipeError(f"lora.train: {untrained} is not trained, with adapters or without", "leave it out")
        matrices = {name for name in targets if _is_matrix(leaves_by_path[name])}
        alone = {pattern for name, pattern in targets.items() if name in matrices}
        # a pattern takes the matrices that it matches; of one that matches none, the first is refused with the reason
        chosen = [name for name, pattern in targets.items() if name in matrices or pattern not in alone]
        adapters = {name: self._adapter(name, leaves_by_path[name]) for name in chosen}

        if follows := next((name for name, param in leaves_by_path.items() if param.average), None):
            message = f"lora: {follows} is an average of parameters, which adapters leave as they are"
            raise RecipeError(message, "train the model in full, without lora")

        def frozen(name: str, param: Param) -> Param | Quantised:
            # what is not trained at all, such as a running mean, stays in the checkpoint
            if name in full or not param.trained:
                return param
            if kept in quantised.WIDTHS and (narrow := _quantised(param, kept, arrays)):
                return narrow
            dtype = "bfloat16" if kept in quantised.WIDTHS else kept or ""
            return replace(param, trained=False, saved=False, dtype="" if param.exact else dtype)

        return {BASE: jax.tree.map(frozen, paths(own), own), ADAPTERS: adapters}

    def _adapter(self, name: str, param: Param) -> dict[str, Param]:
        batch, inner = inner_dims(param.shape, param.names, param.fan_in)
        table = next((TABLES[dim] for dim in param.names if dim in TABLES), "")
        if table or not _is_matrix(param):
            why = f"is {table}" if table else f"has the shape {param.shape}, which is no matrix"
            raise RecipeError(f"lora.targets: {name} {why}", "leave it out of the patterns, or name it in lora.train")
        cut, rank = batch + inner, self.lora.rank
        rows, columns = param.shape[:cut], param.shape[cut:]
        row_names, column_names = param.names[:cut], param.names[cut:]
        std = math.prod(param.shape[batch:cut]) ** -0.5
        of_b = " ".join([*row_names[:batch], "_", *column_names])
        return {
            "a": Param((*rows, rank), " ".join([*row_names, "_"]), declare.normal(std)),
            "b": Param((*rows[:batch], rank, *columns), of_b, declare.zeros),
        }

    def combined(self, params: Tree) -> Tree:
        """The parameters as the model takes them, with an adapted one in place of each target."""
        adapters, arrays = params[ADAPTERS], bool(self.model.user_code)  # a user's code expects arrays

        def one(name: str, leaf: Any) -> Any:
            if is_quantised(leaf):
                leaf = leaf.codes.quantised_by(leaf, arrays) if hasattr(leaf.codes, "quantised_by") else leaf
                leaf = leaf.wide() if is_quantised(leaf) and arrays else leaf
            if name not in adapters:
                return leaf
            a, b = adapters[name]["a"], adapters[name]["b"]
            if hasattr(leaf, "with_low_rank"):  # not yet gathered
                return leaf.with_low_rank(a, b, self.lora.scale, arrays)
            both = LowRank(leaf, a, b, self.lora.scale)
            return both.merged() if arrays else both

        return jax.tree.map(one, paths(self.model.params()), params[BASE])

    def frozen(self, params: Tree) -> Tree:
        """The parameters as the model takes them, without adapters: those of the base."""
        return self.combined({BASE: jax.tree.map(jax.lax.stop_gradient, params[BASE]), ADAPTERS: {}})

    def loss(self, params: Tree, batch: Batch, ctx: Context) -> Loss:
        loss = self.model.loss(self.combined(params), batch, ctx)
        return loss._replace(statistics={f"{BASE}.{name}": value for name, value in loss.statistics.items()})

    def predict(self, params: Tree, batch: Batch, ctx: Context) -> dict[str, jax.Array]:
        return self.model.predict(self.combined(params), batch, ctx)

    def flops(self, example: Example, examples: int, declared: Tree) -> Flops:
        return self.model.adapted_flops(example, examples, self, in_full(declared))


def _is_matrix(param: Param) -> bool:
    """Whether it has dims that are summed and others, beside those of stacked layers: no bias, no scale."""
    return bool(inner_dims(param.shape, param.names, param.fan_in)[1]) and bool(param.fan_in or param.decay)


def _quantised(param: Param, width: Width, arrays: bool) -> Quantised | None:
    """How a frozen matrix is kept in that width; None for what is kept in bfloat16: tables of tokens, heads of language
    models, routers, biases, scales, parameters that are always in float32, and what no block divides.

    `arrays`: the model takes arrays, and may not say which dims it sums.
    """
    summed = [i for i, name in enumerate(param.names) if name in param.fan_in]
    if not param.fan_in and arrays and _is_matrix(param):
        summed = [len(param.shape) - 2]
    if param.exact or not summed or "vocab" in param.names or param.names[summed[-1] + 1 :] in ((), ("experts",)):
        return None
    return quantised.declared(param, width, summed[-1])


def adapted(model: Any, lora: Lora | None) -> Any:
    """The model that is trained: with adapters, if the recipe has `lora`."""
    return Adapted(model, lora) if lora else model


def merged(params: Tree, lora: Lora) -> Tree:
    """The model's own tree in float32, each adapter added to its matrix."""

    def one(path: tuple[object, ...], leaf: Any) -> jax.Array:
        pair = params[ADAPTERS].get(dotted(path))
        leaf = leaf.wide(jnp.float32) if is_quantised(leaf) else leaf.astype(jnp.float32)
        return LowRank(leaf, pair["a"], pair["b"], lora.scale).merged() if pair else leaf

    return jax.tree.map_with_path(one, params[BASE], is_leaf=is_quantised)
