"""Rows for predictions, from image files or text files that a user names, in the form of the training data."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from dtrain.core.counts import counted
from dtrain.core.errors import DataError
from dtrain.core.types import JsonObject
from dtrain.data.arrays import Arrays
from dtrain.data.batch import IMAGE, LABEL, TARGET, TOKEN, Batch, Example
from dtrain.data.digits import WHITE, Digits
from dtrain.data.files import HERE, resolve_files
from dtrain.data.folder_layout import SUFFIXES, is_picture
from dtrain.data.image_files import Decoding, ImageFile, ImageFiles, head
from dtrain.data.npz import Npz
from dtrain.data.pixels import WithPixels
from dtrain.data.record import record_of
from dtrain.data.record_data import Records
from dtrain.data.source import Data, Source, SourceDefaults, Split
from dtrain.data.table import Table
from dtrain.data.tokenizer import BYTES, Tokenizer
from dtrain.data.windows import NO_TARGET, row_example

RECORDS = (".json", ".jsonl", ".parquet", ".arrow")
"""Suffixes of files of conversations, which are no texts."""
TOP = 255.0
"""Largest pixel value of a decoded image file."""


@dataclass(frozen=True)
class Inputs:
    """Examples without labels, and where each comes from."""

    source: Source
    origins: list[JsonObject]
    """Where each example comes from, as `Source.origin_of` says it; several rows of tokens may come from one file."""
    sizes: dict[str, int] = field(default_factory=dict)
    """Bytes of each text file, without those of its first token, which is not predicted."""
    unread: dict[str, str] = field(default_factory=dict)
    """Files that cannot be used, with the reason."""


def named_tokenizer(data: Any, source: Source) -> Tokenizer | None:
    """The tokenizer of a source of tokens, if the data names one: files of tokens may do without."""
    named = data.tokenized and getattr(data.main, "tokenizer", None) is not None
    return data.open_tokenizer() if TOKEN in source.example and named else None


def inputs(data: Data, example: Example, names: Sequence[str]) -> Inputs:
    """The examples in these files, folders and globs, as a model needs them that was trained on `data`.

    DataError if nothing matches a name, if a file cannot be read, or if such data does not come from files.
    """
    if isinstance(data, Records) and not (all(map(is_picture, names)) and IMAGE in example):
        if all(map(is_picture, names)) and len(data.picture_names) == 1:
            column = data.columns[data.picture_names[0]]
            pictures = [str(path.absolute()) for path in resolve_files(tuple(names), "an image", HERE)]
            records = [(name, {column.field or data.picture_names[0]: name}) for name in pictures]
            return Inputs(data.of_records([(Path.cwd() / "records", records)]), _files(pictures))
        source, places, others = data.of_files(names)
        return Inputs(source, _origins("record", places, others))
    if TOKEN in example and data.tokenized:
        return _texts(data, example[TOKEN].shape[0], names)
    if isinstance(data, Npz) and all(Path(name).suffix == ".npz" for name in names):
        return _arrays(data, example, names)
    if IMAGE in example and example[IMAGE].dtype == "uint8" and data.reads_inputs:
        return _images(data, example[IMAGE].shape, names)
    if isinstance(data, Table):
        rows = data.unlabelled(names)
        return Inputs(rows, [rows.origin_of(row) for row in range(len(rows))])
    message = f"data of kind {data.kind} cannot read {names[0]}"
    hint = "leave the files out to use the test split, and change the data with key=value: data.args.path=..."
    raise DataError(message, hint)


def _arrays(data: Npz, example: Example, names: Sequence[str]) -> Inputs:
    """The examples of .npz files, one after the other."""
    read = [data.unlabelled(str(path), example) for path in resolve_files(tuple(names), "an .npz file", HERE)]
    shared = [name for name in read[0][0] if all(name in arrays for arrays, _ in read)]
    values = {name: np.concatenate([arrays[name] for arrays, _ in read]) for name in shared}
    others = [row for _, rows in read for row in rows] if all(rows for _, rows in read) else []
    source = Arrays(values, {name: example[name] for name in values}, "")
    return Inputs(source, _origins("row", range(1, len(source) + 1), others))


def _files(names: Iterable[str]) -> list[JsonObject]:
    return [{"file": name} for name in names]


def _origins(key: str, names: Iterable[Any], others: Sequence[JsonObject]) -> list[JsonObject]:
    """An origin for each name, with what else is known of it, if that is known of all."""
    names = list(names)
    return [{key: name} | other for name, other in zip(names, others or [{}] * len(names), strict=True)]


@dataclass(frozen=True)
class _Unlabelled(SourceDefaults):
    """Image files without their labels, with pixels from 0 to `top`."""

    images: ImageFiles
    top: float

    @property
    def example(self) -> Example:
        return {IMAGE: self.images.example[IMAGE]}

    @property
    def fingerprint(self) -> str:
        return ""

    def __len__(self) -> int:
        return len(self.images)

    def rows(self, indices: np.ndarray) -> Batch:
        image = self.images.rows(indices)[IMAGE]
        return {IMAGE: image if self.top == TOP else np.rint(image * (self.top / TOP)).astype(np.uint8)}

    def changed(self) -> str:
        return self.images.changed()


def records_given(data: Data, records: Sequence[JsonObject]) -> Source:
    """Records as a program gives them, {"text": "a red circle"}: the columns for which each has a field.

    DataError if data of this kind has no columns, or if a value cannot be used.
    """
    if not isinstance(data, Records):
        raise DataError(f"data of kind {data.kind} has no columns that records could fill", "give arrays by name")
    given = [record_of(f"record {number}", record) for number, record in enumerate(records, 1)]
    return data.of_records([(Path.cwd() / "records of a program", given)])


def texts_given(data: Data, texts: Sequence[str]) -> Source:
    """Texts for the one column of tokens. DataError if the data has none, or several."""
    columns = data.text_fields if isinstance(data, Records) else ()
    if len(columns) != 1:
        found = f"has {len(columns)} columns of tokens" if columns else f"of kind {data.kind} has no column of tokens"
        raise DataError(f"a text stands for a column of tokens; the data {found}", "name a file of records")
    return records_given(data, [{columns[0]: text} for text in texts])


def _images(data: Data, shape: tuple[int, ...], names: Sequence[str]) -> Inputs:
    if len(shape) != 3:
        message = f"the run's data has arrays of {' x '.join(map(str, shape))}, not pictures of so many channels"
        raise DataError(message, "leave the files out, and name the data by overrides: data.file=...")
    height, width, channels = shape
    found = list(dict.fromkeys(path for name in names for path in _image_paths(name)))
    unread = {str(path): head(path).problem for path in found}
    shown = [str(path) for path in found if not unread[str(path)]]
    if not shown:
        raise DataError("\n".join(f"{name}: {problem}" for name, problem in unread.items()), "repair the files")
    files = []
    for path in (Path(name).absolute() for name in shown):
        status = path.stat()
        files.append(ImageFile(path.relative_to("/").as_posix(), 0, status.st_size, status.st_mtime_ns))
    how = data.decoding if isinstance(data, WithPixels) else Decoding()
    images = ImageFiles(Path("/"), tuple(files), (height, width, channels), classes=("",), fingerprint="", decoding=how)
    source = _Unlabelled(images, WHITE if isinstance(data, Digits) else TOP)
    return Inputs(source, _files(shown), unread={name: problem for name, problem in unread.items() if problem})


def _image_paths(name: str) -> list[Path]:
    if not Path(name).is_dir():
        return resolve_files((name,), "an image", HERE)
    paths = sorted(path for path in Path(name).rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    if not paths:
        raise DataError(f"{name} contains no image", f"images end in {', '.join(sorted(SUFFIXES))}")
    return paths


def _texts(data: Data, length: int, names: Sequence[str]) -> Inputs:
    """Each file cut into rows of `length` tokens, the last one padded; its first token has no prediction."""
    tokenizer, own = data.open_tokenizer(), cast("Any", data)
    conversational = own.main.conversational
    rows, origins, sizes = [], [], {}
    for path in resolve_files(tuple(names), "text", HERE):
        if conversational and path.suffix in RECORDS:
            hint = f"dtrain evaluate RUN data.test_files='[{path}]' measures conversations"
            raise DataError(f"{path}: `predict` scores texts, and these are records of conversations", hint)
        try:
            text = path.read_bytes()
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from error
        tokens = tokenizer.encode(text).astype(np.int32)
        if len(tokens) < 2:
            message = f"{path}: has {counted(len(tokens), 'token')}"
            raise DataError(f"{message}; at least 2 are needed, since the first is not predicted")
        cut = np.full((-(-(len(tokens) - 1) // length), length + 1), NO_TARGET, np.int32)
        for row in range(len(cut)):
            part = tokens[row * length : (row + 1) * length + 1]
            cut[row, : len(part)] = part
        rows.append(cut)
        origins += [str(path)] * len(cut)
        first = 1 if tokenizer.key == BYTES else len(tokenizer.decode(tokens[:1].tolist()).encode())
        sizes[str(path)] = len(text) - first  # of what is predicted
    cut = np.concatenate(rows)
    features = {TOKEN: np.maximum(cut[:, :-1], 0), TARGET: cut[:, 1:]}
    return Inputs(Arrays(features, row_example(length, packed=False), ""), _files(origins), sizes)


def opened_in_order(data: Data, split: Split) -> Source:
    """A split, each of its examples once: rows of tokens are cut one after the other, not at random positions."""
    return data.in_order().open(split)


@dataclass(frozen=True)
class Relabelled(SourceDefaults):
    """A source whose labels are changed to those of the classes that a model was trained on."""

    source: Source
    labels: np.ndarray
    """The new label of each label of the source."""
    classes: int

    @property
    def example(self) -> Example:
        example = self.source.example
        return {**example, LABEL: replace(example[LABEL], values=self.classes)}

    @property
    def fingerprint(self) -> str:
        return self.source.fingerprint

    def __len__(self) -> int:
        return len(self.source)

    def rows(self, indices: np.ndarray) -> Batch:
        batch = self.source.rows(indices)
        return {**batch, LABEL: self.labels[batch[LABEL]]}

    def place(self, index: int) -> str:
        return self.source.place(index)

    def origin_of(self, index: int) -> JsonObject:
        return self.source.origin_of(index)

    def changed(self) -> str:
        return self.source.changed()


def with_classes(source: Source, trained: Sequence[str]) -> Source:
    """The source with the labels of the classes named `trained`, where both have names.

    DataError if the source has a class that the model was not trained on.
    """
    names = list(source.class_names)
    if not names or not trained or names == list(trained):
        return source
    unknown = [name for name in names if name not in trained]
    if unknown:
        message = f"the data has the class {unknown[0]!r}; the model was trained on {', '.join(trained)}"
        raise DataError(message, "name the folders as those of the training data")
    labels = np.array([list(trained).index(name) for name in names], np.int32)
    return Relabelled(source, labels, len(trained))
