"""What a recipe's step is made of: every parameter, and where the mesh puts it by which rule."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dtrain.models.nn.param import Param, count, paths
from dtrain.parallel.mesh import mesh_sizes
from dtrain.parallel.rules import Layout
from dtrain.recipe.recipe import Recipe
from dtrain.train.banner import mesh_text


@dataclass(frozen=True)
class Placed:
    """One parameter: `split` says of each dim which axis cuts it; bytes are those of parameters alone."""

    name: str
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    split: dict[str, str]
    copies: int
    """Devices that hold the same part."""
    bytes: int
    bytes_per_device: int

    def text(self, width: int) -> str:
        """A line for a person."""
        named = ", ".join(f"{dim} {size}" for dim, size in zip(self.dims, self.shape, strict=True))
        rules = ", ".join(f"{dim}: {axis}" for dim, axis in self.split.items()) or "whole"
        copies = f", {self.copies} copies" if self.copies > 1 else ""
        return f"  {self.name:<{width}}  ({named})  {rules}{copies}  {size_text(self.bytes_per_device)} a device"


@dataclass(frozen=True)
class Explanation:
    """A recipe's parameters on a mesh."""

    recipe: Recipe
    layout: Layout
    devices: int
    parameters: tuple[Placed, ...]

    def lines(self) -> Iterator[str]:
        """The whole, for a person."""
        recipe, total = self.recipe, sum(part.bytes_per_device for part in self.parameters)
        yield f"{recipe.name}: {recipe.model.kind} of {count(self.layout.declared):,} parameters"
        yield f"mesh {mesh_text(mesh_sizes(self.layout.sizes))} on {self.devices} devices, engine {recipe.engine.kind}"
        width = max(len(part.name) for part in self.parameters)
        yield from (part.text(width) for part in self.parameters)
        yield f"  in all {size_text(total)} of parameters a device, in {recipe.precision.params}"
        whole = [part for part in self.parameters if not part.split]
        if whole and self.devices > 1:
            yield f"  whole on every device: {size_text(sum(part.bytes for part in whole))} in {len(whole)} parameters"

    def values(self) -> dict[str, Any]:
        """The whole, for a program. Sizes are in bytes."""
        return {
            "name": self.recipe.name,
            "devices": self.devices,
            "mesh": mesh_sizes(self.layout.sizes),
            "engine": self.recipe.engine.kind,
            "parameters": [vars(part) for part in self.parameters],
        }


def explain(recipe: Recipe, devices: int) -> Explanation:
    """Where each parameter lies on that many devices; RecipeError where one cannot be placed."""
    layout = Layout(recipe.mesh.sizes(devices), recipe.mesh.table(), recipe.model.params())
    layout.check()
    width = jnp.dtype(recipe.precision.params).itemsize
    leaves = zip(jax.tree.leaves(paths(layout.declared)), jax.tree.leaves(layout.declared), strict=True)
    return Explanation(recipe, layout, devices, tuple(_placed(layout, name, p, width, devices) for name, p in leaves))


def _placed(layout: Layout, name: str, param: Param, width: int, devices: int) -> Placed:
    split = {dim: " and ".join(layout.axes(dim)) for dim in param.names if layout.axes(dim)}
    parts = 1
    for dim in split:
        parts *= layout.parts(dim)
    size = param.size * width
    return Placed(name, param.shape, param.names, split, devices // parts, size, size // parts)


def size_text(size: float) -> str:
    """1536 → 1.5 KiB."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
