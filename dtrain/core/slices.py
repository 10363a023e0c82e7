"""Parse the name of a hardware target: a TPU slice, a number of GPUs, or CPU devices."""

import difflib
import math
import re
from dataclasses import dataclass

from dtrain.core.chips import CHIPS, PER_HOST, Chip
from dtrain.core.errors import RecipeError


@dataclass(frozen=True)
class Target:
    """Chips of one kind in one or several slices; `shape` is the torus of one slice, () for GPUs and CPUs."""

    name: str
    chip: Chip | None
    """None for the CPU of this machine."""
    chips: int
    """Number of chips in all slices together."""
    shape: tuple[int, ...] = ()
    slices: int = 1

    @property
    def devices(self) -> int:
        """Number of JAX devices in all slices together."""
        return self.chips * (self.chip.devices if self.chip else 1)

    @property
    def platform(self) -> str:
        """tpu, gpu or cpu."""
        return self.chip.platform if self.chip else "cpu"

    @property
    def hosts(self) -> int:
        """Number of GPU hosts; 0 for other chips."""
        return -(-self.chips // PER_HOST) if self.platform == "gpu" else 0

    @property
    def rented(self) -> int:
        """Number of chips that are billed: GPUs are rented in the machine sizes that the cloud sells."""
        sold = self.chip.cloud.sold if self.chip and self.chip.cloud else ()
        return next((count for count in sold if count >= self.chips), self.chips)

    @property
    def machine(self) -> str:
        """Machine type of each GPU host; empty for other chips."""
        cloud = self.chip.cloud if self.chip and self.platform == "gpu" else None
        return cloud.machine.replace(f"-{PER_HOST}g", f"-{min(self.rented, PER_HOST)}g") if cloud else ""

    def __str__(self) -> str:
        torus = f", {'x'.join(map(str, self.shape))}" if self.shape else ""
        several = f"{self.slices} x " if self.slices > 1 else ""
        kind = self.chip.name if self.chip else "CPU"
        return f"{several}{self.name} ({self.chips} {kind} {'chips' if self.platform == 'tpu' else 'devices'}{torus})"


def target(name: str, slices: int = 1) -> Target:
    """Parse a target name: v5e-16, v5p-128, v5p:4x4x12, h100-8, cpu-8. RecipeError lists the nearest valid names."""
    family, separator, rest = re.match(r"([a-z0-9]+(?:-\d+g)?)?([-:]?)(.*)", name.lower()).groups()  # pyright: ignore[reportOptionalMemberAccess]
    chip = next((chip for chip in CHIPS if family in (chip.name, *chip.aliases)), None)
    if family == "cpu" and rest.isdigit() and int(rest) > 0 and slices == 1:
        return Target(name, None, int(rest))
    if chip is None or not separator:
        raise _unknown(name)
    if chip.platform == "gpu":
        return _gpus(name, chip, rest, slices)
    if separator == ":":
        return _torus(name, chip, rest, slices)
    if rest.isdigit() and int(rest) % chip.units_per_chip == 0 and int(rest) // chip.units_per_chip in chip.slices:
        chips = int(rest) // chip.units_per_chip
        return Target(name, chip, chips * slices, chip.slices[chips], slices)
    raise _unknown(name)


def _gpus(name: str, chip: Chip, rest: str, slices: int) -> Target:
    if not rest.isdigit() or not 0 < int(rest) <= chip.max_chips or (int(rest) > PER_HOST and int(rest) % PER_HOST):
        small = f"{chip.name}-1 to {chip.name}-{PER_HOST}"
        hint = f"valid names are {small}, and multiples of {PER_HOST} up to {chip.largest}"
        raise RecipeError(f"{name!r} is not a valid number of GPUs", hint)
    if slices > 1:
        message = f"--slices {slices} is for TPUs only: {name} consists of hosts, not slices"
        raise RecipeError(message, f"use {chip.name}-N with the total number of GPUs")
    return Target(name, chip, int(rest))


def _torus(name: str, chip: Chip, rest: str, slices: int) -> Target:
    sides = [int(side) for side in rest.split("x") if side.isdigit()]
    if _is_available(chip, sides):
        return Target(name, chip, math.prod(sides) * slices, tuple(sides), slices)
    if _is_available(chip, sorted(sides)):
        ascending = "x".join(map(str, sorted(sides)))
        raise RecipeError(f"there is no slice {name!r}", f"write the sides in ascending order: {chip.name}:{ascending}")
    raise _unknown(name)


def _is_available(chip: Chip, sides: list[int]) -> bool:
    """Whether a torus with these sides can be rented: made of 4 x 4 x 4 cubes, or a listed shape."""
    of_cubes = chip.dims == 3 and len(sides) == 3 and all(side % 4 == 0 and side for side in sides)
    custom = of_cubes and sides == sorted(sides) and math.prod(sides) <= chip.max_chips
    return custom or tuple(sides) == chip.slices.get(math.prod(sides))


def _unknown(name: str) -> RecipeError:
    family = next((chip for chip in CHIPS if name.lower().startswith((chip.name, *chip.aliases))), None)
    unit = (
        f"; the number counts {'TensorCores' if family.units_per_chip == 2 else 'chips'}"
        if family and family.dims
        else ""
    )
    return RecipeError(f"there is no slice {name!r}{unit}", _hint(name, family))


def _hint(name: str, family: Chip | None) -> str:
    """The largest slice if the name asks for a larger one, else the nearest valid names."""
    sides = [int(side) for side in re.findall(r"\d+", name.partition(":")[2] or name.rpartition("-")[2])]
    if family and family.dims and sides:
        requested = math.prod(sides) * (family.units_per_chip if ":" in name else 1)
        if requested > max(family.slices) * family.units_per_chip:
            return f"the largest available slice is {family.largest}; --slices N combines several"
        counts = sorted(family.slices, key=lambda count: abs(count * family.units_per_chip - requested))[:4]
        near = [f"{family.name}-{count * family.units_per_chip}" for count in sorted(counts)]
    else:
        names = [f"{chip.name}-{count * chip.units_per_chip}" for chip in CHIPS if chip.dims for count in chip.slices]
        names += [f"{chip.name}-{count}" for chip in CHIPS if chip.platform == "gpu" for count in (1, 8, 64)]
        near = difflib.get_close_matches(name.lower(), [*names, "cpu-8"], 4, 0.5)
    examples = "v5e-16, v5p-128, v6e-256, tpu7x-128, h100-8, cpu-8"
    return f"did you mean {', '.join(near)}?" if near else f"examples of valid names: {examples}"
