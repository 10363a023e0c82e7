"""Records with columns of any kinds: pictures and captions, texts and numbers, in files or in object storage."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal

import jax
import numpy as np

from dtrain.core.errors import DataError, FieldError
from dtrain.core.types import Fraction, JsonObject
from dtrain.data.batch import (
    IMAGE,
    LABEL,
    OTHER_IMAGE,
    OTHER_LABEL,
    ROW,
    SHARE,
    SMOOTHING,
    STEP,
    TARGET,
    TOKEN,
    WEIGHT,
    Batch,
    Example,
)
from dtrain.data.columns import AnyColumn, Column, ImageColumn, TokensColumn, Unfit, class_text
from dtrain.data.data_check import BYTES, SPLITS, TEXT_BYTES, DataCheck
from dtrain.data.digest_cache import NO_CACHE, cached_by_file, file_digest
from dtrain.data.files import address_packages
from dtrain.data.image_files import Decoding
from dtrain.data.paths import CACHE, expand_path, is_remote
from dtrain.data.picture_folder import has_pictures, picture_records
from dtrain.data.pixels import Pixels, WithPixels
from dtrain.data.record import Content, Limits, Record
from dtrain.data.record_shards import SHOWN, Shard, kept_shard
from dtrain.data.record_source import RecordRows, named_pictures, refuse_broken
from dtrain.data.records import has_record_files, packages_of, record_files, records
from dtrain.data.source import Load, Source, Split
from dtrain.data.tokenise import Tokenised

RESERVED = (ROW, STEP, WEIGHT, SHARE, SMOOTHING, OTHER_IMAGE, OTHER_LABEL)
"""Names of arrays that dtrain adds to a batch."""


@dataclass(frozen=True, kw_only=True)
class Records(WithPixels):
    """JSON lines, JSON, Parquet, Arrow, WebDataset (.tar) or a folder of pictures with captions; `columns` says what of
    each record the model gets."""

    keeps: ClassVar[str] = "the columns of the records, and digests and headers of pictures, which each run decodes"
    kind: Literal["records"] = "records"
    files: tuple[str, ...]
    """Files, folders, globs or addresses (gs://, s3://)."""
    columns: dict[str, AnyColumn]
    """The arrays of an example, by name: {image: {kind: image, size: [64, 64]}, text: {kind: tokens, length: 32}}."""
    root: str | None = None
    """The folder from which the names of pictures start; default: the folder of the file that names them."""
    test: Fraction = 0.1
    """Fraction of the records held out for testing, selected by a hash: of `group`, else of the first picture, else of
    the record. Records that name the same picture, or have the same bytes, are never in both splits."""
    test_files: tuple[str, ...] = ()
    """Files for testing; if set, no record of `files` is held out."""
    group: str | None = None
    """A field: records with the same value of it are in the same split."""
    broken: Literal["refuse", "leave_out"] = "refuse"
    """What happens to records that lack a field or have an unfit one, and to pictures that cannot be read."""
    pixels: Pixels = field(default_factory=Pixels)
    """Scaling and augmentation of every column of pictures; those of one record are augmented alike."""
    limits: Limits = field(default_factory=Limits)
    cache: str = CACHE
    """Folder for what is read of the files, and for copies of those in object storage."""
    load: Load = field(default_factory=Load)

    def __post_init__(self) -> None:
        if not self.columns:
            raise FieldError("columns", "names no column", "{image: {kind: image, size: [64, 64]}}")
        for name in self.columns:
            if name in RESERVED:
                raise FieldError(
                    f"columns.{name}", "dtrain adds an array of that name", "call the column something else"
                )
            if name in (TOKEN, TARGET):
                hint = "data of kind text, tokens or chat makes such rows; call the column something else"
                raise FieldError(f"columns.{name}", "is the name of a language model's tokens", hint)
        if self.group == "":
            raise FieldError("group", "is empty", "the name of a field")
        if not self.picture_names and self.pixels != Pixels():
            raise FieldError("pixels", "no column has pictures", "add a column of kind image, or leave pixels out")
        if self.pixels.needs_pairs and set(self.columns) != {IMAGE, LABEL}:
            other = ", ".join(name for name in self.columns if name not in (IMAGE, LABEL)) or "no label"
            raise FieldError(
                "pixels", f"mixup and cutmix mix pictures and labels alone; there is {other}", "leave them out"
            )
        if self.pixels.smoothing and LABEL not in self.columns:
            raise FieldError("pixels.smoothing", "there is no column named label")

    @property
    def picture_names(self) -> tuple[str, ...]:
        return tuple(name for name, column in self.columns.items() if column.pictures)

    @property
    def text_fields(self) -> tuple[str, ...]:
        """The fields of the columns that have a text."""
        named = (column.field or name for name, column in self.columns.items() if column.has_text)
        return tuple(dict.fromkeys(named))

    def tokenises(self) -> Iterator[Tokenised]:
        for name, column in self.columns.items():
            if isinstance(column, TokensColumn):
                yield Tokenised(column.tokenizer, self.files, self.cache, fields=(column.field or name,))

    @property
    def decoding(self) -> Decoding:
        image = self.columns.get(IMAGE)
        return image.decoding if isinstance(image, ImageColumn) else Decoding()

    @property
    def reads_inputs(self) -> bool:
        return True

    @property
    def packages(self) -> tuple[str, ...]:
        named = (*self.files, *self.test_files)
        own = [package for column in self.columns.values() for package in column.packages]
        return tuple(dict.fromkeys([*own, *packages_of(named), *address_packages(named)]))

    @property
    def example_from_files(self) -> bool:
        return any(column.from_file for column in self.columns.values())

    def example(self) -> Example | None:
        if not all(column.ready for column in self.columns.values()):
            return None
        return {name: column.feature(()) for name, column in self.columns.items()}

    def without_cache(self) -> "Records":
        return replace(self, cache=NO_CACHE)

    def inspect(self, check: DataCheck) -> None:
        names = (*self.files, *self.test_files)
        if any(map(is_remote, names)):
            check.not_checked.append("data.files: addresses, which the run copies from there")
            return
        try:
            files = [file for file in _files(names, self.cache) if file.is_file()]
        except DataError as error:
            check.refuse("data.files", error)
            return
        if check.too_large(f"the records of {len(files)} files", files, TEXT_BYTES if self.picture_names else BYTES):
            return
        for split in SPLITS:
            try:
                check.take(split, self.without_cache()._opened(split, digested=False))
            except DataError as error:
                check.refuse("data.files", error)

    def prepare(self, batch: Batch, key: jax.Array, train: bool) -> Batch:
        there = [name for name in self.picture_names if name in batch]  # what samples are drawn for may have none
        return self.pixels.apply(batch, 255.0, key, train, there)

    def open(self, split: Split) -> Source:
        """Read what the columns need of all files. DataError if a record cannot be used, or if there is none."""
        return self._opened(split)

    def _opened(self, split: Split, digested: bool = True) -> RecordRows:
        own = self._shards(self.files)
        other = self._shards(self.test_files) if self.test_files else []
        self._refuse_overlap(own, other)
        if self.broken == "refuse":
            refuse_broken([*own, *other])
        shards = other if other and split == "test" else own
        chosen = [np.arange(len(shard)) for shard in shards]
        if not other:
            held = [shard.keys / 2.0**64 < self.test for shard in shards]
            chosen = [np.flatnonzero(which == (split == "test")) for which in held]
        index = [np.stack([np.full_like(rows, number), rows], 1) for number, rows in enumerate(chosen)]
        numbered = {name: column for name, column in self.columns.items() if column.numbered}
        classes = {name: self._classes(name, column, [*own, *other]) for name, column in numbered.items()}
        named = named_pictures(self, shards, index, digested)
        rows = RecordRows(self, tuple(shards), np.concatenate(index), classes, split, named)
        rows = rows.without_broken() if self.broken == "leave_out" else rows.refuse_broken()
        if not len(rows):
            files = self.test_files if shards is other else self.files
            message = f"{files[0]}: no record for the {split} split, of {sum(map(len, shards)):,} records"
            raise DataError(message, "use more files, another data.test, or data.test_files")
        return rows

    def of_records(self, read: Sequence[tuple[Path, Sequence[Record]]]) -> RecordRows:
        """Records of some files without a split, such as those to draw samples for: the columns that they have.

        DataError if they have none, if some have a column and others do not, or if a value cannot be used.
        """
        found = [record for _, some in read for record in some]
        columns: dict[str, AnyColumn] = {}
        for name, column in self.columns.items():
            lacking = [where for where, fields in found if fields.get(column.field or name) is None]
            if column.numbered or len(lacking) == len(found):
                continue
            if lacking:
                message = f"{lacking[0]}: has no {column.field or name}, which other records have"
                raise DataError(message, "give it to all of them, or to none")
            columns[name] = column
        if not columns:
            wanted = ", ".join(column.field or name for name, column in self.columns.items())
            where = read[0][0] if read else "the records"
            raise DataError(f"{where}: has no field of {wanted}", "name the fields as the training data does")
        data = replace(self, columns=columns, cache=NO_CACHE, pixels=Pixels(), group=None)
        shards = [kept_shard(file, self._root(file), "", some, columns, None, NO_CACHE) for file, some in read if some]
        refuse_broken(shards, "repair them")
        index = [
            np.stack([np.full(len(shard), number), np.arange(len(shard))], 1) for number, shard in enumerate(shards)
        ]
        named = named_pictures(data, shards, index, False)
        return RecordRows(data, tuple(shards), np.concatenate(index), {}, "test", named).refuse_broken("repair them")

    def of_files(self, names: Sequence[str]) -> tuple[RecordRows, list[str], list[JsonObject]]:
        """The records of other files, the place of each, and its label as it is written, if all have one."""
        read = [(file, list(self._records(file))) for file in _files(names, self.cache)]
        found = [record for _, some in read for record in some]
        label = self.columns[LABEL].field or LABEL if LABEL in self.columns else ""
        others: list[JsonObject] = []
        with suppress(Unfit):
            values = (fields.get(label) for _, fields in found if label)
            others = [{LABEL: class_text(value.read() if isinstance(value, Content) else value)} for value in values]
        return self.of_records(read), [where for where, _ in found], others

    def _shards(self, names: Sequence[str]) -> list[Shard]:
        files = _files(names, self.cache)
        digests = iter(cached_by_file(self.cache, "records", [file for file in files if file.is_file()], file_digest))
        shards = []
        for file in files:
            digest = next(digests) if file.is_file() else _folder_digest(file, self.limits)
            form = f"{digest} {''.join(file.suffixes)} {self.limits}"
            shard = kept_shard(file, self._root(file), form, self._records(file), self.columns, self.group, self.cache)
            shards.append(shard)
        return shards

    def _root(self, file: Path) -> Path:
        """The folder from which names of pictures start."""
        if file.is_dir():
            return file
        return expand_path(self.root) if self.root else file.parent

    def _refuse_overlap(self, own: Sequence[Shard], other: Sequence[Shard]) -> None:
        """DataError if a file for testing has the same content as another one; equal names may be of other pictures."""

        def content(shard: Shard) -> tuple[str, Path | None]:
            return shard.digest, shard.root.resolve() if shard.about["named"] else None

        known = {content(shard): shard.file for shard in own}
        for shard in other:
            if (file := known.get(content(shard))) is not None:
                message = f"{shard.file} of data.test_files has the same content as {file} of data.files"
                raise DataError(message, "train on other files than those that are tested on")

    def _records(self, file: Path) -> Iterator[Record]:
        if file.is_dir():
            yield from picture_records(file, self.limits)
            return
        wanted = {column.field or name for name, column in self.columns.items()} | {self.group or ""}
        yield from records(file, self.limits, wanted)

    def _classes(self, name: str, column: Column, shards: Sequence[Shard]) -> tuple[str, ...]:
        """The names of the classes of a column. DataError if a value is none of those that the recipe names."""
        found: set[str] = set()
        for shard in shards:
            texts = shard.about["texts"][name]
            found |= {texts[number] for number in np.unique(shard.arrays[name].values).tolist()}
        names = column.names(sorted(found))
        if unknown := sorted(found - set(names)):
            shown = ", ".join(unknown[:SHOWN])
            raise DataError(f"data.columns.{name}: {shown} is not among the {len(names):,} classes", "see `classes`")
        return names


def _files(names: Sequence[str], cache: str) -> list[Path]:
    """The files of records, and the folders of pictures that have none."""
    files: list[Path] = []
    for name in names:
        folder = expand_path(name)
        if not is_remote(name) and folder.is_dir() and not has_record_files(folder) and has_pictures(folder):
            files.append(folder)
        else:
            files += record_files((name,), cache)
    return list({file.resolve(): file for file in reversed(files)}.values())[::-1] or record_files((), cache)


def _folder_digest(folder: Path, limits: Limits) -> str:
    """A hash of the names of the pictures, and of what is beside them."""
    digest = hashlib.sha256()
    for where, fields in picture_records(folder, limits):
        digest.update(repr((Path(where).relative_to(folder).as_posix(), sorted(fields.items()))).encode())
    return digest.hexdigest()
