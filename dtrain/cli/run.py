"""dtrain run"""

import faulthandler
import logging
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dtrain.cli.arguments import Debug, Devices, Overrides, Recipe, RunsDir
from dtrain.cli.exits import exits
from dtrain.errors import RecipeError

if TYPE_CHECKING:
    from dtrain.parallel.devices import Seat

RESTARTS = 3
EXAMPLE = "Example: dtrain run mlp-digits optimizer.lr=3e-4 --devices 8"


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command(epilog=EXAMPLE)(run)


def run(
    recipe: Recipe,
    overrides: Overrides = None,
    devices: Devices = None,
    processes: Annotated[int, typer.Option(min=1, help="Run in this many processes on this machine's CPU.")] = 1,
    restarts: Annotated[
        int | None,
        typer.Option(min=0, help="Start again so often without a new checkpoint; 3 with --processes, else 0."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="A few real steps, a save and a restore, on the CPU; keeps nothing.")
    ] = False,
    allow_changes: Annotated[
        bool, typer.Option("--allow-changes", help="Go on with saved state although the recipe changed.")
    ] = False,
    runs_dir: RunsDir = Path("runs"),
    debug: Debug = False,
) -> None:
    """Train. Running the same recipe again goes on where it stopped."""
    from dtrain.parallel.devices import join, pretend, seat
    from dtrain.parent import leave_with_parent, watched

    with exits(debug, leave=watched()):
        place = seat()
        if (processes > 1 or restarts) and dry_run:
            raise RecipeError("--dry-run takes one process", "use --devices in place of --processes")
        if (processes > 1 or restarts) and not watched():
            again = restarts if restarts is not None else RESTARTS
            raise typer.Exit(_supervised(recipe, overrides or [], devices, processes, runs_dir, again, place))
        leave_with_parent()
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        if devices or dry_run:
            pretend(_count(recipe, overrides or [], devices) // (place.processes if place else 1))
        if place:
            join(place)
        _train(recipe, overrides or [], runs_dir, devices, allow_changes=allow_changes, dry=dry_run)


def _train(
    recipe: str, overrides: list[str], runs: Path, devices: int | None, *, allow_changes: bool, dry: bool
) -> None:
    import tempfile

    from dtrain.cli.recipes import find
    from dtrain.recipe.load import load

    loaded = load(find(recipe), overrides, devices)
    logging.getLogger("absl").setLevel(logging.ERROR)  # orbax and JAX tell of each save and each signal
    from dtrain.parallel.devices import found

    found()
    import jax

    from dtrain.report.summary import summarise
    from dtrain.run import run as train
    from dtrain.track.console import Console

    console = Console(silent=jax.process_index() > 0)
    if dry:
        with tempfile.TemporaryDirectory(prefix="dtrain-dry-") as folder:
            train(loaded, Path(folder), console, dry=True)
        return
    done = train(loaded, runs, console, allow_changes=allow_changes)
    if done and not console.silent:
        typer.echo(summarise(done).text())


def _count(recipe: str, overrides: list[str], devices: int | None) -> int:
    """How many devices to pretend: what was asked for, or in a dry run the fewest that the mesh fits on."""
    if devices:
        return devices
    from dtrain.cli.recipes import find
    from dtrain.recipe.compose import compose, least_devices

    return least_devices(compose(find(recipe), overrides))


def _supervised(
    recipe: str,
    overrides: list[str],
    devices: int | None,
    processes: int,
    runs: Path,
    restarts: int,
    among: "Seat | None",
) -> int:
    from dtrain.cli.recipes import find
    from dtrain.folder import folder
    from dtrain.recipe.load import load
    from dtrain.supervise import supervise

    everywhere = processes * (among.processes if among else 1)
    total = devices or (everywhere if processes > 1 else None)
    if total and total % everywhere:
        raise RecipeError(
            f"--devices {total} do not divide by {everywhere} processes", f"use {everywhere} or a multiple"
        )
    place = folder(runs, load(find(recipe), overrides, total).name)
    pretended = ["--devices", str(total)] if total and not devices else []
    return supervise([*sys.argv[1:], *pretended], processes, place, restarts, among)
