"""dtrain verify"""

from typing import TYPE_CHECKING, Annotated

import typer

from dtrain.cli.arguments import RUNS, Debug, Devices, Json, Overrides, Recipe
from dtrain.cli.exits import exits, interruptible
from dtrain.core.errors import DtrainError, EnvironmentFault, RecipeError

if TYPE_CHECKING:
    from dtrain.recipe.recipe import Recipe as Loaded
    from dtrain.runtime.verify import Certificate

EXAMPLE = "Example: dtrain verify mlp-digits steps=200 --kills 3 --devices 4"
ENGINES = ("jit", "shard_map")


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command(epilog=EXAMPLE)(verify)


def verify(
    recipe: Recipe,
    overrides: Overrides = None,
    devices: Devices = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Number of processes that train together; by default 1.")
    ] = None,
    kills: Annotated[int, typer.Option(min=1, help="Number of times that the run is killed, at random moments.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of the random moments.")] = 0,
    others: Annotated[
        bool,
        typer.Option(help="Without --on: also compare with the other engine, and with other devices and processes."),
    ] = True,
    on: Annotated[
        str | None,
        typer.Option(
            metavar="TARGET",
            help="Train on this launch target, kill processes and hosts there, and measure how it recovers: the kind "
            "of the recipe's launch section, or a section as for launch=, such as local or @pod.json.",
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="With --on: do not ask for confirmation.")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train, kill at random, resume, and compare bit by bit; compare engines and topologies; print a certificate."""
    with exits(debug), interruptible():
        import json

        if on is None:
            certificate = _here(recipe, overrides or [], devices, processes or 1, kills, seed, others=others)
        elif devices or processes:
            name = "devices" if devices else "processes"
            raise RecipeError(f"--{name} is for this machine", f"with --on, give launch.{name}=...")
        else:
            certificate = _there(recipe, overrides or [], on, kills, seed, yes=yes)
        typer.echo(json.dumps(certificate.values(), indent=2) if as_json else "\n".join(certificate.lines()))
        if not certificate.kept:
            raise typer.Exit(DtrainError.exit_code)


def _say(text: str) -> None:
    typer.echo(text, err=True)


def _here(
    recipe: str, overrides: list[str], devices: int | None, processes: int, kills: int, seed: int, *, others: bool
) -> "Certificate":
    """The guarantees, on this machine."""
    from dtrain.core.leftovers import temporary_folder
    from dtrain.core.shipped import find
    from dtrain.recipe.load import load
    from dtrain.runtime.verify import Trial
    from dtrain.runtime.verify import verify as tried

    loaded = load(find(recipe), overrides, devices or (processes if processes > 1 else None))
    options = [*overrides, f"checkpoint.every={max(1, _steps(loaded) // 10)}", "checkpoint.keep=3", "track.every=1"]
    run_dir = (["--devices", str(devices)] if devices else []) + (
        ["--processes", str(processes)] if processes > 1 else []
    )
    choices = list(loaded.engine.choices)
    own = choices[:1] if run_dir else choices  # simulated devices are CPUs, on which `auto` is the first
    different = [engine for engine in ENGINES if [engine] != own][: len(choices)]
    compared = {f"engine {other}": [*run_dir, f"engine={other}"] for other in different}
    if devices and devices > 1:
        compared["in one process" if processes > 1 else "in two processes"] = [
            "--devices", str(devices), *([] if processes > 1 else ["--processes", "2"]),
        ]  # fmt: skip
    with temporary_folder("verify") as folder:
        trial = Trial(str(find(recipe)), options, run_dir, folder, lambda text: _say(f"{text} ..."))
        return tried(trial, kills, seed, compared if others else {})


def _steps(loaded: "Loaded") -> int:
    return loaded.steps or loaded.total_steps(len(loaded.data.open("train")))


def _there(recipe: str, overrides: list[str], on: str, kills: int, seed: int, *, yes: bool) -> "Certificate":
    """The guarantees on a launch target, and how it recovers."""
    import secrets

    from dtrain.cli.launch_lookup import launchable
    from dtrain.cli.launch_output import confirm, show, start_lines
    from dtrain.core.shipped import find
    from dtrain.recipe.load import draft, load
    from dtrain.runtime.drill import Launches, drill

    path = find(recipe)
    section = draft(path).tree.plain().get("launch")
    own = section.get("kind") if isinstance(section, dict) else section
    overrides = [*([] if own == on else [f"launch={on}"]), *overrides, "track.notify=null"]
    loaded = load(path, overrides)
    steps, token = _steps(loaded), secrets.token_hex(2)
    if not 0 < loaded.checkpoint.every <= steps // 3:
        every = max(1, steps // 10)
        overrides.append(f"checkpoint.every={every}")
        _say(f"saving every {every} steps, since checkpoint.every is {loaded.checkpoint.every or 'not set'}")
    name = f"{loaded.name[:40].rstrip('-')}-drill-{token}"
    target, undisturbed = launchable(recipe, [*overrides, f"name={name}-straight"])
    _, killed = launchable(recipe, [*overrides, f"name={name}-killed"])
    if lines := target.by_hand(killed):
        raise EnvironmentFault(
            "\n  ".join([f"dtrain cannot watch how a run recovers on {killed.target['kind']}; by hand:", *lines]),
            f"start it with: dtrain launch up {recipe}; `dtrain report` shows its starts, goodput and lost time",
        )
    launch_plan = target.plan(undisturbed)
    notes = target.check(undisturbed)
    show(launch_plan, whole=False)
    for line in [*start_lines(target, undisturbed), *undisturbed.needs, *notes]:
        _say(line)
    _say(f"two runs of {steps} steps: {name}-straight, and {name}-killed, which is killed {kills} times")
    confirm("Start them?", yes)
    launches = Launches(target, RUNS, launch_plan.hosts, _say)
    found = drill(launches, undisturbed, killed, kills, seed)
    _say(f"their folders stay on the target: {name}-straight and {name}-killed")
    return found
