"""The mesh: which axes there are, how large each is, and which dims each may split."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import jax
from annotated_types import Ge
from jax.sharding import AxisType

from dtrain.errors import FieldError

Axis = Literal["data", "fsdp", "tensor"]
AXES: tuple[str, ...] = ("data", "fsdp", "tensor")
"""From the axis that talks least, which may cross the slow network, to the one that talks most."""

BATCH_AXES: tuple[str, ...] = ("data", "fsdp")
"""The axes that each see their own examples."""

MEMORY_AXES: tuple[str, ...] = ("fsdp",)
"""The axes that split parameters only to save memory: made whole again before use."""

RULES: Mapping[str, tuple[str, ...]] = {
    "batch": BATCH_AXES,
    "embed": ("fsdp",),
    "hidden": ("tensor",),
    "heads": ("tensor",),
}
"""Which axes split a dim of that name. A dim without a rule stays whole."""

Size = Annotated[int, Ge(-1)]


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """The size of each mesh axis; one of them may be -1 and takes the devices that are left."""

    data: Size = -1
    """Copies of the model, each with its own examples."""
    fsdp: Size = 1
    """Parts of parameters and optimizer state; each part also has its own examples."""
    tensor: Size = 1
    """Parts of every layer's matrices."""
    rules: dict[str, Axis] = field(default_factory=dict)
    """Further dims to split, or other axes for the known ones: {classes: tensor}."""

    def __post_init__(self) -> None:
        sizes = [getattr(self, axis) for axis in AXES]
        if 0 in sizes:
            raise FieldError(AXES[sizes.index(0)], "an axis has at least one device; found 0", "use 1 to leave it out")
        if sizes.count(-1) > 1:
            raise FieldError(AXES[sizes.index(-1)], f"only one axis may be -1; found {self._product()}")

    def _product(self) -> str:
        return " x ".join(f"{axis} {getattr(self, axis)}" for axis in AXES)

    @property
    def given(self) -> dict[str, int]:
        """The size of each axis as far as it is said: 1 for the one to be filled."""
        return {axis: max(getattr(self, axis), 1) for axis in AXES}

    @property
    def least(self) -> int:
        """The fewest devices that this mesh fits on."""
        return math.prod(self.given.values())

    @property
    def exact(self) -> bool:
        """Whether no axis is left to be filled."""
        return all(getattr(self, axis) > 0 for axis in AXES)

    def sizes(self, devices: int) -> dict[str, int]:
        """Every axis with its size on that many devices; FieldError where they do not fit."""
        if devices % self.least or (self.exact and devices != self.least):
            relation = "!=" if self.exact else "does not divide"
            left, right = (self.least, devices)
            raise FieldError(
                "",
                f"{self._product()}: {left} {relation} {right} devices",
                f"set one axis to -1 to fill it, or run on {self.least} devices: --devices {self.least} pretends them",
            )
        fill = devices // self.least
        return {axis: fill if getattr(self, axis) == -1 else getattr(self, axis) for axis in AXES}

    def table(self) -> dict[str, tuple[str, ...]]:
        """The rules with the recipe's own over them."""
        return {**RULES, **{dim: (axis,) for dim, axis in self.rules.items()}}


def build(sizes: Mapping[str, int], devices: Sequence[Any]) -> jax.sharding.Mesh:
    """The mesh of JAX, its devices placed by their position on the network."""
    shape, names = tuple(sizes[axis] for axis in AXES), AXES
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names), devices=devices)
