"""What a model draws for some held-out examples: pictures as one PNG, other arrays as JSON lines or in a .npz."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dtrain.assembly.assemble import Assembly
from dtrain.assembly.input import eval_batches
from dtrain.assembly.state import State
from dtrain.core.errors import DataError, EnvironmentFault, RecipeError, cause
from dtrain.data.source import Source

COLUMNS = 8
"""Pictures side by side."""
GAP = 2
"""White pixels between pictures."""
LISTED = 256
"""Most values of an example that are written as JSON; arrays of larger ones are written by NumPy."""

Rows = Mapping[str, np.ndarray]
"""What was drawn, by name: (examples, ...)."""


@dataclass(frozen=True)
class Sampler:
    """The compiled program that draws for the first `count` examples of a source."""

    assembly: Assembly
    source: Source
    count: int
    compiled: jax.stages.Compiled

    def __call__(self, state: State) -> Rows:
        """Draw with the parameters of a state; with several processes, all must call this."""
        batches = -(-self.count // self.assembly.eval_batch)
        parts = [
            jax.device_get(jax.block_until_ready(self.compiled(state, batch)))
            for batch in eval_batches(self.assembly, self.source, batches)
        ]
        return {name: np.concatenate([_plain(part[name]) for part in parts])[: self.count] for name in parts[0]}


def _plain(values: Any) -> np.ndarray:
    """The values in a dtype of NumPy's own: its files have no bfloat16."""
    return np.asarray(values, np.float32 if values.dtype.kind == "V" else None)


def sampler(assembly: Assembly, source: Source, count: int, state: State | None = None) -> Sampler:
    """Compile the model's `sample` for such a state; by default for one of the run. RecipeError if it draws nothing."""
    model = assembly.recipe.model
    if model.generates:
        raise RecipeError(f"a model of kind {model.kind} writes texts, and draws no samples", "dtrain generate RUN")
    if not assembly.model.samples:
        hint = "give its class a method sample(params, batch, ctx)"
        raise RecipeError(f"the model of kind {model.kind} draws no samples", hint)
    traced = assembly.predict(assembly.shapes if state is None else state, source.example, "samples")
    compiled = assembly.recipe.engine.compile(traced, assembly.layout.platform)
    return Sampler(assembly, source, min(count, len(source)), compiled)


def is_pictures(values: np.ndarray) -> bool:
    """Whether an array has pictures: uint8 (examples, height, width, 1 or 3)."""
    return values.dtype == np.uint8 and values.ndim == 4 and values.shape[-1] in (1, 3)


def side_by_side(pictures: np.ndarray) -> np.ndarray:
    """Pictures (examples, height, width, 1 or 3) as one (height, width, 3), in rows of COLUMNS."""
    count, high, wide, channels = pictures.shape
    across = min(count, COLUMNS)
    rows = -(-count // across)
    whole = np.full((rows * (high + GAP) - GAP, across * (wide + GAP) - GAP, 3), 255, np.uint8)
    for number, picture in enumerate(pictures):
        top, left = number // across * (high + GAP), number % across * (wide + GAP)
        whole[top : top + high, left : left + wide] = np.repeat(picture, 3, 2) if channels == 1 else picture
    return whole


def write_samples(rows: Rows, folder: Path, stem: str) -> dict[str, np.ndarray]:
    """Write what was drawn into files whose names begin with `stem`; the pictures side by side, by name.

    DataError if an array has numbers that are not finite, EnvironmentFault if the files cannot be written.
    """
    for name, values in rows.items():
        if np.issubdtype(values.dtype, np.floating) and not np.isfinite(values).all():
            raise DataError(f"the samples {name!r} have values that are not finite")
    grids = {name: side_by_side(values) for name, values in rows.items() if is_pictures(values)}
    rest = {name: values for name, values in rows.items() if name not in grids}
    listed = {name: values for name, values in rest.items() if values[0].size <= LISTED}
    large = {name: values for name, values in rest.items() if name not in listed}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, grid in grids.items():
            _write(folder / f"{stem}{_file_name(name)}.png", lambda path, grid=grid: _png(path, grid))
        if listed:
            count = len(next(iter(listed.values())))
            lines = [
                json.dumps({name: values[one].tolist() for name, values in listed.items()}) for one in range(count)
            ]
            _write(folder / f"{stem}samples.jsonl", lambda path: path.write_text("\n".join(lines) + "\n"))
        if large:
            _write(folder / f"{stem}samples.npz", lambda path: _npz(path, large))
    except OSError as error:
        raise EnvironmentFault(f"cannot write samples into {folder}: {cause(error)}") from error
    return grids


def _write(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file that appears when it is complete."""
    part = path.with_name(f"{path.name}.part")
    write(part)
    part.replace(path)


def _png(path: Path, grid: np.ndarray) -> None:
    from PIL import Image

    Image.fromarray(grid).save(path, "PNG")


def _npz(path: Path, arrays: Rows) -> None:
    with path.open("wb") as file:
        np.savez_compressed(file, **arrays)  # pyright: ignore[reportArgumentType]


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name) or "samples"
