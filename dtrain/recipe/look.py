"""A look at the data that a recipe names, as far as it is cheap, writes nothing and fetches nothing."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from functools import singledispatch
from glob import has_magic
from pathlib import Path
from typing import Any

import numpy as np

from dtrain.core.errors import DataError
from dtrain.data.batch import Example
from dtrain.data.codec import File
from dtrain.data.files import PACKAGE, matching
from dtrain.data.idx import FILES, IDX
from dtrain.data.images import Images
from dtrain.data.known import NO_CACHE
from dtrain.data.source import Data, Source, Split
from dtrain.data.text import Text
from dtrain.data.tokens import Tokens, held_out, windows

ENTRIES = 20_000
"""Names of files that are read, at most, to find those that are meant."""
BYTES = 64 * 2**20
"""Of files that are read whole."""
TEXT_BYTES = 16 * 2**20
TOKENIZER_BYTES = 8 * 2**20
SPLITS: tuple[Split, Split] = ("train", "test")


@dataclass
class Look:
    """What was found."""

    examples: int | None = None
    """In an epoch of training."""
    found: dict[Split, Example] = field(default_factory=dict)
    problems: list[tuple[str, DataError]] = field(default_factory=list)
    """Dotted path, and what is wrong there."""
    opened: bool = False
    """Whether any of the data was read."""
    unseen: list[str] = field(default_factory=list)
    """What was not looked at, and why."""

    def open(self, data: Any, key: str) -> None:
        """Both splits, as a run opens them, but for the records that a run keeps of its files."""
        data = replace(data, cache=NO_CACHE) if hasattr(data, "cache") else data
        for split in SPLITS:
            try:
                self.take(split, data.open(split))
            except DataError as error:
                self.refuse(key, error)

    def refuse(self, key: str, error: DataError) -> None:
        """A problem; once, where both splits have it."""
        if all(error.message != known.message for _, known in self.problems):
            self.problems.append((key, error))

    def take(self, split: Split, source: Source) -> None:
        """What a source holds."""
        self.found[split], self.opened = source.example, True
        self.examples = len(source) if split == "train" else self.examples


def look(data: Data) -> Look:
    """What the data holds, what is wrong with it, and what was not looked at."""
    found = Look()
    try:
        _look(data, found)
    except DataError as error:
        found.problems.append(("data", error))
    except (OSError, ValueError) as error:
        found.problems.append(("data", DataError(f"cannot be read: {error}")))
    return found


@singledispatch
def _look(data: Any, found: Look) -> None:
    found.open(data, "data")


@_look.register
def _(data: IDX, found: Look) -> None:
    root = Path(data.root).expanduser()
    names = [name for split in SPLITS for name in FILES[split]]
    files = [next((p for p in (root / name, root / f"{name}.gz") if p.is_file()), None) for name in names]
    missing = [name for name, path in zip(names, files, strict=True) if path is None]
    if missing and data.download:
        found.unseen.append(f"data: {root} lacks {missing[0]}; the run fetches MNIST into it")
    elif _bytes(path for path in files if path) > BYTES:
        found.unseen.append(f"data: the labels and the contents of {root}, which is large")
        example = data.example()
        found.found |= {"train": example} if example else {}
    else:
        found.open(data, "data.root")


@_look.register
def _(data: Images, found: Look) -> None:
    root = Path(data.root).expanduser()
    if root.is_dir() and not _few([str(root / "**" / "*")]):
        found.unseen.append(f"data: the images of {root}, which are many")
    elif root.exists() and not (root.is_dir() or root.is_file()):
        found.problems.append(("data.root", DataError(f"{root} is neither a folder nor a .zip")))
    else:
        found.open(data, "data.root")


@_look.register
def _(data: Tokens, found: Look) -> None:
    files = _matching(data.files, data.test_files, "tokens", found)
    if data.tokenizer:
        _tokenizer(data, found)
    if not files:
        return
    if _bytes(files) > BYTES:
        found.unseen.append(f"data: the tokens of {len(files)} files, which are large")
        found.found["train"] = data.example()
    else:
        found.open(data, "data.files")


@_look.register
def _(data: Text, found: Look) -> None:
    files = _matching(data.files, data.test_files, "text", found)
    known = _tokenizer(data, found)
    found.found["train"] = data.example()
    if not (files and known):
        return
    if data.tokenizer != "bytes":
        found.unseen.append("data: how many tokens the text has, and the largest of them")
    elif _bytes(files) > TEXT_BYTES:
        found.unseen.append(f"data: the text of {len(files)} files, which is long")
    else:
        _read_text(data, found)


def _read_text(data: Text, found: Look) -> None:
    """The bytes of the text as a run's tokens, without the cache that a run keeps."""
    separator = 0 if data.pack else None
    for split in SPLITS:
        files = matching(data.test_files if split == "test" and data.test_files else data.files, "text")
        ending = b"" if separator is None else b"\0"
        stream: Any = InMemory(np.frombuffer(b"".join(path.read_bytes() + ending for path in files), np.uint8))
        stream = stream if data.test_files else held_out(stream, data.test, split)
        try:
            drawn = data.random and split == "train"
            found.take(split, windows([str(files[0])], [stream], data.length, drawn, separator, split, NO_CACHE))
        except DataError as error:
            found.refuse("data.length", error)


@dataclass(frozen=True)
class InMemory:
    """Tokens as a `Stream` that no file holds."""

    tokens: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    def part(self, start: int, stop: int) -> "InMemory":
        return InMemory(self.tokens[start:stop])

    def scanned(self, _: str) -> dict[str, Any]:
        return {"digest": "", "smallest": 0, "largest": int(self.tokens.max(initial=0))}


def _tokenizer(data: Text | Tokens, found: Look) -> bool:
    """Whether the tokenizer could be looked at and is sound."""
    try:
        made = data.codec()
        if isinstance(made, File) and made.path.stat().st_size > TOKENIZER_BYTES:
            found.unseen.append(f"data.tokenizer: {made.path}, which is large")
            return False
        made.encode(b"a")
        if isinstance(data, Text) and data.pack:
            made.number(data.end)
    except DataError as error:
        found.problems.append(("data.tokenizer", error))
        return False
    return True


def _matching(names: Sequence[str], test_names: Sequence[str], what: str, found: Look) -> list[Path]:
    """The files that are meant; none where some are missing, or where there are too many to look at."""
    files: list[Path] = []
    for key, some in (("data.files", tuple(names)), ("data.test_files", tuple(test_names))):
        if not _few(some):
            found.unseen.append(f"{key}: more than {ENTRIES:,} files have to be searched")
            return []
        try:
            files += matching(some, what) if some or key == "data.files" else []
        except DataError as error:
            found.problems.append((key, error))
    return [] if any(key in ("data.files", "data.test_files") for key, _ in found.problems) else files


def _bytes(files: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in files)


def _few(patterns: Sequence[str]) -> bool:
    """Whether finding the files of these globs reads few names: `/**/x` would read every folder of a machine."""
    left = ENTRIES
    for pattern in patterns:
        whole = Path(pattern.replace(PACKAGE, str(Path(__file__).parents[1]))).expanduser()
        waiting = [(Path(), whole.parts)]
        while waiting:
            base, parts = waiting.pop()
            while parts and not has_magic(parts[0]):
                base, parts = base / parts[0], parts[1:]
            for name, inside in _entries(base) if parts else ():
                left -= 1
                if left < 0:
                    return False
                if inside and parts[0] == "**":
                    waiting.append((base / name, parts))
                elif inside and parts[1:] and fnmatch(name, parts[0]):
                    waiting.append((base / name, parts[1:]))
            if parts[1:] and parts[0] == "**":
                waiting.append((base, parts[1:]))
    return True


def _entries(folder: Path) -> Iterable[tuple[str, bool]]:
    """The names in a folder, and whether each is a folder."""
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                yield entry.name, entry.is_dir()
    except OSError:
        return
