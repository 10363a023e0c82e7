"""Runs as a page of HTML: curves with zoom and smoothing, times, recipes, confusion matrix, pictures.

The page holds its scripts and its style, `web/` beside this file, so that it opens without a network. Its parts are
`Markup`: what is put into one is escaped, unless it is `Markup` itself.
"""

import json
import os
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote
from zlib import crc32

import numpy as np
from markupsafe import Markup

from dtrain.core.errors import EnvironmentFault, cause
from dtrain.core.types import JsonObject
from dtrain.track.charts import SMOOTHING, changed_at, charts
from dtrain.track.comparison import MARK, column_names, table
from dtrain.track.picture import refuse_missing_folder
from dtrain.track.summary import Summary
from dtrain.track.text import duration

WEB = Path(__file__).parent / "web"
MOST_PICTURES = 50
"""Most evaluations whose pictures a page has; of more, some at equal distances, with the first and the last."""
LARGEST_MATRIX = 100
"""Most classes for which the confusion matrix is drawn."""
VALUES = 120_000
"""About the most values of curves in a page, which are about 1 MB; of longer curves neighbours become their mean."""
FEWEST_POINTS = 100
"""Points that a curve keeps in any case."""
STRONG = 0.8
"""The share of a class from which on the text in its cell of the matrix is light."""
COLOURS = {
    "start": "#a9c4e8", "compile": "#6f9fdc", "restore": "#8fd3e8", "data": "#f2b56b", "dispatch": "#a8d8b0",
    "device": "#6fbf7a", "host": "#cfe3a0", "step": "#6fbf7a", "evaluate": "#c3a6ea", "save": "#5fc0b8",
    "profile": "#d9d36b", "locate": "#d8b894", "finish": "#b7c0cc", "unknown": "#dddddd",
}  # fmt: skip
"""By the section of the time of a run: green for steps, blue for what comes before, orange for waiting for data."""
LOST = "#e06666"
"""Of time that was lost to failures, whatever its cause; nothing else is red."""
LABELLED = 0.08
"""The part of the time from which on a section of a bar has its name in it."""
CONTROLS = Markup(
    '<div class="controls"><span id="smooth"><label>smoothing '
    '<input id="smoothing" type="range" min="0" max="0.99" step="0.01" value="{}"></label> <output id="share"></output>'
    '</span><label><input id="log" type="checkbox"> logarithmic</label>'
    '<span class="quiet">Drag to zoom, double-click to zoom out; keys: arrows, + and -, Escape.</span></div>'
)
THEME = Markup(
    '<label class="theme quiet">theme <select id="theme"><option>system<option>light<option>dark</select></label>'
)
PAGE = Markup(
    '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
    '<meta name="viewport" content="width=device-width, initial-scale=1"><style>{style}</style></head>\n'
    "<body>{body}{scripts}</body></html>\n"
)


@dataclass(frozen=True)
class Contents:
    """What a page shows of its runs."""

    summaries: Sequence[Summary]
    recipes: Sequence[str]
    """The text of each run's recipe; empty if it cannot be read."""
    differences: Mapping[str, Sequence[object]]
    """Keys in which the recipes differ, with their values."""
    evaluations: Sequence[JsonObject]
    """The saved evaluation of each run; empty if there is none."""
    samples: Sequence[Sequence[Path]]
    """The pictures that each run drew, STEP-NAME.png."""

    @property
    def names(self) -> list[str]:
        """A name for each run."""
        return column_names(self.summaries)

    @property
    def heading(self) -> str:
        """The run's name, or how many there are."""
        return self.names[0] if len(self.names) == 1 else f"{len(self.names)} runs"

    def curves(self) -> JsonObject:
        """The charts as JSON values for `web/page.js`."""
        several = len(self.summaries) > 1
        number = sum(len(summary.history.curves) for summary in self.summaries)
        most = max(FEWEST_POINTS, VALUES // max(3 * number, 1))  # a mean, a lowest and a highest value
        steps: list[list[int]] = []
        drawn = [chart.plain(steps) for chart in charts(self.summaries, most)]
        return {"several": several, "steps": steps, "charts": drawn, "changes": changed_at(self.summaries)}

    def parts(self) -> dict[str, Markup]:
        """The parts of the page that change while a run is going on, but for curves and `examples`."""
        names, summaries = self.names, self.summaries
        if len(names) == 1:
            head = Markup("<pre>{}</pre>").format(summaries[0].text())
        else:
            head = _table(table(summaries), "results, the best of a row in bold", MARK)
        rows = [
            {"recipe key": key} | dict(zip(names, map(_value, found), strict=True))
            for key, found in self.differences.items()
        ]
        recipe = Markup("<details><summary>Recipe of {}</summary><pre>{}</pre></details>")
        return {
            "results": head,
            "differences": Markup("<h2>Differences of the recipes</h2>{}").format(_table(rows)) if rows else Markup(""),
            "times": _times(summaries),
            "recipes": _joined(recipe.format(name, text) for name, text in zip(names, self.recipes, strict=True)),
        }

    def examples(self) -> Markup:
        """Pictures that were drawn, confusion matrices, the most confident mistakes."""
        found = [part for name, drawn in zip(self.names, self.samples, strict=True) for part in _samples(name, drawn)]
        for name, evaluation in zip(self.names, self.evaluations, strict=True):
            found += _confusion(name, evaluation) + _mistakes(name, evaluation)
        return _joined(found, "\n")

    def examples_version(self) -> str:
        """Changes whenever `examples` does, and is computed in less time."""
        pictures = [[(path.name, path.stat().st_mtime_ns) for path in drawn] for drawn in self.samples]
        return f"{crc32(json.dumps([self.evaluations, pictures]).encode()):08x}"


def write_page(contents: Contents, path: Path) -> None:
    """Write the page. EnvironmentFault if the file cannot be written."""
    refuse_missing_folder(path)
    try:
        path.write_text(runs_page(contents), encoding="utf-8", errors="replace")
    except OSError as error:
        raise EnvironmentFault(f"cannot write {path}: {cause(error)}", "name a file in a folder that exists") from error


def runs_page(contents: Contents, live: Mapping[str, str] | None = None, nonce: str = "") -> str:
    """The page of one run or several. `live`: attributes by which it follows them; `nonce`: of its scripts."""
    parts = {name: _part(name, html) for name, html in contents.parts().items()}
    # text inside <script> ends at "</script": JSON may write "<" as an escape
    curves = Markup(json.dumps(contents.curves(), separators=(",", ":")).replace("<", "\\u003c"))
    body = Markup(
        "{top}{results}{differences}<h2>Curves</h2>{controls}"
        '<div class="charts"></div><h2>Where the time went</h2>{times}{examples}{recipes}'
        '<script id="data" type="application/json">{curves}</script>'
    ).format(
        top=_top(contents.heading, live is not None),
        controls=CONTROLS.format(SMOOTHING),
        examples=_part("examples", contents.examples()),
        curves=curves,
        **parts,
    )
    return _page(f"{contents.heading} - dtrain", body, ("chart.js", "page.js"), live, nonce)


def list_page(rows: Markup, where: str, live: Mapping[str, str], nonce: str) -> str:
    """The page with the table of runs, whose rows are `run_rows`."""
    head = Markup('<th scope="col" data-sort="{}"><button type="button">{}</button></th>')
    heads = _joined(head.format(column, title) for column, title in COLUMNS.items())
    body = Markup(
        '{}<div class="controls"><label>filter <input id="filter" type="search" placeholder="name, state, result">'
        '</label><button id="compare" type="button" disabled>open</button><span id="count" class="quiet" role="status">'
        '</span></div><div class="wide"><table class="runs"><caption class="hidden">runs</caption><thead><tr>'
        '<th scope="col"><span class="hidden">compare</span></th>{}</tr></thead><tbody>{}</tbody></table></div>'
    ).format(_top(f"Runs in {where}", True, back=False), heads, rows)
    return _page(f"{where} - dtrain", body, ("page.js", "runs.js"), live, nonce)


COLUMNS = {
    "name": "name", "state": "state", "step": "step", "result": "result", "best": "best", "changed": "age",
    "bytes": "size", "problem": "problem",
}  # fmt: skip
"""Columns of the table of runs, with their titles."""


def run_rows(rows: Iterable[tuple[str, Mapping[str, tuple[str, str | float]]]]) -> Markup:
    """The rows of the table of runs: of each its name, and by column a text and the value to sort by."""
    cell = Markup('<td data-column="{}" data-value="{}" class="{}">{}</td>')
    row = Markup('<tr><td><input type="checkbox" value="{}" aria-label="compare {}"></td>{}</tr>')
    link = Markup('<a href="runs?run={}">{}</a>')
    return _joined(
        row.format(
            name,
            name,
            _joined(
                cell.format(
                    column,
                    value,
                    f"state-{text.split(' ', 1)[0]}" if column == "state" else f"column-{column}",
                    link.format(quote(os.fsencode(name), safe=""), text) if column == "name" else text,
                )
                for column, (text, value) in cells.items()
            ),
        )
        for name, cells in rows
    )


def _page(title: str, body: Markup, scripts: Sequence[str], live: Mapping[str, str] | None, nonce: str) -> str:
    attributes = _joined(Markup(' data-{}="{}"').format(key, value) for key, value in (live or {}).items())
    text = "\n".join((WEB / name).read_text() for name in scripts)
    return PAGE.format(
        title=title,
        style=Markup((WEB / "page.css").read_text()),
        body=Markup("<main{}>{}</main>").format(attributes, body),
        scripts=Markup("<script{}>{}</script>").format(
            Markup(' nonce="{}"').format(nonce) if nonce else "", Markup(text)
        ),
    )


def _top(heading: str, live: bool, back: bool = True) -> Markup:
    state = Markup('<span id="live" class="quiet" role="status">live</span>') if live else ""
    link = Markup('<a href=".">all runs</a>') if live and back else ""
    return Markup('<div class="top"><h1>{}</h1><span>{} &nbsp; {} &nbsp; {}</span></div>').format(
        heading, link, state, THEME
    )


def _part(name: str, html: Markup) -> Markup:
    return Markup('<div id="{}">{}</div>').format(name, html)


def _joined(parts: Iterable[Markup], between: str = "") -> Markup:
    return Markup(between).join(parts)


def _value(value: object) -> str:
    return "" if value is None else str(value)


def _table(rows: Sequence[Mapping[str, str]], caption: str = "", mark: str = "") -> Markup:
    """A table whose first column names the rows. Cells that end in `mark` are the best of their row."""

    def cell(text: str) -> Markup:
        best = bool(mark) and text.endswith(mark)
        return Markup('<td class="best">{}</td>').format(text[:-1]) if best else Markup("<td>{}</td>").format(text)

    def line(first: str, *others: str) -> Markup:
        return Markup('<tr><th scope="row">{}</th>{}</tr>').format(first, _joined(map(cell, others)))

    head = _joined(Markup('<th scope="col">{}</th>').format(key) for key in rows[0])
    body = _joined(line(*row.values()) for row in rows)
    title = Markup("<caption>{}</caption>").format(caption) if caption else ""
    return Markup('<div class="wide"><table>{}<thead><tr>{}</tr></thead><tbody>{}</tbody></table></div>').format(
        title, head, body
    )


def _times(summaries: Sequence[Summary]) -> Markup:
    """A bar for each run, divided into the sections of its time, and the same as a table; lost time by its cause."""
    names = column_names(summaries)
    sections = dict.fromkeys(name for summary in summaries for name in summary.values["parts"])
    longest = max((sum(summary.values["parts"].values()) for summary in summaries), default=0.0)
    if not sections or not longest:
        return Markup('<p class="quiet">No times are recorded yet.</p>')
    piece = Markup('<span class="{}" style="--part: {}; width: {:.3f}%" title="{}">{}</span>')
    bars = []
    for name, summary in zip(names, summaries, strict=True):
        pieces = []
        for section, seconds in summary.values["parts"].items():
            text, width = f"{_words(section)} {duration(seconds)}", seconds / longest
            kind, colour = _colour(section)
            pieces.append(piece.format(kind, colour, 100 * width, text, text if width >= LABELLED else ""))
        bar = Markup('<span>{}</span><div class="bar" aria-hidden="true">{}</div>')
        bars.append(bar.format(name, _joined(pieces)))
    row = Markup('<tr><th scope="row"><span class="key {}" style="--part: {}"></span>{}</th>{}</tr>')
    cells = Markup("<td>{}</td>")
    rows = [
        row.format(
            *_colour(section),
            _words(section),
            _joined(
                cells.format(
                    _share(summary.values["parts"][section], summary) if section in summary.values["parts"] else ""
                )
                for summary in summaries
            ),
        )
        for section in sections
    ]
    if any(summary.values["goodput"] for summary in summaries):
        texts = (f"{s.values['goodput']:.1%} of {duration(s.values['wall'])}" for s in summaries)
        title = "share of the time in steps that were not computed again later"
        rows.append(
            Markup('<tr title="{}"><th scope="row">goodput</th>{}</tr>').format(
                title, _joined(map(cells.format, texts))
            )
        )
    head = _joined(Markup('<th scope="col">{}</th>').format(name) for name in ("section", *names))
    return Markup(
        '<div class="times">{}</div><div class="wide"><table><thead><tr>{}</tr></thead><tbody>{}</tbody></table></div>'
    ).format(_joined(bars), head, _joined(rows))


def _words(section: str) -> str:
    return section.replace("_", " ") if section in COLOURS else f"lost: {section.replace('_', ' ')}"


def _colour(section: str) -> tuple[str, str]:
    """The class and the colour of a section of the time; what is none of a run's sections was lost."""
    return ("", COLOURS[section]) if section in COLOURS else ("lost", LOST)


def _share(seconds: float, summary: Summary) -> str:
    return f"{duration(seconds)} ({seconds / summary.values['wall']:.1%})"


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
        slider = Markup('<input type="range" min="0" max="{}" value="{}" aria-label="step"> step <span></span>').format(
            last, last
        )
        head = Markup("<h2>Samples of {}: {}</h2>").format(run, name)
        yield head + Markup('<div class="samples"><p>{}</p>{}</div>').format(slider, images)


def _confusion(name: str, evaluation: JsonObject) -> list[Markup]:
    """The confusion matrix as a table: a row for each true class, darker cells for more of its examples."""
    if not evaluation.get("confusion") or len(evaluation["confusion"]) > LARGEST_MATRIX:
        return []
    classes, counts = [str(one) for one in evaluation["classes"]], evaluation["confusion"]
    head = _joined(Markup('<th scope="col">{}</th>').format(one) for one in classes)
    cell = Markup('<td class="{}" style="--share: {:.2f}" title="true {}, predicted {}: {:,}">{:,}</td>')
    rows = []
    for true, row in zip(classes, counts, strict=True):
        shares = [count / max(sum(row), 1) for count in row]
        cells = (
            cell.format("strong" if share > STRONG else "", share, true, predicted, count, count)
            for predicted, count, share in zip(classes, row, shares, strict=True)
        )
        rows.append(Markup('<tr><th scope="row">{}</th>{}</tr>').format(true, _joined(cells)))
    title = Markup("<h2>Confusion matrix of {}, {}, step {:,}</h2>")
    matrix = Markup(
        '<div class="wide" tabindex="0"><table class="matrix"><caption>rows: true class, columns: predicted</caption>'
        "<thead><tr><td></td>{}</tr></thead><tbody>{}</tbody></table></div>"
    ).format(head, _joined(rows))
    return [title.format(name, _examples_of(evaluation), evaluation["step"]), matrix]


def _examples_of(evaluation: JsonObject) -> str:
    """What was evaluated: what a recipe holds out may be called a validation set, and not a test set."""
    return "training examples" if evaluation["split"] == "train" else "held-out examples"


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
    head = Markup("<h2>The most confident mistakes of {}, {}</h2>").format(name, _examples_of(evaluation))
    return [head, Markup('<div class="mistakes">{}</div>').format(_joined(cells))]
