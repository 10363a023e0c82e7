"""Image files, decoded on demand. What is in a file is not to be trusted: only the formats named here
are decoded, never by another program, and only up to a number of pixels."""

import io
import zipfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dtrain.core.errors import DataError
from dtrain.data.batch import Batch, Example
from dtrain.data.files import reason
from dtrain.data.source import CHANGED, image_example

FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "PPM")
"""By content, whatever the name: Pillow would start Ghostscript for an EPS called .png."""
MAX_PIXELS = 2**26
MAX_BYTES = 2**28


class ImageFile(NamedTuple):
    """Where an image is, its class, and what its file had when the run began."""

    path: str
    label: int
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class ImageFiles:
    """Images in a folder or a zip."""

    root: Path
    files: tuple[ImageFile, ...]
    shape: tuple[int, int, int]
    names: tuple[str, ...]
    """Of the classes."""
    fingerprint: str
    zipped: tuple[int, int] | None = None
    """Size and time of change of the zip, where it is one."""
    starts: None = None

    @property
    def example(self) -> Example:
        return image_example(self.shape, len(self.names))

    def __len__(self) -> int:
        return len(self.files)

    def rows(self, indices: np.ndarray) -> Batch:
        changed = self.changed()
        if changed:
            raise DataError(changed, CHANGED)
        images = np.empty((len(indices), *self.shape), np.uint8)
        for row, index in enumerate(indices):
            images[row] = self._decoded(self.files[index])
        return {"image": images, "label": np.array([self.files[i].label for i in indices], np.int32)}

    def changed(self) -> str:
        """How the zip differs from what was opened. Files in a folder are compared one by one as they are read."""
        if self.zipped is None:
            return ""
        try:
            status = self.root.stat()
        except OSError as error:
            return f"{self.root}: cannot be read any more: {error.strerror}"
        same = (status.st_size, status.st_mtime_ns) == self.zipped
        return "" if same else f"{self.root}: was written to or replaced since it was opened"

    def _decoded(self, file: ImageFile) -> np.ndarray:
        from PIL import Image

        where, (height, width, channels) = f"{self.root}/{file.path}", self.shape
        try:
            with Image.open(io.BytesIO(self._content(file)), formats=FORMATS) as image:
                if image.width * image.height > MAX_PIXELS:
                    raise DataError(f"{where}: {image.width} x {image.height} pixels; {MAX_PIXELS:,} are read at most")
                if image.mode in ("I", "F") or image.mode.startswith("I;"):
                    raise DataError(f"{where}: more than 8 bits a value, which would be cut off", "save it with 8 bits")
                scaled = image.convert("L" if channels == 1 else "RGB").resize((width, height))
        except DataError:
            raise
        except Exception as error:  # decoders raise anything on damaged bytes
            message = f"{where}: cannot be read as an image: {reason(error)}"
            raise DataError(message, "repair or remove the file") from error
        return np.asarray(scaled, np.uint8).reshape(self.shape)

    def _content(self, file: ImageFile) -> bytes:
        """All bytes of a file; of a zip, they are held against its checksum."""
        if file.size > MAX_BYTES:
            raise DataError(f"{self.root}/{file.path}: {file.size:,} bytes; {MAX_BYTES:,} are read at most")
        if self.zipped is not None:
            with self._zip.open(file.path) as opened:
                return opened.read()
        path = self.root / file.path
        status = path.stat()
        if (status.st_size, status.st_mtime_ns) != (file.size, file.mtime_ns):
            raise DataError(f"{path}: was written to or replaced since the run began", CHANGED)
        return path.read_bytes()

    @cached_property
    def _zip(self) -> zipfile.ZipFile:
        return zipfile.ZipFile(self.root)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_zip"}
