"""Evaluate a trained model: its metrics over a split of the data and, for a classifier, which classes it confuses."""

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from dtrain.assembly.assemble import assemble
from dtrain.assembly.input import eval_batches
from dtrain.core.errors import DataError, RecipeError
from dtrain.core.extras import installed
from dtrain.core.metrics import LOSS, Metric, known
from dtrain.core.types import JsonObject
from dtrain.data.batch import IMAGE, LABEL, Example
from dtrain.data.source import Source
from dtrain.inference.measures import declared, measurements
from dtrain.inference.outputs import outputs, state_of
from dtrain.inference.predict import Names
from dtrain.models.nn.model import PROBABILITY, Loss
from dtrain.models.objective import OF_ANSWERS
from dtrain.recipe.recipe import Recipe
from dtrain.weights.load import LoadedRun

BITS = "eval/bits_per_byte"
LARGEST_EXPONENT = 700.0
"""Limit of the exponent of the perplexity: exp(710) overflows a float64."""
LABEL_WIDTH = 12
"""Most characters of a class's name above its column of the confusion matrix."""
MISTAKES, PRINTED = 16, 5
"""Most mistakes that are kept, and that are printed."""
SHOWN = 20
"""Most classes that are printed; of more, those with the lowest accuracy."""


@dataclass(frozen=True)
class Mistake:
    """An example that a classifier takes for another class."""

    example: int
    """Its number in the split."""
    place: str
    """The file that it comes from; empty if it is not of one."""
    label: str
    predicted: str
    probability: float
    """That of the predicted class."""
    picture: str = ""
    """A PNG in base64; empty if the example is no picture."""

    @property
    def text(self) -> str:
        """One line."""
        where = self.place or f"example {self.example:,}"
        return f"{where}: {self.label}, taken for {self.predicted} with {self.probability:.1%}"


@dataclass(frozen=True)
class Evaluated:
    """The result of an evaluation."""

    examples: int
    metrics: dict[str, float]
    """By name, without the prefix `eval/`."""
    confusion: np.ndarray | None = None
    """Number of examples by (class, predicted class); None for a model that is no classifier."""
    classes: Names = field(default_factory=Names)
    measured: tuple[Metric, ...] = ()
    """The metrics of the recipe's measures."""
    mistakes: tuple[Mistake, ...] = ()
    """Those with the highest probability of the predicted class, highest first."""

    def json(self) -> JsonObject:
        """The result as JSON values."""
        values: JsonObject = {"examples": self.examples, "metrics": self.metrics}
        if self.confusion is not None:
            names = [self.classes(i) for i in range(len(self.confusion))]
            precision, recall, f1 = _scores(self.confusion)
            values |= {"classes": names}
            for name, each in {"accuracy": recall, "precision": precision, "recall": recall, "f1": f1}.items():
                values[f"{name}_of_class"] = dict(zip(names, np.nan_to_num(each).tolist(), strict=True))
            values["confusion"] = self.confusion.tolist()
            values["mistakes"] = [
                {name: value for name, value in vars(one).items() if name != "picture" or value}
                for one in self.mistakes
            ]
        return values

    def lines(self, declared: Sequence[Metric]) -> list[str]:
        """The result as text; `declared`: the metrics that the model declares."""
        lines = []
        for name, value in self.metrics.items():
            metric = known(name, (*self.measured, *declared)) or LOSS._replace(name=name)
            lines.append(f"{name:<{max(12, *(len(one) + 2 for one in self.metrics))}}{metric.text(value):>10}")
        if self.confusion is None:
            return lines
        confident = [f"  {one.text}" for one in self.mistakes[:PRINTED]]
        confident = ["", "the most confident mistakes", *confident] if confident else []
        return [*lines, "", *self._classes(), *self._matrix(self.confusion), *confident]

    def _classes(self) -> list[str]:
        assert self.confusion is not None
        counts, (precision, recall, f1) = self.confusion.sum(1), _scores(self.confusion)
        order = np.arange(len(counts)) if len(counts) <= SHOWN else np.argsort(f1, kind="stable")[:SHOWN]
        names = [self.classes(int(i)) for i in order]
        width = max(5, *map(len, names))
        lines = [f"{'class':<{width}}  examples  precision   recall       F1  most often taken for"]
        for i, name in zip(order.tolist(), names, strict=True):
            wrong = self.confusion[i].copy()
            wrong[i] = 0
            other = f"{self.classes(int(wrong.argmax()))} ({wrong.max()})" if wrong.any() else ""
            scores = (f"{one[i]:.2%}" if np.isfinite(one[i]) else "-" for one in (precision, recall, f1))
            shown = "  ".join(f"{one:>{size}}" for one, size in zip(scores, (9, 7, 7), strict=True))
            lines.append(f"{name:<{width}}  {counts[i]:>8,}  {shown}  {other}".rstrip())
        means = (np.nan_to_num(one[counts > 0]).mean() for one in (precision, recall, f1))  # as the measure has them
        shown = "  ".join(f"{f'{one:.2%}':>{size}}" for one, size in zip(means, (9, 7, 7), strict=True))
        lines.append(f"{'mean':<{width}}  {counts.sum():>8,}  {shown}")
        if len(counts) > SHOWN:
            lines.append(f"the {SHOWN} with the lowest F1 of {len(counts)} classes; --json has all")
        return lines

    def _matrix(self, confusion: np.ndarray) -> list[str]:
        if len(confusion) > SHOWN:
            return []
        names = [self.classes(i) for i in range(len(confusion))]
        width = max(map(len, names))
        digits = max(len(f"{count}") for count in confusion.ravel().tolist())
        cell = max(3, digits, min(width, LABEL_WIDTH)) + 1
        head = "".join(f"{name[: cell - 1]:>{cell}}" for name in names)
        rows = (
            f"{name:<{width}}" + "".join(f"{count or '.':>{cell}}" for count in row.tolist())
            for name, row in zip(names, confusion, strict=True)
        )
        return [
            "",
            "confusion matrix: rows are the true classes, columns the predicted ones",
            " " * width + head,
            *rows,
        ]


def _scores(confusion: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Precision, recall and F1 of each class (classes,); NaN where they are not defined: no example, or none chosen.

    F1 = 2 TP / (examples + chosen), which is 0 for a class that is never chosen and has examples.
    """
    right, counts, chosen = confusion.diagonal(), confusion.sum(1), confusion.sum(0)

    def ratio(top: np.ndarray, bottom: np.ndarray) -> np.ndarray:
        return np.where(bottom > 0, top / np.maximum(bottom, 1), np.nan)

    return ratio(right, chosen), ratio(right, counts), ratio(2 * right, counts + chosen)


def lacks_base(loaded: LoadedRun, data: Any) -> bool:
    """Whether data are answers to compare, and the run was not trained on such, with a frozen base for their loss."""
    trained_on = loaded.recipe.data.answers if loaded.as_trained else ""
    return bool(data.answers) and data.answers not in (loaded.assembly.recipe.minimised.answers, trained_on)


def evaluate(loaded: LoadedRun, source: Source) -> Evaluated:
    """Evaluate the loaded parameters on every example of a source.

    Raises DataError if the model cannot take such examples, or if they have no weight.
    """
    if lacks_base(loaded, loaded.recipe.data):
        hint = "score answers to questions (--questions), or give other data: data='{kind: chat, ...}' objective=null"
        text = OF_ANSWERS[loaded.recipe.data.answers].text
        why = f"{text} are measured by a run that was trained on such, against its frozen base"
        raise RecipeError(why, hint)
    if loaded.as_trained and loaded.recipe.data.answers:
        loaded = loaded.as_trained()
    assembly, state = loaded.assembly, state_of(loaded)
    if unfit := assembly.recipe.model.mismatch(source.example):
        raise DataError(unfit, "evaluate on data of the same shape and classes")
    if _arrays(source.example) != _arrays(assembly.layout.example):  # other data than the run was trained on
        assembly = assemble(assembly.recipe, assembly.layout.devices, source.example, assembly.steps, assembly.frozen)
    compiled = assembly.compile(assembly.evaluate(state))
    sums = [jax.device_get(compiled(state, batch)) for batch in eval_batches(assembly, source, None)]
    values = evaluated(sums, text_bytes(assembly.recipe, source))
    measures = measurements(assembly, assembly.recipe.evaluate.measures, source, state)
    for measure in measures:
        values |= measure(loaded.step, state)
    metrics = {name.removeprefix("eval/"): value for name, value in values.items()}
    classifies = LABEL in source.example and assembly.recipe.model.predicts
    confusion, mistakes = _classified(loaded, source) if classifies else (None, ())
    return Evaluated(len(source), metrics, confusion, Names(loaded.classes), declared(measures), mistakes)


def _arrays(example: Example) -> dict[str, tuple[tuple[int, ...], str]]:
    return {name: (feature.shape, feature.dtype) for name, feature in example.items()}


def _classified(loaded: LoadedRun, source: Source) -> tuple[np.ndarray | None, tuple[Mistake, ...]]:
    """The number of examples by (class, predicted class), None if the model predicts no probabilities; and the most
    confident mistakes."""
    counts, state, names = None, state_of(loaded), Names(loaded.classes)
    confident: list[tuple[float, int, int, int]] = []
    for indices, values in outputs(loaded.assembly, source, state=state)(state):
        if PROBABILITY not in values:
            return None, ()
        probability = values[PROBABILITY]
        if counts is None:
            counts = np.zeros((probability.shape[1], probability.shape[1]), np.int64)
        label, chosen = source.rows(indices)[LABEL], probability.argmax(1)
        np.add.at(counts, (label, chosen), 1)
        rows = zip(probability.max(1).tolist(), indices.tolist(), label.tolist(), chosen.tolist(), strict=True)
        confident = sorted([*confident, *(row for row in rows if row[2] != row[3])], reverse=True)[:MISTAKES]
    pictures = _pictures(source, np.array([index for _, index, _, _ in confident], np.int64))
    return counts, tuple(
        Mistake(index, source.place(index), names(label), names(chosen), share, picture)
        for (share, index, label, chosen), picture in zip(confident, pictures, strict=True)
    )


def _pictures(source: Source, indices: np.ndarray) -> list[str]:
    """The pictures of these examples, each as a PNG in base64; empty for examples that are none, or without Pillow.

    The largest value of all is white.
    """
    shape = source.example[IMAGE].shape if IMAGE in source.example else ()
    if not (len(shape) == 3 and shape[2] in (1, 3) and len(indices) and installed("PIL")):
        return [""] * len(indices)
    from PIL import Image

    image_BHWC = source.rows(indices)[IMAGE].astype(np.float32)
    top, low = float(image_BHWC.max()), min(0.0, float(image_BHWC.min()))
    bytes_BHWC = (255 * (image_BHWC - low) / max(top - low, 1e-6)).astype(np.uint8)
    found = []
    for one_HWC in bytes_BHWC:
        with io.BytesIO() as file:
            Image.fromarray(one_HWC.squeeze(2) if shape[2] == 1 else one_HWC).save(file, "PNG")
            found.append(base64.b64encode(file.getvalue()).decode())
    return found


def text_bytes(recipe: Recipe, source: Source) -> float | None:
    """Bytes of text for each token, as `evaluated` takes them; None if what it measures is not the NLL of texts."""
    return source.bytes_per_token if recipe.minimised.measures_nll else None


def evaluated(sums: Sequence[Loss], bytes_per_token: float | None) -> dict[str, float]:
    """Metrics of an evaluation from the sums of its batches. DataError if all examples have weight 0.

    If the examples are tokens (`bytes_per_token` is not None), the loss is that of predicting the next one: its
    exponential is the perplexity, and where the bytes of a token are known, bits per byte is nll / (ln 2 x bytes).
    """
    total = jax.tree.map(lambda *parts: sum(float(part) for part in parts), *sums)
    if not total.weight > 0:
        hint = "hold out other examples, or more of them (data.test)"
        raise DataError("the held-out examples have no weight: every target in them is masked", hint)
    totals = {"loss": total.sum, **total.metrics}
    values = {f"eval/{name}": value / total.weight for name, value in totals.items()}
    if bytes_per_token is not None:
        nll = values.get("eval/nll", values["eval/loss"])
        values["eval/perplexity"] = math.exp(min(nll, LARGEST_EXPONENT))
        if bytes_per_token:
            values[BITS] = nll / math.log(2) / bytes_per_token
    return values
