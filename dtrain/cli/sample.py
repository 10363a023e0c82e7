"""dtrain sample"""

from pathlib import Path
from typing import Annotated, Literal

import typer

from dtrain.cli.arguments import Best, Debug, Devices, Overrides, Run, Step, use_devices
from dtrain.cli.exits import exits, interruptible


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command(epilog="Example: dtrain sample runs/my-diffusion --count 64 --seed 1 --out drawn")(sample)


def sample(
    run: Run,
    overrides: Overrides = None,
    count: Annotated[int, typer.Option(min=1, help="Number of examples of the split to draw for.")] = 32,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Draw other numbers; default: those of the run's evaluations.")
    ] = None,
    split: Annotated[Literal["train", "test"], typer.Option(help="The examples to draw for.")] = "test",
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder for the files.")] = Path("samples"),
    step: Step = None,
    best: Best = False,
    devices: Devices = None,
    debug: Debug = False,
) -> None:
    """Draw samples with a trained model: pictures side by side as PNG, other arrays as JSON lines or .npz.

    Calls the model's `sample(params, batch, ctx)`, or its `predict`, for the first examples of a split.
    """
    with exits(debug), interruptible():
        use_devices(devices)
        from dtrain.core.run_list import find_run
        from dtrain.inference.outputs import outputs, state_of
        from dtrain.inference.samples import drawn, write_samples
        from dtrain.weights.load import load_run

        changes = [*(overrides or []), *([] if seed is None else [f"seed={seed}"])]
        loaded = load_run(find_run(run), changes, lambda text: typer.echo(text, err=True), step=step, best=best)
        typer.secho(f"{run} at {loaded.chosen}", dim=True, err=True)
        state = state_of(loaded)
        program = outputs(loaded.assembly, loaded.recipe.data.open(split), "samples", state)
        rows = drawn(program, state, count)
        write_samples(rows, out, "")
        what = ", ".join(f"{name} {list(values.shape)}" for name, values in rows.items())
        typer.secho(f"{out}: {what}", fg="green", err=True)
