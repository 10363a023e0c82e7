"""dtrain replay"""

from typing import Annotated, Any

import typer

from dtrain.cli.arguments import RUNS, Debug, Devices, Json, Run, RunsDir, use_devices
from dtrain.cli.exits import exits, interruptible

BEFORE, SHOWN = 20, 10
"""Steps whose norms are compared, and examples and norms that are printed."""


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command(epilog="Examples: dtrain replay mlp-digits --at 120; dtrain replay my-run --at 5000 --json")(replay)


def replay(
    run: Run,
    at: Annotated[int, typer.Option(min=1, metavar="STEP", help="The step to compute again.")],
    before: Annotated[
        int, typer.Option(min=0, help="Steps before it whose losses and norms tell the usual range.")
    ] = BEFORE,
    abandoned: Annotated[
        bool, typer.Option("--abandoned", help="The step with the batch that a rollback skipped later.")
    ] = False,
    most: Annotated[int, typer.Option(min=1, help="Most examples and norms to print.")] = SHOWN,
    devices: Devices = None,
    as_json: Json = False,
    runs_dir: RunsDir = RUNS,
    debug: Debug = False,
) -> None:
    """Compute a step of a run again: its examples with their losses, and the tensor whose norm left its range first.

    For spikes and NaN. It starts from a checkpoint, with the run's own data, and says whether the losses that the run
    logged are the same bits. Nothing is written.
    """
    with exits(debug), interruptible():
        import json

        from dtrain.core.run_list import find_run

        found = find_run(run, runs_dir)
        use_devices(devices or _simulated(found.read_record()))
        from dtrain.runtime.replay import replay as replayed

        result = replayed(found, at, before, abandoned, _say)
        _say("")
        typer.echo(json.dumps(result.json(), indent=2) if as_json else "\n".join(result.lines(most)))


def _say(text: str) -> None:
    """What is being done, on one line that the next one replaces; on a terminal alone."""
    import sys

    if sys.stderr.isatty():
        typer.echo(f"\r\033[K{text}", nl=False, err=True)


def _simulated(record: dict[str, object]) -> int | None:
    """The devices of a run that simulated several on the CPU; None to take those of this machine."""
    topology: Any = record.get("topology") or {}
    count, platform = topology.get("devices"), topology.get("platform")
    return count if isinstance(count, int) and count > 1 and platform == "cpu" else None
