"""Measures: what is computed at an evaluation from the outputs for all examples, and is no sum over them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from dtrain.core.errors import RecipeError
from dtrain.core.metrics import ACCURACY, MAE, PERCENT, Metric
from dtrain.core.types import Natural
from dtrain.core.user_code import UserTarget, build_target, user_errors
from dtrain.data.batch import LABEL
from dtrain.models.nn.examples import Purpose
from dtrain.models.nn.model import PROBABILITY, VALUE

Columns = Mapping[str, np.ndarray]
Rows = Iterable[tuple[Columns, Columns]]
"""For some examples at a time, their arrays as the data has them and the model's outputs: (examples, ...) by name."""


class Measured(Protocol):
    """What a measure opens: made once at the start of a run, then called at evaluations."""

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """What it returns."""
        ...

    def __call__(self, step: int, rows: Rows) -> Mapping[str, float]:
        """The values by name, without the prefix `eval/`; one that is not defined for these rows is left out."""
        ...


@dataclass(frozen=True)
class Needs:
    """What a measure needs of the model."""

    output: str
    """The output that it reads."""
    what: str
    """What that output is, for messages."""
    of: str
    """What its labels are, for messages."""
    metric: Metric
    """The metric of dtrain's own models that have this output."""


@dataclass(frozen=True, kw_only=True)
class Measure(ABC):
    """One entry of the recipe's `evaluate.measures`."""

    every: Natural = 0
    """Steps from one measurement to the next, a multiple of `evaluate.every`; 0: at every evaluation. The one
    after the recipe's last step always has it; that of an early stop has it if it is due."""
    examples: Natural = 0
    """It gets the first so many examples of the test split; 0: all of them."""

    @property
    def user_code(self) -> str:
        """What the recipe names as code that runs when it is opened; empty for dtrain's own measures."""
        return ""

    @property
    def purpose(self) -> Purpose:
        """Which outputs it gets."""
        return "prediction"

    @property
    def declared(self) -> tuple[Metric, ...] | None:
        """What it returns; None if only the user's code could answer."""
        return None

    @property
    def needs(self) -> Needs | None:
        """What it needs beside labels; None if only the user's code could answer."""
        return None

    @abstractmethod
    def open(self) -> Measured:
        """The object that is called. RecipeError if it cannot be made."""


@dataclass(frozen=True, kw_only=True)
class CustomMeasure(UserTarget, Measure):
    """`target: module:name`, called with `args`. It returns an object with `metrics` and `__call__(step, rows)`.

    `metrics` is a tuple of dtrain.Metric. `rows` yields (arrays of the data, outputs of the model) for some examples at
    a time, NumPy arrays by name; the call returns a number for each metric. It is made in every process of a run, and
    called in process 0.
    """

    kind: Literal["custom"] = "custom"
    of: Literal["predictions", "samples"] = "predictions"
    """The outputs that it gets: those of the model's `predict`, or of its `sample`."""

    @property
    def purpose(self) -> Purpose:
        return "samples" if self.of == "samples" else "prediction"

    def open(self) -> Measured:
        """Raises RecipeError if the target cannot be imported, fails, or returns anything else."""
        where = f"evaluate.measures.target: {self.target}"
        own: Any = build_target("evaluate.measures", self.target, self.args, self.folder)
        with user_errors(where):
            metrics: Any = getattr(own, "metrics", ())
        if not callable(own):
            raise RecipeError(f"{where} returns a {type(own).__name__} without __call__(self, step, rows)")
        fine = isinstance(metrics, tuple | list) and all(isinstance(metric, Metric) for metric in metrics)
        if not fine or not metrics:
            hint = "metrics = (dtrain.Metric('fid', higher_is_better=False),)"
            raise RecipeError(f"{where}: its `metrics` are not a tuple of dtrain.Metric", hint)
        return _Own(own, tuple(metrics), where)


@dataclass(frozen=True)
class _Own:
    """A user's measure, whose errors have their file and line."""

    own: Any
    metrics: tuple[Metric, ...]
    where: str

    def __call__(self, step: int, rows: Rows) -> Mapping[str, float]:
        with user_errors(self.where):
            found = self.own(step, rows)
        names = [metric.name for metric in self.metrics]
        if not isinstance(found, Mapping):
            raise RecipeError(f"{self.where} returns a {type(found).__name__}, not numbers by name", f"return {names}")
        if unknown := [name for name in found if name not in names]:
            raise RecipeError(f"{self.where} returns {unknown[0]!r}; its `metrics` declare {names}", "declare it")
        try:
            return {name: float(value) for name, value in found.items()}
        except (TypeError, ValueError) as error:
            raise RecipeError(f"{self.where}: a value is no number: {error}", "return floats") from error


PRECISION = Metric("precision", True, PERCENT, "Of what is taken for a class, the share that is of it, a mean of all.")
RECALL = Metric("recall", True, PERCENT, "Of the examples of a class, the share that is taken for it, a mean of all.")
F1 = Metric("f1", True, PERCENT, "2 TP / (2 TP + FP + FN), a mean over classes.")
TOP5 = Metric(
    "top5_accuracy",
    True,
    PERCENT,
    "The share of examples whose label is among the five most probable; of more than five classes.",
)
AUC = Metric("auc", True, meaning="Area under the ROC curve, one class against the others, a mean over classes.")
CALIBRATION = Metric(
    "calibration_error", False, PERCENT, "How far probabilities are from how often they are right: Guo et al., 15 bins."
)
CLASSIFICATION = (PRECISION, RECALL, F1, TOP5, AUC, CALIBRATION)
BINS = 15
"""Of the calibration error, as in Guo et al. 2017."""


@dataclass(frozen=True, kw_only=True)
class Classification(Measure):
    """Precision, recall, F1, top-5 accuracy, area under the ROC curve and calibration error of a classifier.

    Precision, recall, F1 and AUC (one class against the others) are means over the classes that have examples. The
    calibration error is that of Guo et al. 2017, with 15 bins.
    """

    kind: Literal["classification"] = "classification"

    @property
    def declared(self) -> tuple[Metric, ...]:
        return CLASSIFICATION

    @property
    def needs(self) -> Needs:
        return Needs(PROBABILITY, "probabilities (examples, classes)", "classes", ACCURACY)

    def open(self) -> Measured:
        return _OfLabels(CLASSIFICATION, PROBABILITY, classification)


@dataclass(frozen=True)
class _OfLabels:
    """Calls a function with the labels and one output of all examples."""

    metrics: tuple[Metric, ...]
    output: str
    function: Callable[[np.ndarray, np.ndarray], Mapping[str, float]]

    def __call__(self, step: int, rows: Rows) -> Mapping[str, float]:
        pairs = [(data[LABEL], outputs[self.output]) for data, outputs in rows]
        label_N, output_N = (np.concatenate(part) for part in zip(*pairs, strict=True))
        return self.function(label_N, output_N.astype(np.float64))


def classification(label_N: np.ndarray, probability_NC: np.ndarray) -> dict[str, float]:
    """The metrics of `Classification` for N examples and C classes; without `auc` if all have one class."""
    examples, classes = probability_NC.shape
    chosen_N = probability_NC.argmax(1)
    confusion = np.zeros((classes, classes), np.int64)
    np.add.at(confusion, (label_N, chosen_N), 1)
    right_C, of_class_C, chosen_C = confusion.diagonal(), confusion.sum(1), confusion.sum(0)
    met = of_class_C > 0
    precision_C = right_C / np.maximum(chosen_C, 1)  # 0 for a class that is never chosen
    recall_C = right_C / np.maximum(of_class_C, 1)
    f1_C = 2 * right_C / np.maximum(of_class_C + chosen_C, 1)
    best = np.argsort(-probability_NC, axis=1, kind="stable")[:, :5]
    values = {
        PRECISION.name: precision_C[met].mean(),
        RECALL.name: recall_C[met].mean(),
        F1.name: f1_C[met].mean(),
        CALIBRATION.name: _calibration_error(probability_NC.max(1), chosen_N == label_N),
    }
    areas = [_auc(probability_NC[:, c], label_N == c) for c in np.flatnonzero(met & (of_class_C < examples))]
    values |= {TOP5.name: (best == label_N[:, None]).any(1).mean()} if classes > best.shape[1] else {}  # else always 1
    values |= {AUC.name: np.mean(areas)} if areas else {}
    return {name: float(value) for name, value in values.items()}


def _auc(score_N: np.ndarray, positive_N: np.ndarray) -> float:
    """The probability that a positive example has a higher score than a negative one; ties count half."""
    _, place_N, count = np.unique(score_N, return_inverse=True, return_counts=True)
    rank_N = (np.cumsum(count) - (count - 1) / 2)[place_N]  # from 1; equal scores have the mean of their ranks
    positives, negatives = int(positive_N.sum()), int((~positive_N).sum())
    return (rank_N[positive_N].sum() - positives * (positives + 1) / 2) / (positives * negatives)


def _calibration_error(confidence_N: np.ndarray, right_N: np.ndarray) -> float:
    """The mean distance of confidence and accuracy over equal bins of confidence, each weighted by its examples."""
    bin_N = np.minimum(np.ceil(confidence_N * BINS).astype(np.int64) - 1, BINS - 1)  # the bins are (low, high]
    gaps = [np.abs((confidence_N[bin_N == b] - right_N[bin_N == b]).sum()) for b in range(BINS)]
    return float(np.sum(gaps) / len(confidence_N))


R2 = Metric(
    "r2", True, meaning="1 - squared error / that of the labels' mean: 1 is without error, 0 no better than the mean."
)
RMSE = Metric("rmse", False, meaning="Root of the mean squared error of a number, in its unit.")
REGRESSION = (R2, RMSE)


@dataclass(frozen=True, kw_only=True)
class Regression(Measure):
    """The coefficient of determination (R2) and the root of the mean squared error of a model that predicts numbers.

    Of several numbers in a label, both are means over these.
    """

    kind: Literal["regression"] = "regression"

    @property
    def declared(self) -> tuple[Metric, ...]:
        return REGRESSION

    @property
    def needs(self) -> Needs:
        return Needs(VALUE, "numbers of the shape of the labels", "numbers", MAE)

    def open(self) -> Measured:
        return _OfLabels(REGRESSION, VALUE, regression)


def regression(label_N: np.ndarray, value_N: np.ndarray) -> dict[str, float]:
    """The metrics of `Regression` for labels and predictions (N, ...); without `r2` if all labels are equal."""
    label_NK, value_NK = (array.astype(np.float64).reshape(len(label_N), -1) for array in (label_N, value_N))
    error_K, spread_K = ((label_NK - other) ** 2 for other in (value_NK, label_NK.mean(0)))
    error_K, spread_K = error_K.mean(0), spread_K.mean(0)
    values = {RMSE.name: float(np.sqrt(error_K).mean())}
    differing = spread_K > 0
    return values | ({R2.name: float((1 - error_K[differing] / spread_K[differing]).mean())} if differing.any() else {})
