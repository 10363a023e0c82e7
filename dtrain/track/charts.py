"""Which curves of a run belong into one chart, shared by the picture and the page."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dtrain.track.comparison import column_names
from dtrain.track.summary import Summary

SMOOTHING = 0.9
"""The share of the earlier mean in each smoothed point."""
TITLES = {
    "lr": "learning rate",
    "grad_norm": "gradient norm",
    "time/step": "milliseconds per step",
    "rate/examples_per_s": "examples per second",
    "rate/tokens_per_s": "tokens per second",
    "rate/mfu": "model FLOPs utilisation",
    "memory/peak_bytes": "peak memory, bytes",
}
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


@dataclass(frozen=True)
class Chart:
    """Curves with one vertical axis."""

    title: str
    lines: tuple[Line, ...]


def charts(summaries: Sequence[Summary]) -> list[Chart]:
    """The charts of one run or several: each metric of training beside that of evaluation, then rates and times."""
    runs = list(zip(column_names(summaries), summaries, strict=True))
    groups: dict[str, list[Line]] = {}
    for name in dict.fromkeys(name for _, summary in runs for name in summary.history.curves):
        if len(runs) > 1 and name.startswith("norm/"):
            continue
        group = _group(name)
        if len(runs) > 1 and name in TIMES[1:]:
            continue  # the parts of a step, of one run only
        if group:
            groups.setdefault(group, []).extend(_lines(name, runs))
    rank = {name: number for number, name in enumerate(ORDER)}
    ordered = sorted(groups, key=lambda group: (rank.get(group, len(ORDER)), "/" in group))
    return [Chart(TITLES.get(group, group), tuple(_largest(groups[group]))) for group in ordered if groups[group]]


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


def _lines(name: str, runs: list[tuple[str, Summary]]) -> Iterator[Line]:
    for run, summary in runs:
        curve = summary.history.curves.get(name)
        if curve is not None:
            step, mean, low, high = curve.shown()
            if len(step):
                yield Line(run, name, step, mean, low, high, curve.stride)


def smoothed(values: np.ndarray, share: float = SMOOTHING) -> np.ndarray:
    """Exponential moving mean, corrected for the first points (as Kingma and Ba 2015, section 3)."""
    mean, weight, result = 0.0, 0.0, np.empty(len(values))
    for index, value in enumerate(values):
        mean, weight = share * mean + (1 - share) * value, share * weight + (1 - share)
        result[index] = mean / weight
    return result
