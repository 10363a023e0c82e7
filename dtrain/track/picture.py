"""Curves of runs as a PNG, drawn by matplotlib without a display."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dtrain.core.errors import EnvironmentFault, RecipeError, cause
from dtrain.track.charts import FEW, Chart, changed_at, charts, shown_as, smoothed
from dtrain.track.summary import Summary

COLUMNS = 3
COLOURS = ("#1f5fa8", "#b85400", "#1d7a3e", "#7b3fb0", "#007d86", "#b8327a", "#7a5230", "#555b63")
MARKERS = "os^Dv<P"
"""Colours, those of the page, and markers of the curves; their numbers have no common factor."""

SPREAD = 5
"""The ratio of the largest to the smallest value of a key from which on its axis is logarithmic."""
FORMATS = (".png", ".svg", ".pdf")


def refuse_missing_folder(path: Path) -> None:
    """Raise EnvironmentFault if the folder of a file that is to be written does not exist."""
    if not path.parent.is_dir():
        raise EnvironmentFault(
            f"cannot write {path}: the folder {path.parent} does not exist", f"mkdir -p {path.parent}"
        )


def draw(summaries: Sequence[Summary], path: Path) -> None:
    """Write the picture. EnvironmentFault if nothing was logged, or the file cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = charts(summaries)
    if not shown:
        raise EnvironmentFault("nothing to draw: no metrics are logged yet", "wait for the first logged step")
    rows = math.ceil(len(shown) / COLUMNS)
    figure = Figure(figsize=(4.4 * min(COLUMNS, len(shown)), 3.0 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for number, chart in enumerate(shown):
        axes = figure.add_subplot(rows, min(COLUMNS, len(shown)), number + 1)
        _draw(axes, chart, several=len(summaries) > 1)
        for step in changed_at(summaries):
            axes.axvline(step, color="grey", linestyle=":", linewidth=1)
    if len(summaries) == 1:
        figure.suptitle(summaries[0].text().partition("\n")[0], fontsize=10)
    refuse_missing_folder(path)
    if path.suffix.lower() not in FORMATS:
        raise RecipeError(f"{path}: not a format for curves", "name a .png, .svg or .pdf file")
    try:
        figure.savefig(path, dpi=110, format=path.suffix.lstrip(".").lower())
    except (OSError, ValueError) as error:
        hint = "name a .png, .svg or .pdf file in a folder that exists"
        raise EnvironmentFault(f"cannot write {path}: {cause(error)}", hint) from error


def draw_results(keys: Sequence[str], runs: Sequence[tuple[Mapping[str, str], Summary]], path: Path) -> bool:
    """The result of each run over each key of a sweep, and the losses of all runs. False if no run has a result.

    EnvironmentFault if the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    name, rises = next((s.main_metric for _, s in runs if s.main_metric[0]), ("", None))
    shown = [(values, s) for values, s in runs if name in s.values["last"]]
    if not shown:
        return False
    unit, factor = shown_as(name.partition("/")[2], [s for _, s in shown])[1:]
    results = [factor * s.values["last"][name] for _, s in shown]
    best = results.index((max if rises else min)(results))
    figure = Figure(figsize=(4.4 * (len(keys) + 1), 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    for number, key in enumerate(keys, 1):
        axes = figure.add_subplot(1, len(keys) + 1, number)
        points = [_position(values[key]) for values, _ in shown]
        numbers = [point for point in points if isinstance(point, float)]
        where = numbers if len(numbers) == len(points) else [values[key] for values, _ in shown]
        for index, (point, result) in enumerate(zip(where, results, strict=True)):
            axes.scatter([point], [result], color=COLOURS[index == best], marker="*" if index == best else "o")
        if len(numbers) == len(points) and min(numbers) > 0 and max(numbers) >= SPREAD * min(numbers):
            axes.set_xscale("log")
        if min(results) > 0 and max(results) > 100 * min(results):
            axes.set_yscale("log")
        axes.set_xlabel(key, fontsize=8)
        axes.set_ylabel(f"{name} ({unit})" if unit else name, fontsize=8)
        axes.tick_params(labelsize=7)
        axes.grid(visible=True, alpha=0.3)
    axes = figure.add_subplot(1, len(keys) + 1, len(keys) + 1)
    for index, (_, summary) in enumerate(shown):
        for chart in (chart for chart in charts([summary]) if chart.name == "loss"):
            line, how = chart.lines[0], {"color": COLOURS[index == best], "alpha": 1 if index == best else 0.3}
            how |= {"marker": "o", "markersize": 3} if len(line.step) <= FEW else {}
            axes.plot(line.step, line.mean if line.exact else smoothed(line.mean), **how)
            _frame(axes, chart, f"train/loss; orange: {Path(shown[best][1].values['folder']).name}")
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise EnvironmentFault(f"cannot write {path}: {cause(error)}", "make the folder writable") from error
    return True


def _position(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _draw(axes: Any, chart: Chart, *, several: bool) -> None:
    runs = list(dict.fromkeys(line.run for line in chart.lines))
    names = list(dict.fromkeys(line.name for line in chart.lines))
    for line in chart.lines:
        number = runs.index(line.run) if several else names.index(line.name)
        look = {
            "color": COLOURS[number % len(COLOURS)],
            "linestyle": "--" if line.evaluated else "-",
            "marker": MARKERS[number % len(MARKERS)],  # curves differ in a print without colours, too
            "markersize": 3,
            "markevery": 1 if len(line.step) <= FEW else (0.02 * (number % 5), 0.1),
            "label": line.label(several),
        }
        if line.exact:
            axes.plot(line.step, line.mean, **look)
        else:
            axes.plot(line.step, line.mean, color=look["color"], alpha=0.25, linewidth=0.8)
            axes.plot(line.step, smoothed(line.mean), **look)
    _frame(axes, chart)
    if len(chart.lines) > 1:
        axes.legend(fontsize=7)


def _frame(axes: Any, chart: Chart, title: str = "") -> None:
    """Title, units, what was smoothed, and the label of the horizontal axis."""
    note = f"\n{chart.drawn}" if chart.drawn else ""
    axes.set_title(f"{title or chart.heading}{note}", fontsize=8)
    axes.set_xlabel("step", fontsize=7)
    axes.tick_params(labelsize=7)
    axes.grid(visible=True, alpha=0.3)
