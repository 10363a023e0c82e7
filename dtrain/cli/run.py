"""dtrain run"""

import faulthandler
import logging
import signal
import sys
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dtrain.cli.arguments import Debug, Devices, Overrides, Recipe, RunsDir
from dtrain.cli.exits import exits
from dtrain.core.errors import Exhausted, HostLost, RecipeError, Stopped

if TYPE_CHECKING:
    from dtrain.core.process_info import ProcessInfo
    from dtrain.core.run_control import RunControl
    from dtrain.recipe.recipe import Recipe as Loaded

RESTARTS = 3
EXAMPLE = "Example: dtrain run mlp-digits optimizer.lr=3e-4 --devices 8"


@dataclass(frozen=True)
class _Command:
    """What was typed."""

    recipe: str
    overrides: list[str]
    devices: int | None
    processes: int
    restarts: int
    hours: float | None
    runs: Path
    allow_changes: bool
    dry: bool


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
    hours: Annotated[
        float | None, typer.Option(help="Save and leave when all starts of the run together have taken so long.")
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
    from dtrain.core.parent import watched
    from dtrain.core.process_info import launch_id, process_info, replaces_hosts

    with exits(debug, stoppable=True):
        info = process_info()
        if dry_run and (processes > 1 or restarts or hours is not None):
            raise RecipeError("--dry-run takes one process and no --hours", "use --devices in place of --processes")
        if hours is not None and not hours > 0:
            raise RecipeError(f"--hours {hours:g} is not above 0")
        again = (RESTARTS if processes > 1 or launch_id() else 0) if restarts is None else restarts
        command = _Command(
            recipe, overrides or [], devices, processes, again, hours, runs_dir, allow_changes, dry_run
        )  # fmt: skip
        supervised = processes > 1 or again or (info is not None and replaces_hosts())
        if supervised and not dry_run and not watched():
            raise typer.Exit(_supervised(command, info))
        _process(command, info)


def _process(command: _Command, info: "ProcessInfo | None") -> None:
    """Train in this process, together with others where there are some."""
    from dtrain.core import preemption
    from dtrain.core.parent import exit_with_parent
    from dtrain.parallel.devices import part, pretend

    exit_with_parent()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    preemption.watch()
    if command.devices or command.dry:
        pretend(_count(command) // (info.world_size if info else 1))
    from dtrain.cli.recipes import find
    from dtrain.recipe.load import load  # imports JAX

    loaded = load(find(command.recipe), command.overrides, command.devices)
    with ExitStack() as stack:
        control = None if command.dry else stack.enter_context(closing(_control(command, loaded, info)))
        _meet(command, loaded, info, control)
        try:
            _train(command, loaded, control)
        except Stopped:
            with suppress(RuntimeError):  # another one is gone: what was agreed on is saved
                part()
            raise
        part()


def _control(command: _Command, loaded: "Loaded", info: "ProcessInfo | None") -> "RunControl":
    from dtrain.core.parent import watched
    from dtrain.core.process_info import launch_id
    from dtrain.core.run_control import Limits, RunControl, clear_stale_request
    from dtrain.core.run_dir import folder

    place, launch, lead = folder(command.runs, loaded.name), launch_id(), info is None or info.rank == 0
    if lead and not launch and not watched():
        clear_stale_request(place, _say)
    control = RunControl(place, Limits(launch, command.hours, command.restarts), lead=lead)
    control.begin()
    return control


def _meet(
    command: _Command, loaded: "Loaded", info: "ProcessInfo | None", control: "RunControl | None"
) -> None:  # fmt: skip
    """Join the other processes, unless the run is not to start. Raises why not, in every process the same."""
    from dtrain.core.run_control import note_end
    from dtrain.core.run_dir import folder
    from dtrain.parallel.devices import join

    try:
        if info:
            join(info, local=command.processes, refusal=control.refusal if control else lambda: None)
        elif control and (refused := control.refusal()):
            raise refused
    except (Stopped, Exhausted) as error:
        if info is None or info.rank == 0 or isinstance(error, HostLost):
            note_end(folder(command.runs, loaded.name), error)
        raise


def _train(command: _Command, loaded: "Loaded", control: "RunControl | None") -> None:
    import tempfile

    logging.getLogger("absl").setLevel(logging.ERROR)  # orbax and JAX tell of each save and each signal
    from dtrain.parallel import compile_cache
    from dtrain.parallel.devices import found

    uncached = compile_cache.use()
    found()
    import jax

    from dtrain.track.console import Console
    from dtrain.track.summary import summarise
    from dtrain.train.run import run as train

    console = Console(silent=jax.process_index() > 0)
    if uncached:
        console.warn(uncached)
    if command.dry:
        with tempfile.TemporaryDirectory(prefix="dtrain-dry-") as folder:
            train(loaded, Path(folder), console, dry=True)
        return
    done = train(loaded, command.runs, console, allow_changes=command.allow_changes, control=control)
    if done and not console.silent:
        summary = summarise(done).text()
        typer.echo(summary)
        console.note(summary)


def _count(command: _Command) -> int:
    """How many devices to pretend: what was asked for, or in a dry run the fewest that the mesh fits on."""
    if command.devices:
        return command.devices
    from dtrain.cli.recipes import find
    from dtrain.recipe.compose import compose, least_devices

    return least_devices(compose(find(command.recipe), command.overrides))


def _supervised(command: _Command, among: "ProcessInfo | None") -> int:
    from dtrain.cli.recipes import find
    from dtrain.core.process_info import launch_id
    from dtrain.core.run_control import clear_stale_request
    from dtrain.core.run_dir import folder
    from dtrain.recipe.load import load
    from dtrain.runtime.supervisor import supervise
    from dtrain.track.notifier import supervising

    everywhere = command.processes * (among.world_size if among else 1)
    total = command.devices or (everywhere if command.processes > 1 else None)
    if total and total % everywhere:
        raise RecipeError(
            f"--devices {total} do not divide by {everywhere} processes", f"use {everywhere} or a multiple"
        )
    loaded = load(find(command.recipe), command.overrides, total)
    lead = among is None or among.rank == 0
    place, notify = folder(command.runs, loaded.name), loaded.track.notify if lead else None
    if not launch_id() and lead:
        clear_stale_request(place, _say)
    pretended = ["--devices", str(total)] if total and not command.devices else []
    with supervising(notify, place, lambda text: _say(f"warning: {text}")) as ended:
        return ended(supervise([*sys.argv[1:], *pretended], command.processes, place, command.restarts, among))


def _say(text: str) -> None:
    typer.echo(text, err=True)
