"""dtrain verify"""

from typing import Annotated

import typer

from dtrain.cli.arguments import Debug, Devices, Json, Overrides, Recipe
from dtrain.cli.exits import exits, interruptible
from dtrain.core.errors import DtrainError

EXAMPLE = "Example: dtrain verify mlp-digits steps=200 --kills 3 --devices 4"
ENGINES = ("jit", "shard_map")


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command(epilog=EXAMPLE)(verify)


def verify(
    recipe: Recipe,
    overrides: Overrides = None,
    devices: Devices = None,
    processes: Annotated[int, typer.Option(min=1, help="Number of processes that train together.")] = 1,
    kills: Annotated[int, typer.Option(min=1, help="Number of times that the run is killed, at random moments.")] = 3,
    seed: Annotated[int, typer.Option(help="Seed of the random moments.")] = 0,
    others: Annotated[
        bool, typer.Option(help="Also compare with the other engine, and with other devices and processes.")
    ] = True,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train, kill at random, resume, and compare bit by bit; compare engines and topologies; print a certificate."""
    with exits(debug), interruptible():
        import json

        from dtrain.core.shipped import find
        from dtrain.recipe.load import load
        from dtrain.runtime.verify import Trial
        from dtrain.runtime.verify import verify as tried

        loaded = load(find(recipe), overrides or [], devices or (processes if processes > 1 else None))
        steps = loaded.steps or loaded.total_steps(len(loaded.data.open("train")))
        every = max(1, steps // 10)
        options = [*(overrides or []), f"checkpoint.every={every}", "checkpoint.keep=3", "track.every=1"]
        run_dir = (["--devices", str(devices)] if devices else []) + (
            ["--processes", str(processes)] if processes > 1 else []
        )
        other = next(engine for engine in ENGINES if engine != loaded.engine.kind)
        compared = {f"engine {other}": [*run_dir, f"engine={other}"]}
        if devices and devices > 1:
            compared["in one process" if processes > 1 else "in two processes"] = [
                "--devices", str(devices), *([] if processes > 1 else ["--processes", "2"]),
            ]  # fmt: skip
        from dtrain.core.leftovers import temporary_folder

        with temporary_folder("verify") as folder:

            def say(text: str) -> None:
                typer.echo(f"{text} ...", err=True)

            trial = Trial(str(find(recipe)), options, run_dir, folder, say)
            certificate = tried(trial, kills, seed, compared if others else {})
        typer.echo(json.dumps(certificate.values(), indent=2) if as_json else "\n".join(certificate.lines()))
        if not certificate.kept:
            raise typer.Exit(DtrainError.exit_code)
