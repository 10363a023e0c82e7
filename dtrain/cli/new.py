"""dtrain new"""

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dtrain.cli.arguments import Debug
from dtrain.cli.exits import exits, interruptible

if TYPE_CHECKING:
    from dtrain.data.guess import Guess


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command(
        epilog="Examples: dtrain new photos; dtrain new houses.csv --label price --run; "
        "dtrain new chats.jsonl --weights llama-3.2-1b; dtrain new photos --weights vit-base-patch16-224"
    )(new)


def new(
    data: Annotated[Path, typer.Argument(metavar="DATA", help="A folder of pictures, a table, a text, conversations.")],
    out: Annotated[Path | None, typer.Option(help="The recipe's file; default: NAME.yaml in this folder.")] = None,
    label: Annotated[
        str | None, typer.Option(help="The column of a table, or the array of a .npz file, that is predicted.")
    ] = None,
    kind: Annotated[str | None, typer.Option(help="The kind of data, where it could be several.")] = None,
    weights: Annotated[
        Path | None,
        typer.Option(help="A folder of published weights to start from: of a language model, or of a ViT or ResNet."),
    ] = None,
    run: Annotated[bool, typer.Option("--run", help="Train at once.")] = False,
    debug: Debug = False,
) -> None:
    """Write a first recipe for your data: what was seen in it, and settings that train here in minutes."""
    with exits(debug), interruptible():
        from dtrain.core.errors import RecipeError
        from dtrain.core.files import create
        from dtrain.recipe.compose import name_of
        from dtrain.recipe.new import new_recipe, selected

        if out and out.exists():
            raise RecipeError(f"{out} already exists", "name another file: --out FILE")
        of_images = weights is not None and _of_images(weights)
        if of_images and (label or kind not in (None, "images")):
            message = f"{weights} takes pictures: --kind images is what it goes with"
            raise RecipeError(message, "leave --kind and --label out")
        if (weights or _is_model(data)) and (label or kind) and not of_images:
            raise RecipeError("--label and --kind do not go with published weights", "leave them out")
        if _is_model(data) or (weights and not of_images):
            path = _tuned(data if weights else None, weights or data, out)
        else:
            found = selected(data, "images" if of_images else kind, label)
            chosen, guess = found[0] if len(found) == 1 else _asked(data, found)
            if out and out.parent.resolve() != Path.cwd():  # paths in a recipe are relative to it
                guess, weights = _elsewhere(guess), weights.absolute() if weights else None
            if weights:
                _refuse_unread(weights)
            recipe = new_recipe(data, chosen, guess, name_of(out) if out else None, weights)
            path = out or Path(f"{recipe.name}.yaml")
            create(path, recipe.text, "name another file: --out FILE")
            for line in recipe.seen:
                typer.echo(line, err=True)
        typer.echo(path)
        if run:
            sys.stdout.flush()
            # -P: a random.py beside the data would be imported in place of Python's own
            os.execv(sys.executable, [sys.executable, "-P", "-m", "dtrain", "run", str(path)])
        typer.echo(f"next: dtrain run {shlex.quote(str(path))}", err=True)


def _is_model(folder: Path) -> bool:
    """Whether it is a folder of published weights."""
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def _of_images(weights: Path) -> bool:
    """Whether it has the weights of a classifier of images. DataError if it does not say what it has."""
    from dtrain.models.agreement import described

    return not described(weights).model.generates


def _refuse_unread(weights: Path) -> None:
    """DataError if the files do not have the parameters of the net that their config.json describes; of those of the
    last layer, which is new, none is needed."""
    from dtrain.checkpoint.tensors import opened
    from dtrain.models.agreement import described
    from dtrain.weights.read import find_tensors, without_padding

    model = described(weights).model
    declared = without_padding(model.params())
    with opened(weights) as tensors:
        find_tensors(tensors, model, declared, weights, [name for name in declared if name.startswith("head.")])


def _asked(data: Path, found: "list[tuple[str, Guess]]") -> "tuple[str, Guess]":
    """The reading that the user picks. RecipeError with all of them where standard input is no terminal."""
    from dtrain.core.errors import RecipeError
    from dtrain.recipe.new import listing

    lines = list(listing(found))
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise RecipeError([f"{data} can be read in {len(found)} ways; say which:", *lines])
    typer.echo(f"{data} can be read in {len(found)} ways:", err=True)
    for number, line in enumerate(lines, 1):
        typer.echo(f"{number:>3}{line}", err=True)
    number = 0
    try:
        while not 1 <= number <= len(found):
            number = typer.prompt(f"Which one, 1 to {len(found)}", type=int, err=True)
    except typer.Abort:  # Ctrl-D or Ctrl-C
        typer.echo("nothing was written", err=True)
        raise typer.Exit(130) from None
    return found[number - 1]


def _elsewhere(guess: "Guess") -> "Guess":
    """The same reading with absolute paths."""
    from dataclasses import replace

    def absolute(value: object) -> object:
        if isinstance(value, list):
            return [absolute(one) for one in value]
        return str(Path(value).absolute()) if isinstance(value, str) else value

    keys = ("root", "file", "files", "test_files")
    return replace(guess, section={**guess.section, **{k: absolute(v) for k, v in guess.section.items() if k in keys}})


def _tuned(data: Path | None, weights: Path, out: Path | None) -> Path:
    """Write a recipe that tunes published weights on conversations."""
    from dtrain.recipe.compose import name_of
    from dtrain.recipe.new import selected
    from dtrain.train.import_run import import_published

    if data:
        selected(data, "chat")
    else:
        typer.echo(f"{weights} has published weights; your conversations belong into chat.jsonl", err=True)
    elsewhere = out is not None and out.parent.resolve() != Path.cwd()
    if elsewhere:
        weights, data = weights.absolute(), data.absolute() if data else None
    return import_published(
        weights,
        name_of(out or weights.resolve()) or "new",
        [],
        None,
        Path("runs"),
        lambda text: typer.echo(text, err=True),
        recipe_only=True,
        data=data,
        out=out,
    )
