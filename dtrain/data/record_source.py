"""The rows of a split of records: arrays from what was kept, pictures decoded when they are needed."""

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from dtrain.core.errors import DataError
from dtrain.core.types import JsonObject
from dtrain.data.batch import LABEL, Batch, Example
from dtrain.data.columns import NAMED, ImageColumn
from dtrain.data.digest_cache import cached_by_file, file_digest, file_stamp
from dtrain.data.image_files import MAX_BYTES, Head, Threads, decoded, head
from dtrain.data.overlap import hashes, row_hashes
from dtrain.data.picture_folder import left_out
from dtrain.data.pixels import Pixels
from dtrain.data.record_shards import CLEAR, SHOWN, Shard, special
from dtrain.data.source import CHANGED, SourceDefaults, Split

SIDES = re.compile(r"\b(left|right)\b", re.IGNORECASE)
"""Words of a text that a mirrored picture contradicts."""
SAMPLE = 2000
"""Most texts that are searched for them."""


class Section(Protocol):
    """What the recipe's section says of the rows."""

    @property
    def columns(self) -> Mapping[str, Any]:
        """The columns by name."""
        ...

    @property
    def pixels(self) -> Pixels:
        """How pictures are augmented."""
        ...

    @property
    def picture_names(self) -> tuple[str, ...]:
        """The columns of pictures."""
        ...

    @property
    def test_files(self) -> tuple[str, ...]:
        """Files for testing alone."""
        ...

    @property
    def cache(self) -> str:
        """Folder for headers and digests of pictures."""
        ...


REPAIR = "repair them, or set data.broken: leave_out"


def refuse_broken(shards: Sequence[Shard], hint: str = REPAIR) -> None:
    """DataError that names the records which cannot be used."""
    problems = [problem for shard in shards for problem in shard.problems]
    _refuse(problems, sum(shard.about["refused"] for shard in shards), "records", hint)


def _refuse(problems: Sequence[str], count: int, what: str, hint: str) -> None:
    if count:
        more = f"\n  and {count - SHOWN:,} more" if count > SHOWN else ""
        shown = "\n  ".join(problems[:SHOWN])
        first = shown if count == 1 else f"{count:,} {what} cannot be used:\n  {shown}{more}"
        raise DataError(first, hint)


class Pictures(NamedTuple):
    """The pictures of a column that are files of their own."""

    paths: tuple[Path, ...]
    """Each file once."""
    of_row: np.ndarray
    """The number of each row's file (rows,); -1 where the picture is in a file of records."""
    stamps: np.ndarray
    """Size and modification time of each file (files, 2)."""
    digests: tuple[str, ...]
    heads: tuple[Head, ...]


def named_pictures(
    data: Section, shards: Sequence[Shard], index: Sequence[np.ndarray], digested: bool
) -> dict[str, Pictures]:
    """The pictures that the rows name, by column; with `digested` also their digests."""
    found = {}
    for name in data.picture_names:
        numbers: dict[Path, int] = {}
        of_row = []
        for shard, rows in zip(shards, index, strict=True):
            for place in shard.arrays[name].values[rows[:, 1]].tolist():
                named = place[0] == NAMED
                of_row.append(numbers.setdefault(shard.root / shard.text(place), len(numbers)) if named else -1)
        paths = tuple(numbers)
        looked = _looked_at(data.cache, paths, digested)
        found[name] = Pictures(
            paths,
            np.array(of_row, np.int64),
            np.array([stamp for stamp, _, _ in looked], np.int64).reshape(-1, 2),
            tuple(digest for _, digest, _ in looked),
            tuple(Head(*values) for _, _, values in looked),
        )
    return found


def _looked_at(cache: str, paths: Sequence[Path], digested: bool) -> list[tuple[list[int], str, list[Any]]]:
    """Size and time, digest and header of each picture; of one that is missing, a header with that problem."""
    there = [path for path in paths if _is_file(path)]
    heads = cached_by_file(cache, "heads of records", there, head)
    digests = cached_by_file(cache, "pictures of records", there, file_digest) if digested else [""] * len(there)
    known = dict(zip(there, zip(digests, heads, strict=True), strict=True))
    found = []
    for path in paths:
        digest, values = known.get(path, ("", Head("does not exist")))
        size, time = file_stamp(path)[:2] if path in known else (0, 0)
        if size > MAX_BYTES:
            values = [*Head(f"has {size:,} bytes; the limit is {MAX_BYTES:,}")]
        found.append(([size, time], digest, values))
    return found


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # the name is too long, or a folder cannot be read
        return False


@dataclass(frozen=True)
class RecordRows(SourceDefaults):
    """The records of a split."""

    data: Section
    shards: tuple[Shard, ...]
    index: np.ndarray
    """The shard of each row, and its number there (rows, 2)."""
    classes: Mapping[str, tuple[str, ...]]
    """The names of the classes of each column of labels."""
    split: Split
    named: Mapping[str, Pictures]
    left_out: tuple[str, ...] = ()
    """Problems of pictures that are left out."""
    threads: Threads = field(default_factory=Threads, compare=False, repr=False)

    def __len__(self) -> int:
        return len(self.index)

    @property
    def example(self) -> Example:
        return {name: column.feature(self.classes.get(name, ())) for name, column in self.data.columns.items()}

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.classes.get(LABEL, ())

    @property
    def row_labels(self) -> np.ndarray | None:
        return self._kept(LABEL, np.arange(len(self))) if self.class_names else None

    @property
    def content_hashes(self) -> np.ndarray | None:
        parts, every = [], np.arange(len(self))
        for name, column in self.data.columns.items():
            pictures = self.named.get(name)
            if not isinstance(column, ImageColumn):
                parts.append(self._kept(name, every))
            elif pictures and all(pictures.digests) and (pictures.of_row >= 0).all():
                parts.append(hashes(digest.encode() for digest in pictures.digests)[pictures.of_row])
            else:  # inside of the records
                return None
        return row_hashes(*parts)

    def text_of(self, name: str, row: np.ndarray) -> str | None:
        return self.data.columns[name].text(row)

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        """A hash of what was kept, of the files that pictures are in, and of how they are decoded."""
        digest = hashlib.sha256(repr((self.classes, self.index.shape)).encode())
        digest.update(np.ascontiguousarray(self.index).data)
        for shard in self.shards:
            digest.update(repr((sorted(shard.about["digests"].items()), shard.about["texts"])).encode())
            digest.update((shard.digest if shard.about["inside"] else "").encode())
        for name, column in self.data.columns.items():
            digest.update(repr((name, column.decoded_by)).encode())
        for name, pictures in self.named.items():
            own = [pictures.digests[number] if number >= 0 else "" for number in pictures.of_row.tolist()]
            digest.update(repr((name, own)).encode())
        return f"records:{self.split}:{len(self)}:{digest.hexdigest()[:16]}"

    def rows(self, indices: np.ndarray) -> Batch:
        if changed := self.changed():
            raise DataError(changed, CHANGED)
        picked = self.index[indices]
        batch: Batch = {}
        for name, column in self.data.columns.items():
            batch[name] = kept = self._kept(name, indices)
            if isinstance(column, ImageColumn):
                batch[name] = self._decoded(name, column, indices, picked, kept)
        return batch

    def _kept(self, name: str, indices: np.ndarray) -> np.ndarray:
        """What is kept of a column of these rows; of a class its number."""
        shape, dtype = self.data.columns[name].kept
        picked = self.index[indices]
        kept = np.empty((len(picked), *shape), dtype)
        for number in np.unique(picked[:, 0]).tolist():
            mine = picked[:, 0] == number
            values = self.shards[number].arrays[name].values[picked[mine, 1]]
            kept[mine] = self._class_numbers[name][number][values] if name in self.classes else values
        return kept

    @cached_property
    def _class_numbers(self) -> dict[str, list[np.ndarray]]:
        """For each column of labels and each shard the class of each text."""
        found = {}
        for name, classes in self.classes.items():
            number = {text: i for i, text in enumerate(classes)}
            texts = [shard.about["texts"][name] for shard in self.shards]
            found[name] = [np.array([number.get(text, -1) for text in one], np.int32) for one in texts]
        return found

    def _decoded(
        self, name: str, column: ImageColumn, indices: np.ndarray, picked: np.ndarray, places: np.ndarray
    ) -> np.ndarray:
        images = np.empty((len(indices), *column.shape), np.uint8)

        def decode(row: int) -> None:
            shard, number = self.shards[picked[row, 0]], int(self.named[name].of_row[indices[row]])
            if number >= 0:
                path = self.named[name].paths[number]
                images[row] = decoded(str(path), lambda: self._file(name, number), column.shape, column.decoding)
            else:
                where = f"{shard.file}: record {picked[row, 1] + 1}"
                images[row] = decoded(where, lambda: shard.content(places[row]), column.shape, column.decoding)

        self.threads.each(len(indices), decode)
        return images

    def _file(self, name: str, number: int) -> bytes:
        pictures = self.named[name]
        path = pictures.paths[number]
        if file_stamp(path)[:2] != pictures.stamps[number].tolist():
            raise DataError(f"{path}: was modified or replaced after the run started", CHANGED)
        return path.read_bytes()

    def changed(self) -> str:
        return next(filter(None, (shard.changed() for shard in self.shards)), "")

    def place(self, index: int) -> str:
        shard, row = self.index[index].tolist()
        for pictures in self.named.values():
            if (number := pictures.of_row[index]) >= 0:
                return str(pictures.paths[number])
        return f"{self.shards[shard].file}: record {row + 1}"

    def origin_of(self, index: int) -> JsonObject:
        return {"record": self.place(index)}

    def _broken(self) -> dict[int, str]:
        """The problem of each row whose picture cannot be used."""
        found: dict[int, str] = {}
        for pictures in self.named.values():
            bad = [number for number, one in enumerate(pictures.heads) if one.problem]
            for row in np.flatnonzero(np.isin(pictures.of_row, bad)).tolist():
                number = pictures.of_row[row]
                found.setdefault(row, f"{pictures.paths[number]}: {pictures.heads[number].problem}")
        return found

    def refuse_broken(self, hint: str = REPAIR) -> "RecordRows":
        """This source. DataError that names the pictures which cannot be used."""
        problems = list(dict.fromkeys(self._broken().values()))
        _refuse(problems, len(problems), "pictures", hint)
        return self

    def without_broken(self) -> "RecordRows":
        """The source without the rows whose pictures cannot be used."""
        broken = self._broken()
        kept = np.setdiff1d(np.arange(len(self)), list(broken))
        named = {name: pictures._replace(of_row=pictures.of_row[kept]) for name, pictures in self.named.items()}
        return replace(self, index=self.index[kept], named=named, left_out=tuple(broken.values()))

    @property
    def notes(self) -> Sequence[str]:
        return tuple(self._notes())

    def _notes(self) -> Iterator[str]:
        """What was found in the files, and what is not used."""
        what = ", ".join(f"{name} {list(of.shape)}" for name, of in self.example.items())
        yield f"{len(self):,} records: {what}"
        for name, classes in self.classes.items():
            counts = Counter(self._kept(name, np.arange(len(self))).tolist())
            shown = ", ".join(f"{text} {counts[number]:,}" for number, text in enumerate(classes[:SHOWN]))
            yield f"{name}: {shown}{f' and {len(classes) - SHOWN:,} more' if len(classes) > SHOWN else ''}"
            if missing := [text for number, text in enumerate(classes) if not counts[number]]:
                yield f"{name}: no record of {', '.join(missing[:SHOWN])} in this split"
        if self.data.pixels.flip and self.split == "train":
            yield from self._sides()
        whole = self.split == "train" or bool(self.data.test_files)
        yield from self._unused(whole)
        for name, column in self.data.columns.items():
            inside = sum((Counter(shard.about["counts"][name]) for shard in self.shards), Counter())
            pictures = self.named[name].heads if name in self.named else ()
            files = Counter(note for one in pictures for note in special(one))
            for of, counts in (("of all records", inside if whole else {}), ("files", files)):
                for what, count in counts.items():
                    over = f" {list(column.background)}" if what == CLEAR and isinstance(column, ImageColumn) else ""
                    yield f"{name}: {count:,} {of} {what}{over}"

    def _unused(self, whole: bool) -> Iterator[str]:
        """Pictures that are left out and, of `whole` files, fields, records and files that are not used."""
        if self.left_out:
            yield f"{len(self.left_out):,} records of this split are left out; the first: {self.left_out[0]}"
        if not whole:
            return
        unused = sum((Counter(shard.about["unused"]) for shard in self.shards), Counter())
        if unused:
            shown = ", ".join(sorted(map(str, unused))[:SHOWN])
            yield f"fields that no column uses: {shown}{' and more' if len(unused) > SHOWN else ''}"
        if refused := sum(shard.about["refused"] for shard in self.shards):
            first = next(problem for shard in self.shards for problem in shard.problems)
            yield f"{refused:,} of all records are left out; the first: {first}"
        files = sum((left_out(shard.file) for shard in self.shards if shard.file.is_dir()), Counter())
        if files:
            yield "files left out: " + ", ".join(f"{count:,} {suffix}" for suffix, count in sorted(files.items()))

    def _sides(self) -> Iterator[str]:
        """Texts that a mirrored picture contradicts."""
        for name, column in self.data.columns.items():
            some = self._kept(name, np.arange(min(len(self), SAMPLE)))
            count = sum(bool(SIDES.search(column.text(row) or "")) for row in some)
            if count:
                of = f"{count:,} of {len(some):,} texts of {name} name left or right"
                yield f"{of}: data.pixels.flip mirrors their pictures all the same"
