"""Read and write parameters in safetensors files, which contain no executable code."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dtrain.core.errors import DataError, EnvironmentFault
from dtrain.core.types import JsonObject

PICKLES = {".bin", ".ckpt", ".npy", ".npz", ".pickle", ".pkl", ".pt", ".pth"}
FLOATS = {"F64", "F32", "F16", "BF16"}


@dataclass(frozen=True)
class Tensors:
    """The tensors of one or several files, read one at a time."""

    files: JsonObject
    """Name of each tensor → the open file that contains it."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Metadata from the files' headers."""

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, read from the header."""
        return tuple(self.files[name].get_slice(name).get_shape())

    def part(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """A part of a tensor, of which only this part is read; a slice with start and stop for each dim."""
        tensor = self.files[name].get_slice(name)
        kind = tensor.get_dtype()
        if kind not in FLOATS:
            raise DataError(f"{name} has dtype {kind}; parameters must be floating-point: {', '.join(sorted(FLOATS))}")
        return tensor[index]

    def __getitem__(self, name: str) -> np.ndarray:
        return self.part(name, tuple(slice(0, size) for size in self.shape(name)))


@dataclass(frozen=True)
class InMemory(Tensors):
    """Arrays in memory, with the interface of tensors in files."""

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.files[name].shape)

    def part(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        return np.asarray(self.files[name][index])


@contextmanager
def opened(path: Path) -> Iterator[Tensors]:
    """Open a file, or every .safetensors file in a folder.

    Raises DataError if there is none, if it is a pickle, or if a file is damaged.
    """
    from safetensors import SafetensorError, safe_open

    parts = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if path.suffix in PICKLES or (not parts and any(part.suffix in PICKLES for part in path.iterdir())):
        raise DataError(f"{path} is in pickle format, which can execute code", "convert it to safetensors")
    if not parts:
        raise DataError(f"{path} has no .safetensors file", "give a file, a folder of files, or a run folder")
    files: dict[str, Any] = {}
    metadata: dict[str, str] = {}
    with ExitStack() as stack:
        for part in parts:
            try:
                file = stack.enter_context(safe_open(part, framework="numpy"))
            except (SafetensorError, OSError) as error:
                raise DataError(f"{part} cannot be read as safetensors: {error}") from error
            duplicates = files.keys() & set(file.keys())
            if duplicates:
                raise DataError(f"{min(duplicates)} is in more than one file of {path}")
            files |= dict.fromkeys(file.keys(), file)
            metadata |= file.metadata() or {}
        yield Tensors(files, metadata)


def write(path: Path, tensors: Mapping[str, np.ndarray], about: Mapping[str, str]) -> None:
    """Write a safetensors file atomically, with default permissions. Raises EnvironmentFault if that fails."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    part = path.with_name(f"{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.touch()
        mode = part.stat().st_mode  # safetensors creates files that only their owner can read
        save_file(dict(tensors), part, {**about, "format": "pt"})  # transformers requires this field
        part.chmod(mode)
        part.replace(path)
    except (SafetensorError, OSError) as error:
        part.unlink(missing_ok=True)
        raise EnvironmentFault(f"cannot write {path}: {error}") from error
