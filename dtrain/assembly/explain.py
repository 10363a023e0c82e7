"""Where the mesh places every parameter of a recipe, and by which rule."""

from collections.abc import Iterator
from dataclasses import dataclass

import jax

from dtrain.assembly.assemble import engine_on, prepared
from dtrain.assembly.frozen import frozen_models
from dtrain.core.slices import Target
from dtrain.core.types import JsonObject
from dtrain.models.nn.param import Param, paths
from dtrain.parallel.mesh import mesh_sizes, mesh_text
from dtrain.parallel.rules import Layout, dtypes_of, with_default_dims
from dtrain.recipe.recipe import Recipe
from dtrain.recipe.sizes import with_sizes


@dataclass(frozen=True)
class Placed:
    """One parameter and its placement: `split` maps sharded dims to mesh axes; bytes are without optimizer state."""

    name: str
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    split: dict[str, str]
    copies: int
    """Devices that hold the same shard."""
    bytes: int
    bytes_per_device: int

    def text(self, width: int) -> str:
        """One line of text; `width` pads the name."""
        named = ", ".join(f"{dim} {size}" for dim, size in zip(self.dims, self.shape, strict=True))
        rules = ", ".join(f"{dim}: {axis}" for dim, axis in self.split.items()) or "replicated"
        copies = f", {self.copies} copies" if self.copies > 1 else ""
        return f"  {self.name:<{width}}  ({named})  {rules}{copies}  {size_text(self.bytes_per_device)} per device"


@dataclass(frozen=True)
class Explanation:
    """The placement of all parameters of a recipe on a mesh."""

    recipe: Recipe
    engine: str
    """Its kind; auto if the hardware is not known."""
    layout: Layout
    devices: int
    parameters: tuple[Placed, ...]

    def lines(self) -> Iterator[str]:
        """The explanation as lines of text."""
        recipe, total = self.recipe, sum(part.bytes_per_device for part in self.parameters)
        yield f"{recipe.name}: {recipe.model.kind} of {self.layout.values:,} parameters"
        yield f"mesh {mesh_text(mesh_sizes(self.layout.sizes))} on {self.devices} devices, engine {self.engine}"
        width = max(len(part.name) for part in self.parameters)
        yield from (part.text(width) for part in self.parameters)
        kept = dtypes_of(self.layout.declared, recipe.precision.params)
        yield f"  total {size_text(total)} of parameters per device, in {kept}"
        replicated = [part for part in self.parameters if not part.split]
        if replicated and self.devices > 1:
            size = size_text(sum(part.bytes for part in replicated))
            yield f"  replicated on every device: {size} in {len(replicated)} parameters"

    def values(self) -> JsonObject:
        """The explanation as JSON values. Sizes are in bytes."""
        return {
            "name": self.recipe.name,
            "devices": self.devices,
            "mesh": mesh_sizes(self.layout.sizes),
            "engine": self.engine,
            "parameters": [vars(part) for part in self.parameters],
        }


def explain(recipe: Recipe, devices: int, on: Target | None = None) -> Explanation:
    """Place each parameter on that many devices, of a target if one is named. Raises RecipeError if one cannot be
    placed."""
    example, recipe = None, with_sizes(recipe)
    if recipe.model.user_code:
        example = recipe.data.example() or recipe.data.open("train").example
    sizes = recipe.mesh.sizes(devices)
    model = recipe.model.for_example(prepared(recipe, example)) if example else recipe.model
    model = recipe.minimised.wrap(model, recipe.lora, frozen_models(recipe))
    layout = Layout(sizes, recipe.mesh.table(), with_default_dims(model.params(), sizes))
    layout.check()
    dtype = recipe.precision.params
    leaves = zip(jax.tree.leaves(paths(layout.declared)), jax.tree.leaves(layout.declared), strict=True)
    engine = engine_on(recipe, on.chip, on.devices, on.slices) if on else recipe.engine
    return Explanation(
        recipe, engine.kind, layout, devices, tuple(_placed(layout, name, p, dtype, devices) for name, p in leaves)
    )


def _placed(layout: Layout, name: str, param: Param, dtype: str, devices: int) -> Placed:
    split = {dim: " and ".join(layout.axes(dim)) for dim in param.names if layout.axes(dim)}
    parts = 1
    for dim in split:
        parts *= layout.parts(dim)
    size = param.bytes(dtype)
    return Placed(
        name, param.shape, param.names, split=split, copies=devices // parts, bytes=size, bytes_per_device=size // parts
    )


def size_text(size: float) -> str:
    """A number of bytes in the largest fitting unit: 1536 → "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
