"""Import what a recipe names as `package.module:name`, and give errors in the user's code their file and line."""

import importlib
import importlib.util
import inspect
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

from dtrain.core import extras
from dtrain.core.errors import DtrainError, FieldError, RecipeError

PACKAGE, PYTHON = str(Path(__file__).parents[1]), sysconfig.get_path("stdlib")
VARYING = ("varying", "manual axis type", "manual_axis_type")
"""Words in JAX's errors about values that vary over mesh axes (its `check_vma`)."""
FORWARD = "forward-mode autodiff (jvp) to a custom_vjp"
"""In JAX's error about a second derivative of a function that has a gradient of its own."""
MACHINE = ("JaxRuntimeError", "XlaRuntimeError")
"""Errors of JAX that point to the machine, such as too little memory, not to the user's code."""
_SEARCHED: set[Path] = set()
"""The folders in which this process has searched for the modules of recipes."""


@dataclass(frozen=True, kw_only=True)
class UserTarget:
    """A section of a recipe that names code of the user's own."""

    target: str
    """package.module:name, from the recipe's folder, the working folder or an installed package. Importing it runs its
    code."""
    args: dict[str, object] = field(default_factory=dict)
    """Keyword arguments."""
    folder: str | None = None
    """Folder that is searched first for the module: the recipe's, if the module is in it."""

    def __post_init__(self) -> None:
        refuse_malformed(self.target)

    @property
    def user_code(self) -> str:
        return self.target


def refuse_malformed(target: str) -> None:
    """Raise FieldError if a target is not of the form package.module:name."""
    if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", target):
        raise FieldError("target", f"{target!r} is not of the form package.module:name")


def build_target(section: str, target: str, args: Mapping[str, object], folder: str | None) -> object:
    """What the class or function `target` returns for these keyword arguments.

    The module is searched for in `folder`, in the working folder and among installed packages; importing it runs its
    code. RecipeError if the module or the name is missing or raises an error, or if this process has imported a module
    of the same name from another recipe's folder. `section` is for messages: "model".
    """
    module, _, name = target.partition(":")
    where, places = f"{section}.target: {target}", [Path(place).resolve() for place in (folder, Path.cwd()) if place]
    _refuse_modules_of_others(where, places)
    for place in map(str, reversed(places)):  # the folder of this recipe before that of an earlier one
        sys.path[:] = [place, *(other for other in sys.path if other != place)]
    if not _exists(module):
        hint = "put the module into the folder of the recipe or the working folder, or install its package"
        raise RecipeError(f"{where} cannot be imported: no module named {module!r}", hint)
    with user_errors(where):
        found = named_in(importlib.import_module(module), name, where)
        _refuse_unknown(where, found, args)
        return found(**args)


def named_in(module: ModuleType, name: str, where: str) -> Any:
    """What a module has of that name. RecipeError, with the nearest name, if it has none."""
    found = getattr(module, name, None)
    if found is None:
        names = {one.lower(): one for one in vars(module)}
        near = get_close_matches(name.lower(), names, 1)
        hint = f"did you mean {module.__name__}:{names[near[0]]}?" if near else "name a class or function of the module"
        raise RecipeError(f"{where}: module {module.__name__!r} has no attribute {name!r}", hint)
    return found


def _refuse_unknown(where: str, called: Any, args: Iterable[str]) -> None:
    """RecipeError for an argument that the class or function does not have, with the nearest that it has."""
    try:
        has = inspect.signature(called).parameters
    except (TypeError, ValueError):  # some of C have no signature
        return
    unknown = next((name for name in args if name not in has), None)
    if unknown is None or any(one.kind is one.VAR_KEYWORD for one in has.values()):
        return
    near = get_close_matches(unknown, has, 1)
    hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(has) or 'no arguments'}"
    raise RecipeError(f"{where}: unexpected keyword argument {unknown!r}", hint)


def _refuse_modules_of_others(where: str, places: list[Path]) -> None:
    """RecipeError if a module in one of these folders has the name of one that was imported for another recipe.

    Python imports a name once: the recipe would silently get the other's code.
    """
    found: dict[str, Path] = {}
    for place in places:
        for file in (*place.glob("*.py"), *place.glob("*/__init__.py")):
            found.setdefault(file.parent.name if file.stem == "__init__" else file.stem, file)
    for name, file in found.items():
        loaded = Path(getattr(sys.modules.get(name), "__file__", None) or file).resolve()
        folder = loaded.parents[1 if loaded.stem == "__init__" else 0]
        if folder in _SEARCHED and loaded != file.resolve():
            message = f"{where}: this process has imported {loaded}, and the recipe's {name} is {file}"
            raise RecipeError(message, "rename one of the modules, or use a process for each recipe")
    _SEARCHED.update(places)


@contextmanager
def user_errors(where: str, arrays: Iterable[str] = ()) -> Iterator[None]:
    """Turn an error in the user's code into a RecipeError with its file and line; `where` if they are not known.

    `arrays`: the names of the arrays that the code is given, for one that looks for another.
    """
    try:
        yield
    except DtrainError as error:
        line = _line(error)
        error.message = f"{line}: {error.message}" if line else error.message
        raise
    except (MemoryError, OSError):
        raise  # a fault of the machine, not of the user's code
    except Exception as error:
        if type(error).__name__ in MACHINE:
            raise
        text = str(error).strip().splitlines() or [""]
        hint = "--debug shows the whole traceback"
        if isinstance(error, ModuleNotFoundError):
            name = (error.name or "").partition(".")[0]
            known = extras.command([name]) if extras.use_of(name) else f"{sys.executable} -m pip install ..."
            hint = f"install the package that has it: {known}"
        if isinstance(error, KeyError) and (names := list(arrays)) and error.args and error.args[0] not in names:
            hint = f"the batch has {', '.join(sorted(names))}; {hint}"
        if any(word in str(error) for word in VARYING):
            hint = "the carry of a loop starts the same on every device but becomes different: start it with "
            hint += "dtrain.vary(zeros, dtrain.axes_of(x)), where x is computed from the batch; a loop in a library "
            hint += "works with engine: jit"
        if FORWARD in str(error):
            hint = "dtrain's layers have gradients for reverse mode: jax.jacrev(jax.grad(f)) in place of jax.hessian(f)"
        raise RecipeError(f"{_line(error) or where}: {type(error).__name__}: {text[0]}", hint) from error


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # raised by a parent package
        return False


def _line(error: Exception) -> str:
    """`file:line` of the innermost frame of the user's code in the traceback, or of its syntax error; empty if there is
    none."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        return f"{error.filename}:{error.lineno}"
    frame, line = error.__traceback__, ""
    while frame:
        file = frame.tb_frame.f_code.co_filename
        if not file.startswith((PACKAGE, PYTHON, "<")) and "site-packages" not in file and Path(file).suffix == ".py":
            line = f"{file}:{frame.tb_lineno}"
        frame = frame.tb_next
    return line
