"""dtrain predict"""

import sys
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from dtrain.cli.arguments import Best, Debug, Devices, Run, Step, use_devices
from dtrain.cli.exits import exits, interruptible
from dtrain.core.errors import DataError, EnvironmentFault, RecipeError, cause

if TYPE_CHECKING:
    from dtrain.core.types import JsonObject

FORMATS = (".jsonl", ".csv")


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command(epilog="Example: dtrain predict runs/my-images holiday/*.jpg --out labels.csv")(predict)


def predict(
    run: Run,
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FILE|KEY=VALUE]...",
            help="Images or texts: files, folders, globs; default: the test split. KEY=VALUE overrides the recipe.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="A .jsonl or .csv file to write; default: lines to the terminal.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Number of classes whose probabilities are given.")] = 3,
    step: Step = None,
    best: Best = False,
    devices: Devices = None,
    debug: Debug = False,
) -> None:
    """Predict classes, or what else the model predicts, for files or for the test split: one line for each.

    Lines are JSON unless standard output is a terminal.
    """
    with exits(debug), interruptible():
        files, overrides = _divided(what or [])
        if out and out.suffix not in FORMATS:
            raise RecipeError(f"--out {out}: expected a name that ends in {' or '.join(FORMATS)}")
        use_devices(devices)
        from dtrain.core.run_list import find_run
        from dtrain.data.prediction_inputs import inputs, with_classes
        from dtrain.inference.predict import predictions
        from dtrain.weights.load import load_run

        loaded = load_run(find_run(run), overrides, lambda text: typer.echo(text, err=True), step=step, best=best)
        data, example = loaded.recipe.data, loaded.assembly.layout.example
        chosen = inputs(data, example, files) if files else None
        given, unread = chosen or with_classes(data.open("test"), loaded.classes), chosen.unread if chosen else {}
        typer.secho(f"{run} at {loaded.chosen}", dim=True, err=True)
        agreed: list[bool | None] = []
        rows = _compared(predictions(loaded, given, top), agreed)
        if out is None:
            for row in rows:
                _print(row)
        else:
            count = _write(rows, out, ["error"] if unread else [])
            typer.secho(f"{out}: {count:,} rows", fg="green", err=True)
        if labelled := [same for same in agreed if same is not None]:
            share = sum(labelled) / len(labelled)
            typer.secho(f"{share:.2%} of {len(labelled):,} rows with a label are predicted so", fg="green", err=True)
        if unread:
            raise DataError(f"{len(unread):,} files cannot be used; the others are predicted", "see their `error`")


def _compared(rows: "Iterable[JsonObject]", agreed: list[bool | None]) -> "Iterator[JsonObject]":
    """The rows; `agreed` gets whether each has the class of its label, None if it has no label."""
    for row in rows:
        both = row.get("label") is not None and "class" in row
        agreed.append(str(row["label"]) == row["class"] if both else None)
        yield row


def _divided(what: list[str]) -> tuple[list[str], list[str]]:
    """Files, and overrides: words with `=` that are no existing file."""
    overrides = [word for word in what if "=" in word and not Path(word).exists()]
    return [word for word in what if word not in overrides], overrides


def _print(row: "JsonObject") -> None:
    import json

    if not sys.stdout.isatty():
        typer.echo(json.dumps(row))
        return
    origin, *rest = row.items()
    shown = [f"{origin[1]}"]
    for name, value in rest:
        if name == "top":
            shown.append("  ".join(f"{other} {share:.1%}" for other, share in value.items()))
        elif name != "probability":
            shown.append(f"{value}" if name == "class" else f"{name} {value}")
    typer.echo("  ".join(shown))


def _write(rows: "Iterable[JsonObject]", out: Path, more: list[str]) -> int:
    """Write the rows into a file, which appears when it is complete; a table has the columns `more`. Returns their
    number."""
    part, count = out.with_name(f"{out.name}.part"), 0
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with part.open("w", newline="") as file:
            write = _csv(file, more) if out.suffix == ".csv" else _jsonl(file)
            next(write)
            for row in rows:
                write.send(row)
                count += 1
        part.replace(out)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise EnvironmentFault(f"cannot write {out}: {cause(error)}") from error
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return count


def _jsonl(file: TextIO) -> Generator[None, Any, None]:
    import json

    while True:
        file.write(json.dumps((yield)) + "\n")


def _csv(file: TextIO, more: list[str]) -> Generator[None, Any, None]:
    import csv

    writer: Any = None
    while True:
        row = _flat((yield))
        if writer is None:
            writer = csv.DictWriter(file, [*row, *more])
            writer.writeheader()
        writer.writerow(row)


def _flat(row: "JsonObject") -> "JsonObject":
    """The row with one column for each value: lists become name.0, name.1; of `top`, the class and its share."""
    flat: JsonObject = {}
    for name, value in row.items():
        if name == "top":
            for i, (other, share) in enumerate(value.items(), 1):
                flat |= {f"class{i}": other, f"probability{i}": share}
        elif isinstance(value, list):
            flat |= _flat({f"{name}.{i}": item for i, item in enumerate(value)})
        else:
            flat[name] = value
    return flat
