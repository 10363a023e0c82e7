"""dtrain ls"""

from typing import Annotated

import typer

from dtrain.cli import completion
from dtrain.cli.arguments import RUNS, Debug, Json, RunsDir
from dtrain.cli.exits import exits


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command(epilog="Examples: dtrain ls; dtrain ls 'lr-*'; dtrain ls /data/runs")(ls)


def ls(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN]...",
            help="Folders of runs, runs, names in --runs-dir, or patterns such as 'lr-*'; default: all in --runs-dir.",
            autocompletion=completion.runs,
        ),
    ] = None,
    as_json: Json = False,
    runs_dir: RunsDir = RUNS,
    debug: Debug = False,
) -> None:
    """List the runs: state, step, newest and best result, age, size on disk."""
    with exits(debug):
        import json

        from dtrain.cli.tables import print_table
        from dtrain.core.errors import RecipeError
        from dtrain.core.run_list import find_runs, is_folder, meant, name_of, runs_in
        from dtrain.track.listing import entry

        if not runs_dir.is_dir() and runs_dir != RUNS:
            raise RecipeError(f"{runs_dir} is not a folder", "give the folder that contains the run folders")
        empty = [word for word in runs or () if not meant(word, runs_dir) and is_folder(word)]
        words = [word for word in runs or () if word not in empty]
        found = find_runs(words, runs_dir) if words else [] if runs else runs_in(runs_dir)
        entries = [entry(run_dir, name_of(run_dir.path, runs_dir, runs or ())) for run_dir in found]
        entries.sort(key=lambda one: one.changed, reverse=True)
        if as_json:
            typer.echo(json.dumps([one.values() for one in entries], indent=2))
        elif entries:
            print_table([one.row() for one in entries], spare=("size", "age", "step", "best"))
        for where in empty or ([] if entries else [str(runs_dir)]):
            typer.echo(f"no runs in {where}; `dtrain run mlp-digits` makes one", err=True)
