"""dtrain evaluate"""

from typing import Annotated, Literal

import typer

from dtrain.cli.arguments import Best, Debug, Devices, Json, Overrides, Run, Step, use_devices
from dtrain.cli.exits import exits, interruptible


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command(epilog="Example: dtrain evaluate runs/mlp-digits --best")(evaluate)


def evaluate(
    run: Run,
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

        from dtrain.core.errors import cause
        from dtrain.core.run_dir import overwrite
        from dtrain.core.run_list import find_run
        from dtrain.data.inputs import opened_in_order, with_classes
        from dtrain.train.evaluate import evaluate as measure
        from dtrain.train.load import load_run

        place = find_run(run)
        loaded = load_run(place, overrides or [], lambda text: typer.echo(text, err=True), step=step, best=best)
        source = opened_in_order(loaded.recipe.data, split)
        result = measure(loaded, with_classes(source, loaded.classes))
        values = json.dumps({"run": str(run), "step": loaded.step, "split": split} | result.json(), indent=2)
        if not overrides:
            try:
                overwrite(place.evaluation, values + "\n")  # for `dtrain report --html`
            except OSError as error:
                typer.echo(f"the result is not kept in the run folder: {cause(error)}", err=True)
        if as_json:
            typer.echo(values)
            return
        typer.secho(f"{run} at {loaded.chosen}: {result.examples:,} examples of the {split} split", dim=True, err=True)
        typer.echo("\n".join(result.lines(loaded.recipe.model.metrics)))
