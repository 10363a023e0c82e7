"""A model of the user's own: any class that keeps the contract of `dtrain.models.nn.model.Model`."""

import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

import dtrain
from dtrain.core.errors import DtrainError, FieldError, RecipeError
from dtrain.data.batch import Batch, Example
from dtrain.models.nn.context import Context
from dtrain.models.nn.model import Flops, Loss, Model
from dtrain.models.nn.param import Param, Tree, dotted

VARYING = ("varying", "manual axis type", "manual_axis_type")
"""Words of JAX's own errors about values that differ from device to device."""


@dataclass(frozen=True, kw_only=True)
class Custom:
    """`target: package.module:Class`, built with `args`; imported when the run starts, not before."""

    kind: Literal["custom"] = "custom"
    target: str
    """package.module:Class, from the recipe's folder, the working folder, or installed. Importing it runs its code."""
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the class."""
    folder: str | None = None
    """Where the module is searched for first: the recipe's folder, where the module is in it."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", self.target):
            raise FieldError("target", f"{self.target!r} is not of the form package.module:Class")

    @cached_property
    def model(self) -> Model:
        """The user's model; RecipeError says why it could not be had."""
        module, _, name = self.target.partition(":")
        for folder in (str(Path.cwd()), self.folder):
            if folder and folder not in sys.path:
                sys.path.insert(0, folder)
        if not _exists(module):
            hint = "put the module beside the recipe or into the working folder, or install its package"
            message = f"model.target: {self.target} could not be built: No module named {module!r}"
            raise RecipeError(message, hint)
        with self._own_code():
            found = getattr(importlib.import_module(module), name, None)
            if found is None:
                raise RecipeError(f"model.target: {self.target}: module {module!r} has no attribute {name!r}")
            made = found(**self.args)
        missing = [verb for verb in ("params", "loss", "flops", "mismatch") if not hasattr(made, verb)]
        if missing:
            hint = "docs/guide.md, 'A model of your own', shows the whole contract"
            raise RecipeError(f"model.target: {self.target} lacks {', '.join(missing)}", hint)
        return made

    @cached_property
    def _declared(self) -> tuple[Tree, list[str], Any]:
        """The user's tree of declarations, the dotted path of each, and the structure."""
        model = self.model
        with self._own_code():
            tree = model.params()
        leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
        names = [dotted(path) for path, _ in leaves]
        wrong = [f"{dotted(path)}: {type(leaf).__name__}" for path, leaf in leaves if not _is(leaf)]
        if wrong or len(set(names)) < len(names):
            why = f"params() gives {wrong[0]}" if wrong else f"params() gives {max(names, key=names.count)} twice"
            hint = "declare each with dtrain.Param(shape, dims, init); values that do not train belong in fields"
            raise RecipeError(f"model.target: {self.target}: {why}, not a Param for each path", hint)
        return tree, names, structure

    def params(self) -> Tree:
        """As declared where that is dicts and lists; else by dotted path, since checkpoints name other nodes in ways
        of their own."""
        tree, names, _ = self._declared
        return tree if _plain(tree) else dict(zip(names, jax.tree.leaves(tree), strict=True))

    def loss(self, params: Tree, batch: Batch, ctx: Context) -> Loss:
        (tree, names, structure), model = self._declared, self.model
        own = params if _plain(tree) else jax.tree.unflatten(structure, [params[name] for name in names])
        with self._own_code():
            found = model.loss(own, batch, ctx)
        try:
            return Loss(_scalar(found.sum), _scalar(found.weight), {n: _scalar(v) for n, v in found.metrics.items()})
        except (AttributeError, TypeError, ValueError) as error:
            why = f"loss() gives no Loss(sum, weight, metrics) of scalars: {error}"
            raise RecipeError(f"model.target: {self.target}: {why}", "sum over the examples of the batch") from error

    @property
    def split_rows(self) -> bool:
        """Whether the model states that it takes rows split along their length, in the order of `ctx.places`."""
        return bool(getattr(self.model, "split_rows", False))

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
        """An error of the user's code as a RecipeError that names its line."""
        try:
            yield
        except DtrainError as error:
            where = _line(error, "")
            error.message = f"{where}: {error.message}" if where else error.message
            raise
        except (MemoryError, OSError, jax.errors.JaxRuntimeError):
            raise  # of the machine
        except Exception as error:
            text = str(error).strip().splitlines() or [""]
            hint = "--debug shows the whole traceback"
            if any(word in str(error) for word in VARYING):
                hint = "a carry that starts from zeros is the same on every device, what it becomes is not: start it "
                hint += "with dtrain.vary(zeros, dtrain.axes_of(x)), x being computed from the batch"
            where = _line(error, f"model.target: {self.target}")
            raise RecipeError(f"{where}: {type(error).__name__}: {text[0]}", hint) from error


def _is(leaf: Any) -> bool:
    return isinstance(leaf, Param)


def _plain(tree: Tree) -> bool:
    """Whether a tree is of dicts and lists alone."""
    if isinstance(tree, dict):
        return all(isinstance(key, str) and "." not in key and _plain(child) for key, child in tree.items())
    return all(map(_plain, tree)) if type(tree) in (list, tuple) else _is(tree)


def _scalar(value: Any) -> jax.Array:
    found = jnp.asarray(value, jnp.float32)
    if found.shape != ():
        raise ValueError(f"an array of shape {found.shape}")
    return found


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # of a package around it
        return False


def _line(error: Exception, otherwise: str) -> str:
    """The innermost line of the user's own code that an error came through."""
    package, frame, found = str(Path(dtrain.__file__).parent), error.__traceback__, ""
    while frame:
        file = frame.tb_frame.f_code.co_filename
        if not file.startswith((package, "<")) and "site-packages" not in file and Path(file).suffix == ".py":
            found = f"{file}:{frame.tb_lineno}"
        frame = frame.tb_next
    return found or otherwise
