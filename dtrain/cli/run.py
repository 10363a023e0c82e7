"""dtrain run"""

import faulthandler
import logging
import os
import re
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dtrain.cli.arguments import RUNS, Debug, Devices, Overrides, Recipe, RunsDir
from dtrain.cli.exits import exits
from dtrain.cli.tables import echo_fitted
from dtrain.core.errors import Exhausted, HostLost, RecipeError, Stopped

if TYPE_CHECKING:
    from dtrain.core.process_info import ProcessInfo
    from dtrain.core.run_control import RunControl
    from dtrain.core.run_dir import Folder
    from dtrain.recipe.recipe import Recipe as Loaded
    from dtrain.track.console import Console

LENGTH = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(steps?|epochs?)", re.IGNORECASE)


def extended_steps(recipe: str, overrides: Sequence[str], runs: Path, extend: str) -> int:
    """The steps of a finished run after it is extended by `extend`: "500steps" or "20epochs".

    Raises RecipeError if there is no such run, or it has not finished.
    """
    from dtrain.core.run_dir import folder
    from dtrain.core.shipped import find
    from dtrain.recipe.compose import name_of_run  # without JAX: fake devices are set up before it is imported

    found = LENGTH.fullmatch(extend.strip())
    if not found or not float(found[1]) > 0:
        raise RecipeError(f"--extend {extend}: not a length", "write for example 500steps or 20epochs")
    run_dir = folder(runs, name_of_run(find(recipe), overrides))
    record = run_dir.read_record()
    if not record or not record.get("steps"):
        raise RecipeError(f"--extend: there is no run in {run_dir.path}", "train it first, without --extend")
    if record["state"] != "finished":
        message = f"--extend: {run_dir.path} has not finished: it is at step {record['step']} of {record['steps']}"
        raise RecipeError(message, f"resume it first; a run that was extended resumes with steps={record['steps']}")
    amount, epochs = float(found[1]), (record.get("data") or {}).get("epochs")
    if found[2].lower().startswith("step"):
        return record["steps"] + round(amount)
    if not epochs:
        raise RecipeError("--extend: the run did not record its epochs", "give a number of steps: 500steps")
    return record["steps"] + max(round(amount * record["steps"] / epochs), 1)


def with_length(arguments: Sequence[str], steps: int) -> list[str]:
    """A command line with the new length in place of --extend and of the length that it had."""
    kept, skip = [], False
    for word in arguments:
        if not skip and not word.startswith(("--extend=", "steps=", "epochs=")):
            kept.append(word)
        skip = word == "--extend" and not skip
    return [*(word for word in kept if word != "--extend"), f"steps={steps}"]


RESTARTS = 3
EXAMPLE = "Example: dtrain run mlp-digits optimizer.lr=3e-4 --devices 8"


@dataclass(frozen=True)
class _Command:
    """The arguments of the command line."""

    recipe: str
    overrides: list[str]
    devices: int | None
    processes: int
    restarts: int
    hours: float | None
    runs: Path
    allow_changes: bool
    dry: bool
    extended: bool = False
    """Whether the length of the run may differ from that of its folder, and nothing else."""


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command(epilog=EXAMPLE)(run)


def run(
    recipe: Recipe,
    overrides: Overrides = None,
    devices: Devices = None,
    processes: Annotated[int, typer.Option(min=1, help="Number of processes, on this machine's CPU.")] = 1,
    restarts: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Restarts in a row without a new checkpoint; default: 3 with --processes or if launched, else 0.",
        ),
    ] = None,
    hours: Annotated[
        float | None, typer.Option(help="Save and exit when all starts of the run together have taken this many hours.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Do a few real steps, a save and a restore on the CPU; keep nothing.")
    ] = False,
    extend: Annotated[str | None, typer.Option(help="Train a finished run longer: 500steps or 20epochs.")] = None,
    extended: Annotated[bool, typer.Option("--extended", hidden=True)] = False,
    allow_changes: Annotated[
        bool, typer.Option("--allow-changes", help="Resume from saved state even if the recipe changed.")
    ] = False,
    runs_dir: RunsDir = RUNS,
    debug: Debug = False,
) -> None:
    """Train a model. Running the same recipe again resumes the run."""
    from dtrain.core.parent import is_supervised, stop_with_sweep
    from dtrain.core.standby import STANDBY

    if STANDBY in os.environ:
        _stand_by()
    stop_with_sweep()
    from dtrain.core.process_info import launch_id, process_info, replaces_hosts

    with exits(debug, stoppable=True):
        info = process_info()
        if dry_run and (processes > 1 or restarts or hours is not None):
            raise RecipeError(
                "--dry-run cannot be combined with --processes, --restarts or --hours",
                "use --devices in place of --processes",
            )
        if hours is not None and not hours > 0:
            raise RecipeError(f"--hours {hours:g} is not above 0")
        again = (RESTARTS if processes > 1 or launch_id() else 0) if restarts is None else restarts
        from dtrain.track.wandb import agent_name

        overrides = [*(overrides or []), *agent_name(recipe, overrides or [])]
        if extend is not None:
            if dry_run:
                raise RecipeError("--dry-run cannot be combined with --extend", "leave one of them out")
            steps = extended_steps(recipe, overrides, runs_dir, extend)
            sys.argv[1:], extended = [*with_length(sys.argv[1:], steps), "--extended"], True
            overrides = with_length(overrides, steps)
        command = _Command(
            recipe, overrides, devices, processes=processes, restarts=again, hours=hours, runs=runs_dir,
            allow_changes=allow_changes, dry=dry_run, extended=extended,
        )  # fmt: skip
        supervised = processes > 1 or again or (info is not None and replaces_hosts())
        if supervised and not dry_run and not is_supervised():
            raise typer.Exit(_supervised(command, info))
        _train(command, info)


def _stand_by() -> None:
    """Import what a run needs, and wait until this process is to replace another."""
    import importlib

    from dtrain.core import signals
    from dtrain.core.parent import exit_with_parent
    from dtrain.core.standby import await_start
    from dtrain.parallel.devices import configure_environment

    exit_with_parent()
    with signals.leaving_silently():  # it has nothing to save
        configure_environment()
        for name in ("optax", "orbax.checkpoint", "grain", "rich.progress", "dtrain.recipe.load", "dtrain.train.run"):
            importlib.import_module(name)
        await_start()
    signals.restart_clock()


def _train(command: _Command, info: "ProcessInfo | None") -> None:
    """Train in this process, together with the run's other processes if there are any."""
    _set_up_process(command, info)
    from dtrain.core.leftovers import temporary_folder
    from dtrain.core.shipped import find
    from dtrain.parallel.devices import disconnect
    from dtrain.recipe.load import load  # imports JAX
    from dtrain.train.run import run as train

    loaded = load(find(command.recipe), command.overrides, command.devices)
    with ExitStack() as stack:
        control = None if command.dry else stack.enter_context(closing(_control(command, loaded, info)))
        _rendezvous(command, loaded, info, control)
        console = _console()
        try:
            runs = stack.enter_context(temporary_folder("dry")) if command.dry else command.runs
            allowed = command.allow_changes or (command.extended and _only_extended(command, loaded, console))
            finished = train(loaded, runs, console, allow_changes=allowed, dry=command.dry, control=control)
        except Stopped:
            with suppress(RuntimeError):  # another process has exited; the checkpoint is saved
                disconnect()
            raise
        if finished and not command.dry and not console.silent:
            _print_end(finished, loaded, console)
        disconnect()


def _set_up_process(command: _Command, info: "ProcessInfo | None") -> None:
    """Signals and fake devices, before JAX is imported."""
    from dtrain.core import preemption
    from dtrain.core.parent import exit_with_parent
    from dtrain.parallel.devices import fake_devices

    exit_with_parent()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    preemption.watch()
    if command.devices or command.dry:
        fake_devices(_count(command) // (info.world_size if info else 1))


def _control(command: _Command, loaded: "Loaded", info: "ProcessInfo | None") -> "RunControl":
    from dtrain.core.parent import is_supervised
    from dtrain.core.process_info import launch_id
    from dtrain.core.run_control import Limits, RunControl, clear_stale_request
    from dtrain.core.run_dir import folder

    run_dir, launch, lead = folder(command.runs, loaded.name), launch_id(), info is None or info.rank == 0
    if lead and not launch and not is_supervised():
        clear_stale_request(run_dir, _say)
    control = RunControl(run_dir, Limits(launch, command.hours, command.restarts), lead=lead)
    control.begin()
    return control


def _rendezvous(
    command: _Command, loaded: "Loaded", info: "ProcessInfo | None", control: "RunControl | None"
) -> None:  # fmt: skip
    """Join the other processes. If the run must not start, raise the reason, the same in every process."""
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


def _console() -> "Console":
    """Start the devices, with the cache of compiled programs, and the console of this process."""
    logging.getLogger("absl").setLevel(logging.ERROR)  # orbax and JAX log every save and every signal
    from dtrain.parallel import compile_cache
    from dtrain.parallel.devices import available_devices

    uncached = compile_cache.use()
    available_devices()
    compile_cache.written_by_each()
    import jax

    from dtrain.track.console import Console

    console = Console(silent=jax.process_index() > 0)
    if uncached:
        console.warn(uncached)
    return console


def _only_extended(command: _Command, loaded: "Loaded", console: "Console") -> bool:
    """True: changes are allowed, since the length is the only one. Raises RecipeError if there are others."""
    from dtrain.core.run_dir import folder
    from dtrain.train.recipe_check import refuse_other_changes

    run_dir = folder(command.runs, loaded.name)
    refuse_other_changes(run_dir, loaded)
    if run_dir.read_record().get("steps") != loaded.steps:
        text = f"extended to {loaded.steps} steps; if it is stopped, it resumes with steps={loaded.steps}"
        console.say(f"{text} in place of --extend")
    return True


def _print_end(finished: "Folder", loaded: "Loaded", console: "Console") -> None:
    """The result of the run in a summary, and the commands that come next."""
    from dtrain.cli.next_commands import next_commands
    from dtrain.track.summary import summarise

    summary = summarise(finished).text()
    echo_fitted(summary)
    console.note(summary)
    with suppress(OSError):  # stderr may be on a full disk; the run is done
        typer.secho(next_commands(finished.path, loaded), dim=True, err=True)


def _count(command: _Command) -> int:
    """Number of devices to simulate: --devices, or in a dry run the smallest number that the mesh fits on."""
    if command.devices:
        return command.devices
    from dtrain.core.shipped import find
    from dtrain.recipe.compose import compose, least_devices

    return least_devices(compose(find(command.recipe), command.overrides))


def _supervised(command: _Command, info: "ProcessInfo | None") -> int:
    from dtrain.core.process_info import launch_id
    from dtrain.core.run_control import clear_stale_request
    from dtrain.core.run_dir import folder
    from dtrain.core.shipped import find
    from dtrain.recipe.load import load
    from dtrain.runtime.supervisor import supervise
    from dtrain.track.notifier import supervising

    everywhere = command.processes * (info.world_size if info else 1)
    total = command.devices or (everywhere if command.processes > 1 else None)
    if total and total % everywhere:
        raise RecipeError(
            f"--devices {total} is not divisible by {everywhere} processes", f"use {everywhere} or a multiple"
        )
    loaded = load(find(command.recipe), command.overrides, total)
    lead = info is None or info.rank == 0
    run_dir, notify = folder(command.runs, loaded.name), loaded.track.notify if lead else None
    if not launch_id() and lead:
        clear_stale_request(run_dir, _say)
    simulated = ["--devices", str(total)] if total and not command.devices else []
    with supervising(notify, run_dir, lambda text: _say(f"warning: {text}")) as ended:
        copies, arguments = loaded.checkpoint.memory is not None, [*sys.argv[1:], *simulated]
        return ended(supervise(arguments, command.processes, run_dir, command.restarts, info, copies))


def _say(text: str) -> None:
    typer.echo(text, err=True)
