"""dtrain data"""

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dtrain.cli.arguments import RUNS, Debug, Json, Overrides, Recipe, Run, RunsDir
from dtrain.cli.exits import cancel_interrupt, exits, interruptible
from dtrain.cli.synonyms import Group

if TYPE_CHECKING:
    from dtrain.data.source import Source
    from dtrain.data.tokenizer import Tokenizer

app = typer.Typer(
    cls=Group,
    help="Show examples as the model sees them and when it saw them, and tokenise data ahead of a run.",
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
    png: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the pictures of the rows into a file.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Print examples as the model gets them.

    Tokens: as text, what counts in the loss in green, the rest dim, and how full the rows are; without colours, what
    counts in the loss is between ⟦ and ⟧; as numbers if the data names no tokenizer. Pictures: at the model's size,
    before augmentation, drawn in a terminal with colours. Tables: each column as the number that the model gets.
    """
    with exits(debug), interruptible():
        from dtrain.cli.show_rows import save_pictures, show_rows
        from dtrain.core.errors import RecipeError

        source, tokenizer = _opened(recipe, overrides, split)
        if first >= len(source):
            raise RecipeError(f"--first {first}: the {split} split has {len(source):,} rows")
        for line in source.notes:
            typer.secho(line, dim=True, err=True)
        indices = range(first, min(first + rows, len(source)))
        if png:
            save_pictures(source, indices, png)
        show_rows(source, tokenizer, indices)


@app.command(epilog="Example: dtrain data seen mlp-digits --at 12")
def seen(
    run: Run,
    at: Annotated[int | None, typer.Option(min=1, metavar="STEP", help="Show which examples this step had.")] = None,
    row: Annotated[
        list[int] | None,
        typer.Option(min=0, help="Show which steps had this example, by its number in `--at`."),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(
            help="Show which examples with this text the run had, and when: in tokens, columns, "
            "the name of the file, the class."
        ),
    ] = None,
    most: Annotated[int, typer.Option(min=1, help="Most examples and steps to print.")] = 20,
    as_json: Json = False,
    runs_dir: RunsDir = RUNS,
    debug: Debug = False,
) -> None:
    """Show what a run was trained on, and when: exactly, through epochs, mixtures, packing and rollbacks.

    The data must be that of the run; nothing is trained. A row is an example with its number in the training data.
    """
    with exits(debug), interruptible():
        from dtrain.cli.show_seen import show_seen
        from dtrain.core.run_list import find_run
        from dtrain.inference.seen import seen as opened

        show_seen(*opened(find_run(run, runs_dir)), step=at, rows=row or [], text=text, most=most, as_json=as_json)


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

    Of pictures it keeps digests and headers: each run decodes them.

    Files are tokenised in groups of 16 MiB or more. What is done when the command is interrupted is not done again.
    """
    with exits(debug), interruptible():
        start = time.perf_counter()
        data = _tokenised(recipe, overrides, jobs)
        for split in ("train", "test"):
            source, _ = _opened(recipe, overrides, split)
            typer.echo(f"{split}: {len(source):,} examples")
            for line in source.notes:
                typer.echo(f"  {line}")
        kept = (
            f"in the cache: {data.keeps}" if data.keeps else f"data of kind {data.kind} has no cache: nothing is kept"
        )
        typer.secho(f"{kept} (after {time.perf_counter() - start:.1f} s)", fg="green", err=True)


def _tokenised(recipe: str, overrides: list[str] | None, jobs: int | None) -> Any:
    """The data of a recipe after the tokens of all groups of files are made that are not in the cache, with a progress
    bar."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from dtrain.core.shipped import find
    from dtrain.data.tokenise import tokenise_in_processes
    from dtrain.recipe.load import load

    data: Any = load(find(recipe), overrides or []).data
    groups = list({group.name: group for split in ("train", "test") for group in data.file_groups(split)}.values())
    if not groups:
        return data
    columns = (TextColumn("tokenising"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=sum(group.size for group in groups))
        for done in tokenise_in_processes(groups, jobs or _cores(), cancel_interrupt):
            bar.advance(task, done.size)
    typer.secho(f"{len(groups)} groups of files are tokenised", dim=True, err=True)
    return data


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _opened(
    recipe: str, overrides: list[str] | None, split: Literal["train", "test"]
) -> "tuple[Source, Tokenizer | None]":
    """A split of a recipe's data, in order, and its tokenizer if its examples are tokens."""
    from dtrain.core.shipped import find
    from dtrain.data.prediction_inputs import named_tokenizer, opened_in_order
    from dtrain.recipe.load import load

    data: Any = load(find(recipe), overrides or []).data
    source = opened_in_order(data, split)
    return source, named_tokenizer(data, source)
