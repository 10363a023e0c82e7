"""Arrays in a .npz file: their names are the names of the features, their first dim counts the examples."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dtrain.core.counts import counted
from dtrain.core.errors import DataError
from dtrain.core.types import Fraction, JsonObject, Positive
from dtrain.data.batch import FEATURES, IMAGE, LABEL, TOKEN, Batch, Example
from dtrain.data.custom import UserRows
from dtrain.data.data_check import BYTES, DataCheck
from dtrain.data.files import address_packages
from dtrain.data.fitted import Scaling
from dtrain.data.guess import FEW, Guess
from dtrain.data.order import hash64
from dtrain.data.overlap import row_hashes
from dtrain.data.paths import expand_path, reason
from dtrain.data.source import Load, Source, Split, Unaugmented

USUAL = {
    IMAGE: ("image", "images", "x", "features", "data", "inputs"),
    LABEL: ("label", "labels", "y", "target", "targets", "class", "classes"),
}
"""Names that arrays of pictures or numbers, and of labels, usually have."""
SOME, WIDE = 10_000, 30.0
"""How many examples are looked at for values of different sizes, and by what factor their deviations may differ."""


@dataclass(frozen=True, kw_only=True)
class Npz(Unaugmented):
    """The arrays that `numpy.savez` wrote; all of them are read into memory."""

    kind: Literal["npz"] = "npz"
    file: str
    """A .npz file: image, label; token, target; or any names that your model uses."""
    arrays: tuple[str, ...] = ()
    """The arrays of `file` that are used, by their names there; default: all. Their first dims count the examples."""
    names: dict[str, str] = field(default_factory=dict)
    """The names of features, by the names in the file: {x: image, y: label}; the others keep theirs."""
    classes: Positive | None = None
    """Number of classes of `label`; default: the largest label and one. Texts are classes by their names."""
    test: Fraction = 0.1
    """Fraction of the examples held out for testing, selected by a hash of the example's number."""
    test_file: str | None = None
    """A file for testing; if set, no example of `file` is held out."""
    test_names: dict[str, str] = field(default_factory=dict)
    """The names of features by those of the arrays for testing, in `test_file` or in `file` itself, if they have other
    names there: {x_test: image, y_test: label}. No other array is read for testing."""
    scale: bool = False
    """Subtract from each value of `features` its mean over the training examples, and divide it by its standard
    deviation there."""
    load: Load = field(default_factory=Load)

    @cached_property
    def kept(self) -> Scaling | None:
        """What a run computed from the examples that it trained on; None: it is computed from the file."""
        return None

    def with_fitted(self, fitted: JsonObject) -> "Npz":
        data = replace(self)
        vars(data).update(kept=Scaling(**fitted))  # as cached_property stores it
        return data

    @classmethod
    def guesses(cls, path: Path) -> Iterator[Guess]:
        """One for each array of numbers that may be the label, with an array of pictures (examples, height, width,
        channels) or of numbers beside it; that of a usual name is the usual one."""
        if path.suffix.lower() != ".npz" or not path.is_file():
            return
        arrays = _load(path)
        shown = ", ".join(f"{name} {list(values.shape)}" for name, values in arrays.items())
        twins = {name: twin for name in arrays if (twin := _testing(name)) != name and twin in arrays}
        own = {name: arrays[name] for name in twins or arrays}
        inputs = next((name for name in own if _usual(name, IMAGE)), None)
        wide = [name for name, values in own.items() if values.ndim > 1 and values.dtype.kind in "biuf"]
        inputs = inputs or (wide[0] if len(wide) == 1 else None)
        labels = [name for name in own if name != inputs and inputs and _may_label(own[name], own[inputs])]
        if inputs and (named := next((name for name in own if _usual(name, LABEL)), None)):
            _read(str(path), (inputs, named), {inputs: IMAGE, named: LABEL})  # says what is wrong with the two
        if not inputs or not labels:
            hint = f"for `dtrain new`, call them {IMAGE} and {LABEL}; or write the recipe: docs/data.md"
            raise DataError(f"{path}: which arrays are pictures or numbers, and which labels? It has {shown}", hint)
        for label in labels:
            usual = _usual(label, LABEL) or len(labels) == 1
            yield _guess(path, arrays, inputs, label, twins, f"arrays: {shown}; {label} is predicted", usual)

    @property
    def packages(self) -> tuple[str, ...]:
        return address_packages((self.file, self.test_file))

    @property
    def reads_inputs(self) -> bool:
        return True

    def example(self) -> Example | None:
        return None

    def unlabelled(self, file: str, example: Example) -> tuple[Batch, list[JsonObject]]:
        """The arrays of a file that the model takes (examples, ...), and for each example its label, if there is one.

        DataError if an array of dtrain's own models is missing, or has another shape or dtype than in training.
        """
        names = {**{to: to for to in example}, **self.names, **self.test_names}
        found = _load(file)
        arrays = {names[name]: values for name, values in found.items() if names.get(name) in example}
        # other arrays, such as targets of a model of the user's own, may be left out: what the model reads is found
        # when it is traced
        absent = [name for name in example if name not in arrays and name != LABEL]
        if missing := [name for name in absent if name in (IMAGE, FEATURES, TOKEN) or len(absent) == len(example)]:
            raise DataError(f"{file}: has no array {missing[0]!r}", f"it has {', '.join(found)}")
        wanted = {name: feature for name, feature in example.items() if name in arrays and name != LABEL}
        for name, feature in wanted.items():
            if arrays[name].shape[1:] != feature.shape:
                shapes = f"{list(arrays[name].shape[1:])}, in training {list(feature.shape)}"
                raise DataError(f"{file}: an example of {name!r} has the shape {shapes}", "give it the same")
        _refuse_lengths(file, arrays)
        given = {name: arrays[name].astype(feature.dtype) for name, feature in wanted.items()}
        if self.scale and FEATURES in given:
            scaling = self.kept or Scaling.of(self._training()[FEATURES])
            given[FEATURES] = scaling(arrays[FEATURES]).astype(np.float32)
        label = arrays.get(LABEL)
        others = [{LABEL: value} for value in label.tolist()] if label is not None and label.ndim == 1 else []
        return given, others

    def inspect(self, check: DataCheck) -> None:
        files = check.files((self.file,), (self.test_file,) if self.test_file else (), "data")
        if not check.too_large(f"the rows of {len(files)} files", files, BYTES) and files:
            check.open(self, "data.file")

    def open(self, split: Split) -> Source:
        """Read a split. DataError if the arrays have different lengths, are no numbers or not finite."""
        own = _read(self.file, self.arrays, self.names)
        other = self._testing()
        chosen, file = (other, str(self.test_file or self.file)) if other and split == "test" else (own, self.file)
        count = len(next(iter(chosen.values())))
        rows = np.arange(count)
        if not other:
            share = hash64(rows.astype(np.uint64)) / 2**64
            rows = np.flatnonzero((share < self.test) == (split == "test"))
        texts = [arrays[LABEL] for arrays in (own, other) if LABEL in arrays and arrays[LABEL].dtype.kind == "U"]
        names = np.unique(np.concatenate(texts)) if texts else np.empty(0, str)
        for arrays in (own, other):
            if texts and LABEL in arrays:
                arrays[LABEL] = np.searchsorted(names, arrays[LABEL].astype(names.dtype)).astype(np.int32)
        chosen = {name: values[rows] for name, values in chosen.items()}
        scaling = None
        if self.scale:
            scaling = self.kept or Scaling.of(self._training()[FEATURES])
            chosen[FEATURES] = scaling(chosen[FEATURES]).astype(np.float32)
        for of, arrays in ((self.file, own), (self.test_file or self.file, other)):
            _refuse_infinite(of, arrays)
        most = {LABEL: self.classes} if self.classes else {}
        for name in (LABEL, TOKEN):
            known = [arrays[name] for arrays in (own, other) if name in arrays and arrays[name].size]
            if name not in most and known and all(values.dtype.kind in "iu" for values in known):
                most[name] = max(int(values.max()) for values in known) + 1
        held = _Arrays(chosen, most.get(LABEL), most.get(TOKEN), tuple(names.tolist()), rows, file)
        source = _Rows(f"{file}, split {split}", held, scaling=scaling)
        source.refuse_unfit()
        return source

    def _training(self) -> dict[str, np.ndarray]:
        """The arrays of the examples to train on. DataError if `scale` is set and they have no rows of numbers."""
        arrays = _read(self.file, self.arrays, self.names)
        if self.scale and (
            FEATURES not in arrays or arrays[FEATURES].ndim != 2 or arrays[FEATURES].dtype.kind not in "biuf"
        ):
            found = ", ".join(f"{name} {list(values.shape)}" for name, values in arrays.items())
            message = f"{self.file}: data.scale needs an array {FEATURES!r} with a row of numbers for each example"
            raise DataError(f"{message}; it has {found}", f"name it so: data.names={{x: {FEATURES}}}")
        if self._testing():
            return arrays
        share = hash64(np.arange(len(next(iter(arrays.values()))), dtype=np.uint64)) / 2**64
        return {name: values[share >= self.test] for name, values in arrays.items()}

    def _testing(self) -> dict[str, np.ndarray]:
        """The arrays for testing; none if some examples of the file are held out."""
        if not (self.test_file or self.test_names):
            return {}
        used, names = (tuple(self.test_names), self.test_names) if self.test_names else (self.arrays, self.names)
        return _read(self.test_file or self.file, used, names)


@dataclass(frozen=True)
class _Rows(UserRows):
    """The arrays of a split, with what they are scaled by."""

    scaling: Scaling | None = None

    @property
    def fitted(self) -> JsonObject:
        return asdict(self.scaling) if self.scaling else {}

    @property
    def notes(self) -> Sequence[str]:
        values = self.data.rows(np.arange(min(len(self), SOME))).get(FEATURES)
        notes = list(super().notes)
        if self.scaling is None and values is not None and values.ndim == 2 and values.dtype.kind == "f":
            deviation = values.std(0)
            least, most = float(deviation[deviation > 0].min(initial=np.inf)), float(deviation.max(initial=0))
            if most > WIDE * least:
                spread = f"the deviations of its values are {least:.2g} to {most:.2g}"
                notes.append(f"{FEATURES}: {spread}; data.scale: true makes all of them 1")
        return notes


class _Arrays:
    """Arrays in memory, as the rows of a user's class."""

    def __init__(
        self,
        arrays: Mapping[str, np.ndarray],
        classes: int | None,
        vocab: int | None,
        class_names: tuple[str, ...],
        numbers: np.ndarray,
        file: str,
    ) -> None:
        """`numbers` (examples,): the number of each example in the file, from 0."""
        self._arrays, self._numbers, self._file = arrays, numbers, file
        self.class_names = class_names
        if classes is not None:
            self.classes = classes
        if vocab is not None:
            self.vocab = vocab
        label = arrays.get(LABEL)
        if label is not None and label.dtype.kind == "f" and label.ndim == 1 and len(label):  # numbers to predict
            wide = label.astype(np.float64)
            self.spread = (float(wide.mean()), float(wide.std()) or 1.0)
        if classes is not None and label is not None and label.ndim == 1:
            self.row_labels = label

    def __len__(self) -> int:
        return len(next(iter(self._arrays.values())))

    def place(self, index: int) -> str:
        return f"{self._file}: row {self._numbers[index] + 1}"

    def origin_of(self, index: int) -> JsonObject:
        return {"row": int(self._numbers[index]) + 1}

    @property
    def content_hashes(self) -> np.ndarray:
        return row_hashes(*self._arrays.values())

    def rows(self, indices: np.ndarray) -> Batch:
        return {name: values[indices] for name, values in self._arrays.items()}


def _refuse_infinite(file: str, arrays: Mapping[str, np.ndarray]) -> None:
    for name, values in arrays.items():
        if values.dtype.kind == "f" and not (finite := np.isfinite(values)).all():
            rows = np.flatnonzero(~finite.reshape(len(values), -1).all(1))
            where = f"{counted(len(rows), 'row')} of {name!r} with NaN or infinite numbers"
            raise DataError(f"{file}: {where}, the first is row {rows[0]}", "fix these rows, or leave them out")


def _load(file: str | Path) -> dict[str, np.ndarray]:
    path = expand_path(str(file))
    try:
        with np.load(path, allow_pickle=False) as content:
            return {name: content[name] for name in content.files}
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist", "set data.file to a .npz file") from error
    except Exception as error:  # zipfile and numpy raise many types on damaged files
        hint = "numpy.savez writes such files; arrays of objects, which are pickled, are not read"
        raise DataError(f"{path}: cannot be read as .npz: {reason(error)}", hint) from error


def _read(file: str, used: Sequence[str], names: Mapping[str, str]) -> dict[str, np.ndarray]:
    """The arrays of a file that are `used`, all if that is empty, by the names of features."""
    found = _load(file)
    if unknown := [name for name in (*used, *names) if name not in found]:
        raise DataError(f"{file}: has no array {unknown[0]!r}", f"it has {', '.join(found)}")
    arrays = {names.get(name, name): values for name, values in found.items() if name in used or not used}
    _refuse_lengths(file, arrays)
    if (label := arrays.get(LABEL)) is not None and label.ndim != 1:
        one_of = label.ndim == 2 and np.isin(label, (0, 1)).all() and (label.sum(1) == 1).all()
        if one_of or label.dtype.kind in "iub":
            several = "several of an example are for a model of your own, under another name: data.names={y: tags}"
            hint = "write label[:, 0]" if label.shape[1:] == (1,) else "write label.argmax(1)" if one_of else several
            hint = f"a class is one whole number: {hint}"
            raise DataError(f"{file}: the label has the shape {list(label.shape)}", hint)
    return arrays


def _refuse_lengths(file: str, arrays: Mapping[str, np.ndarray]) -> None:
    lengths = {values.shape[:1] for values in arrays.values()}
    if len(lengths) != 1 or () in lengths:
        found = ", ".join(f"{name} {list(values.shape)}" for name, values in arrays.items()) or "no array"
        hint = "the first dim counts the examples: transpose or cut the arrays to equal lengths"
        if len(arrays) > 2:
            hint += ", or name those that are used: data.arrays=[image, label]"
        raise DataError(f"{file}: the first dims of its arrays differ: {found}", hint)


def _testing(name: str) -> str:
    """The name that a test array has beside a training array of this name: x_test of x_train."""
    return re.sub("(?i)train(ing)?", "test", name)


def _usual(name: str, feature: str) -> bool:
    """Whether arrays of this feature are usually called so: `x`, `x_train`, `train_images`."""
    return re.sub("_?train(ing)?_?", "", name.lower()) in USUAL[feature]


def _may_label(values: np.ndarray, inputs: np.ndarray) -> bool:
    """Whether an array has one number or text for each of these examples."""
    return values.ndim == 1 and values.dtype.kind in "biufU" and inputs.shape[:1] == values.shape


def _guess(
    path: Path,
    arrays: Mapping[str, np.ndarray],
    inputs: str,
    label: str,
    twins: Mapping[str, str],
    seen: str,
    usual: bool,
) -> Guess:
    """The reading with these arrays; `twins`: the test array of each training array, if the file has both."""
    what = IMAGE if arrays[inputs].ndim > 2 else FEATURES
    names = {inputs: what, label: LABEL}
    section: dict[str, Any] = {"file": str(path)}
    left = [name for name in arrays if name not in names and name not in [twins.get(one) for one in names]]
    section |= {"arrays": list(names)} if left or twins else {}
    section |= {"names": renamed} if (renamed := {name: to for name, to in names.items() if name != to}) else {}
    section |= {"scale": True} if what == FEATURES else {}
    if twins:
        section["test_names"] = {twins[name]: to for name, to in names.items()}
    elif len(arrays[label]) < FEW:
        section["test"] = 0.2
    comments = {
        "scale": "each value by its mean and deviation",
        "names": "the names that the model expects",
        "test": "the share that is held out",
        "arrays": f"without {', '.join(left)}" if left else "those to train on",
        "test_names": "the arrays for testing",
    }
    values = arrays[label]
    floats = values.dtype.kind == "f" and np.array_equal(values, np.floor(values))
    why = "the labels are whole, but floats: they are predicted as numbers; cast them to int for classes"
    notes = ((why,) if floats else ()) + channels_first(arrays[inputs].shape)
    return Guess(seen, section, f"--label {shlex.quote(label)}", comments, notes, usual, label)


def channels_first(shape: tuple[int, ...]) -> tuple[str, ...]:
    """A line if pictures of this shape (examples, ...) probably have their channels first, as PyTorch has them."""
    if len(shape) == 4 and shape[1] in (1, 3) and shape[3] > 4:
        return (f"pictures {list(shape[1:])} are read as {shape[1]} pixels high with {shape[3]} channels; if they have "
                "their channels first: image.transpose(0, 2, 3, 1)",)  # fmt: skip
    return ()
