"""dtrain evaluate"""

from pathlib import Path
from typing import Annotated, Literal

import typer

from dtrain.cli.arguments import Best, Debug, Devices, Json, Overrides, Step, use_devices
from dtrain.cli.exits import exits, interruptible


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command(epilog="Example: dtrain evaluate runs/mlp-digits --best")(evaluate)


def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    overrides: Overrides = None,
    split: Annotated[Literal["train", "test"], typer.Option(help="The examples to evaluate on.")] = "test",
    step: Step = None,
    best: Best = False,
    as_json: Json = False,
    devices: Devices = None,
    debug: Debug = False,
) -> None:
    """Measure a trained model: metrics, accuracy of each class, confusion matrix.

    Other data is named by overrides, e.g. data.root=photos.
    """
    with exits(debug), interruptible():
        use_devices(devices)
        import json

        from dtrain.core.run_dir import Folder
        from dtrain.data.inputs import opened_in_order, with_classes
        from dtrain.train.evaluate import evaluate as measure
        from dtrain.train.load import load_run

        loaded = load_run(Folder(run), overrides or [], lambda text: typer.echo(text, err=True), step=step, best=best)
        source = opened_in_order(loaded.recipe.data, split)
        result = measure(loaded, with_classes(source, loaded.classes))
        if as_json:
            typer.echo(json.dumps({"run": str(run), "step": loaded.step, "split": split} | result.json(), indent=2))
            return
        typer.secho(f"{run} at {loaded.chosen}: {result.examples:,} examples of the {split} split", dim=True, err=True)
        typer.echo("\n".join(result.lines(loaded.recipe.model.metrics)))
