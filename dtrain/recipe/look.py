"""Inspect the data that a recipe names, as far as it is cheap, writes nothing and downloads nothing."""

import os
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from functools import singledispatch
from glob import has_magic
from pathlib import Path
from typing import Any

import numpy as np

from dtrain.core.errors import DataError
from dtrain.core.limited import OverLimit, limited
from dtrain.data.chat import Templated
from dtrain.data.codec import File
from dtrain.data.custom import CustomData
from dtrain.data.digest_cache import NO_CACHE
from dtrain.data.files import resolve_files
from dtrain.data.idx import FILES, IDX
from dtrain.data.images import Images
from dtrain.data.mixture import Mixture
from dtrain.data.npz import Npz
from dtrain.data.paths import PACKAGE, is_remote
from dtrain.data.source import Data
from dtrain.data.stream import InMemory
from dtrain.data.table import Table
from dtrain.data.text import Text
from dtrain.data.tokens import Tokens, held_out, windows
from dtrain.recipe.findings import SPLITS, Look

ENTRIES = 20_000
"""Largest number of file names that are listed to expand globs."""
BYTES, TEXT_BYTES, TOKENISED_BYTES, TOKENIZER_BYTES = (size * 2**20 for size in (64, 16, 2, 8))
"""Largest total sizes of binary files, of texts, of records that are tokenised, and of a tokenizer."""


def inspect_data(data: Data) -> Look:
    """Inspect the data: its examples, its problems, and what was not inspected.

    Data, templates and tokenizers may come from others, and may be made to take all of a machine's time or memory.
    """
    try:
        return limited(_inspected, data)
    except OverLimit as error:
        hint = "a file may be made to cost this much; if it is right, `--no-data` leaves the data out of the check"
        return Look(problems=[("data", DataError(f"cannot be inspected: {error}", hint))])


def _inspected(data: Data) -> Look:
    result = Look()
    try:
        _look(data, result)
    except DataError as error:
        result.problems.append(("data", error))
    except (OSError, ValueError, MemoryError) as error:
        result.problems.append(("data", DataError(f"cannot be read: {error or 'it needs more memory than there is'}")))
    return result


@singledispatch
def _look(data: object, found: Look) -> None:
    found.open(data, "data")


@_look.register
def _(_data: CustomData, found: Look) -> None:
    found.unseen.append("the data, whose module is imported only when the run starts")


@_look.register
def _(data: IDX, found: Look) -> None:
    root = Path(data.root).expanduser()
    names = [name for split in SPLITS for name in FILES[split]]
    files = [next((p for p in (root / name, root / f"{name}.gz") if p.is_file()), None) for name in names]
    missing = [name for name, path in zip(names, files, strict=True) if path is None]
    if missing and data.download:
        found.unseen.append(f"data: {root} lacks {missing[0]}; the run downloads MNIST into it")
    elif _bytes(path for path in files if path) > BYTES:
        found.unseen.append(f"data: the labels and contents of {root}, over {BYTES >> 20} MiB")
        example = data.example()
        found.found |= {"train": example} if example else {}
    else:
        found.open(data, "data.root")


@_look.register
def _(data: Images, found: Look) -> None:
    root = Path(data.root).expanduser()
    if root.is_dir() and not _few([str(root / "**" / "*")]):
        found.unseen.append(f"data: the images of {root}, over {ENTRIES:,} files")
    elif root.exists() and not (root.is_dir() or root.is_file()):
        found.problems.append(("data.root", DataError(f"{root} is neither a folder nor a .zip")))
    else:
        found.open(data, "data.root")


@_look.register(Table)
@_look.register(Npz)
def _(data: Table | Npz, found: Look) -> None:
    files = data.files if isinstance(data, Table) else (data.file,)
    test = data.test_files if isinstance(data, Table) else filter(None, (data.test_file,))
    paths = _matching(files, tuple(test), "data", found)
    if paths and _bytes(paths) > BYTES:
        found.unseen.append(f"data: the rows of {len(paths)} files, over {BYTES >> 20} MiB")
    elif paths:
        found.open(data, "data.files" if isinstance(data, Table) else "data.file")


@_look.register
def _(data: Templated, found: Look) -> None:
    files = _matching(data.files, data.test_files, "records", found)
    known, most = _tokenizer(data, found), TEXT_BYTES if data.tokenizer == "bytes" else TOKENISED_BYTES
    if _bytes(files) > most:
        found.unseen.append(f"data: the records of {len(files)} files, over {most >> 20} MiB")
    elif files and known:
        found.open(data, "data.files")


@_look.register
def _(data: Mixture, found: Look) -> None:
    for number, source in enumerate(data.sources):
        inner, where = Look(), f"data.sources.{number}.data"
        _look(source.data, inner)
        found.problems += [(f"{where}{key.removeprefix('data')}", problem) for key, problem in inner.problems]
        found.unseen += [f"source {source.name}: {text}" for text in inner.unseen]
        found.opened |= inner.opened
    found.found["train"] = data.example()


@_look.register
def _(data: Tokens, found: Look) -> None:
    files = _matching(data.files, data.test_files, "tokens", found)
    if data.tokenizer:
        _tokenizer(data, found)
    if not files:
        return
    if _bytes(files) > BYTES:
        found.unseen.append(f"data: the tokens of {len(files)} files, over {BYTES >> 20} MiB")
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
        found.unseen.append("data: the number of tokens in the text, and the largest token")
    elif _bytes(files) > TEXT_BYTES:
        found.unseen.append(f"data: the text of {len(files)} files, over {TEXT_BYTES >> 20} MiB")
    else:
        _read_text(data, found)


def _read_text(data: Text, found: Look) -> None:
    """Read the bytes of the text as the run's tokens, without the cache that a run writes."""
    separator = 0 if data.pack else None
    for split in SPLITS:
        files = resolve_files(data.test_files if split == "test" and data.test_files else data.files, "text")
        ending = b"" if separator is None else b"\0"
        stream: Any = InMemory(np.frombuffer(b"".join(path.read_bytes() + ending for path in files), np.uint8))
        stream = stream if data.test_files else held_out(stream, data.test, split)
        try:
            drawn = data.random and split == "train"
            found.take(split, windows([str(files[0])], [stream], data.length, drawn, separator, split, NO_CACHE))
        except DataError as error:
            found.refuse("data.length", error)


def _tokenizer(data: Text | Tokens | Templated, found: Look) -> bool:
    """Whether the tokenizer was opened and works."""
    try:
        codec = data.codec()
        if isinstance(codec, File) and codec.path.stat().st_size > TOKENIZER_BYTES:
            found.unseen.append(f"data.tokenizer: {codec.path}, over {TOKENIZER_BYTES >> 20} MiB")
            return False
        codec.encode(b"a")
        if isinstance(data, Text) and data.pack:
            codec.number(data.end)
    except DataError as error:
        found.problems.append(("data.tokenizer", error))
        return False
    return True


def _matching(names: Sequence[str], test_names: Sequence[str], what: str, found: Look) -> list[Path]:
    """The files that the globs match; none if a glob matches nothing, or if there are too many names to list."""
    files: list[Path] = []
    for key, some in (("data.files", tuple(names)), ("data.test_files", tuple(test_names))):
        remote = [name for name in some if is_remote(name)]
        if remote:
            found.unseen.append(f"{key}: {remote[0]}, which the run copies from there")
            return []
        if not _few(some):
            found.unseen.append(f"{key}: more than {ENTRIES:,} file names to search")
            return []
        try:
            files += resolve_files(some, what) if some or key == "data.files" else []
        except DataError as error:
            found.problems.append((key, error))
    return [] if any(key in ("data.files", "data.test_files") for key, _ in found.problems) else files


def _bytes(files: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in files)


def _few(patterns: Sequence[str]) -> bool:
    """Whether expanding these globs lists at most `ENTRIES` names: `/**/x` would list every folder of the machine."""
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
