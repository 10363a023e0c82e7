"""A user-defined model: any class that implements the contract `dtrain.models.nn.model.Model`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal, Protocol, Self

import jax
import jax.numpy as jnp

from dtrain.core.errors import RecipeError
from dtrain.core.metrics import Metric
from dtrain.core.user_code import UserTarget, build_target, user_errors
from dtrain.data.batch import ROW, STEP, WEIGHT, Batch, Example
from dtrain.models.adapter import from_outputs
from dtrain.models.nn.context import Context
from dtrain.models.nn.count_flops import gradient_flops
from dtrain.models.nn.model import Declared, FieldValue, Flops, Loss, Structure
from dtrain.models.nn.param import UNNAMED, MadeTogether, Param, Tree, dotted, paths
from dtrain.models.nn.patterns import matched, replaced

DECLARE = "declare each with dtrain.Param(shape, dims, init); other values belong in fields of the class"


class WithInit(Protocol):
    """A user's model that makes its parameters itself."""

    def init(self, key: jax.Array, example: Batch) -> Tree:
        """The initial parameters, from a random key and a batch of one example that is all zeros."""
        ...


def from_params(tree: Tree) -> Tree:
    """The tree that `params()` returned. RecipeError if a leaf is no Param, or two leaves have one path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    names = [dotted(path) for path, _ in leaves]
    wrong = [f"{name}: {type(leaf).__name__}" for name, (_, leaf) in zip(names, leaves, strict=True) if not _is(leaf)]
    if wrong:
        raise RecipeError(f"params() returns {wrong[0]}; every leaf must be a Param with a path of its own", DECLARE)
    _refuse_equal(names, "params()")
    return tree


def from_init(model: WithInit, example: Mapping[str, jax.ShapeDtypeStruct]) -> Tree:
    """A Param for each array that `init` returns, without creating any array.

    All initial values come from one call of `init`, which is traced and compiled with the shardings of the parameters,
    so that none is created in full on one device. Weight decay applies to arrays with at least two dims. RecipeError if
    `init` returns anything but floating-point arrays.
    """

    def make(key: jax.Array) -> Tree:
        return model.init(key, {name: jnp.zeros(of.shape, of.dtype) for name, of in example.items()})

    def values(key: jax.Array) -> Sequence[jax.Array]:
        return jax.tree.leaves(make(key))

    shapes, structure = jax.tree_util.tree_flatten_with_path(jax.eval_shape(lambda: make(jax.random.key(0))))
    for path, leaf in shapes:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            hint = "keep integers, random keys and constants out of what init returns: in fields of the class"
            raise RecipeError(
                f"init() returns {dotted(path)} of type {leaf.dtype}; parameters are floating-point", hint
            )
    _refuse_equal([dotted(path) for path, _ in shapes], "init()")
    params = [
        Param(leaf.shape, " ".join([UNNAMED] * leaf.ndim), MadeTogether(values, i), decay=leaf.ndim > 1)
        for i, (_, leaf) in enumerate(shapes)
    ]
    return jax.tree.unflatten(structure, params)


def with_dims(tree: Tree, table: Mapping[str, str], where: str) -> Tree:
    """The tree with the dim names that `table` has for patterns of paths: {"*kernel": "embed hidden"}."""
    chosen = matched(table, jax.tree.leaves(paths(tree)), where)

    def named(name: str, param: Param) -> Param:
        if name not in chosen:
            return param
        dims = table[chosen[name]]
        if len(dims.split()) != len(param.shape):
            message = f"{where}: {dims!r} names {len(dims.split())} dims; parameter {name} has shape {param.shape}"
            raise RecipeError(message, "one name for each dim; `_` for a dim that is not split")
        return replace(param, dims=dims)

    return jax.tree.map(named, paths(tree), tree)


def with_statistics(tree: Tree, chosen: Sequence[str] | Callable[[str], bool], where: str) -> Tree:
    """The tree with some parameters declared as not trained, and kept in float32.

    `chosen`: patterns of their paths, or a function of a path.
    """
    if not callable(chosen):
        chosen = matched(chosen, jax.tree.leaves(paths(tree)), where).__contains__

    def kept(name: str, param: Param) -> Param:
        return replace(param, trained=False, exact=True, decay=False) if chosen(name) else param

    return jax.tree.map(kept, paths(tree), tree)


def with_averages(tree: Tree, table: Mapping[str, tuple[str, float]], where: str) -> Tree:
    """The tree with some parameters declared as averages of others: {"target.*": ("online.*", 0.996)}.

    The text that `*` stands for is the same in both patterns. An average is not trained. RecipeError if the other
    parameter is missing, has another shape, or is an average itself.
    """
    names = jax.tree.leaves(paths(tree))
    params = dict(zip(names, jax.tree.leaves(tree), strict=True))
    chosen = matched(table, names, where)

    def follows(name: str, param: Param) -> Param:
        if name not in chosen:
            return param
        source, decay = table[chosen[name]]
        of = replaced(name, chosen[name], source, where)
        if of not in params or of in chosen:
            why = "an average itself" if of in chosen else "no parameter"
            raise RecipeError(
                f"{where}: {name} follows {of}, which is {why}", f"the parameters are {', '.join(names[:8])}"
            )
        if params[of].shape != param.shape or not 0 <= decay < 1:
            found = f"{name} {param.shape}, {of} {params[of].shape}, decay {decay}"
            raise RecipeError(f"{where}: an average has the shape of its values, and 0 <= decay < 1: {found}")
        return replace(param, trained=False, decay=False, average=(of, float(decay)))

    return jax.tree.map(follows, paths(tree), tree)


def _is(leaf: object) -> bool:
    return isinstance(leaf, Param)


def _refuse_equal(names: Sequence[str], made_by: str) -> None:
    twice = max(names, key=names.count, default="")
    if names.count(twice) > 1:
        raise RecipeError(
            f"{made_by} returns {twice} twice; every leaf must be a Param with a path of its own", DECLARE
        )


GUIDE = "docs/models.md, 'A model of your own', shows the whole contract"


@dataclass(frozen=True, kw_only=True)
class Custom(UserTarget, Declared):
    """`target: package.module:Class`, called with `args`; imported when the run starts, not before."""

    kind: Literal["custom"] = "custom"
    dims: dict[str, str] = field(default_factory=dict)
    """Names of dims by patterns of parameters' paths: {"*kernel": "embed hidden"}; they precede those of the class."""

    @cached_property
    def model(self) -> Any:
        """The user's model. RecipeError if its module or class is missing, raises, or lacks a method."""
        model = build_target("model", self.target, self.args, self.folder)
        missing = [] if hasattr(model, "params") or hasattr(model, "init") else ["params (or init)"]
        missing += [] if hasattr(model, "loss") or hasattr(model, "outputs") else ["loss (or outputs)"]
        if missing:
            raise RecipeError(f"{self._where} lacks {', '.join(missing)}", GUIDE)
        return model if hasattr(model, "loss") else from_outputs(model)

    def __getstate__(self) -> dict[str, object]:
        """The recipe's section alone: what was built from it may hold functions that cannot be pickled."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def _where(self) -> str:
        return f"model.target: {self.target}"

    @cached_property
    def _example(self) -> Mapping[str, jax.ShapeDtypeStruct] | None:
        return None

    def for_example(self, example: Mapping[str, jax.ShapeDtypeStruct]) -> Self:
        model = replace(self)
        vars(model).update(_example=example, model=self.model)  # as cached_property stores them
        return model

    @cached_property
    def _declared(self) -> Tree:
        """The user's tree, a `Param` at each leaf."""
        model, where = self.model, self._where
        with user_errors(where):
            if hasattr(model, "params"):
                tree = from_params(model.params())
            elif self._example is None:
                hint = "give the class a method params(), or use data whose shapes the recipe states"
                raise RecipeError(f"{where}: the shapes that init() needs are known only when the data is read", hint)
            else:
                tree = from_init(model, self._example)
            table = dict(getattr(model, "dims", {})) | self.dims
            tree = with_dims(tree, table, "model.dims" if self.dims else f"{where}: dims")
            tree = with_averages(tree, getattr(model, "averages", {}), f"{where}: averages")
            return with_statistics(tree, getattr(model, "statistics", ()), f"{where}: statistics")

    def params(self) -> Tree:
        """The user's tree where it consists of dicts and lists; else a dict by dotted path, since checkpoints name the
        leaves of other node types in their own ways."""
        tree = self._declared
        if _plain(tree):
            return tree
        return dict(zip(jax.tree.leaves(paths(tree)), jax.tree.leaves(tree), strict=True))

    def _own(self, params: Tree, ctx: Context) -> Tree:
        """The parameters in the user's own tree; gathered if `init` made them, for code that knows nothing of it."""
        tree = self._declared
        own = params
        if not _plain(tree):
            names, structure = jax.tree.leaves(paths(tree)), jax.tree.structure(tree)
            own = jax.tree.unflatten(structure, [params[name] for name in names])
        return own if hasattr(self.model, "params") else ctx.gather(own)

    def loss(self, params: Tree, batch: Batch, ctx: Context) -> Loss:
        with user_errors(self._where, _of_user(batch)):
            result = self.model.loss(self._own(params, ctx), batch, ctx)
        if not hasattr(result, "weight"):
            array = f"an array {list(result.shape)}" if getattr(result, "shape", ()) else "one number"
            found = array if isinstance(result, jax.Array) else type(result).__name__
            hint = "return dtrain.Loss(sum, weight): the sum over the examples of the batch, and their number"
            raise RecipeError(f"{self._where}: loss() returns {found} in place of a Loss", hint)
        try:
            metrics = {name: _scalar(value) for name, value in result.metrics.items()}
            statistics = {name: jnp.asarray(value, jnp.float32) for name, value in result.statistics.items()}
            checked = Loss(_scalar(result.sum), _scalar(result.weight), metrics, statistics)
        except (AttributeError, TypeError, ValueError) as error:
            why = f"loss() does not return a Loss(sum, weight, metrics) of scalars: {error}"
            raise RecipeError(f"{self._where}: {why}", "sum each over the examples of the batch") from error
        self._refuse_unknown(checked.statistics)
        return checked

    @property
    def predicts(self) -> bool:
        return hasattr(self.model, "predict")

    @property
    def samples(self) -> bool:
        return hasattr(self.model, "sample") or self.predicts

    def predict(self, params: Tree, batch: Batch, ctx: Context) -> dict[str, jax.Array]:
        return self._for_examples("predict", params, batch, ctx)

    def sample(self, params: Tree, batch: Batch, ctx: Context) -> dict[str, jax.Array]:
        return self._for_examples("sample" if hasattr(self.model, "sample") else "predict", params, batch, ctx)

    def _for_examples(self, method: str, params: Tree, batch: Batch, ctx: Context) -> dict[str, jax.Array]:
        """What a method of the user's model returns. RecipeError if it has none, or returns other than rows by name."""
        if not hasattr(self.model, method):
            message = f"{self._where} has no {method}(params, batch, ctx), which returns arrays (examples, ...) by name"
            raise RecipeError(message, GUIDE)
        with user_errors(self._where, _of_user(batch)):
            outputs = getattr(self.model, method)(self._own(params, ctx), batch, ctx)
        examples = next(iter(batch.values())).shape[0]  # len() would refuse a number that is not known yet
        if not isinstance(outputs, Mapping):
            found = f"{type(outputs).__name__}, not arrays by name"
            raise RecipeError(f"{self._where}: {method}() returns {found}", "return {'name': array}")
        wrong = [name for name, value in outputs.items() if jnp.shape(value)[:1] != (examples,)]
        if wrong:
            found = f"{wrong[0]!r} of shape {jnp.shape(outputs[wrong[0]])} for {examples} examples"
            raise RecipeError(f"{self._where}: {method}() returns {found}", "return one row for each example")
        return {name: jnp.asarray(value) for name, value in outputs.items()}

    def _refuse_unknown(self, statistics: Mapping[str, jax.Array]) -> None:
        """Raise RecipeError if a statistic is no parameter that is declared as not trained, or of another shape."""
        declared = dict(zip(jax.tree.leaves(paths(self._declared)), jax.tree.leaves(self._declared), strict=True))
        for name, value in statistics.items():
            if name not in declared or declared[name].trained or declared[name].average:
                average = name in declared and declared[name].average
                why = "is an average" if average else "is trained" if name in declared else "is no parameter"
                hint = "declare it with Param(..., trained=False), or by statistics = ('pattern',) in the class"
                raise RecipeError(f"{self._where}: loss() returns the statistic {name!r}, which {why}", hint)
            if value.shape != declared[name].shape:
                shapes = f"has shape {value.shape}; the parameter has {declared[name].shape}"
                raise RecipeError(f"{self._where}: the statistic {name} {shapes}", "sum it over the examples")

    @property
    def split_rows(self) -> bool:
        """Whether the model declares that it accepts rows split along their length, in the order of `ctx.places`."""
        return bool(getattr(self.model, "split_rows", False))

    @property
    def exact_inputs(self) -> tuple[str, ...]:
        """What the user's model declares in `exact_inputs`. RecipeError if it is not a tuple of names."""
        with user_errors(self._where):
            names: Any = getattr(self.model, "exact_inputs", ())
        if isinstance(names, tuple | list) and all(isinstance(name, str) for name in names):
            return tuple(names)
        raise RecipeError("model: its `exact_inputs` are not a tuple of names", "exact_inputs = ('target',)")

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """What the user's model declares in `metrics`. RecipeError if it is not a tuple of `Metric`."""
        with user_errors(self._where):
            metrics: Any = getattr(self.model, "metrics", ())
        if isinstance(metrics, tuple | list) and all(isinstance(metric, Metric) for metric in metrics):
            return tuple(metrics)
        hint = "use dtrain.Metric: metrics = (Metric('top1', higher_is_better=True),)"
        raise RecipeError("model: its `metrics` are not a tuple of dtrain.Metric", hint)

    @property
    def structure(self) -> Structure:
        """What the user's model declares in `structure`. RecipeError if it is not a `Structure`."""
        with user_errors(self._where):
            structure: Any = getattr(self.model, "structure", Structure())
        if isinstance(structure, Structure):
            return structure
        raise RecipeError("model: its `structure` is not a dtrain.Structure", "structure = Structure(layers=12)")

    def overrides(self, fields: Mapping[str, FieldValue]) -> dict[str, Any]:
        return {"args": dict(fields)}

    def replaced(self, fields: Mapping[str, FieldValue]) -> Self:
        return replace(self, args=self.args | dict(fields))

    def flops(self, example: Example, examples: int, declared: Tree) -> Flops:
        """What the user's model states; by default the products of the gradient of its training loss."""
        if hasattr(self.model, "flops"):
            with user_errors(self._where):
                return self.model.flops(example, examples)
        return gradient_flops(self, example, examples, declared)

    def mismatch(self, example: Example) -> str:
        """What the user's model states; by default nothing: an error while its loss is traced has its line."""
        if not hasattr(self.model, "mismatch"):
            return ""
        with user_errors(self._where):
            return self.model.mismatch(example)


def _of_user(batch: Batch) -> list[str]:
    """The names of the arrays that are of the data."""
    return [name for name in batch if name not in (ROW, STEP, WEIGHT)]


def _plain(tree: Tree) -> bool:
    """Whether a tree consists of dicts and lists only."""
    if isinstance(tree, dict):
        return all(isinstance(key, str) and "." not in key and _plain(child) for key, child in tree.items())
    return all(map(_plain, tree)) if type(tree) in (list, tuple) else isinstance(tree, Param)


def _scalar(value: object) -> jax.Array:
    array = jnp.asarray(value, jnp.float32)
    if array.shape != ():
        raise ValueError(f"an array of shape {array.shape}")
    return array
