"""Curves of runs as a PNG, drawn by matplotlib without a display."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dtrain.core.errors import EnvironmentFault, cause
from dtrain.track.charts import Chart, changed_at, charts, smoothed
from dtrain.track.summary import Summary

COLUMNS = 3
FEW = 20
"""Points up to which a curve is drawn as it is, with markers."""


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
    try:
        figure.savefig(path, dpi=110, format=path.suffix.lstrip(".").lower() or "png")
    except (OSError, ValueError) as error:
        hint = "name a .png, .svg or .pdf file in a folder that exists"
        raise EnvironmentFault(f"cannot write {path}: {cause(error)}", hint) from error


def _draw(axes: Any, chart: Chart, *, several: bool) -> None:
    runs = list(dict.fromkeys(line.run for line in chart.lines))
    for line in chart.lines:
        label = " ".join([*([line.run] if several else []), line.name.partition("/")[0 if line.evaluated else 2]])
        names = list(dict.fromkeys(other.name for other in chart.lines))
        colour = f"C{(runs.index(line.run) if several else names.index(line.name)) % 10}"
        style = "--" if several and line.evaluated else "-"
        marker = "o" if len(line.step) <= FEW else None
        if line.evaluated or len(line.step) <= FEW:
            axes.plot(line.step, line.mean, style, color=colour, marker=marker, markersize=3, label=label)
        else:
            axes.plot(line.step, line.mean, color=colour, alpha=0.25, linewidth=0.8)
            axes.plot(line.step, smoothed(line.mean), style, color=colour, label=label)
    axes.set_title(chart.title, fontsize=9)
    axes.tick_params(labelsize=7)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize=7)
