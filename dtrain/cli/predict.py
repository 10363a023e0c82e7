"""dtrain predict"""

import sys
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TextIO

import typer

from dtrain.cli.arguments import RUNS, Best, Debug, Devices, Run, RunsDir, Step, divided, use_devices
from dtrain.cli.exits import exits, interruptible
from dtrain.core.counts import figures
from dtrain.core.errors import DataError, EnvironmentFault, RecipeError, cause

if TYPE_CHECKING:
    from dtrain.core.types import JsonObject
    from dtrain.weights.load import LoadedRun

FORMATS = (".jsonl", ".csv", ".npz")


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command(
        epilog="Examples: dtrain predict runs/my-images holiday/*.jpg --out labels.csv; "
        "dtrain predict my-encoder --split train --out codes.npz --keep label"
    )(predict)


def predict(
    run: Run,
    what: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[FILE|KEY=VALUE]...",
            help="Images, texts, records: files, folders, globs; default: the test split. KEY=VALUE is an override.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="A .jsonl, .csv or .npz file to write; default: lines to the terminal.")
    ] = None,
    split: Annotated[
        Literal["train", "test"] | None,
        typer.Option(help="The examples to predict, where no file is given; default: test."),
    ] = None,
    keep: Annotated[
        str, typer.Option(metavar="NAME,...", help="Arrays of the data to copy into the .npz file: label,caption.")
    ] = "",
    top: Annotated[
        int | None, typer.Option(min=1, help="Number of classes whose probabilities are given; default: 3.")
    ] = None,
    step: Step = None,
    best: Best = False,
    devices: Devices = None,
    runs_dir: RunsDir = RUNS,
    debug: Debug = False,
) -> None:
    """Predict classes, or what else the model predicts, for files or for the test split: one line for each.

    Lines are JSON unless standard output is a terminal.
    """
    with exits(debug), interruptible():
        files, overrides = divided(what or [])
        if out and out.suffix not in FORMATS:
            raise RecipeError(f"--out {out}: expected a name that ends in {' or '.join(FORMATS)}")
        arrays = out if out and out.suffix == ".npz" else None
        if arrays and files:
            raise RecipeError(f"--out {out}: files give lines, not arrays", "write .jsonl or .csv")
        if keep and not arrays:
            raise RecipeError("--keep goes with --out FILE.npz", "lines have the label already")
        if split and files:
            raise RecipeError(f"--split {split} goes without files", "leave the files out, or the split")
        if top and arrays:
            raise RecipeError(f"--top {top} goes with lines", "a .npz file has the probabilities of all classes")
        use_devices(devices)
        from dtrain.core.run_list import find_run
        from dtrain.data.prediction_inputs import inputs
        from dtrain.inference.predict import predictions
        from dtrain.weights.load import load_run

        loaded = load_run(find_run(run, runs_dir), overrides, _note, step=step, best=best)
        data, example = loaded.recipe.data, loaded.assembly.layout.example
        chosen = inputs(data, example, files) if files else None
        typer.secho(f"{run} at {loaded.chosen}", dim=True, err=True)
        if arrays:
            _write_arrays(loaded, split or "test", [name for name in keep.split(",") if name], arrays)
            return
        given, unread = (
            chosen or loaded.split(split or "test", _note),
            chosen.unread if chosen else {},
        )
        for note in chosen.source.notes if chosen else ():
            typer.echo(note, err=True)
        agreed, errors = list[bool](), list[float]()
        rows = _compared(predictions(loaded, given, top or 3), agreed, errors)
        if out is None:
            for row in rows:
                _print(row)
        else:
            count = _write(rows, out, ["error"] if unread else [])
            typer.secho(f"{out}: {count:,} rows", fg="green", err=True)
        _show_comparison(agreed, errors)
        if unread:
            raise DataError(f"{len(unread):,} files cannot be used; the others are predicted", "see their `error`")


def _write_arrays(loaded: "LoadedRun", split: Literal["train", "test"], keep: list[str], out: Path) -> None:
    """Write the outputs for a split, and these arrays of the data, by name (examples, ...)."""
    import numpy as np

    from dtrain.core.files import atomic_write
    from dtrain.inference.outputs import outputs, state_of
    from dtrain.inference.samples import drawn

    source = loaded.split(split, _note)
    if unknown := [name for name in keep if name not in source.example]:
        raise RecipeError(f"--keep: the data has no {unknown[0]!r}", f"it has {', '.join(source.example)}")
    state = state_of(loaded)
    columns = drawn(outputs(loaded.assembly, source, state=state), state, len(source))
    if twice := [name for name in keep if name in columns]:
        raise RecipeError(f"--keep: {twice[0]!r} is the name of an output as well", "leave it out")
    if keep:  # some rows at a time: they may have pictures, which are not kept
        starts = range(0, len(source), loaded.assembly.eval_batch)
        parts = [source.rows(np.arange(at, min(at + starts.step, len(source)))) for at in starts]
        columns |= {name: np.concatenate([part[name] for part in parts]) for name in keep}
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(out) as file:
            np.savez_compressed(file, **columns)  # pyright: ignore[reportArgumentType]
    except OSError as error:
        raise EnvironmentFault(f"cannot write {out}: {cause(error)}") from error
    what = ", ".join(f"{name} {list(values.shape)}" for name, values in columns.items())
    typer.secho(f"{out}: {what}", fg="green", err=True)


def _show_comparison(agreed: list[bool], errors: list[float]) -> None:
    """Print how well the rows with a label are predicted."""
    if agreed:
        share = sum(agreed) / len(agreed)
        typer.secho(f"{share:.2%} of {len(agreed):,} rows with a label are predicted so", fg="green", err=True)
    if errors:
        mean = f"mean absolute error {figures(sum(errors) / len(errors))}"
        typer.secho(f"{mean} of {len(errors):,} rows with a label", fg="green", err=True)


def _compared(rows: "Iterable[JsonObject]", agreed: list[bool], errors: list[float]) -> "Iterator[JsonObject]":
    """The rows. Of those with a label, `agreed` gets whether it is the class, and `errors` how far it is from the
    number."""
    for row in rows:
        label = row.get("label")
        if label is not None and "class" in row:
            agreed.append(str(label) == row["class"])
        elif isinstance(label, int | float) and isinstance(row.get("value"), int | float):
            errors.append(abs(row["value"] - label))
        yield row


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


def _note(text: str) -> None:
    typer.echo(text, err=True)
