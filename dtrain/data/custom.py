"""User-defined data: any class with a length and rows by index."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np

from dtrain.core.errors import DataError
from dtrain.core.types import JsonObject, Positive
from dtrain.core.user_code import UserTarget, build_target, user_errors
from dtrain.data.batch import DOCUMENT, LABEL, POSITION, ROW, STEP, TARGET, TOKEN, WEIGHT, Batch, Example, Feature
from dtrain.data.class_weights import class_counts
from dtrain.data.data_check import DataCheck
from dtrain.data.source import Load, Source, SourceDefaults, Split, Unaugmented

ROWS_OF_TOKENS = (TOKEN, TARGET, POSITION, DOCUMENT)
NARROWED = {"float64": "float32", "int64": "int32", "uint64": "uint32"}
"""Types that JAX does not use by default; integers are checked to fit."""
READ = 2**30
"""Most bytes that are read at a start to digest data without a fingerprint of its own."""
CHUNK = 1024
"""Rows that are read at a time for the digest."""
SHOWN = 8
"""Most classes that are named."""


@dataclass(frozen=True, kw_only=True)
class CustomData(UserTarget, Unaugmented):
    """`target: package.module:Class`, called with split="train" or "test" and `args`; imported when the run starts."""

    kind: Literal["custom"] = "custom"
    classes: Positive | None = None
    """Number of classes of `label`, if the object does not state it."""
    vocab: Positive | None = None
    """Number of possible tokens, if the object does not state it."""
    load: Load = field(default_factory=Load)

    def example(self) -> Example | None:
        return None  # to know it, the user's code would have to run

    def inspect(self, check: DataCheck) -> None:
        check.not_checked.append("the data, whose module is imported only when the run starts")

    def open(self, split: Split) -> Source:
        """Open the user's rows of a split. DataError if they are not rows of arrays that depend on the index alone."""
        rows = build_target("data", self.target, {"split": split, **self.args}, self.folder)
        stated = {"classes": self.classes, "vocab": self.vocab}
        stated = {name: value for name, value in stated.items() if value is not None}
        source = UserRows(f"data.target: {self.target}, split {split}", rows, stated)
        source.refuse_unfit()
        return source


@dataclass(frozen=True)
class UserRows(SourceDefaults):
    """The rows of a user's object: `len(rows)`, and `rows.rows(indices)`, a dict of arrays (indices, ...).

    Or `rows[index]`, a dict of one row's arrays, as sources and map datasets of grain have.

    `rows.classes` is the number of classes of its labels, `rows.vocab` that of its tokens, and `rows.fingerprint` a
    text that changes with the content; without it all rows are read and digested at every start. `rows.class_names`
    are the names of the classes, and `rows.place(index)` says where a row comes from; both may be left out.
    """

    where: str
    data: Any
    given: Mapping[str, int] = field(default_factory=dict)
    """`classes` and `vocab`, where the object does not state them."""

    def __len__(self) -> int:
        with user_errors(self.where):
            return len(self.data)

    def rows(self, indices: np.ndarray) -> Batch:
        with user_errors(self.where):
            if hasattr(self.data, "rows"):
                found = self.data.rows(indices)
            else:
                rows = [self.data[int(index)] for index in indices]
                found = {name: [row[name] for row in rows] for name in rows[0]}
        return {name: self._checked(name, values, len(indices)) for name, values in found.items()}

    @property
    def row_labels(self) -> np.ndarray | None:
        return getattr(self.data, "row_labels", None)

    @property
    def notes(self) -> Sequence[str]:
        with user_errors(self.where):
            counts = class_counts(self)
        missing = [name for name, count in counts.items() if not count]
        more = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
        named = f"no example of {', '.join(missing[:SHOWN])}{more}, of the {len(counts)} classes of `label`"
        named += ": classes count from 0" if missing[:1] == ["0"] else ""
        return [named] if missing else []

    @property
    def content_hashes(self) -> np.ndarray | None:
        return getattr(self.data, "content_hashes", None)

    @property
    def class_names(self) -> tuple[str, ...]:
        return tuple(getattr(self.data, "class_names", ()))

    def place(self, index: int) -> str:
        with user_errors(self.where):
            return str(self.data.place(index)) if hasattr(self.data, "place") else ""

    def origin_of(self, index: int) -> JsonObject:
        if hasattr(self.data, "origin_of"):
            return self.data.origin_of(index)
        return {"row": index} | ({"place": place} if (place := self.place(index)) else {})

    @property
    def example(self) -> Example:
        return self._example

    @cached_property
    def _example(self) -> Example:
        return {
            name: Feature(
                values.shape[1:],
                str(values.dtype),
                self._most.get(name),
                ("length",) if name in ROWS_OF_TOKENS and values.ndim == 2 else (),
                spread=getattr(self.data, "spread", None) if name == LABEL else None,
            )
            for name, values in self.rows(np.arange(1)).items()
        }

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        own = getattr(self.data, "fingerprint", None)
        if own is not None:
            return f"custom:{own}"
        digest, count = hashlib.sha256(), len(self)
        for start in range(0, count, CHUNK):
            indices = np.arange(start, min(start + CHUNK, count))
            for name, values in sorted(self.rows(indices).items()):
                if np.issubdtype(values.dtype, np.floating) and not np.isfinite(values).all():
                    row = int(indices[~np.isfinite(values.reshape(len(values), -1)).all(1)][0])
                    raise DataError(f"{self.where}: row {row} of {name!r} is NaN or infinite", "fix the row")
                digest.update(f"{name} {values.dtype} {values.shape}".encode())
                digest.update(values.tobytes())
        return f"custom:{digest.hexdigest()[:16]}"

    def refuse_unfit(self) -> None:
        """Raise DataError if there are no rows, if labels have no number of classes, or if rows are not pure."""
        missing = [] if hasattr(self.data, "__len__") else ["__len__"]
        missing += [] if hasattr(self.data, "rows") or hasattr(self.data, "__getitem__") else ["rows (or __getitem__)"]
        if missing:
            raise DataError(
                f"{self.where}: the object lacks {' and '.join(missing)}", "define __len__ and rows(indices)"
            )
        if not len(self):
            raise DataError(f"{self.where}: there are no rows", "check the class and its arguments")
        first, last = 0, len(self) - 1
        pair, other, again = (self.rows(np.array(which)) for which in ([first, last], [last, first], [first, last]))
        for name, attribute in ((LABEL, "classes"), (TOKEN, "vocab")):
            is_number = name == LABEL and name in pair and pair[name].dtype.kind == "f"
            if name in pair and name not in self._most and not is_number:
                hint = f"give the object an attribute {attribute} = N, or set data.{attribute}: values are 0 to N - 1"
                raise DataError(f"{self.where}: it has {name!r}, but no {attribute}", hint)
        for name, values in pair.items():
            if values.dtype.kind == "f" and not np.isfinite(values).all():
                row = (first, last)[int(not np.isfinite(values[1]).all())]
                raise DataError(
                    f"{self.where}: row {row} of {name!r} is NaN or infinite in {values.dtype}", "fix the row"
                )
            if not (np.array_equal(values, again[name]) and np.array_equal(values, other[name][::-1])):
                why = f"rows([{first}, {last}]), called twice or in the other order, gives other values of {name!r}"
                hint = "a row must depend on its index alone; draw random numbers in the model, from ctx.keys"
                raise DataError(f"{self.where}: {why}", hint)
        size = sum(values.nbytes for values in pair.values()) // 2 * len(self)
        if not hasattr(self.data, "fingerprint") and size > READ:
            hint = "give the object an attribute fingerprint: a text that changes with the content"
            raise DataError(f"{self.where}: {size / 2**30:.1f} GiB of rows are too much to digest at every start", hint)

    @property
    def _most(self) -> Mapping[str, int]:
        """The number of possible values of labels and tokens, where the object states it."""
        stated = {LABEL: "classes", TOKEN: "vocab", TARGET: "vocab"}
        own = {key: getattr(self.data, key) for key in stated.values() if hasattr(self.data, key)}
        known = dict(self.given) | own
        return {name: known[key] for name, key in stated.items() if key in known}

    def _checked(self, name: str, values: object, count: int) -> np.ndarray:
        """The array in a type that JAX uses. DataError if it is none of `count` rows, or has values out of range."""
        try:
            array = np.asarray(values)
        except ValueError as error:
            raise DataError(
                f"{self.where}: {name!r} has rows of different shapes: {error}", "pad or cut them"
            ) from error
        if name in (ROW, STEP, WEIGHT):
            raise DataError(f"{self.where}: {name!r} is a name that dtrain uses", "call the array something else")
        if array.dtype.kind not in "biuf" or array.ndim == 0 or len(array) != count:
            found = f"{array.dtype}{list(array.shape)}"
            raise DataError(f"{self.where}: {name!r} is {found} for {count} rows", f"return numbers ({count}, ...)")
        array = array.astype(array.dtype.newbyteorder("="), copy=False)
        narrow = np.dtype(NARROWED.get(str(array.dtype), array.dtype))
        if np.issubdtype(narrow, np.floating) and narrow.itemsize > 4:
            raise DataError(f"{self.where}: {name!r} is {array.dtype}, which JAX does not have", "write it as float32")
        if narrow != array.dtype and array.dtype.kind in "iu" and array.size:
            bounds = np.iinfo(narrow)
            if array.min() < bounds.min or array.max() > bounds.max:
                raise DataError(
                    f"{self.where}: {name!r} has values that do not fit into {narrow}", "use smaller numbers"
                )
        least, most = (-1 if name == TARGET else 0), self._most.get(name)
        if most is not None and array.dtype.kind == "f" and not np.isfinite(array).all():
            raise DataError(f"{self.where}: {name!r} has values that are NaN or infinite", "fix or drop these rows")
        if most is not None and array.size and not least <= int(array.min()) <= int(array.max()) < most:
            spread = f"{int(array.min())} to {int(array.max())}"
            raise DataError(f"{self.where}: {name!r} has the values {spread}; {least} to {most - 1} are allowed", "")
        with np.errstate(
            over="ignore"
        ):  # a value beyond float32 becomes infinite, which is refused where rows are read
            return array.astype(narrow, copy=False)
