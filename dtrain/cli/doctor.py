"""dtrain doctor"""

from pathlib import Path
from typing import Annotated

import typer

from dtrain.cli.arguments import Debug, Devices, Json
from dtrain.cli.exits import exits


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command(epilog="Example: dtrain doctor --json")(doctor)


def doctor(
    folder: Annotated[
        Path, typer.Option(exists=True, file_okay=False, help="Folder of the runs, to time its disk or bucket.")
    ] = Path(),
    devices: Devices = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Report what this machine has, what is missing, and the command that fixes it."""
    with exits(debug):
        import dataclasses
        import json

        from dtrain.parallel.devices import fake_devices

        if devices:
            fake_devices(devices)
        from dtrain.runtime.doctor import examine, text  # imports JAX

        findings = examine(folder)
        if as_json:
            typer.echo(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
        else:
            typer.echo(text(findings))
        if any(finding.verdict == "missing" for finding in findings):
            raise typer.Exit(3)
