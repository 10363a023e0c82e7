"""Image files, decoded on demand.

The content of the files is not trusted: only the formats in FORMATS are decoded, never by an external program, and only
up to MAX_PIXELS pixels.
"""

import io
import os
import threading
import zipfile
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from multiprocessing import parent_process
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dtrain.core.errors import DataError
from dtrain.data.batch import IMAGE, LABEL, Batch, Example
from dtrain.data.paths import reason
from dtrain.data.source import CHANGED, SourceDefaults, image_example

FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "PPM")
"""Formats by content, not by file name: otherwise Pillow would start Ghostscript for an EPS file named .png."""
MAX_PIXELS = 2**26
THREADS = 16
"""Images that are decoded at the same time, at most."""
MAX_BYTES = 2**28
"""Maximum size of a file."""


class ImageFile(NamedTuple):
    """An image: its path below the root, its class, and the size and modification time of its file when opened."""

    path: str
    label: int
    size: int
    mtime_ns: int


@dataclass(frozen=True)
class ImageFiles(SourceDefaults):
    """A source of images in a folder or a zip file."""

    root: Path
    files: tuple[ImageFile, ...]
    shape: tuple[int, int, int]
    """Height, width, channels."""
    classes: tuple[str, ...]
    """Names of the classes."""
    fingerprint: str
    draft: bool = False
    """Whether large JPEG files are decoded at a fraction of their size."""
    zipped: tuple[int, int] | None = None
    """Size and modification time of the zip file; None for a folder."""

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.classes

    @property
    def example(self) -> Example:
        return image_example(self.shape, len(self.classes))

    def __len__(self) -> int:
        return len(self.files)

    def rows(self, indices: np.ndarray) -> Batch:
        changed = self.changed()
        if changed:
            raise DataError(changed, CHANGED)
        images = np.empty((len(indices), *self.shape), np.uint8)

        def decode(part: slice) -> None:
            for row, index in zip(range(len(indices))[part], indices[part], strict=True):
                images[row] = self._decoded(self.files[index])

        if self.zipped is not None:
            _ = self._zip  # opened once, before the threads need it
        parts = [slice(first, None, self._threads) for first in range(min(self._threads, len(indices)))]
        deque(self._pool.map(decode, parts) if len(parts) > 1 else map(decode, parts), maxlen=0)
        return {IMAGE: images, LABEL: np.array([self.files[i].label for i in indices], np.int32)}

    def changed(self) -> str:
        """How the zip changed after it was opened; empty if it did not. Files in a folder are checked when read."""
        if self.zipped is None:
            return ""
        try:
            status = self.root.stat()
        except OSError as error:
            return f"{self.root}: can no longer be read: {error.strerror}"
        same = (status.st_size, status.st_mtime_ns) == self.zipped
        return "" if same else f"{self.root}: was modified or replaced after it was opened"

    def _decoded(self, file: ImageFile) -> np.ndarray:
        from PIL import Image

        where, (height, width, channels) = f"{self.root}/{file.path}", self.shape
        try:
            with Image.open(io.BytesIO(self._content(file)), formats=FORMATS) as image:
                if image.width * image.height > MAX_PIXELS:
                    raise DataError(f"{where}: has {image.width} x {image.height} pixels; the limit is {MAX_PIXELS:,}")
                if image.mode in ("I", "F") or image.mode.startswith("I;"):
                    message = f"{where}: has more than 8 bits per value (mode {image.mode}); only 8 are supported"
                    raise DataError(message, "convert it to 8 bits")
                mode = "L" if channels == 1 else "RGB"
                if self.draft:
                    image.draft(mode, (width, height))
                scaled = image.convert(mode).resize((width, height))
        except DataError:
            raise
        except Exception as error:  # decoders raise errors of any class on damaged bytes
            message = f"{where}: cannot be read as an image: {reason(error)}"
            raise DataError(message, "repair or remove the file") from error
        return np.asarray(scaled, np.uint8).reshape(self.shape)

    def _content(self, file: ImageFile) -> bytes:
        """All bytes of a file; zipfile verifies the CRC of a file in a zip."""
        if file.size > MAX_BYTES:
            raise DataError(f"{self.root}/{file.path}: has {file.size:,} bytes; the limit is {MAX_BYTES:,}")
        if self.zipped is not None:
            opened, lock = self._zip
            with lock:
                return opened.read(file.path)
        path = self.root / file.path
        status = path.stat()
        if (status.st_size, status.st_mtime_ns) != (file.size, file.mtime_ns):
            raise DataError(f"{path}: was modified or replaced after the run started", CHANGED)
        return path.read_bytes()

    @cached_property
    def _threads(self) -> int:
        """Threads that decode, without the GIL: all cores, or one in a worker process, which has others beside it."""
        return 1 if parent_process() else min(os.cpu_count() or 1, THREADS)

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._threads, "decode")

    @cached_property
    def _zip(self) -> tuple[zipfile.ZipFile, threading.Lock]:
        return zipfile.ZipFile(self.root), threading.Lock()

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_zip", "_pool", "_threads")}
