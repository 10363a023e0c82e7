"""Runs as one self-contained HTML page: curves by plotly with zoom and smoothing, times, recipe, confusion matrix.

The page holds plotly's own script, so that it opens without a network. Its parts are `Markup`: what is put into one is
escaped, unless it is `Markup` itself.
"""

from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from dtrain.core.errors import EnvironmentFault, cause
from dtrain.core.types import JsonObject
from dtrain.track.charts import FEW, SMOOTHING, Chart, Line, changed_at, charts
from dtrain.track.comparison import column_names, table
from dtrain.track.picture import refuse_missing_folder
from dtrain.track.summary import Summary
from dtrain.track.text import duration

COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf")
MOST_PICTURES = 50
"""Most evaluations whose pictures a page has; of more, some at equal distances, with the first and the last."""
LARGEST_MATRIX = 100
"""Most classes for which the confusion matrix is drawn."""
CONFIG = {"responsive": True, "displayModeBar": False}
LAYOUT = {
    "margin": {"l": 50, "r": 10, "t": 30, "b": 30},
    "height": 300,
    "template": "plotly_white",
    "hovermode": "x unified",
    "legend": {"orientation": "h", "y": -0.15},
}
STYLE = Markup("""
body { font: 15px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 1500px; padding: 1rem 2rem; color: #222 }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
pre { background: #f6f8fa; padding: .8rem; overflow-x: auto; font-size: 13px }
table { border-collapse: collapse } td, th { padding: .15rem .8rem; text-align: right; border-bottom: 1px solid #ddd }
td:first-child, th:first-child { text-align: left } .best { font-weight: bold; color: #1a7f37 }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(430px, 1fr)); gap: 1rem }
.samples img { image-rendering: pixelated; min-width: min(100%, 480px); max-width: 100% }
.mistakes { display: flex; flex-wrap: wrap; gap: 12px }
.mistakes figure { margin: 0; width: 132px; font-size: 12px; overflow-wrap: anywhere }
.mistakes img { image-rendering: pixelated; width: 128px }
.samples input { width: min(100%, 400px); vertical-align: middle }
.controls { position: sticky; top: 0; background: white; padding: .5rem 0; z-index: 5 }
""")
SCRIPT = Markup("""
const plots = [...document.querySelectorAll('.charts .plotly-graph-div')];
const raw = new Map(plots.map(plot => [plot, plot.data.map(trace => trace.y)]));
function smoothed(values, share) {
  let mean = 0, weight = 0;
  return values.map(value => {
    mean = share * mean + (1 - share) * value; weight = share * weight + (1 - share);
    return mean / weight;
  });
}
function smooth() {
  const share = +document.getElementById('smoothing').value;
  document.getElementById('share').textContent = share.toFixed(2);
  for (const plot of plots) {
    const indices = plot.data.map((_, index) => index).filter(index => plot.data[index].meta === 'smoothed');
    if (indices.length) {
      Plotly.restyle(plot, {y: indices.map(index => smoothed(raw.get(plot)[index], share))}, indices);
    }
  }
}
function scale() {
  const type = document.getElementById('log').checked ? 'log' : 'linear';
  for (const plot of plots) Plotly.relayout(plot, {'yaxis.type': type});
}
for (const samples of document.querySelectorAll('.samples')) {
  const slider = samples.querySelector('input'), images = [...samples.querySelectorAll('img')];
  const show = () => {
    images.forEach((image, index) => { image.hidden = index !== +slider.value; });
    samples.querySelector('span').textContent = (+images[+slider.value].dataset.step).toLocaleString('en');
  };
  slider.addEventListener('input', show);
  show();
}
document.getElementById('smoothing').addEventListener('input', smooth);
document.getElementById('log').addEventListener('change', scale);
smooth();
window.dispatchEvent(new Event('resize'));  // the first charts were drawn before the columns had their widths
""")


PAGE = Markup(
    '<!doctype html><html><head><meta charset="utf-8"><title>{}</title><style>{}</style>'
    "<script>{}</script></head><body>{}<script>{}</script></body></html>\n"
)


def write_page(
    summaries: Sequence[Summary],
    path: Path,
    *,
    recipes: Sequence[str],
    differences: Mapping[str, Sequence[object]],
    evaluations: Sequence[JsonObject],
    samples: Sequence[Sequence[Path]] = (),
) -> None:
    """Write the page. `recipes`, `evaluations`: text of the recipe and saved evaluation of each run, empty if none;
    `samples`: the pictures that each run drew, STEP-NAME.png.

    `differences`: keys in which the recipes differ, with their values. EnvironmentFault if the file cannot be written.
    """
    from plotly.offline import get_plotlyjs

    refuse_missing_folder(path)
    names = column_names(summaries)
    heading = names[0] if len(names) == 1 else f"{len(names)} runs"
    parts = [Markup("<h1>{}</h1>").format(heading)]
    if len(names) == 1:
        parts += [Markup("<pre>{}</pre>").format(summary.text()) for summary in summaries]
    else:
        parts += [_table(table(summaries))]
    if differences:
        rows = [
            {"recipe": key} | dict(zip(names, map(_value, found), strict=True)) for key, found in differences.items()
        ]
        parts += [Markup("<h2>Differences of the recipes</h2>"), _table(rows)]
    drawn = [_chart(chart, changed_at(summaries)) for chart in charts(summaries)]
    parts += [Markup("<h2>Curves</h2>"), _controls(summaries)]
    parts += [Markup('<div class="charts">\n{}\n</div>').format(_joined(drawn, "\n"))]
    parts += [Markup("<h2>Where the time went</h2>"), _times(summaries)]
    for name, drawn_by in zip(names, samples, strict=False):
        parts += _samples(name, drawn_by)
    for name, evaluation in zip(names, evaluations, strict=True):
        parts += _confusion(name, evaluation) + _mistakes(name, evaluation)
    details = Markup("<details><summary>Recipe of {}</summary><pre>{}</pre></details>")
    parts += [details.format(name, recipe) for name, recipe in zip(names, recipes, strict=True)]
    try:
        path.write_text(PAGE.format(heading, STYLE, Markup(get_plotlyjs()), _joined(parts, "\n"), SCRIPT))
    except OSError as error:
        raise EnvironmentFault(f"cannot write {path}: {cause(error)}", "name a file in a folder that exists") from error


def _joined(parts: Iterable[Markup], between: str = "") -> Markup:
    return Markup(between).join(parts)


def _value(value: object) -> str:
    return "" if value is None else str(value)


def _table(rows: Sequence[Mapping[str, str]]) -> Markup:
    def cell(text: str) -> Markup:
        best = text.endswith("*")
        return Markup('<td class="best">{}</td>').format(text[:-1]) if best else Markup("<td>{}</td>").format(text)

    head = _joined(Markup("<th>{}</th>").format(key) for key in rows[0])
    body = _joined(Markup("<tr>{}</tr>").format(_joined(map(cell, row.values()))) for row in rows)
    return Markup("<table><tr>{}</tr>{}</table>").format(head, body)


def _controls(summaries: Sequence[Summary]) -> Markup:
    rows = (
        max(curve.stride for summary in summaries for curve in [*summary.history.curves.values(), None] if curve)
        if any(summary.history.curves for summary in summaries)
        else 1
    )
    note = f" Each point is the mean of up to {rows} logged rows, the band their range." if rows > 1 else ""
    return Markup(
        '<div class="controls">smoothing '
        '<input id="smoothing" type="range" min="0" max="0.99" step="0.01" value="{}"> <span id="share"></span> &nbsp; '
        '<label><input id="log" type="checkbox"> logarithmic</label> &nbsp; '
        "Drag to zoom, double-click to zoom out.{}</div>"
    ).format(SMOOTHING, note)


def _chart(chart: Chart, changes: Sequence[int]) -> Markup:
    runs = list(dict.fromkeys(line.run for line in chart.lines))
    names = list(dict.fromkeys(line.name for line in chart.lines))
    traces: list[dict[str, Any]] = []
    for line in chart.lines:
        number = runs.index(line.run) if len(runs) > 1 else names.index(line.name)
        traces += _traces(line, COLOURS[number % len(COLOURS)], several=len(runs) > 1)
    line = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "line": {"dash": "dot", "color": "grey", "width": 1}}
    shapes = [line | {"x0": step, "x1": step} for step in changes]
    layout = LAYOUT | {"title": {"text": chart.title, "font": {"size": 14}}, "shapes": shapes}
    return _div({"data": traces, "layout": layout})


def _traces(line: Line, colour: str, *, several: bool) -> list[dict[str, Any]]:
    short = line.name.partition("/")[0 if line.evaluated else 2]
    name = f"{line.run} {short}" if several else short
    common = {"type": "scatter", "x": _numbers(line.step), "name": name, "legendgroup": name}
    dashed = {"dash": "dot"} if several and line.evaluated else {}
    whole = {"color": colour, "width": 2} | dashed
    if line.exact:
        mode = "lines+markers" if len(line.step) <= FEW or line.evaluated else "lines"
        return [common | {"y": _numbers(line.mean), "mode": mode, "line": whole}]
    thin = {"color": colour, "width": 1}
    faint = common | {"y": _numbers(line.mean), "mode": "lines", "line": thin, "opacity": 0.25, "showlegend": False}
    bright = common | {"y": _numbers(line.mean), "mode": "lines", "line": whole, "meta": "smoothed"}
    return [*_band(line, common, colour), faint | {"hoverinfo": "skip"}, bright]


def _band(line: Line, common: dict[str, Any], colour: str) -> list[dict[str, Any]]:
    """The range between the lowest and the highest value of each point, if it stands for several rows."""
    if line.stride == 1:
        return []
    edge = common | {"mode": "lines", "line": {"width": 0}, "showlegend": False, "hoverinfo": "skip"}
    filled = {"fill": "tonexty", "fillcolor": f"{colour}26"}  # with an opacity of 15 %
    return [edge | {"y": _numbers(line.low)}, edge | {"y": _numbers(line.high)} | filled]


def _times(summaries: Sequence[Summary]) -> Markup:
    """A bar for each run, divided into the sections of its time; lost time by its cause."""
    sections = dict.fromkeys(name for summary in summaries for name in summary.values["parts"])
    names = column_names(summaries)
    bars = []
    for section in sections:
        seconds = [summary.values["parts"].get(section, 0.0) for summary in summaries]
        texts = [f"{section.replace('_', ' ')} {duration(value)}" for value in seconds]
        bars.append({
            "type": "bar", "orientation": "h", "y": names, "x": seconds, "name": section.replace("_", " "),
            "text": texts, "textposition": "inside", "hovertext": texts, "hoverinfo": "text",
        })  # fmt: skip
    layout = LAYOUT | {"barmode": "stack", "height": 140 + 40 * len(names), "hovermode": "closest"}
    layout |= {"xaxis": {"ticksuffix": " s"}, "margin": LAYOUT["margin"] | {"l": 140, "b": 80}}
    layout |= {"legend": {"orientation": "h", "traceorder": "normal", "yref": "container", "y": 0}}
    line = Markup("<p>goodput of {}: {:.1%} of {}</p>")
    goodput = _joined(
        line.format(name, summary.values["goodput"], duration(summary.values["wall"]))
        for name, summary in zip(names, summaries, strict=True)
        if summary.values["goodput"]
    )
    return _div({"data": bars, "layout": layout}) + goodput


def _samples(run: str, paths: Sequence[Path]) -> Iterator[Markup]:
    """The pictures that a run drew at its evaluations, of each name with a slider over the steps."""
    by_name: dict[str, list[tuple[int, Path]]] = {}
    for path in sorted(paths):
        step, _, name = path.stem.partition("-")
        if step.isdecimal() and name:
            by_name.setdefault(name, []).append((int(step), path))
    for name, found in by_name.items():
        chosen = [found[round(at)] for at in np.linspace(0, len(found) - 1, min(len(found), MOST_PICTURES))]
        images = _joined(
            Markup('<img data-step="{}" src="data:image/png;base64,{}" alt="{} at step {}"{}>').format(
                step,
                b64encode(path.read_bytes()).decode(),
                name,
                f"{step:,}",
                Markup(" hidden") * (number + 1 < len(chosen)),
            )
            for number, (step, path) in enumerate(chosen)
        )
        last = len(chosen) - 1
        slider = Markup('<input type="range" min="0" max="{}" value="{}"> step <span></span>').format(last, last)
        head = Markup("<h2>Samples of {}: {}</h2>").format(run, name)
        yield head + Markup('<div class="samples"><p>{}</p>{}</div>').format(slider, images)


def _confusion(name: str, evaluation: JsonObject) -> list[Markup]:
    if not evaluation.get("confusion") or len(evaluation["confusion"]) > LARGEST_MATRIX:
        return []
    classes, counts = [str(one) for one in evaluation["classes"]], evaluation["confusion"]
    heat = {
        "type": "heatmap", "z": counts, "x": classes, "y": classes, "colorscale": "Blues", "texttemplate": "%{z}",
        "hovertemplate": "true %{y}, predicted %{x}: %{z}<extra></extra>",
    }  # fmt: skip
    side = max(300, min(900, 120 + 32 * len(classes)))
    axes = {"xaxis": {"title": {"text": "predicted"}, "type": "category"}}
    axes |= {"yaxis": {"title": {"text": "true"}, "type": "category", "autorange": "reversed"}}
    layout = LAYOUT | axes | {"height": side, "width": side + 120, "hovermode": "closest"}
    head = Markup("<h2>Confusion matrix of {}, {} split, step {}</h2>")
    return [head.format(name, evaluation["split"], evaluation["step"]), _div({"data": [heat], "layout": layout})]


def _mistakes(name: str, evaluation: JsonObject) -> list[Markup]:
    """The most confident mistakes of a classifier, with their pictures where there are some."""
    found = evaluation.get("mistakes") or []
    if not found:
        return []
    picture = Markup('<img src="data:image/png;base64,{}" alt="{}">')
    cell = Markup("<figure>{}<figcaption>{}<br>{}, taken for {} ({})</figcaption></figure>")
    cells = (
        cell.format(
            picture.format(one["picture"], one["label"]) if one.get("picture") else "",
            one["place"] or f"example {one['example']:,}",
            one["label"],
            one["predicted"],
            f"{one['probability']:.0%}",
        )
        for one in found
    )
    head = Markup("<h2>The most confident mistakes of {}, {} split</h2>").format(name, evaluation["split"])
    return [head, Markup('<div class="mistakes">{}</div>').format(_joined(cells))]


def _div(figure: dict[str, Any]) -> Markup:
    """The figure as HTML, in which plotly escapes what is in it."""
    from plotly.graph_objects import Figure

    return Markup(Figure(figure).to_html(full_html=False, include_plotlyjs=False, config=CONFIG))


def _numbers(values: np.ndarray) -> list[float]:
    """Values with seven digits, which keeps the page small."""
    return [float(f"{value:.7g}") for value in values]
