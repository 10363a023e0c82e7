"""A user-defined model: any class that implements the contract `dtrain.models.nn.model.Model`."""

import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp

import dtrain
from dtrain.core.errors import DtrainError, FieldError, RecipeError
from dtrain.core.metrics import Metric
from dtrain.data.batch import Batch, Example
from dtrain.models.nn.context import Context
from dtrain.models.nn.model import Declared, Flops, Loss, Model, Structure
from dtrain.models.nn.param import Param, Tree, dotted

VARYING = ("varying", "manual axis type", "manual_axis_type")
"""Words in JAX's errors about values that vary over mesh axes (its `check_vma`)."""


@dataclass(frozen=True, kw_only=True)
class Custom(Declared):
    """`target: package.module:Class`, called with `args`; imported when the run starts, not before."""

    kind: Literal["custom"] = "custom"
    target: str
    """package.module:Class, from the recipe's folder, the working folder or an installed package. Importing it runs its
    code."""
    args: dict[str, object] = field(default_factory=dict)
    """Keyword arguments for the class."""
    folder: str | None = None
    """Folder that is searched first for the module: the recipe's, if the module is in it."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", self.target):
            raise FieldError("target", f"{self.target!r} is not of the form package.module:Class")

    @cached_property
    def model(self) -> Model:
        """The user's model. RecipeError if its module or class is missing, raises, or lacks a method."""
        module, _, name = self.target.partition(":")
        for folder in (str(Path.cwd()), self.folder):
            if folder and folder not in sys.path:
                sys.path.insert(0, folder)
        if not _exists(module):
            hint = "put the module into the folder of the recipe or the working folder, or install its package"
            message = f"model.target: {self.target} cannot be imported: no module named {module!r}"
            raise RecipeError(message, hint)
        with self._own_code():
            model_class = getattr(importlib.import_module(module), name, None)
            if model_class is None:
                raise RecipeError(f"model.target: {self.target}: module {module!r} has no attribute {name!r}")
            model = model_class(**self.args)
        missing = [method for method in ("params", "loss", "flops", "mismatch") if not hasattr(model, method)]
        if missing:
            hint = "docs/guide.md, 'A model of your own', shows the whole contract"
            raise RecipeError(f"model.target: {self.target} lacks {', '.join(missing)}", hint)
        return model

    @cached_property
    def _declared(self) -> tuple[Tree, list[str], object]:
        """The user's tree of `Param`, the dotted path of each leaf, and the tree's structure."""
        model = self.model
        with self._own_code():
            tree = model.params()
        leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
        names = [dotted(path) for path, _ in leaves]
        wrong = [f"{dotted(path)}: {type(leaf).__name__}" for path, leaf in leaves if not _is_param(leaf)]
        if wrong or len(set(names)) < len(names):
            why = f"params() returns {wrong[0]}" if wrong else f"params() returns {max(names, key=names.count)} twice"
            hint = "declare each with dtrain.Param(shape, dims, init); other values belong in fields of the class"
            raise RecipeError(
                f"model.target: {self.target}: {why}; every leaf must be a Param with a path of its own", hint
            )
        return tree, names, structure

    def params(self) -> Tree:
        """The user's tree where it consists of dicts and lists; else a dict by dotted path, since checkpoints name the
        leaves of other node types in their own ways."""
        tree, names, _ = self._declared
        return tree if _plain(tree) else dict(zip(names, jax.tree.leaves(tree), strict=True))

    def loss(self, params: Tree, batch: Batch, ctx: Context) -> Loss:
        (tree, names, structure), model = self._declared, self.model
        own = params if _plain(tree) else jax.tree.unflatten(structure, [params[name] for name in names])
        with self._own_code():
            result = model.loss(own, batch, ctx)
        try:
            return Loss(_scalar(result.sum), _scalar(result.weight), {n: _scalar(v) for n, v in result.metrics.items()})
        except (AttributeError, TypeError, ValueError) as error:
            why = f"loss() does not return a Loss(sum, weight, metrics) of scalars: {error}"
            raise RecipeError(
                f"model.target: {self.target}: {why}", "sum each over the examples of the batch"
            ) from error

    @property
    def split_rows(self) -> bool:
        """Whether the model declares that it accepts rows split along their length, in the order of `ctx.places`."""
        return bool(getattr(self.model, "split_rows", False))

    @property
    def user_code(self) -> str:
        return self.target

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """What the user's model declares in `metrics`. RecipeError if it is not a tuple of `Metric`."""
        with self._own_code():
            metrics: Any = getattr(self.model, "metrics", ())
        if isinstance(metrics, tuple | list) and all(isinstance(metric, Metric) for metric in metrics):
            return tuple(metrics)
        hint = "use dtrain.Metric: metrics = (Metric('top1', higher_is_better=True),)"
        raise RecipeError("model: its `metrics` are not a tuple of dtrain.Metric", hint)

    @property
    def structure(self) -> Structure:
        """What the user's model declares in `structure`. RecipeError if it is not a `Structure`."""
        with self._own_code():
            structure: Any = getattr(self.model, "structure", Structure())
        if isinstance(structure, Structure):
            return structure
        raise RecipeError("model: its `structure` is not a dtrain.Structure", "structure = Structure(layers=12)")

    def overrides(self, fields: Mapping[str, str | int]) -> dict[str, Any]:
        return {"args": dict(fields)}

    def replaced(self, fields: Mapping[str, str | int]) -> Self:
        return replace(self, args=self.args | dict(fields))

    def flops(self, example: Example, examples: int) -> Flops:
        model = self.model
        with self._own_code():
            return model.flops(example, examples)

    def mismatch(self, example: Example) -> str:
        model = self.model
        with self._own_code():
            return model.mismatch(example)

    @contextmanager
    def _own_code(self) -> Iterator[None]:
        """Turn an error in the user's code into a RecipeError with its file and line."""
        try:
            yield
        except DtrainError as error:
            where = _line(error, "")
            error.message = f"{where}: {error.message}" if where else error.message
            raise
        except (MemoryError, OSError, jax.errors.JaxRuntimeError):
            raise  # a fault of the machine, not of the user's code
        except Exception as error:
            text = str(error).strip().splitlines() or [""]
            hint = "--debug shows the whole traceback"
            if any(word in str(error) for word in VARYING):
                hint = "the carry of a loop starts the same on every device but becomes different: start it with "
                hint += "dtrain.vary(zeros, dtrain.axes_of(x)), where x is computed from the batch"
            where = _line(error, f"model.target: {self.target}")
            raise RecipeError(f"{where}: {type(error).__name__}: {text[0]}", hint) from error


def _is_param(leaf: object) -> bool:
    return isinstance(leaf, Param)


def _plain(tree: Tree) -> bool:
    """Whether a tree consists of dicts and lists only."""
    if isinstance(tree, dict):
        return all(isinstance(key, str) and "." not in key and _plain(child) for key, child in tree.items())
    return all(map(_plain, tree)) if type(tree) in (list, tuple) else _is_param(tree)


def _scalar(value: object) -> jax.Array:
    array = jnp.asarray(value, jnp.float32)
    if array.shape != ():
        raise ValueError(f"an array of shape {array.shape}")
    return array


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # raised by a parent package
        return False


def _line(error: Exception, otherwise: str) -> str:
    """`file:line` of the innermost frame of the user's code in the traceback; else `otherwise`."""
    package, frame, line = str(Path(dtrain.__file__).parent), error.__traceback__, ""
    while frame:
        file = frame.tb_frame.f_code.co_filename
        if not file.startswith((package, "<")) and "site-packages" not in file and Path(file).suffix == ".py":
            line = f"{file}:{frame.tb_lineno}"
        frame = frame.tb_next
    return line or otherwise
