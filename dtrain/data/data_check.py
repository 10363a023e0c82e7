"""What `dtrain check` finds in the data of a recipe, as far as it is cheap; nothing is written or downloaded."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from glob import has_magic
from pathlib import Path
from typing import TYPE_CHECKING

from dtrain.core.errors import DataError
from dtrain.data.files import resolve_files
from dtrain.data.overlap import overlap
from dtrain.data.paths import PACKAGE, is_remote

if TYPE_CHECKING:
    from dtrain.data.batch import Example
    from dtrain.data.source import Data, Source, Split

SPLITS: "tuple[Split, Split]" = ("train", "test")
ENTRIES = 20_000
"""Largest number of file names that are listed to expand globs."""
BYTES, TEXT_BYTES, TOKENISED_BYTES, TOKENIZER_BYTES = (size * 2**20 for size in (64, 16, 2, 8))
"""Largest total sizes of binary files, of texts, of records that are tokenised, and of a tokenizer."""


@dataclass
class DataCheck:
    """The examples of a recipe's data, its problems, and what was not checked."""

    rows: int | None = None
    """In an epoch of training."""
    examples: "dict[Split, Example]" = field(default_factory=dict)
    """Shape and dtype of each feature, of the splits where they are known."""
    problems: list[tuple[str, DataError]] = field(default_factory=list)
    """Dotted path, and what is wrong there."""
    opened: bool = False
    """Whether any of the data was read."""
    not_checked: list[str] = field(default_factory=list)
    """What was not checked, and why."""
    notes: list[str] = field(default_factory=list)
    """What the sources found in their files, and did not use."""
    warnings: list[str] = field(default_factory=list)
    """What is probably not meant."""
    partly: bool = False
    """Whether a part of the data was not checked."""

    def open(self, data: "Data", key: str) -> None:
        """Open both splits as a run does, but without the cache that a run writes."""
        data, opened = data.without_cache(), []
        for split in SPLITS:
            try:
                opened.append(data.open(split))
                self.take(split, opened[-1])
            except DataError as error:
                self.refuse(key, error)
        if len(opened) == len(SPLITS):
            self.notes += overlap(*opened)

    def refuse(self, key: str, error: DataError) -> None:
        """Record a problem, once if both splits have it."""
        if all(error.message != before.message for _, before in self.problems):
            self.problems.append((key, error))

    def take(self, split: "Split", source: "Source") -> None:
        """Record the examples of a source."""
        self.examples[split], self.opened = source.example, True
        self.notes += [f"{split}: {line}" for line in source.notes]
        self.rows = len(source) if split == "train" else self.rows

    def too_large(self, what: str, files: Sequence[Path], most: int) -> bool:
        """Whether the files have more bytes in all than `most`: then they are not read, and that is recorded."""
        if total_bytes(files) <= most:
            return False
        self.not_checked.append(f"data: {what}, over {most >> 20} MiB")
        return True

    def tokenizer(self, data: "Data", end: str = "") -> bool:
        """Whether the tokenizer was opened and works, and has the token `end`."""
        try:
            tokenizer = data.open_tokenizer()
            if tokenizer.file_bytes > TOKENIZER_BYTES:
                self.not_checked.append(f"data.tokenizer: {tokenizer.path}, over {TOKENIZER_BYTES >> 20} MiB")
                return False
            tokenizer.encode(b"a")
            if end:
                tokenizer.token_id(end)
        except DataError as error:
            self.problems.append(("data.tokenizer", error))
            return False
        return True

    def files(self, names: Sequence[str], test_names: Sequence[str], what: str) -> list[Path]:
        """The files that the globs match; none if a glob matches nothing, or if there are too many names to list."""
        files: list[Path] = []
        for key, some in (("data.files", tuple(names)), ("data.test_files", tuple(test_names))):
            remote = [name for name in some if is_remote(name)]
            if remote:
                self.not_checked.append(f"{key}: {remote[0]}, which the run copies from there")
                return []
            if not few(some):
                self.not_checked.append(f"{key}: more than {ENTRIES:,} file names to search")
                return []
            try:
                files += resolve_files(some, what) if some or key == "data.files" else []
            except DataError as error:
                self.problems.append((key, error))
        return [] if any(key in ("data.files", "data.test_files") for key, _ in self.problems) else files


def total_bytes(files: Iterable[Path]) -> int:
    """The sum of the sizes of files."""
    return sum(path.stat().st_size for path in files)


def few(patterns: Sequence[str], most: int = ENTRIES) -> bool:
    """Whether expanding these globs lists at most `most` names: `/**/x` would list every folder of the machine."""
    left = most
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
