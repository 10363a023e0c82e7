"""Parameters in safetensors files: names, shapes and numbers, and nothing that could run."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dtrain.core.errors import DataError, EnvironmentFault

PICKLES = {".bin", ".ckpt", ".npy", ".npz", ".pickle", ".pkl", ".pt", ".pth"}
FLOATS = {"F64", "F32", "F16", "BF16"}


@dataclass(frozen=True)
class Tensors:
    """What one or several files hold, read tensor by tensor."""

    files: Mapping[str, Any]
    """The open file that holds each name."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """What the files' headers say besides."""

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Without reading the numbers."""
        return tuple(self.files[name].get_slice(name).get_shape())

    def __getitem__(self, name: str) -> np.ndarray:
        kind = self.files[name].get_slice(name).get_dtype()
        if kind not in FLOATS:
            raise DataError(f"{name} holds {kind}; parameters are floating-point numbers")
        return self.files[name].get_tensor(name)


@dataclass(frozen=True)
class InMemory(Tensors):
    """Arrays at hand, read as those of a file are."""

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.files[name].shape)

    def __getitem__(self, name: str) -> np.ndarray:
        return np.asarray(self.files[name])


@contextmanager
def opened(path: Path) -> Iterator[Tensors]:
    """The tensors of a file, or of every .safetensors file in a folder.

    DataError where it is no such file, or could run what it holds, or its header does not describe its bytes.
    """
    from safetensors import SafetensorError, safe_open

    parts = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if path.suffix in PICKLES or (not parts and any(part.suffix in PICKLES for part in path.iterdir())):
        raise DataError(f"{path} holds pickles, which run what they hold", "convert it to safetensors")
    if not parts:
        raise DataError(f"{path} holds no .safetensors file", "give a file, a folder of files, or a run's folder")
    files: dict[str, Any] = {}
    metadata: dict[str, str] = {}
    with ExitStack() as stack:
        for part in parts:
            try:
                file = stack.enter_context(safe_open(part, framework="numpy"))
            except (SafetensorError, OSError) as error:
                raise DataError(f"{part} cannot be read as safetensors: {error}") from error
            twice = files.keys() & set(file.keys())
            if twice:
                raise DataError(f"{min(twice)} is in more than one file of {path}")
            files |= dict.fromkeys(file.keys(), file)
            metadata |= file.metadata() or {}
        yield Tensors(files, metadata)


def write(path: Path, tensors: Mapping[str, np.ndarray], about: Mapping[str, str]) -> None:
    """A safetensors file, whole or not at all, with the mode of any new file. EnvironmentFault where it cannot be
    written."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    part = path.with_name(f"{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.touch()
        mode = part.stat().st_mode  # safetensors makes files that their owner alone can read
        save_file(dict(tensors), part, {**about, "format": "pt"})  # which other libraries ask for
        part.chmod(mode)
        part.replace(path)
    except (SafetensorError, OSError) as error:
        part.unlink(missing_ok=True)
        raise EnvironmentFault(f"cannot write {path}: {error}") from error
