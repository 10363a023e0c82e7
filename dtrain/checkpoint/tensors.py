"""Read and write parameters in safetensors files, which contain no executable code."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dtrain.core.errors import DataError, EnvironmentFault
from dtrain.core.files import read_object, refuse_pointer
from dtrain.core.narrow import (
    BLOCK,
    BLOCKS,
    BYTES,
    FACTORS,
    FP8,
    SCALES,
    Read,
    has_factors,
    mapped_fp8,
    multiplied,
    unpacked,
    unpacked_shape,
)
from dtrain.core.types import JsonObject

PICKLES = {".bin", ".ckpt", ".npy", ".npz", ".pickle", ".pkl", ".pt", ".pth"}
FLOATS = {"F64", "F32", "F16", "BF16"}


@dataclass(frozen=True)
class Tensors:
    """The tensors of one or several files, read one at a time; those in MXFP4 and FP8 as float32 (`narrow`)."""

    files: JsonObject
    """Name of each tensor → the open file that contains it."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Metadata from the files' headers."""
    left_out: tuple[str, ...] = ()
    """Names of files in the folder that are not the model's by its index, and are not read."""
    mapped: Mapping[str, np.ndarray] = field(default_factory=dict)
    """The tensors in FP8, which safetensors does not give as arrays of numpy."""

    def __contains__(self, name: str) -> bool:
        return (name in self.files and not self._part_of_another(name)) or self._packed(name)

    def __iter__(self) -> Iterator[str]:
        for name in self.files:
            if not self._part_of_another(name):
                yield name
            elif name.endswith(BLOCKS):
                yield name.removesuffix(BLOCKS)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, read from the header."""
        packed = self._packed(name)
        found = f"{name}{BLOCKS}" if packed else name
        shape = tuple(self.files[found].get_slice(found).get_shape())
        return unpacked_shape(shape) if packed else shape

    def _packed(self, name: str) -> bool:
        return name not in self.files and all(f"{name}{end}" in self.files for end in (BLOCKS, SCALES))

    def _part_of_another(self, name: str) -> bool:
        if name.endswith(FACTORS):
            return name.removesuffix(FACTORS) in self.files
        return any(name.endswith(end) and self._packed(name.removesuffix(end)) for end in (BLOCKS, SCALES))

    def _raw(self, name: str, kind: str) -> Read:
        tensor = self.files[name].get_slice(name)
        if tensor.get_dtype() != kind:
            raise DataError(f"{name} has dtype {tensor.get_dtype()}; such a tensor must have {kind}")
        return lambda index: np.asarray(tensor[index])

    def part(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """A part of a tensor, of which only this part is read; a slice with start and stop for each dim."""
        if self._packed(name):
            blocks, scales = (self._raw(f"{name}{end}", BYTES) for end in (BLOCKS, SCALES))
            return unpacked(blocks, scales, index)
        tensor = self.files[name].get_slice(name)
        kind, factors = tensor.get_dtype(), f"{name}{FACTORS}"
        if kind == FP8 and factors in self.files:
            if not has_factors(self.shape(name), self.shape(factors)):
                message = f"{factors} has shape {self.shape(factors)}, for a tensor of {self.shape(name)}"
                raise DataError(message, f"dtrain reads FP8 with a factor for each {BLOCK} x {BLOCK} values")
            return multiplied(lambda part: self.mapped[name][part], partial(self.part, factors), index)
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


INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
"""What lists the files of a model that has several, and the file of a model that has one."""


def _parts(folder: Path) -> tuple[list[Path], tuple[str, ...]]:
    """The files of the model in a folder, and the names of others: those that the index lists, else model.safetensors,
    else all. DataError if a file that the index lists is missing."""
    found = sorted(folder.glob("*.safetensors"))
    index = folder / INDEX
    if index.is_file():
        listed = read_object(index, "an index of tensors").get("weight_map")
        if not isinstance(listed, dict):
            raise DataError(f"{index} cannot be read as an index of tensors: it has no weight_map")
        names = sorted(set(map(str, listed.values())))
        missing = [name for name in names if "/" in name or not (folder / name).is_file()]
        if missing:
            lost = sum(str(name) in missing for name in listed.values())
            message = (
                f"{folder}: {', '.join(missing)} of {INDEX} is not there, with {lost:,} of {len(listed):,} tensors"
            )
            raise DataError(message, "download the folder again, all of it")
    else:
        names = [SINGLE] if (folder / SINGLE).is_file() else [path.name for path in found]
    parts = [folder / name for name in names]
    return parts, tuple(path.name for path in found if path not in parts)


@contextmanager
def opened(path: Path) -> Iterator[Tensors]:
    """Open a file, or the .safetensors files of the model in a folder.

    Raises DataError if there is none, if one that the folder's index lists is missing, if it is a pickle, or if a file
    is damaged.
    """
    from safetensors import SafetensorError, safe_open

    parts, left_out = _parts(path) if path.is_dir() else ([path], ())
    if path.suffix in PICKLES or (not parts and any(part.suffix in PICKLES for part in path.iterdir())):
        raise DataError(f"{path} is in pickle format, which can execute code", "convert it to safetensors")
    if not parts:
        raise DataError(f"{path} has no .safetensors file", "give a file, a folder of files, or a run folder")
    files: dict[str, Any] = {}
    mapped: dict[str, np.ndarray] = {}
    metadata: dict[str, str] = {}
    with ExitStack() as stack:
        for part in parts:
            refuse_pointer(part)
            try:
                file = stack.enter_context(safe_open(part, framework="numpy"))
            except (SafetensorError, OSError) as error:
                raise DataError(f"{part} cannot be read as safetensors: {error}") from error
            duplicates = files.keys() & set(file.keys())
            if duplicates:
                raise DataError(f"{min(duplicates)} is in more than one file of {path}")
            files |= dict.fromkeys(file.keys(), file)
            metadata |= file.metadata() or {}
            eight_bits = [name for name in list(file.keys()) if file.get_slice(name).get_dtype() == FP8]
            mapped |= mapped_fp8(part, eight_bits)
        yield Tensors(files, metadata, left_out, mapped)


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
