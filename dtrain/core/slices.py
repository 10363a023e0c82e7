"""What can be rented, by the name the cloud gives it: a slice of TPUs, or a number of GPUs."""

import difflib
import math
import re
from dataclasses import dataclass

from dtrain.core.chips import CHIPS, PER_HOST, Chip
from dtrain.core.errors import RecipeError


@dataclass(frozen=True)
class Target:
    """Chips of one kind in one or several slices; `shape` is the torus of a slice, () where there is none."""

    name: str
    chip: Chip | None
    """None for the CPU of this machine."""
    chips: int
    """Chips of all slices."""
    shape: tuple[int, ...] = ()
    slices: int = 1

    @property
    def devices(self) -> int:
        """JAX devices in all."""
        return self.chips * (self.chip.devices if self.chip else 1)

    @property
    def platform(self) -> str:
        """tpu, gpu or cpu."""
        return self.chip.platform if self.chip else "cpu"

    @property
    def hosts(self) -> int:
        """Hosts of GPUs; 0 of other chips."""
        return -(-self.chips // PER_HOST) if self.platform == "gpu" else 0

    @property
    def rented(self) -> int:
        """Chips that are paid for: a host of GPUs is rented as one of the machines that are sold."""
        sold = self.chip.cloud.sold if self.chip and self.chip.cloud else ()
        return next((count for count in sold if count >= self.chips), self.chips)

    @property
    def machine(self) -> str:
        """The machine type of each host of GPUs; empty for other chips."""
        cloud = self.chip.cloud if self.chip and self.platform == "gpu" else None
        return cloud.machine.replace(f"-{PER_HOST}g", f"-{min(self.rented, PER_HOST)}g") if cloud else ""

    def __str__(self) -> str:
        torus = f", {'x'.join(map(str, self.shape))}" if self.shape else ""
        several = f"{self.slices} x " if self.slices > 1 else ""
        kind = self.chip.name if self.chip else "CPU"
        return f"{several}{self.name} ({self.chips} {kind} {'chips' if self.platform == 'tpu' else 'devices'}{torus})"


def target(name: str, slices: int = 1) -> Target:
    """The target of that name: v5e-16, v5p-128, v5p:4x4x12, h100-8, cpu-8. RecipeError lists the nearest names."""
    family, sign, rest = re.match(r"([a-z0-9]+(?:-\d+g)?)?([-:]?)(.*)", name.lower()).groups()  # pyright: ignore[reportOptionalMemberAccess]
    chip = next((one for one in CHIPS if family in (one.name, *one.aliases)), None)
    if family == "cpu" and rest.isdigit() and int(rest) > 0 and slices == 1:
        return Target(name, None, int(rest))
    if chip is None or not sign:
        raise _unknown(name)
    if chip.platform == "gpu":
        return _gpus(name, chip, rest, slices)
    if sign == ":":
        return _torus(name, chip, rest, slices)
    if rest.isdigit() and int(rest) % chip.counted == 0 and int(rest) // chip.counted in chip.slices:
        chips = int(rest) // chip.counted
        return Target(name, chip, chips * slices, chip.slices[chips], slices)
    raise _unknown(name)


def _gpus(name: str, chip: Chip, rest: str, slices: int) -> Target:
    if not rest.isdigit() or not 0 < int(rest) <= chip.most or (int(rest) > PER_HOST and int(rest) % PER_HOST):
        small = f"{chip.name}-1 to {chip.name}-{PER_HOST}"
        raise RecipeError(f"no {name}", f"{small}, then multiples of {PER_HOST} up to {chip.largest}")
    if slices > 1:
        raise RecipeError(f"--slices {slices}: GPUs come in hosts, not in slices", f"ask for {chip.name}-N in all")
    return Target(name, chip, int(rest))


def _torus(name: str, chip: Chip, rest: str, slices: int) -> Target:
    sides = [int(side) for side in rest.split("x") if side.isdigit()]
    if _can_be_had(chip, sides):
        return Target(name, chip, math.prod(sides) * slices, tuple(sides), slices)
    if _can_be_had(chip, sorted(sides)):
        rising = "x".join(map(str, sorted(sides)))
        raise RecipeError(
            f"no slice is called {name!r}", f"the sides are written in rising order: {chip.name}:{rising}"
        )
    raise _unknown(name)


def _can_be_had(chip: Chip, sides: list[int]) -> bool:
    whole = chip.dims == 3 and len(sides) == 3 and all(side % 4 == 0 and side for side in sides)
    cubes = whole and sides == sorted(sides) and math.prod(sides) <= chip.most
    return cubes or tuple(sides) == chip.slices.get(math.prod(sides))


def _unknown(name: str) -> RecipeError:
    family = next((one for one in CHIPS if name.lower().startswith((one.name, *one.aliases))), None)
    counted = f"; a number counts {'TensorCores' if family.counted == 2 else 'chips'}" if family and family.dims else ""
    return RecipeError(f"no slice is called {name!r}{counted}", _hint(name, family))


def _hint(name: str, family: Chip | None) -> str:
    """The largest slice for a name above it, else the nearest names."""
    sides = [int(side) for side in re.findall(r"\d+", name.partition(":")[2] or name.rpartition("-")[2])]
    if family and family.dims and sides:
        wanted = math.prod(sides) * (family.counted if ":" in name else 1)
        if wanted > max(family.slices) * family.counted:
            return f"the largest slice that can be rented is {family.largest}; --slices N joins several"
        counts = sorted(family.slices, key=lambda count: abs(count * family.counted - wanted))[:4]
        near = [f"{family.name}-{count * family.counted}" for count in sorted(counts)]
    else:
        names = [f"{chip.name}-{count * chip.counted}" for chip in CHIPS if chip.dims for count in chip.slices]
        names += [f"{chip.name}-{count}" for chip in CHIPS if chip.platform == "gpu" for count in (1, 8, 64)]
        near = difflib.get_close_matches(name.lower(), [*names, "cpu-8"], 4, 0.5)
    return f"did you mean {', '.join(near)}?" if near else "such as v5e-16, v5p-128, v6e-256, tpu7x-128, h100-8, cpu-8"
