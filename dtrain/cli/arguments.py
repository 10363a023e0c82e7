"""The arguments that several verbs share."""

from pathlib import Path
from typing import Annotated

import typer

Recipe = Annotated[str, typer.Argument(help="A recipe file, or the name of one that comes with dtrain.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes, as in optimizer.lr=3e-4.")
]
Devices = Annotated[int | None, typer.Option(min=1, help="Pretend this many devices on the CPU.")]
RunsDir = Annotated[Path, typer.Option(help="Folder that holds the run folders.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
