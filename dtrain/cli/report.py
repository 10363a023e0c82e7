"""dtrain report"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dtrain.cli import completion
from dtrain.cli.arguments import RUNS, Debug, Json, RunsDir
from dtrain.cli.exits import exits
from dtrain.core.printable import printable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dtrain.core.run_dir import Folder
    from dtrain.core.types import JsonObject
    from dtrain.track.history import History
    from dtrain.track.page import Contents
    from dtrain.track.summary import Summary

PATIENCE = 30.0
"""Seconds after which a run that was killed is not expected to be restarted."""
EVERY = 2.0
"""Seconds between two looks at a live run."""


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command(epilog="Example: dtrain report 'lr-*' --html report.html; dtrain report --serve")(report)


def report(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN]...",
            help="Runs: folders, names in --runs-dir, or patterns such as 'lr-*'; --serve has a default: all.",
            autocompletion=completion.runs,
        ),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write one page with curves, times and recipes.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write the curves as a .png, .svg or .pdf.")] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Follow a live run until it ends.")] = False,
    serve: Annotated[bool, typer.Option("--serve", help="Show live runs in a browser on this machine.")] = False,
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port for --serve; default: the first free one from 8765 on.")
    ] = None,
    as_json: Json = False,
    runs_dir: RunsDir = RUNS,
    debug: Debug = False,
) -> None:
    """Show the results of a run: metrics, curves, speed, where the time went. Several runs are compared."""
    with exits(debug):
        import json

        from dtrain.cli.tables import echo_fitted
        from dtrain.core.errors import RecipeError
        from dtrain.core.run_list import find_runs
        from dtrain.track.comparison import differences, table

        if port and not serve:
            raise RecipeError("--port is of --serve, which is not given", "add --serve")
        if serve:
            if watch or as_json or html or plot:
                raise RecipeError("--serve shows runs in a browser", "give runs or none, --port, and no other option")
            _serve(runs or [], runs_dir, port)
            return
        if not runs:
            raise RecipeError("no run is named", "dtrain report RUN; `dtrain ls` lists the runs, --serve shows all")
        places = find_runs(runs, runs_dir)
        if watch and (len(places) > 1 or as_json or html or plot):
            raise RecipeError("--watch follows one run in the terminal", "give one run and no other option")
        if watch:
            _watch(places[0])
            return
        found = _summaries(places)
        summaries = [summary for _, summary in found]
        if as_json:
            values = [summary.values for summary in summaries]
            typer.echo(json.dumps(values if len(values) > 1 else values[0], indent=2))
        elif len(summaries) == 1:
            echo_fitted(summaries[0].text())
        else:
            changed = differences([_recipe(run_dir)[1] for run_dir, _ in found])
            _compare(summaries, table(summaries), changed)
        if plot:
            from dtrain.track.picture import draw

            draw(summaries, plot)
            typer.echo(f"curves: {plot}", err=True)
        if html:
            from dtrain.track.page import write_page

            write_page(_contents(found, set()), html)
            typer.echo(f"page: {html}", err=True)


def _serve(words: list[str], runs_dir: Path, port: int | None) -> None:
    """Serve pages of the runs that the words mean, or of all, until Ctrl-C."""
    import socket
    from contextlib import suppress

    from dtrain.core.errors import RecipeError
    from dtrain.core.run_list import find_runs, name_of, runs_in
    from dtrain.track.server import Runs, open_server
    from dtrain.track.summary import summarise

    if words:
        find_runs(words, runs_dir)
    elif not runs_dir.is_dir():
        raise RecipeError(f"{runs_dir} is not a folder", "give the folder that contains the run folders: --runs-dir")

    def find() -> "list[tuple[str, Folder]]":
        places = find_runs(words, runs_dir, missing_ok=True) if words else runs_in(runs_dir)
        names = [name_of(run_dir.path, runs_dir, words) for run_dir in places]
        return [
            (name if names.count(name) == 1 else str(run_dir.path), run_dir)
            for name, run_dir in zip(names, places, strict=True)
        ]

    warned: set[Path] = set()  # a page is made again and again

    def gather(kept: "Sequence[tuple[Folder, History]]") -> "Contents":
        return _contents([(run_dir, summarise(run_dir, history)) for run_dir, history in kept], warned)

    runs = Runs(find, gather, " ".join(words) or str(runs_dir))
    with open_server(runs, port) as server:
        typer.echo(f"runs in {runs.where}: {server.address}")
        other = f"ssh -L {server.server_port}:127.0.0.1:{server.server_port} {socket.gethostname()}"
        typer.echo(f"from another machine: {other}, then the same address. Ctrl-C stops.", err=True)
        with suppress(KeyboardInterrupt):
            server.serve_forever(poll_interval=0.2)
    typer.echo("stopped", err=True)


def _contents(found: "Sequence[tuple[Folder, Summary]]", warned: set[Path]) -> "Contents":
    """What a page shows of runs. `warned`: see `_evaluation`."""
    from dtrain.track.comparison import differences
    from dtrain.track.page import Contents

    recipes = [_recipe(run_dir) for run_dir, _ in found]
    return Contents(
        [summary for _, summary in found],
        recipes=[text for text, _ in recipes],
        differences=differences([plain for _, plain in recipes]),
        evaluations=[_evaluation(run_dir, warned) for run_dir, _ in found],
        samples=[sorted(run_dir.samples.glob("*.png")) for run_dir, _ in found],
    )


def _summaries(places: "list[Folder]") -> "list[tuple[Folder, Summary]]":
    """The summary of each run. Of several, those that cannot be read are named and left out."""
    from dtrain.core.errors import DtrainError
    from dtrain.track.summary import summarise

    found, last = [], None
    for run_dir in places:
        try:
            found.append((run_dir, summarise(run_dir)))
        except DtrainError as error:
            if len(places) == 1:
                raise
            typer.secho(f"left out: {printable(error.message.splitlines()[0])}", fg="yellow", err=True)
            last = error
    if last and not found:
        raise last
    return found


def _recipe(run_dir: "Folder") -> "tuple[str, JsonObject]":
    """The recipe of a run as text and as plain values; empty if it cannot be read."""
    from dtrain.core.errors import RecipeError
    from dtrain.core.files import read_regular
    from dtrain.recipe.yaml import parse

    try:
        text = read_regular(run_dir.recipe).decode()
        plain = parse(text, str(run_dir.recipe)).plain()
    except (OSError, UnicodeDecodeError, RecipeError):
        return "", {}
    return text, plain if isinstance(plain, dict) else {}


def _evaluation(run_dir: "Folder", warned: set[Path]) -> "JsonObject":
    """The newest result of `dtrain evaluate` that was saved in the run folder; empty if there is none.

    `warned`: the damaged files that were named before, to which one that is named now is added.
    """
    from dtrain.core.files import read_json

    try:
        values = read_json(run_dir.evaluation)
    except (OSError, ValueError):
        return {}
    if isinstance(values, dict) and _well_formed(values):
        return values
    if run_dir.evaluation not in warned:
        typer.echo(f"{run_dir.evaluation} is damaged, and is left out; `dtrain evaluate` writes it again", err=True)
    warned.add(run_dir.evaluation)
    return {}


def _well_formed(values: "JsonObject") -> bool:
    """Whether a saved evaluation has what the page shows of it, in its form."""
    counts, classes = values.get("confusion", []), values.get("classes", [])
    fields = {"example": int, "place": str, "label": str, "predicted": str, "probability": float}
    mistakes = values.get("mistakes", [])
    return (
        {"split", "step"} <= values.keys()
        and all(isinstance(part, list) for part in (counts, classes, mistakes))
        and all(isinstance(row, list) and len(row) == len(counts) == len(classes) for row in counts)
        and all(isinstance(count, int) for row in counts for count in row)
        and all(
            isinstance(one, dict)
            and all(isinstance(one.get(name), kind) for name, kind in fields.items())
            and isinstance(one.get("picture", ""), str)
            for one in mistakes
        )
    )


def _compare(summaries: "list[Summary]", rows: list[dict[str, str]], changed: "dict[str, list[object]]") -> None:
    from dtrain.cli.tables import print_table
    from dtrain.track.comparison import column_names

    print_table(rows)
    typer.echo("* the best of the row")
    names = column_names(summaries)
    if changed:
        typer.echo("")
        cells = {key: ["" if value is None else str(value) for value in values] for key, values in changed.items()}
        print_table([{"recipe key": key} | dict(zip(names, texts, strict=True)) for key, texts in cells.items()])


def _watch(run_dir: "Folder") -> None:
    """Print the summary again whenever the run logs something, until it ends."""
    import time

    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from dtrain.cli.tables import echo_fitted
    from dtrain.track.history import History
    from dtrain.track.summary import KILLED, RUNNING, summarise

    screen, history, alive = Console(highlight=False), History(run_dir.metrics), time.monotonic()
    with Live(console=screen, auto_refresh=False, transient=screen.is_terminal) as live:
        while True:
            summary = summarise(run_dir, history)
            live.update(Text(summary.text()), refresh=screen.is_terminal)
            state = summary.values["state"]
            alive = time.monotonic() if state == RUNNING else alive
            # a run that was killed may be restarted by its supervisor
            if state not in (RUNNING, KILLED) or time.monotonic() - alive > PATIENCE:
                break
            time.sleep(EVERY)
    if screen.is_terminal:
        echo_fitted(summary.text())
    if state == KILLED:
        typer.echo(f"{run_dir.path}: the process of the run was killed", err=True)
