"""Which curves of a run belong into one chart, shared by the picture and the page."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dtrain.core.metrics import PERCENT, known
from dtrain.core.types import JsonObject
from dtrain.track.comparison import column_names
from dtrain.track.history import POINTS
from dtrain.track.summary import Summary

SMOOTHING = 0.9
"""The share of the earlier mean in each smoothed point."""
TITLES = {
    "lr": ("learning rate", "", 1.0),
    "grad_norm": ("gradient norm", "", 1.0),
    "time/step": ("time of a step", "ms", 1.0),
    "rate/examples_per_s": ("examples per second", "", 1.0),
    "rate/tokens_per_s": ("tokens per second", "", 1.0),
    "rate/mfu": ("model FLOPs utilisation", PERCENT, 100.0),
    "memory/peak_bytes": ("peak memory", "GiB", 2.0**-30),
}
"""Title and unit of a chart whose values are no metrics, and the factor from the logged value to that unit."""
TIMES = ("time/step_ms", "time/data_ms", "time/dispatch_ms", "time/device_ms")
FEW = 20
"""Points up to which a curve is drawn as it is, with markers."""
MOST = 24
"""Most norms in one chart."""
ORDER = ("loss", "accuracy", "perplexity")


@dataclass(frozen=True)
class Line:
    """One curve of a chart."""

    run: str
    name: str
    step: np.ndarray
    mean: np.ndarray
    low: np.ndarray
    high: np.ndarray
    stride: int
    """Logged rows in each point."""

    @property
    def evaluated(self) -> bool:
        """Whether these are few points that were measured on held-out examples."""
        return self.name.startswith("eval/")

    @property
    def exact(self) -> bool:
        """Whether the points are not noisy or few, and so are drawn as they are, not smoothed."""
        return self.evaluated or self.name == "train/lr" or len(self.step) <= FEW

    @property
    def short(self) -> str:
        """The name in its chart: "train", "eval", of times and norms the part; empty for a line that is alone."""
        prefix, _, rest = self.name.partition("/")
        if prefix in ("train", "eval"):
            return prefix
        return rest.removesuffix("_ms") if prefix == "time" else rest.partition("/")[2]

    def label(self, several: bool) -> str:
        """The name in a legend. `several`: with that of the run."""
        return f"{self.run} {self.short}".strip() if several else self.short

    def plain(self, steps: list[list[int]]) -> JsonObject:
        """The line as JSON values, see Chart."""
        step = [int(value) for value in self.step]
        if step not in steps:
            steps.append(step)
        about = {"run": self.run, "short": self.short, "eval": self.evaluated, "exact": self.exact}
        values = {"mean": self.mean} | ({"low": self.low, "high": self.high} if self.stride > 1 else {})
        return about | {"step": steps.index(step)} | {name: _numbers(found) for name, found in values.items()}


@dataclass(frozen=True)
class Chart:
    """Curves over the step, with one vertical axis."""

    name: str
    """Of the metric, or of the group of values: "loss", "time/step"."""
    title: str
    unit: str
    """Of the values; empty for plain numbers."""
    lines: tuple[Line, ...]

    @property
    def heading(self) -> str:
        """The title with the unit: "accuracy (%)"."""
        return f"{self.title} ({self.unit})" if self.unit else self.title

    @property
    def drawn(self) -> str:
        """How noisy curves are drawn, in words; empty if every point is drawn as it was logged."""
        stride = max(line.stride for line in self.lines)
        means = f"points: means of up to {stride:,} logged rows" if stride > 1 else ""
        smooth = "bright: smoothed, faint: as logged" if not all(line.exact for line in self.lines) else ""
        return "; ".join(filter(None, (smooth, means)))

    def plain(self, steps: list[list[int]]) -> JsonObject:
        """The chart as JSON values. The steps of a line are an index into `steps`, to which new ones are added: many
        curves share them."""
        about = {"name": self.name, "title": self.heading, "stride": max(line.stride for line in self.lines)}
        return about | {"lines": [line.plain(steps) for line in self.lines]}


def charts(summaries: Sequence[Summary], most: int = 2 * POINTS) -> list[Chart]:
    """The charts of one run or several: each metric of training beside that of evaluation, then rates and times.

    `most`: points of a line; of more, neighbours become their mean.
    """
    runs = list(zip(column_names(summaries), summaries, strict=True))
    groups: dict[str, list[Line]] = {}
    for name in dict.fromkeys(name for _, summary in runs for name in summary.history.curves):
        if len(runs) > 1 and name.startswith("norm/"):
            continue
        group = _group(name)
        if len(runs) > 1 and name in TIMES[1:]:
            continue  # the parts of a step, of one run only
        if group:
            groups.setdefault(group, []).extend(_lines(name, runs, shown_as(group, summaries)[2], most))
    rank = {name: number for number, name in enumerate(ORDER)}
    ordered = sorted(groups, key=lambda group: (rank.get(group, len(ORDER)), "/" in group))
    return [
        Chart(group, *shown_as(group, summaries)[:2], tuple(_largest(groups[group])))
        for group in ordered
        if groups[group]
    ]


def shown_as(group: str, summaries: Sequence[Summary]) -> tuple[str, str, float]:
    """The title and the unit of a chart, and the factor from the logged value to that unit."""
    if group in TITLES:
        return TITLES[group]
    metrics = (known(f"eval/{group}", summary.declared) for summary in summaries)
    unit = next((metric.unit for metric in metrics if metric), "")
    return group.replace("_", " "), unit, 100.0 if unit == PERCENT else 1.0


def _largest(lines: list[Line]) -> list[Line]:
    """The lines of a chart; of many norms those with the largest last value."""
    many = len(lines) > MOST and lines[0].name.startswith("norm/")
    return sorted(lines, key=lambda line: -line.mean[-1])[:MOST] if many else lines


def changed_at(summaries: Sequence[Summary]) -> list[int]:
    """The steps at which the recipe of a run was changed, to be marked in its charts; of a single run only."""
    changes = summaries[0].values["changes"] if len(summaries) == 1 else []
    return [change["step"] for change in changes if isinstance(change.get("step"), int)]


def _group(name: str) -> str:
    prefix, _, short = name.partition("/")
    if name in TIMES:
        return "time/step"
    if prefix in ("train", "eval"):
        return short
    if prefix == "norm":
        return f"norm of {short.partition('/')[0]}"
    return name if name in TITLES else ""


def _lines(name: str, runs: list[tuple[str, Summary]], factor: float, most: int) -> Iterator[Line]:
    for run, summary in runs:
        curve = summary.history.curves.get(name)
        if curve is not None:
            step, mean, low, high = curve.shown(most)
            if len(step):
                yield Line(
                    run, name, step, factor * mean, factor * low, factor * high, curve.stride * curve.merged(most)
                )


def _numbers(values: np.ndarray) -> list[float]:
    """Values with six digits of their range, which keeps the page small; of 1000.001 to 1000.002 these are twelve."""
    largest, span = float(np.abs(values).max()), float(values.max() - values.min())
    more = math.ceil(math.log10(largest / span)) if 0 < span < largest else 0
    return [float(f"{value:.{min(6 + more, 17)}g}") for value in values]


def smoothed(values: np.ndarray, share: float = SMOOTHING) -> np.ndarray:
    """Exponential moving mean, corrected for the first points (as Kingma and Ba 2015, section 3)."""
    mean, weight, result = 0.0, 0.0, np.empty(len(values))
    for index, value in enumerate(values):
        mean, weight = share * mean + (1 - share) * value, share * weight + (1 - share)
        result[index] = mean / weight
    return result
