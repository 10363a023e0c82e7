"""Arguments that several verbs share."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dtrain.cli import completion

if TYPE_CHECKING:
    from dtrain.recipe.recipe import Recipe as Loaded

Recipe = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="A recipe file, or the name of a recipe that comes with dtrain.",
        autocompletion=completion.recipes,
    ),
]
Run = Annotated[
    str,
    typer.Argument(metavar="RUN", help="A run: its folder, or its name in --runs-dir.", autocompletion=completion.runs),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Overrides, e.g. optimizer.lr=3e-4.",
        autocompletion=completion.overrides,
    ),
]
Devices = Annotated[int | None, typer.Option(min=1, help="Simulate this many devices on the CPU.")]
RUNS = Path("runs")
"""The folder of run folders where none is given."""
RunsDir = Annotated[Path, typer.Option(help="Folder that contains the run folders.")]
Step = Annotated[int | None, typer.Option(min=0, help="Use the checkpoint of this step; default: the newest.")]
Best = Annotated[bool, typer.Option("--best", help="Use the best checkpoint, by the recipe's checkpoint.best.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of every error.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
RunCode = Annotated[
    bool,
    typer.Option("--run-code", help="Import the modules that the recipe names: their code runs with your permissions."),
]


def refuse_code(user_code: Sequence[str], agreed: bool) -> None:
    """Raise RecipeError if the command would run this code, which a recipe names, unless the user has agreed."""
    from dtrain.core.errors import RecipeError

    if user_code and not agreed:
        message = f"{' and '.join(user_code)}: custom code, which this command must run"
        raise RecipeError(message, "read it, then add --run-code; `dtrain check` runs no code")


def use_devices(devices: int | None) -> None:
    """Find the devices of this machine, or simulate this many on the CPU, with the cache of compiled programs."""
    import logging

    from dtrain.parallel import compile_cache
    from dtrain.parallel.devices import available_devices, fake_devices

    if devices:
        fake_devices(devices)
    logging.getLogger("absl").setLevel(logging.ERROR)
    available_devices()
    compile_cache.use()


def load_to_measure(recipe: str, overrides: Sequence[str], devices: int | None, steps: int) -> "Loaded":
    """A recipe for so many steps in a temporary folder: nothing is evaluated, saved or sent, and the learning rate is
    constant, since other schedules have lengths that may not fit."""
    from dtrain.core.shipped import find
    from dtrain.recipe.load import load

    use_devices(devices)
    short = [f"steps={steps}", "evaluate={every: 0, questions: [], samples: 0}", "checkpoint={minutes: 0, every: 0}"]
    short += ["track.notify=null", "optimizer.schedule={kind: constant}"]
    return load(find(recipe), [*overrides, *short], devices)


def divided(what: list[str]) -> tuple[list[str], list[str]]:
    """Files, and overrides: words with `=` that are no existing file."""
    overrides = [word for word in what if "=" in word and not Path(word).exists()]
    return [word for word in what if word not in overrides], overrides
