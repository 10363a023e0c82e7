"""A model of the user's own: any class that keeps the contract of `dtrain.model.Model`."""

import importlib
import re
import sys
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from dtrain.batch import Batch, Example
from dtrain.context import Context
from dtrain.errors import FieldError, RecipeError
from dtrain.model import Flops, Loss, Model
from dtrain.params import Tree


@dataclass(frozen=True, kw_only=True)
class Custom:
    """`target: package.module:Class`, built with `args`; imported when the run starts, not before."""

    kind: Literal["custom"] = "custom"
    target: str
    """package.module:Class; modules beside you are found too. Importing it runs its code."""
    args: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the class."""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", self.target):
            raise FieldError("target", f"{self.target!r} is not of the form package.module:Class")

    @cached_property
    def model(self) -> Model:
        """The user's model; RecipeError says why it could not be had."""
        module, _, name = self.target.partition(":")
        if str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))
        try:
            made = getattr(importlib.import_module(module), name)(**self.args)
        except (ImportError, AttributeError, TypeError) as error:
            hint = "start dtrain in the folder that holds the module, or install its package"
            raise RecipeError(f"model.target: {self.target} could not be built: {error}", hint) from error
        missing = [verb for verb in ("params", "loss", "flops", "mismatch") if not hasattr(made, verb)]
        if missing:
            hint = "docs/guide.md, 'A model of your own', shows the whole contract"
            raise RecipeError(f"model.target: {self.target} lacks {', '.join(missing)}", hint)
        return made

    def params(self) -> Tree:
        return self.model.params()

    def loss(self, params: Tree, batch: Batch, ctx: Context) -> Loss:
        return self.model.loss(params, batch, ctx)

    def flops(self, example: Example, examples: int) -> Flops:
        return self.model.flops(example, examples)

    def mismatch(self, example: Example) -> str:
        return self.model.mismatch(example)
