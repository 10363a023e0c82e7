"""The columns of `kind: records`: how a field of a record becomes an array of an example.

A column keeps a row of numbers for each record when the files are read: tokens, a number, or where a picture's bytes
are. Arrays of a batch are copies of these, but those of pictures, which are decoded then.
"""

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from io import BytesIO
from pathlib import PurePath
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np

from dtrain.core.errors import DataError, FieldError
from dtrain.core.types import Positive
from dtrain.data.batch import Feature
from dtrain.data.image_files import Colour, Decoding, Fit
from dtrain.data.record import Content
from dtrain.data.tokenizer import BYTES, Tokenizer, open_tokenizer, packages_of

INSIDE, COPIED, NAMED = 0, 1, 2
"""Where the bytes of a picture are: in the file of records itself; copied into the cache; in a file of its own, whose
path is in the cache."""
PLACE = 3
"""Numbers that say where a picture is: one of the above, its first byte, its number of bytes."""


NAME = 1024
"""Most characters of a path; a longer text is something else, such as base64."""


class Unfit(Exception):
    """The value of a field cannot be used; the message continues after the field's name."""


class Store(Protocol):
    """Where a column puts what is no number while a file is read."""

    def append(self, content: bytes) -> tuple[int, int]:
        """Keep bytes; the place of the first one, and their number."""
        ...

    def number(self, text: str) -> int:
        """The number of a text: those of the column are numbered as they come."""
        ...

    def count(self, what: str) -> None:
        """Count something that a user should know."""
        ...


class Shape(NamedTuple):
    """The shape and dtype of an array of one example."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, kw_only=True)
class Column(ABC):
    """A column of the examples."""

    field: str | None = None
    """The field of the records; default: the name of the column."""

    kind: Any = ""
    """How the field is read."""
    pictures: ClassVar[bool] = False
    """Whether its rows are pictures."""
    has_text: ClassVar[bool] = False
    """Whether `text` gives a text."""
    numbered: ClassVar[bool] = False
    """Whether it keeps numbers of texts, of which `names` says what they become."""

    @property
    @abstractmethod
    def kept(self) -> Shape:
        """What is kept of each record."""

    @abstractmethod
    def keep(self, value: Any, store: Store) -> Any:
        """What is kept of a value. Raises Unfit."""

    def feature(self, classes: Sequence[str]) -> Feature:
        """The column in an example; `classes` are the names of its classes if it has any."""
        del classes
        return Feature(*self.kept)

    @property
    def ready(self) -> bool:
        """Whether `feature` is known without the records."""
        return True

    @property
    def made_by(self) -> str:
        """What the kept values depend on beside the field: a change of it reads the records again."""
        return repr(replace(self, field=None))

    @property
    def from_file(self) -> bool:
        """Whether `feature` reads a file."""
        return False

    @property
    def packages(self) -> tuple[str, ...]:
        """The optional packages that it needs."""
        return ()

    def text(self, row: np.ndarray) -> str | None:
        """The text that a row was made of; None if it was none."""
        del row
        return None

    def names(self, found: Sequence[str]) -> tuple[str, ...]:
        """The names of the classes, by their number, if these different texts were numbered."""
        del found
        return ()

    @property
    def decoded_by(self) -> str:
        """What an example depends on beside the kept values."""
        return self.kind


@dataclass(frozen=True, kw_only=True)
class ImageColumn(Column):
    """A picture: its file, its bytes, or what `datasets` writes, {bytes, path}."""

    kind: Literal["image"] = "image"
    size: tuple[Positive, Positive]
    """Height and width to which every picture is resized."""
    fit: Fit = "crop"
    """How a picture of another shape gets there: crop keeps its centre, pad adds `background`, stretch distorts it."""
    background: Colour = (255, 255, 255)
    """The colour (red, green, blue) under transparent pixels, and around pictures that are padded."""
    channels: Literal[1, 3] = 3
    """1 for grayscale, 3 for RGB."""
    draft: bool = False
    """Decode large JPEG files at 1/2, 1/4 or 1/8 of their size, whichever is still at least `size`."""

    pictures: ClassVar[bool] = True

    @property
    def kept(self) -> Shape:
        return Shape((PLACE,), "int64")

    @property
    def made_by(self) -> str:
        return self.kind

    @property
    def packages(self) -> tuple[str, ...]:
        return ("PIL",)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width, channels."""
        return (*self.size, self.channels)

    @property
    def decoding(self) -> Decoding:
        """How bytes become pixels."""
        return Decoding(self.fit, self.background, self.draft)

    @property
    def decoded_by(self) -> str:
        return repr((self.kind, self.shape, tuple(self.decoding)))

    def feature(self, classes: Sequence[str]) -> Feature:
        del classes
        return Feature(self.shape, "uint8")

    def keep(self, value: Any, store: Store) -> Any:
        if isinstance(value, dict):
            value = value.get("bytes") or value.get("path")
        if isinstance(value, Content):
            return (INSIDE, value.offset, value.size)
        if isinstance(value, bytes) and value:
            return (COPIED, *store.append(value))
        if not isinstance(value, str | PurePath) or not str(value):
            raise Unfit("is no picture: expected a file name, or the bytes of a file")
        name = str(value)
        if "://" in name[:12] or name.startswith("data:"):
            raise Unfit(f"is an address, {name[:60]}: save the pictures as files, or in a .tar or .parquet")
        if len(name) > NAME or "\n" in name:
            raise Unfit(f"is no file name, but a text of {len(name):,} characters: save the pictures as files")
        return (NAMED, *store.append(os.fsencode(name)))


@dataclass(frozen=True, kw_only=True)
class TokensColumn(Column):
    """The tokens of a text: int32 (length,), padded at the end."""

    kind: Literal["tokens"] = "tokens"
    length: Positive
    """Tokens of each row."""
    tokenizer: str = BYTES
    """"bytes", or the path of a tokenizer.json or of a folder that contains one."""
    pad: str | None = None
    """The token that fills a row, by its text; default: the tokenizer's own padding token; 0 with "bytes"."""
    begin: str | None = None
    """A token before each text, by its text, such as <|startoftext|>; default: none, whatever the tokenizer adds."""
    end: str | None = None
    """A token after each text."""
    cut: bool = False
    """Cut texts of more tokens; otherwise they are refused."""

    has_text: ClassVar[bool] = True

    @property
    def kept(self) -> Shape:
        return Shape((self.length,), "int32")

    def feature(self, classes: Sequence[str]) -> Feature:
        del classes
        return Feature((self.length,), "int32", self.opened.size)

    @property
    def made_by(self) -> str:
        return f"{self.kind} {self.length} {self.padding} {self._around} {self.cut} {self.opened.key}"

    @property
    def from_file(self) -> bool:
        return self.tokenizer != BYTES

    @property
    def packages(self) -> tuple[str, ...]:
        return packages_of(self.tokenizer)

    @cached_property
    def opened(self) -> Tokenizer:
        """The tokenizer; DataError if it does not exist."""
        try:
            return open_tokenizer(self.tokenizer)
        except DataError as error:
            hint = "`tokenizer` of a column is bytes, a tokenizer.json, or a folder that contains one"
            raise DataError(error.message, hint) from error

    def _id(self, key: str, token: str) -> int:
        try:
            return self.opened.token_id(token)
        except DataError as error:
            raise DataError(
                error.message, f"see `{key}` of the column: a token of the tokenizer, by its text"
            ) from error

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """The tokens before and after each text."""
        before, after = (
            [self._id(key, token)] if token is not None else []
            for key, token in (("begin", self.begin), ("end", self.end))
        )
        return before, after

    @cached_property
    def padding(self) -> int:
        """The token that fills a row. DataError if the tokenizer has none."""
        if self.tokenizer == BYTES:
            return 0
        named = self.pad or self.opened.special.get("pad_token")
        if not named:
            raise DataError(f"{self.tokenizer}: names no padding token", "name a token that no text has: pad: <pad>")
        return self._id("pad", named)

    def __post_init__(self) -> None:
        for key in ("pad", "begin", "end"):
            if self.tokenizer == BYTES and getattr(self, key) is not None:
                raise FieldError(
                    key, "bytes have no such token; they are padded with 0, which no text has", "leave it out"
                )

    def keep(self, value: Any, store: Store) -> Any:
        text = _text(value)
        if not isinstance(text, str):
            raise Unfit(f"is {type(value).__name__}, no text")
        before, after = self._around
        try:
            own = self.opened.encode(text.encode())
        except UnicodeEncodeError:
            raise Unfit("has half of a character (a lone surrogate)") from None
        if (own == self.padding).any():
            raise Unfit(f"has the token {self.padding}, which fills rows, in its text")
        count, room = len(before) + len(own) + len(after), self.length - len(before) - len(after)
        if count > self.length:
            if not self.cut:
                raise Unfit(f"has {count:,} tokens, more than length: {self.length:,}; cut: true cuts it")
            store.count(f"are cut to {self.length:,} tokens")
        if not len(own):
            store.count("are empty")
        tokens = [*before, *own[: max(room, 0)].tolist(), *after][: self.length]
        row = np.full(self.length, self.padding, np.int32)
        row[: len(tokens)] = tokens
        return row

    def text(self, row: np.ndarray) -> str:
        tokens = row.tolist()
        while tokens and tokens[-1] == self.padding:
            tokens.pop()
        return self.opened.decode(tokens)


@dataclass(frozen=True, kw_only=True)
class NumberColumn(Column):
    """A number: float32 ()."""

    kind: Literal["number"] = "number"

    @property
    def kept(self) -> Shape:
        return Shape((), "float32")

    def keep(self, value: Any, store: Store) -> Any:
        del store
        return _finite(_number(value), "float32")


@dataclass(frozen=True, kw_only=True)
class LabelColumn(Column):
    """A class: int32 (). The different values of all files are the classes, in order, if `classes` names none."""

    kind: Literal["label"] = "label"
    classes: Positive | tuple[str, ...] | None = None
    """The names of the classes in their order, or their number: then the values are 0 to that number, less one."""

    numbered: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if isinstance(self.classes, tuple) and len(set(self.classes)) < len(self.classes):
            raise FieldError("classes", "a name stands there twice")

    @property
    def kept(self) -> Shape:
        return Shape((), "int32")

    @property
    def made_by(self) -> str:
        return self.kind

    @property
    def ready(self) -> bool:
        return self.classes is not None

    def feature(self, classes: Sequence[str]) -> Feature:
        known = self.classes if isinstance(self.classes, int) else len(self.classes or classes)
        return Feature((), "int32", known)

    def keep(self, value: Any, store: Store) -> Any:
        return store.number(class_text(value))

    def names(self, found: Sequence[str]) -> tuple[str, ...]:
        if isinstance(self.classes, int):
            return tuple(str(number) for number in range(self.classes))
        if self.classes is not None:
            return self.classes
        if all(re.fullmatch(r"0|-?[1-9][0-9]*", text) for text in found):
            return tuple(sorted(found, key=int))  # 10 comes after 9
        return tuple(sorted(found))


@dataclass(frozen=True, kw_only=True)
class ArrayColumn(Column):
    """Numbers of a fixed shape: lists of numbers, or the bytes of a .npy file."""

    kind: Literal["array"] = "array"
    shape: tuple[Positive, ...]
    """Of each record's array."""
    dtype: Literal["float32", "int32", "uint8"] = "float32"
    """To which the numbers are converted; whole numbers that do not fit are refused."""

    @property
    def kept(self) -> Shape:
        return Shape(self.shape, self.dtype)

    def keep(self, value: Any, store: Store) -> Any:
        del store
        try:
            found = np.load(BytesIO(value), allow_pickle=False) if isinstance(value, bytes) else np.array(value)
        except Exception as error:  # numpy raises many types on damaged bytes and uneven lists
            raise Unfit("is no array: expected lists of equal lengths, or the bytes of a .npy file") from error
        if not isinstance(found, np.ndarray):
            raise Unfit("is a .npz file of several arrays: write one array as .npy")
        if found.shape != self.shape:
            raise Unfit(f"has the shape {list(found.shape)}, not {list(self.shape)}")
        return _finite(found, self.dtype)


def class_text(value: Any) -> str:
    """The text of a class or a group: a text or a whole number, also as a float. Raises Unfit."""
    found = _text(value)
    if isinstance(found, float | np.floating) and float(found).is_integer():
        found = int(found)
    if isinstance(found, bool) or not isinstance(found, str | int | np.integer):
        raise Unfit(f"is {type(value).__name__}: expected a text or a whole number")
    if not (text := str(found).strip()):
        raise Unfit("is empty")
    return text


def _text(value: Any) -> Any:
    """The text of bytes; other values as they are. Raises Unfit."""
    try:
        return value.decode("utf-8-sig") if isinstance(value, bytes) else value
    except UnicodeDecodeError:
        raise Unfit("is not UTF-8") from None


AnyColumn = ImageColumn | TokensColumn | NumberColumn | LabelColumn | ArrayColumn


def _number(value: Any) -> np.ndarray:
    """A number, or its text."""
    if isinstance(value, str | bytes):
        try:
            written = _text(value).strip()
            if "_" in written:
                raise ValueError
            value = int(written) if re.fullmatch(r"[-+]?[0-9]+", written) else float(written)
        except ValueError:
            raise Unfit(f"is no number: {value[:40]!r}") from None
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise Unfit(f"is {type(value).__name__}, no number")
    if isinstance(value, int) and abs(value) > np.iinfo(np.int64).max:
        raise Unfit("is a whole number that float32 does not hold exactly")
    return np.asarray(value)


def _finite(values: np.ndarray, dtype: str) -> np.ndarray:
    """The numbers in this dtype. Raises Unfit if they are none, if one is not finite there, or changes."""
    if values.dtype.kind not in "biuf":
        raise Unfit(f"has values that are no numbers ({values.dtype})")
    with np.errstate(over="ignore", invalid="ignore"):
        cast = values.astype(dtype)
    if not np.isfinite(cast).all():
        raise Unfit(f"has a value that is NaN, infinite, or too large for {dtype}")
    whole = values.dtype.kind in "iu" or dtype != "float32"
    if whole and not np.array_equal(cast.astype(np.longdouble), values.astype(np.longdouble)):  # float64 rounds int64
        exact = "has whole numbers that float32 does not hold exactly"
        raise Unfit(exact if dtype == "float32" else f"has values that are no {dtype}")
    return cast
