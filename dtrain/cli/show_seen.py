"""Print what a run was trained on, and when."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from dtrain.core.errors import RecipeError
from dtrain.core.printable import printable

if TYPE_CHECKING:
    from dtrain.core.types import JsonObject
    from dtrain.data.tokenizer import Tokenizer
    from dtrain.inference.seen import Seen

WIDTH = 72
"""Most characters of an example's text in a line."""


def show_seen(
    seen: "Seen",
    tokenizer: "Tokenizer | None",
    *,
    step: int | None,
    rows: Sequence[int],
    text: str | None,
    most: int,
    as_json: bool,
) -> None:
    """Answer one question: which examples a step had, which steps had these examples, or those with a text."""
    if (step is not None) + bool(rows) + (text is not None) != 1:
        raise RecipeError("give one of --at, --row and --text", "dtrain data seen RUN --at 1")
    _say_what_is_known(seen)
    if step is not None:
        found = _of_step(seen, step)
        _print(found, [_step_line(one, seen.text(one["row"], tokenizer)) for one in found[:most]], most, as_json)
        return
    around: dict[int, str] = {}
    if text is not None:
        around = dict(seen.with_text(text, tokenizer, _progress))
        typer.secho(f"{len(around):,} examples with {text!r} among those that it was trained on", dim=True, err=True)
    elif wrong := [row for row in rows if row >= seen.numbers]:
        raise RecipeError(f"--row {wrong[0]}: the training data has the rows 0 to {seen.numbers - 1:,}")
    import numpy as np

    steps = seen.steps_with(np.asarray(list(around) if text is not None else rows, np.int64))
    found = [
        _named(seen, row) | {"steps": when} | ({"text": around[row]} if around else {}) for row, when in steps.items()
    ]
    lines = [
        _row_line(seen, row, when, most, around[row] if around else seen.text(row, tokenizer))
        for row, when in list(steps.items())[:most]
    ]
    _print(found, lines, most, as_json)


def _say_what_is_known(seen: "Seen") -> None:
    """What the answers are about, and what was not compared."""
    first = f" from step {seen.first:,} on, since its recipe had another order before" if seen.first > 1 else ""
    typer.secho(
        f"{seen.recipe.name}: {seen.steps:,} steps of {seen.recipe.batch:,} examples{first}", dim=True, err=True
    )
    if not seen.checked:
        typer.secho("no checkpoint tells which data the run had: not compared", fg="yellow", err=True)


def _of_step(seen: "Seen", step: int) -> "list[JsonObject]":
    chosen, numbers = seen.examples(step).tolist(), seen.rows(step).tolist()
    return [_named(seen, index) | {"epoch": seen.epoch(number)} for index, number in zip(chosen, numbers, strict=True)]


def _named(seen: "Seen", index: int) -> "JsonObject":
    source = seen.source_of(index)
    return {"row": index} | ({"source": source} if source else {})


def _step_line(one: "JsonObject", text: str) -> str:
    epoch = f"  epoch {one['epoch']}" if one["epoch"] else ""
    source = f"  {one['source']}" if "source" in one else ""
    return f"row {one['row']}{source}{epoch}  {_short(text)}".rstrip()


def _row_line(seen: "Seen", row: int, when: Sequence[int], most: int, text: str) -> str:
    more = f" and {len(when) - most:,} more" if len(when) > most else ""
    listed = ", ".join(f"{step:,}" for step in when[:most])
    steps = (
        f"step{'s' * (len(when) > 1)} {listed}{more}" if when else f"none of the steps {seen.first:,} to {seen.steps:,}"
    )
    source = f"  {name}" if (name := seen.source_of(row)) else ""
    return f"row {row}{source}  {steps}  {_short(text)}".rstrip()


def _short(text: str) -> str:
    line = printable(" ".join(text.split()))
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..."


def _print(found: "list[JsonObject]", lines: Sequence[str], most: int, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    for line in lines:
        typer.echo(line)
    if len(found) > most:
        typer.secho(f"and {len(found) - most:,} more; --most shows them", dim=True, err=True)


def _progress(done: int, total: int) -> None:
    import sys

    if sys.stderr.isatty():
        typer.echo(f"\r{done:,} of {total:,} examples read", nl=done == total, err=True)
