"""What a model draws for some held-out examples: pictures as one PNG, other arrays as JSON lines or in a .npz."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from dtrain.assembly.state import State
from dtrain.core.errors import DataError, EnvironmentFault, cause
from dtrain.core.files import atomic_write, overwrite
from dtrain.inference.outputs import Outputs

COLUMNS = 8
"""Pictures side by side."""
GAP = 2
"""White pixels between pictures."""
LISTED = 256
"""Most values of an example that are written as JSON; arrays of larger ones are written by NumPy."""

Rows = Mapping[str, np.ndarray]
"""What was drawn, by name: (examples, ...)."""


def drawn(program: Outputs, state: State, count: int) -> dict[str, np.ndarray]:
    """Draw for the first `count` examples, with the parameters of a state; with several processes, all must call it."""
    parts = [values for _, values in program(state, count)]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


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
            _write_picture(folder / f"{stem}{_file_name(name)}.png", grid)
        if listed:
            count = len(next(iter(listed.values())))
            lines = [
                json.dumps({name: values[one].tolist() for name, values in listed.items()}) for one in range(count)
            ]
            overwrite(folder / f"{stem}samples.jsonl", "\n".join(lines) + "\n")
        if large:
            with atomic_write(folder / f"{stem}samples.npz") as file:
                np.savez_compressed(file, **large)  # pyright: ignore[reportArgumentType]
    except OSError as error:
        raise EnvironmentFault(f"cannot write samples into {folder}: {cause(error)}") from error
    return grids


def _write_picture(path: Path, grid: np.ndarray) -> None:
    from PIL import Image

    with atomic_write(path) as file:
        Image.fromarray(grid).save(file, "PNG")


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.-]+", "-", name) or "samples"
