"""Models written with Flax: `Linen` for a linen module, `NNX` for a function that builds an NNX module.

    # my_net.py                                      model: {kind: custom, target: "my_net:model"}
    def model(classes):
        return Linen(Net(classes))

Random numbers of each example come from its own key, and the statistics of `BatchNorm` are those of all examples of a
step (of a microbatch, with `accumulate`), so that a run is the same on every mesh and engine.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Any

import flax.linen as nn
import jax
from flax import nnx
from flax.linen import normalization as linen_normalization
from flax.linen import recurrent as linen_recurrent
from flax.nnx.nn import normalization as nnx_normalization
from flax.nnx.nn import recurrent as nnx_recurrent

from dtrain.core.errors import RecipeError
from dtrain.data.batch import Batch
from dtrain.models.adapter import EXAMPLES, Adapter, weighted_sums
from dtrain.models.nn.context import Context
from dtrain.models.nn.model import Loss
from dtrain.models.nn.param import Tree
from dtrain.models.nn.vma import vary

TRAIN, EVALUATE = {"train", "training", "is_training"}, {"deterministic", "eval", "inference", "use_running_average"}
"""Names of a module's argument that is true in training, and of one that is true in evaluations."""
FOUND = "found by its name"


@dataclass(frozen=True)
class Linen(Adapter):
    """A linen module. Collections other than `params`, such as `batch_stats`, are statistics: kept, not trained.

    A module whose `__call__` has an argument named in TRAIN or EVALUATE gets it.
    """

    module: nn.Module
    rngs: tuple[str, ...] = ("dropout",)
    """The names of its random streams."""
    mode: str | None = FOUND
    """The name of the argument of `__call__` that is true in training, if it is none of the usual ones; None for a
    module that is called alike in training and in evaluations."""

    def init(self, key: jax.Array, example: Batch) -> Tree:
        names = ("params", *self.rngs)
        streams = dict(zip(names, jax.random.split(key, len(names)), strict=True))
        parts: set[str] = set()
        with nn.intercept_methods(_noting(parts)):
            made = dict(self.module.init(streams, *self.arrays(example), **self._mode(False)))
        self._refuse_unknown_mode(parts, made)
        return nn.meta.unbox(made)

    def _refuse_unknown_mode(self, parts: set[str], made: Mapping[str, Any]) -> None:
        """Raise RecipeError if the module has parts that differ in training and no known argument switches them."""
        differing = sorted({"BatchNorm", "Dropout"} & parts | {name for name in made if name != "params"})
        if differing and self.mode is not None and not self._mode(True):
            name = type(self.module).__name__
            message = f"{name} has {', '.join(differing)}, and no argument of its __call__ says whether it trains"
            known = ", ".join(sorted(TRAIN | EVALUATE))
            hint = f"name the argument one of {known}, or give Linen(module, mode='its name'); mode=None if it has none"
            raise RecipeError(message, hint)

    def statistics(self, path: str) -> bool:
        return not path.startswith("params.")

    def outputs(self, params: Tree, batch: Batch, ctx: Context) -> Any:
        with _varying_carries(ctx.example_axes):
            return self.module.apply(params, *self.arrays(batch), **self._mode(False))

    def loss(self, params: Tree, batch: Batch, ctx: Context) -> Loss:
        if not ctx.train:
            return super().loss(params, batch, ctx)
        inputs = self.arrays(batch)
        kept = [name for name in params if name != "params"]

        def one(key: jax.Array, *values: jax.Array) -> Any:
            streams = {name: jax.random.fold_in(key, number) for number, name in enumerate(self.rngs)}
            rows = [value[None] for value in values]
            return self.module.apply(params, *rows, rngs=streams, mutable=kept, **self._mode(True))

        over = nn.intercept_methods(_over_examples((EXAMPLES, *ctx.example_axes), ctx.mixed))
        with _means_over_examples(), over, _varying_carries(ctx.example_axes):
            outputs, statistics = jax.vmap(one)(ctx.keys(batch), *inputs)
        loss = self.loss_of(jax.tree.map(lambda x: x[:, 0], outputs), batch, ctx)
        return loss._replace(statistics=weighted_sums(dict(statistics), batch))

    def _mode(self, train: bool) -> dict[str, Any]:
        """The argument of the module that says whether it trains."""
        if self.mode != FOUND:
            return {self.mode: train} if self.mode else {}
        names = set(inspect.signature(type(self.module).__call__).parameters)
        return dict.fromkeys(names & TRAIN, train) | dict.fromkeys(names & EVALUATE, not train)


def _noting(parts: set[str]) -> Callable[..., Any]:
    """An interceptor that notes the types of the modules that are called."""

    def intercept(call: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], context: Any) -> Any:
        parts.update(kind.__name__ for kind in type(context.module).__mro__)
        return call(*args, **kwargs)

    return intercept


def _over_examples(axes: tuple[str, ...], mixed: list[str]) -> Callable[..., Any]:
    """An interceptor with which `BatchNorm` computes its statistics over these axes as well, and notes that."""

    def intercept(call: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any], context: Any) -> Any:
        if isinstance(context.module, nn.BatchNorm) and context.module.axis_name is None:
            object.__setattr__(context.module, "axis_name", axes)  # linen forbids plain assignment
            mixed.append("BatchNorm")
        return call(*args, **kwargs)

    return intercept


@jax.custom_batching.custom_vmap
def _mean_over_vmapped(x: jax.Array) -> jax.Array:
    """The mean over the axis that `jax.vmap` adds; x itself outside of one."""
    return x


@_mean_over_vmapped.def_vmap
def _mean_rule(_size: int, batched: list[bool], x: jax.Array) -> tuple[jax.Array, bool]:
    return (x.mean(0) if batched[0] else x), False


class _Collectives:
    """`jax.lax` for Flax's `BatchNorm`: inside `shard_map`, JAX has no collective over a vmapped axis."""

    def __getattr__(self, name: str) -> Any:
        return getattr(jax.lax, name)

    def pmean(self, x: jax.Array, axis_name: str | tuple[str, ...], **options: Any) -> jax.Array:
        if isinstance(axis_name, str) or axis_name[0] != EXAMPLES:
            return jax.lax.pmean(x, axis_name, **options)
        mean, axes = _mean_over_vmapped(x), axis_name[1:]
        return jax.lax.pmean(vary(mean, axes), axes, **options) if axes else mean


@contextmanager
def _means_over_examples() -> Iterator[None]:
    """Within this context, Flax takes means over the axis EXAMPLES as means over the examples of a `jax.vmap`."""
    modules = (linen_normalization, nnx_normalization)
    for module in modules:
        module.lax = _Collectives()  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        for module in modules:
            module.lax = jax.lax  # pyright: ignore[reportAttributeAccessIssue]


@contextmanager
def _varying_carries(axes: tuple[str, ...]) -> Iterator[None]:
    """Within this context, the initial state of Flax's recurrent cells varies over these axes, as the later ones do.

    A scan inside `shard_map` requires both to be alike; the cells make the initial one of constants.
    """
    cells = [cell for base in (linen_recurrent, nnx_recurrent) for cell in _subclasses(base.RNNCellBase)]
    own = {cell: vars(cell)["initialize_carry"] for cell in cells if "initialize_carry" in vars(cell)} if axes else {}

    def varying(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def initialize_carry(*args: Any, **kwargs: Any) -> Any:
            return jax.tree.map(lambda x: vary(x, axes), method(*args, **kwargs))

        return initialize_carry

    for cell, method in own.items():
        cell.initialize_carry = varying(method)
    try:
        yield
    finally:
        for cell, method in own.items():
            cell.initialize_carry = method


def _subclasses(kind: type) -> Iterator[Any]:
    """A class and all that inherit from it."""
    yield kind
    for child in kind.__subclasses__():
        yield from _subclasses(child)


@dataclass(frozen=True)
class NNX(Adapter):
    """An NNX module, built by `build(rngs)`. Variables other than `nnx.Param`, such as `nnx.BatchStat`, are statistics.

    Its random streams are seeded anew for each example of a step.
    """

    build: Callable[[nnx.Rngs], nnx.Module]

    @cached_property
    def _graph(self) -> Any:
        """The structure of the module, and its abstract parameters, random streams and other variables."""
        abstract = nnx.eval_shape(lambda: self.build(nnx.Rngs(0)))
        return nnx.split(abstract, nnx.Param, nnx.RngState, ...)

    def init(self, key: jax.Array, example: Batch) -> Tree:
        _, params, _, rest = nnx.split(self.build(nnx.Rngs(key)), nnx.Param, nnx.RngState, ...)
        kept = {"statistics": nnx.to_pure_dict(rest)} if jax.tree.leaves(rest) else {}
        return {"params": nnx.to_pure_dict(params)} | kept

    def statistics(self, path: str) -> bool:
        return path.startswith("statistics.")

    def outputs(self, params: Tree, batch: Batch, ctx: Context) -> Any:
        module = self._module(params, jax.random.key(0), ())
        module.eval()
        with _varying_carries(ctx.example_axes):
            return module(*self.arrays(batch))

    def loss(self, params: Tree, batch: Batch, ctx: Context) -> Loss:
        if not ctx.train:
            return super().loss(params, batch, ctx)
        inputs = self.arrays(batch)
        ctx.mixed.extend(["BatchNorm"] if "statistics" in params else [])

        def one(key: jax.Array, *values: jax.Array) -> Any:
            module = self._module(params, key, (EXAMPLES, *ctx.example_axes))
            module.train()
            output = module(*[value[None] for value in values])
            _, _, _, rest = nnx.split(module, nnx.Param, nnx.RngState, ...)
            return output, nnx.to_pure_dict(rest)

        with _means_over_examples(), _varying_carries(ctx.example_axes):
            outputs, statistics = jax.vmap(one)(ctx.keys(batch), *inputs)
        loss = self.loss_of(jax.tree.map(lambda x: x[:, 0], outputs), batch, ctx)
        return loss._replace(statistics=weighted_sums(statistics, batch, "statistics."))

    def _module(self, params: Tree, key: jax.Array, axes: tuple[str, ...]) -> Any:
        """The module with these parameters and statistics, and random streams that start from the key."""
        graph, own, streams, rest = self._graph
        own, rest = (jax.tree.map(lambda leaf: leaf, state) for state in (own, rest))  # copies
        nnx.replace_by_pure_dict(own, params["params"])
        if "statistics" in params:
            nnx.replace_by_pure_dict(rest, params["statistics"])
        leaves, structure = jax.tree.flatten(streams)
        seeded = [_seeded(leaf, jax.random.fold_in(key, number)) for number, leaf in enumerate(leaves)]
        module = nnx.merge(graph, own, jax.tree.unflatten(structure, seeded), rest)
        for _, part in nnx.iter_graph(module):
            if isinstance(part, nnx.BatchNorm) and part.axis_name is None:
                part.axis_name = axes or None  # pyright: ignore[reportAttributeAccessIssue] (JAX takes several)
        return module


def _seeded(leaf: jax.ShapeDtypeStruct, key: jax.Array) -> jax.Array:
    """A key for a variable that holds a random key, zero for one that counts."""
    if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return key if leaf.shape == () else jax.random.split(key, leaf.shape)
    if leaf.shape == ():
        return jax.numpy.zeros((), leaf.dtype)
    raise RecipeError("a random stream of the module holds an array of counts", "build it without nnx.split_rngs")
