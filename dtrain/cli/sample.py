"""dtrain sample"""

from pathlib import Path
from typing import Annotated, Literal

import typer

from dtrain.cli.arguments import RUNS, Best, Debug, Devices, Run, RunsDir, Step, divided, use_devices
from dtrain.cli.exits import exits, interruptible
from dtrain.core.errors import RecipeError


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command(
        epilog="Examples: dtrain sample runs/my-diffusion --count 64 --seed 1 --out drawn; "
        "dtrain sample runs/text-to-image --text 'a red circle above a blue square'"
    )(sample)


def sample(
    run: Run,
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FILE|KEY=VALUE]...",
            help="Files to draw for, as the training data has them; default: a split. KEY=VALUE overrides the recipe.",
        ),
    ] = None,
    text: Annotated[
        list[str] | None, typer.Option(help="A text to draw for, where the data has a column of tokens; repeatable.")
    ] = None,
    count: Annotated[
        int | None, typer.Option(min=1, help="Number of examples to draw for; default: 32, or all that are given.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Draw other numbers; default: those of the run's evaluations.")
    ] = None,
    split: Annotated[
        Literal["train", "test"] | None, typer.Option(help="The examples to draw for; default: test.")
    ] = None,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder for the files.")] = Path("samples"),
    step: Step = None,
    best: Best = False,
    devices: Devices = None,
    runs_dir: RunsDir = RUNS,
    debug: Debug = False,
) -> None:
    """Draw samples with a trained model: pictures side by side as PNG, other arrays as JSON lines or .npz.

    Calls the model's `sample(params, batch, ctx)`, or its `predict`, for the first examples of a split, for those in
    files, or for texts.
    """
    with exits(debug), interruptible():
        files, overrides = divided(what or [])
        if files and text:
            raise RecipeError("files and --text exclude each other", "put the texts into a file of records")
        if split and (files or text):
            raise RecipeError(f"--split {split} goes without {'files' if files else '--text'}", "leave one of them out")
        use_devices(devices)
        from dtrain.core.run_list import find_run
        from dtrain.data.prediction_inputs import inputs, texts_given
        from dtrain.inference.outputs import outputs, state_of
        from dtrain.inference.samples import drawn, write_samples
        from dtrain.weights.load import load_run

        changes = [*overrides, *([] if seed is None else [f"seed={seed}"])]
        loaded = load_run(
            find_run(run, runs_dir), changes, lambda line: typer.echo(line, err=True), step=step, best=best
        )
        data, example = loaded.recipe.data, loaded.assembly.layout.example
        source = texts_given(data, text) if text else inputs(data, example, files).source if files else None
        typer.secho(f"{run} at {loaded.chosen}", dim=True, err=True)
        state = state_of(loaded)
        program = outputs(loaded.assembly, source or data.open(split or "test"), "samples", state)
        rows = drawn(program, state, count or (len(program.source) if source else 32))
        write_samples(rows, out, "")
        drew = ", ".join(f"{name} {list(values.shape)}" for name, values in rows.items())
        typer.secho(f"{out}: {drew}", fg="green", err=True)


def _note(text: str) -> None:
    typer.echo(text, err=True)
