"""dtrain report"""

from pathlib import Path
from typing import Annotated

import typer

from dtrain.cli.arguments import Debug, Json
from dtrain.cli.exits import exits


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command(epilog="Example: dtrain report runs/mlp-digits --json")(report)


def report(
    folders: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.")],
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Summarise runs: losses, accuracy, speed, and where the time went."""
    with exits(debug):
        import json

        from dtrain.core.run_dir import Folder
        from dtrain.track.summary import summarise

        summaries = [summarise(Folder(path)) for path in folders]
        if as_json:
            values = [summary.values for summary in summaries]
            typer.echo(json.dumps(values if len(values) > 1 else values[0], indent=2))
        else:
            typer.echo("\n\n".join(summary.text() for summary in summaries))
