"""The lines that a run prints before it starts: devices, mesh, model, data and the figures derived from them."""

from collections.abc import Iterator, Mapping

import jax
import numpy as np

from dtrain.core.types import Device
from dtrain.data.source import Source
from dtrain.models.nn.param import count, trained
from dtrain.parallel.mesh import mesh_sizes
from dtrain.parallel.pipeline import bubble
from dtrain.parallel.rules import bytes_of
from dtrain.track.text import epochs_text
from dtrain.train.assembly import Assembly


def banner(assembly: Assembly, train: Source, test: Source, steps: int, devices: list[Device]) -> Iterator[str]:
    """Describe the run that is about to start: devices, parameters, epochs, pipeline bubble, replicated parameters."""
    recipe, layout = assembly.recipe, assembly.layout
    platform, processes = devices[0].device_kind, jax.process_count()
    where = f"{len(devices)} x {platform}" + (f" in {processes} processes" if processes > 1 else "")
    yield f"{recipe.name}  on {where}  mesh {mesh_text(mesh_sizes(layout.sizes))}  engine {recipe.engine.kind}"
    size = bytes_of(layout.declared, recipe.precision.params) / 2**20
    numbers = f"{count(layout.declared):,} parameters, {size:.1f} MiB in {recipe.precision.params}"
    own = count(trained(layout.declared, layout.declared))
    numbers += f", {own:,} of them trained" if own < count(layout.declared) else ""
    yield f"model {recipe.model.kind}: {numbers}"
    epochs = steps * recipe.batch / len(train)
    yield (
        f"data {recipe.data.kind}: {len(train):,} examples to train on, {len(test):,} to test on; "
        f"batch {recipe.batch} x {steps:,} steps = {epochs_text(epochs)} epochs"
    )
    for split, source in {"to train on": train, "to test on": test}.items():
        yield from (f"{split}: {line}" for line in getattr(source, "notes", ()))
    stages = layout.sizes["pipeline"]
    if stages > 1:
        idle = bubble(stages, recipe.accumulate)
        hint = f"; accumulate: {4 * stages} reduces it to {bubble(stages, 4 * stages):.0%}" if idle > 0.25 else ""
        yield f"pipeline of {stages} stages, {recipe.accumulate} microbatches: {idle:.0%} of the time is bubble{hint}"
    replicated = layout.replicated()
    if replicated:
        size = sum(values for _, values in replicated) * np.dtype(recipe.precision.params).itemsize
        more = f" and {len(replicated) - 3} more" if len(replicated) > 3 else ""
        names = ", ".join(name for name, _ in replicated[:3]) + more
        yield f"replicated, as no mesh rule applies: {names}; {size:,} bytes on every device"


def mesh_text(sizes: Mapping[str, int]) -> str:
    """The axes that span more than one device, with their sizes: "fsdp 2 x tensor 4"."""
    return " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "of one device"
