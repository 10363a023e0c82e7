"""Evaluate a trained model: its metrics over a split of the data and, for a classifier, which classes it confuses."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import jax
import numpy as np

from dtrain.assembly.assemble import assemble
from dtrain.assembly.input import eval_batches
from dtrain.core.errors import DataError, RecipeError
from dtrain.core.metrics import LOSS, Metric, known
from dtrain.core.types import JsonObject
from dtrain.data.batch import LABEL, Example
from dtrain.data.source import Source
from dtrain.inference.measures import declared, measurements
from dtrain.inference.outputs import outputs, state_of
from dtrain.inference.predict import Names
from dtrain.models.nn.model import PROBABILITY, Loss
from dtrain.recipe.recipe import Recipe
from dtrain.weights.load import LoadedRun

BITS = "eval/bits_per_byte"
LARGEST_EXPONENT = 700.0
"""Limit of the exponent of the perplexity: exp(710) overflows a float64."""
LABEL_WIDTH = 12
"""Most characters of a class's name above its column of the confusion matrix."""
SHOWN = 20
"""Most classes that are printed; of more, those with the lowest accuracy."""


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
        return values

    def lines(self, declared: Sequence[Metric]) -> list[str]:
        """The result as text; `declared`: the metrics that the model declares."""
        lines = []
        for name, value in self.metrics.items():
            metric = known(name, (*self.measured, *declared)) or LOSS._replace(name=name)
            lines.append(f"{name:<{max(12, *(len(one) + 2 for one in self.metrics))}}{metric.text(value):>10}")
        return lines if self.confusion is None else [*lines, "", *self._classes(), *self._matrix(self.confusion)]

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


def lacks_base(loaded: LoadedRun) -> bool:
    """Whether its data are pairs of answers, whose loss needs the frozen base that a run has only while it trains."""
    recipe = loaded.assembly.recipe
    return recipe.data.pairs and not recipe.minimised.pairs


def evaluate(loaded: LoadedRun, source: Source) -> Evaluated:
    """Evaluate the loaded parameters on every example of a source.

    Raises DataError if the model cannot take such examples, or if they have no weight.
    """
    assembly, state = loaded.assembly, state_of(loaded)
    if lacks_base(loaded):
        hint = "score answers to questions (--questions), or give other data: data='{kind: chat, ...}' objective=null"
        raise RecipeError("pairs of answers are measured while a run trains, against its frozen base", hint)
    if unfit := assembly.recipe.model.mismatch(source.example):
        raise DataError(unfit, "evaluate on data of the same shape and classes")
    if _arrays(source.example) != _arrays(assembly.layout.example):  # other data than the run was trained on
        assembly = assemble(assembly.recipe, assembly.layout.devices, source.example, assembly.steps, assembly.frozen)
    compiled = assembly.recipe.engine.compile(assembly.evaluate(state), assembly.layout.platform)
    sums = [jax.device_get(compiled(state, batch)) for batch in eval_batches(assembly, source, None)]
    values = evaluated(sums, text_bytes(assembly.recipe, source))
    measures = measurements(assembly, assembly.recipe.evaluate.measures, source, state)
    for measure in measures:
        values |= measure(loaded.step, state)
    metrics = {name.removeprefix("eval/"): value for name, value in values.items()}
    classifies = LABEL in source.example and assembly.recipe.model.predicts
    confusion = _confusion(loaded, source) if classifies else None
    return Evaluated(len(source), metrics, confusion, Names(loaded.classes), declared(measures))


def _arrays(example: Example) -> dict[str, tuple[tuple[int, ...], str]]:
    return {name: (feature.shape, feature.dtype) for name, feature in example.items()}


def _confusion(loaded: LoadedRun, source: Source) -> np.ndarray | None:
    """Count the examples by (class, predicted class); None if the model predicts no probabilities of classes."""
    counts, state = None, state_of(loaded)
    for indices, values in outputs(loaded.assembly, source, state=state)(state):
        if PROBABILITY not in values:
            return None
        probability = values[PROBABILITY]
        if counts is None:
            counts = np.zeros((probability.shape[1], probability.shape[1]), np.int64)
        np.add.at(counts, (source.rows(indices)[LABEL], probability.argmax(1)), 1)
    return counts


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
