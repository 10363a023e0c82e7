"""Tables of text."""

import re
import shutil
import sys
import textwrap
from collections.abc import Sequence

import typer

from dtrain.core.printable import printable


def print_table(rows: Sequence[dict[str, str]], spare: Sequence[str] = ()) -> None:
    """Print rows with the same keys as columns under a bold head.

    On a terminal that is too narrow, columns of `spare` are left out from the first on, then the last one is cut.
    """
    rows = [{key: printable(value) for key, value in row.items()} for row in rows]
    columns = {key: max(len(key), *(len(row[key]) for row in rows)) for key in rows[0]}
    limit = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    for key in spare:
        used = [name for name in columns if name or any(row[name] for row in rows)]
        if limit is not None and sum(columns[name] + 2 for name in used) - 2 > limit:
            del columns[key]

    def line(row: dict[str, str]) -> str:
        text = "  ".join(f"{row[key]:<{width}}" for key, width in columns.items()).rstrip()
        return text if limit is None or len(text) <= limit else f"{text[: limit - 1]}…"

    typer.secho(line({key: key for key in columns}), bold=True)
    for row in rows:
        typer.echo(line(row))


def echo_fitted(text: str) -> None:
    """Print lines; on a terminal, those that are too long are broken between words and indented."""
    text = printable(text)
    if not sys.stdout.isatty():
        typer.echo(text)
        return
    width = max(shutil.get_terminal_size().columns, 20)
    for line in text.splitlines():
        indent = " " * (9 if line.startswith("  ") else 2)
        long = len(line) > width
        if not long:
            typer.echo(line)
            continue
        # items are apart by two blanks or a plus; single blanks inside of them do not break
        joined = re.sub(r"(?<=\S) (?=\S)", "\u00a0", line.replace(" + ", "  + "))
        wrapped = textwrap.wrap(joined, width, subsequent_indent=indent, break_on_hyphens=False)
        typer.echo("\n".join(wrapped).replace("\u00a0", " ").replace("  + ", " + "))
