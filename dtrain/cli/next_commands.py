"""What to do after a run: commands that can be typed as they are printed."""

import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dtrain.recipe.recipe import Recipe


def next_commands(folder: Path, recipe: "Recipe") -> str:
    """The commands that show and use a finished run."""
    run = folder.name if folder.parent == Path("runs") else str(folder)
    chat, writes = recipe.data.main.has_template, recipe.data.tokenized and recipe.model.generates
    commands = [f"report {run} --html report.html"]
    commands += [f"generate {run} {'--chat ' * chat}--prompt '...'"] if writes else []
    commands += [f"evaluate {run} --questions FILE"] if chat and writes else []
    commands += [f"sample {run}"] if recipe.evaluate.samples else []
    predicts = recipe.model.predicts and not recipe.data.tokenized
    commands += [f"evaluate {run}", f"predict {run}{' FILE...' * recipe.data.reads_inputs}"] if predicts else []
    lines = [f"{program()} {command}" for command in commands]
    return "next: " + "\n      ".join(lines)


def program() -> str:
    """How this program was called: `dtrain`, or its path if the shell would not find it by that name."""
    called, found = Path(sys.argv[0]), shutil.which("dtrain")
    same = found is not None and called.exists() and Path(found).resolve() == called.resolve()
    return "dtrain" if same or called.name != "dtrain" else sys.argv[0]
