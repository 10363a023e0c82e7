"""dtrain bench"""

from typing import Annotated

import typer

from dtrain.cli.arguments import Debug, Devices, Json, Overrides, Recipe, load_to_measure
from dtrain.cli.exits import exits, interruptible


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command(epilog="Example: dtrain bench decoder-tiny batch=32")(bench)


def bench(
    recipe: Recipe,
    overrides: Overrides = None,
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Rounds; medians over them are shown.")] = 3,
    seconds: Annotated[float, typer.Option(min=0.1, max=600, help="Length of each measurement of a round.")] = 2.0,
    devices: Devices = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Measure where the time of a step goes: matrix products, the rest of the compiled step, the loop, the data.

    The recipe is trained for a few seconds in a temporary folder, without evaluations and checkpoints; then its
    compiled step and its data are timed alone.
    """
    with exits(debug), interruptible():
        import json
        import sys

        loaded = load_to_measure(recipe, [*(overrides or []), "guard.purity=false"], devices, 1000)
        from dtrain.runtime.bench import bench as measure

        def say(text: str) -> None:
            if sys.stderr.isatty():
                typer.echo(f"\r\033[K{text}", nl=False, err=True)

        try:
            found = measure(loaded, rounds, seconds, say)
        finally:
            say("")
        typer.echo(json.dumps(found.values, indent=2) if as_json else "\n".join(found.lines))
