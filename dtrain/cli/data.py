"""dtrain data"""

import os
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dtrain.cli.arguments import Debug, Overrides, Recipe
from dtrain.cli.exits import cancel_interrupt, exits, interruptible
from dtrain.cli.synonyms import Group

if TYPE_CHECKING:
    import numpy as np

    from dtrain.data.source import Source
    from dtrain.data.tokenizer import Tokenizer

app = typer.Typer(
    cls=Group,
    help="Show examples as the model sees them, and tokenise data ahead of a run.",
    epilog="Example: dtrain data show my.yaml --rows 2",
    no_args_is_help=True,
)


@app.command(epilog="Example: dtrain data show my.yaml data.files='[chat.jsonl]' --rows 2")
def show(
    recipe: Recipe,
    overrides: Overrides = None,
    rows: Annotated[int, typer.Option(min=1, help="Number of rows to print.")] = 1,
    first: Annotated[int, typer.Option(min=0, help="Number of the first row.")] = 0,
    split: Annotated[Literal["train", "test"], typer.Option(help="The examples to show.")] = "train",
    debug: Debug = False,
) -> None:
    """Print rows of tokens as text: what counts in the loss in green, the rest dim, and how full the rows are.

    Without colours, what counts in the loss is between ⟦ and ⟧.
    """
    with exits(debug), interruptible():
        import numpy as np

        from dtrain.core.errors import RecipeError
        from dtrain.data.batch import DOCUMENT, TARGET, TOKEN

        source, tokenizer = _opened(recipe, overrides, split)
        if tokenizer is None:
            found = f"the examples have {', '.join(source.example)}, and the data has no tokenizer"
            raise RecipeError(found, "show prints rows of tokens as text")
        if first >= len(source):
            raise RecipeError(f"--first {first}: the {split} split has {len(source):,} rows")
        indices = np.arange(first, min(first + rows, len(source)))
        batch = source.rows(indices)
        for line in source.notes:
            typer.secho(line, dim=True, err=True)
        for number, index in enumerate(indices.tolist()):
            token, target = batch[TOKEN][number], batch[TARGET][number]
            document = batch[DOCUMENT][number] if DOCUMENT in batch else np.zeros_like(token)
            typer.secho(f"row {index}: {_summary(token, target, document)}", bold=True)
            for one in range(int(document.max()) + 1):
                inside = document == one
                if one == document.max() and DOCUMENT in batch and not (target[inside] >= 0).any():
                    continue  # empty slots
                _print(tokenizer, token[inside], target[inside])


@app.command(epilog="Example: dtrain data prepare my.yaml data.cache=/shared/cache")
def prepare(
    recipe: Recipe,
    overrides: Overrides = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes that tokenise; default: one for each core.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Tokenise the data of a recipe into its cache (data.cache), so that every process of a run finds it there.

    Files are tokenised in groups of 16 MiB or more. What is done when the command is interrupted is not done again.
    """
    with exits(debug), interruptible():
        start = time.perf_counter()
        _tokenise(recipe, overrides, jobs)
        for split in ("train", "test"):
            source, _ = _opened(recipe, overrides, split)
            typer.echo(f"{split}: {len(source):,} examples")
            for line in source.notes:
                typer.echo(f"  {line}")
        typer.secho(f"ready after {time.perf_counter() - start:.1f} s", fg="green", err=True)


def _tokenise(recipe: str, overrides: list[str] | None, jobs: int | None) -> None:
    """Make the tokens of all groups of files that are not in the cache, with a progress bar."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from dtrain.core.shipped import find
    from dtrain.data.tokenise import tokenise_in_processes
    from dtrain.recipe.load import load

    data: Any = load(find(recipe), overrides or []).data
    groups = list({group.name: group for split in ("train", "test") for group in data.file_groups(split)}.values())
    if not groups:
        return
    columns = (TextColumn("tokenising"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=sum(group.size for group in groups))
        for done in tokenise_in_processes(groups, jobs or _cores(), cancel_interrupt):
            bar.advance(task, done.size)
    typer.secho(f"{len(groups)} groups of files are tokenised", dim=True, err=True)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _opened(
    recipe: str, overrides: list[str] | None, split: Literal["train", "test"]
) -> "tuple[Source, Tokenizer | None]":
    """A split of a recipe's data, in order, and its tokenizer if its examples are tokens."""
    from dtrain.core.shipped import find
    from dtrain.data.batch import TOKEN
    from dtrain.data.prediction_inputs import opened_in_order
    from dtrain.recipe.load import load

    data: Any = load(find(recipe), overrides or []).data
    source = opened_in_order(data, split)
    return source, data.open_tokenizer() if TOKEN in source.example and data.tokenized else None


def _summary(token: "np.ndarray", target: "np.ndarray", document: "np.ndarray") -> str:
    learned, count = int((target >= 0).sum()), int(document.max()) + 1
    used = [int((document == one).sum()) for one in range(count) if (target[document == one] >= 0).any()]
    parts = f"{len(used)} documents of {', '.join(map(str, used[:8]))}{' ...' if len(used) > 8 else ''} tokens"
    empty = len(token) - sum(used)
    return f"{len(token)} slots, {learned} count in the loss, {empty} empty; {parts}"


def _print(tokenizer: "Tokenizer", token: "np.ndarray", target: "np.ndarray") -> None:
    """Print a document: its tokens, and the last target, which is no token of the row."""
    from itertools import groupby

    from dtrain.core.printable import printable

    ids = [*token.tolist(), *([int(target[-1])] if target[-1] >= 0 else [])]
    learned = [False, *(target >= 0).tolist()][: len(ids)]
    coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    at = 0
    for counts, group in groupby(learned):
        size = len(list(group))
        text = printable(tokenizer.decode(ids[at : at + size]))
        at += size
        if coloured:
            typer.secho(text, fg="green" if counts else None, dim=not counts, nl=False)
        else:
            typer.echo(f"⟦{text}⟧" if counts else text, nl=False)
    typer.echo("\n" + "-" * 20)
