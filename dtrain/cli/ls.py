"""dtrain ls"""

from pathlib import Path
from typing import Annotated

import typer

from dtrain.cli.arguments import Debug, Json
from dtrain.cli.exits import exits


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command(epilog="Example: dtrain ls")(ls)


def ls(
    runs_dir: Annotated[Path, typer.Argument(metavar="[RUNS]", help="Folder that contains the run folders.")] = Path(
        "runs"
    ),
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """List the runs: state, step, newest and best result, age, size on disk."""
    with exits(debug):
        import json

        from dtrain.cli.tables import print_table
        from dtrain.core.errors import RecipeError
        from dtrain.core.run_list import runs_in
        from dtrain.track.listing import entry

        if not runs_dir.is_dir() and runs_dir != Path("runs"):
            raise RecipeError(f"{runs_dir} is not a folder", "give the folder that contains the run folders")
        entries = [entry(run_dir, runs_dir) for run_dir in runs_in(runs_dir)]
        entries.sort(key=lambda one: one.changed, reverse=True)
        if as_json:
            typer.echo(json.dumps([one.values() for one in entries], indent=2))
        elif entries:
            print_table([one.row() for one in entries])
        else:
            typer.echo(f"no runs in {runs_dir}; `dtrain run mlp-digits` makes one", err=True)
