"""Parts of a model whose parameters come from other runs or from files: trained further, or frozen and not saved."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import jax

from dtrain.core.errors import FieldError, RecipeError
from dtrain.core.types import DType
from dtrain.core.weights_source import WeightsSource
from dtrain.models.nn.param import Param, Tree, paths


@dataclass(frozen=True, kw_only=True)
class Part(WeightsSource):
    """One entry of the recipe's `parts`: the parameters whose paths begin with its name."""

    path: str = ""
    """Where the other model has them: what its paths begin with there; default: they are all of it."""
    frozen: bool = False
    """Never changed and not saved: every start reads them again, and compares their checksum."""
    dtype: DType | None = None
    """In which frozen ones are kept; default: `precision.params`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dtype and not self.frozen:
            raise FieldError("dtype", "parameters that are trained are kept in precision.params", "frozen: true")


def with_parts(declared: Tree, parts: Mapping[str, Part]) -> Tree:
    """The declared parameters, those of frozen parts neither trained nor saved.

    RecipeError if no parameter is in a part, or if one part is inside of another.
    """
    if not parts:
        return declared
    names = jax.tree.leaves(paths(declared))
    for part in parts:
        if not any(is_in(part, name) for name in names):
            tops = dict.fromkeys(name.partition(".")[0] for name in names)
            raise RecipeError(f"parts.{part}: no parameter's path begins so", f"paths begin with {', '.join(tops)}")
        if around := next((other for other in parts if other != part and is_in(other, part)), None):
            raise RecipeError(f"parts.{part}: it is inside of the part {around}", "leave one of them out")

    def one(name: str, param: Param) -> Param:
        part = next((part for at, part in parts.items() if is_in(at, name)), None)
        if part is None or not part.frozen:
            return param
        return replace(param, trained=False, saved=False, dtype=part.dtype or "", average=None)

    return jax.tree.map(one, paths(declared), declared)


def is_in(part: str, name: str) -> bool:
    """Whether a path is in that part of a model."""
    return name == part or name.startswith(f"{part}.")
