"""dtrain doctor"""

import typer

from dtrain.cli.arguments import Debug, Json
from dtrain.cli.exits import exits


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command(epilog="Example: dtrain doctor --json")(doctor)


def doctor(as_json: Json = False, debug: Debug = False) -> None:
    """Report what this machine has, what is missing, and the command that fixes it."""
    with exits(debug):
        import dataclasses
        import json

        from dtrain.runtime.doctor import examine

        findings = examine()
        if as_json:
            typer.echo(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
        else:
            typer.echo("\n".join(finding.text() for finding in findings))
        if any(finding.verdict == "missing" for finding in findings):
            raise typer.Exit(3)
