"""Arrays in a .npz file: their names are the names of the features, their first dim counts the examples."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dtrain.core.errors import DataError
from dtrain.core.types import Fraction, JsonObject, Positive
from dtrain.data.batch import FEATURES, IMAGE, LABEL, TOKEN, Batch, Example
from dtrain.data.custom import UserRows
from dtrain.data.data_check import BYTES, DataCheck
from dtrain.data.files import address_packages
from dtrain.data.guess import FEW, Guess
from dtrain.data.order import hash64
from dtrain.data.paths import expand_path, reason
from dtrain.data.source import Load, Source, Split, Unaugmented

USUAL = {
    IMAGE: ("image", "images", "x", "features", "data", "x_train", "inputs"),
    LABEL: ("label", "labels", "y", "target", "targets", "y_train"),
}
"""Names that arrays of pictures or numbers, and of labels, usually have."""


@dataclass(frozen=True, kw_only=True)
class Npz(Unaugmented):
    """The arrays that `numpy.savez` wrote; all of them are read into memory."""

    kind: Literal["npz"] = "npz"
    file: str
    """A .npz file: image, label; token, target; or any names that your model uses."""
    names: dict[str, str] = field(default_factory=dict)
    """The names of features, by the names in the file: {x: image, y: label}; the others keep theirs."""
    classes: Positive | None = None
    """Number of classes of `label`; default: the largest label and one."""
    test: Fraction = 0.1
    """Fraction of the examples held out for testing, selected by a hash of the example's number."""
    test_file: str | None = None
    """A file for testing; if set, no example of `file` is held out."""
    load: Load = field(default_factory=Load)

    @classmethod
    def guesses(cls, path: Path) -> Iterator[Guess]:
        """One for arrays of usual names: of pictures (examples, height, width, channels) or of numbers, and labels."""
        if path.suffix.lower() != ".npz" or not path.is_file():
            return
        arrays = _read(str(path), {})
        own = {name: next((one for one in arrays if one.lower() in usual), None) for name, usual in USUAL.items()}
        shown = ", ".join(f"{name} {list(values.shape)}" for name, values in arrays.items())
        if not own[LABEL] or not own[IMAGE]:
            hint = f"for `dtrain new`, call them {IMAGE} and {LABEL}; or write the recipe: see the guide"
            raise DataError(f"{path}: which arrays are pictures or numbers, and which labels? It has {shown}", hint)
        what = IMAGE if arrays[str(own[IMAGE])].ndim > 2 else FEATURES
        names = {str(name): usual for name, usual in ((own[IMAGE], what), (own[LABEL], LABEL)) if name != usual}
        label = arrays[str(own[LABEL])]
        section: dict[str, Any] = {"file": str(path)} | ({"names": names} if names else {})
        section |= {"test": 0.2} if len(label) < FEW else {}
        unused = sorted(arrays.keys() - set(own.values()))
        comments = {"names": "the names that the model expects", "test": "the share that is held out"}
        notes = (f"not used: {', '.join(unused)}",) if unused else ()
        if label.dtype.kind == "f" and np.array_equal(label, np.floor(label)):
            notes += ("the labels are whole, but floats: they are predicted as numbers; cast them to int for classes",)
        yield Guess(f"arrays: {shown}", section, "--kind npz", comments, notes)

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

        DataError if an array is missing, or has another shape or dtype than in training.
        """
        arrays = _read(file, self.names, missing_ok=True)
        wanted = {name: feature for name, feature in example.items() if name != LABEL}
        for name, feature in wanted.items():
            if name not in arrays:
                raise DataError(f"{file}: has no array {name!r}", f"it has {', '.join(arrays)}")
            if arrays[name].shape[1:] != feature.shape:
                shapes = f"{list(arrays[name].shape[1:])}, in training {list(feature.shape)}"
                raise DataError(f"{file}: an example of {name!r} has the shape {shapes}", "give it the same")
        given = {name: arrays[name].astype(feature.dtype) for name, feature in wanted.items()}
        label = arrays.get(LABEL)
        others = [{LABEL: value} for value in label.tolist()] if label is not None and label.ndim == 1 else []
        return given, others

    def inspect(self, check: DataCheck) -> None:
        files = check.files((self.file,), (self.test_file,) if self.test_file else (), "data")
        if not check.too_large(f"the rows of {len(files)} files", files, BYTES) and files:
            check.open(self, "data.file")

    def open(self, split: Split) -> Source:
        """Read a split. DataError if the arrays have different lengths, are no numbers or not finite."""
        own = _read(self.file, self.names)
        other = _read(self.test_file, self.names) if self.test_file else {}
        chosen = other if other and split == "test" else own
        if not other:
            share = hash64(np.arange(len(next(iter(own.values()))), dtype=np.uint64)) / 2**64
            rows = (share < self.test) == (split == "test")
            chosen = {name: values[rows] for name, values in own.items()}
        for file, arrays in ((self.file, own), (self.test_file, other)):
            _refuse_infinite(str(file), arrays)
        most = {LABEL: self.classes} if self.classes else {}
        for name in (LABEL, TOKEN):
            known = [arrays[name] for arrays in (own, other) if name in arrays and arrays[name].size]
            if name not in most and known and all(values.dtype.kind in "iu" for values in known):
                most[name] = max(int(values.max()) for values in known) + 1
        source = UserRows(f"{self.file}, split {split}", _Arrays(chosen, most.get(LABEL), most.get(TOKEN)))
        source.refuse_unfit()
        return source


class _Arrays:
    """Arrays in memory, as the rows of a user's class."""

    def __init__(self, arrays: Mapping[str, np.ndarray], classes: int | None, vocab: int | None) -> None:
        self._arrays = arrays
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

    def rows(self, indices: np.ndarray) -> Batch:
        return {name: values[indices] for name, values in self._arrays.items()}


def _refuse_infinite(file: str, arrays: Mapping[str, np.ndarray]) -> None:
    for name, values in arrays.items():
        if values.dtype.kind == "f" and not (finite := np.isfinite(values)).all():
            rows = np.flatnonzero(~finite.reshape(len(values), -1).all(1))
            where = f"{len(rows):,} row{'s' * (len(rows) > 1)} of {name!r} with NaN or infinite numbers"
            raise DataError(f"{file}: {where}, the first is row {rows[0]}", "fix these rows, or leave them out")


def _read(file: str, names: Mapping[str, str], missing_ok: bool = False) -> dict[str, np.ndarray]:
    path = expand_path(file)
    try:
        with np.load(path, allow_pickle=False) as content:
            arrays = {name: content[name] for name in content.files}
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist", "set data.file to a .npz file") from error
    except Exception as error:  # zipfile and numpy raise many types on damaged files
        hint = "numpy.savez writes such files; arrays of objects, which are pickled, are not read"
        raise DataError(f"{path}: cannot be read as .npz: {reason(error)}", hint) from error
    unknown = [] if missing_ok else [name for name in names if name not in arrays]
    if unknown:
        raise DataError(f"{path}: has no array {unknown[0]!r}", f"it has {', '.join(arrays)}")
    lengths = {name: values.shape[:1] for name, values in arrays.items()}
    if not lengths or len(set(lengths.values())) > 1 or () in lengths.values():
        found = ", ".join(f"{name} {list(values.shape)}" for name, values in arrays.items()) or "no array"
        raise DataError(f"{path}: the first dims of its arrays differ: {found}", "they count the examples")
    found = {names.get(name, name): values for name, values in arrays.items()}
    if LABEL in found and found[LABEL].ndim != 1 and found[LABEL].dtype.kind in "iub":
        shape = list(found[LABEL].shape)
        raise DataError(
            f"{path}: the label has the shape {shape}", "a class is one whole number: label.argmax(1), or label[:, 0]"
        )
    return found
