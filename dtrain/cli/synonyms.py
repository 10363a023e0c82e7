"""The command line's groups: help for words that other tools use, and for options that are keys of the recipe."""

from typing import Any

import typer
from typer.core import TyperGroup

SYNONYMS = {
    "train": "run", "fit": "run", "start": "run", "resume": "run", "continue": "run", "restart": "run",
    "eval": "evaluate", "test": "evaluate", "score": "evaluate", "validate": "check", "lint": "check",
    "infer": "predict", "inference": "predict", "classify": "predict", "draw": "sample", "chat": "generate",
    "list": "ls", "runs": "ls", "status": "ls", "show": "report", "compare": "report", "plot": "report",
    "search": "sweep", "tune": "sweep", "estimate": "plan", "cost": "plan", "init": "new",
    "cp": "recipes cp", "cat": "recipes show", "schema": "recipes schema", "env": "doctor", "info": "doctor",
    "convert": "export", "save": "export", "load": "import", "download": "import", "trace": "profile",
    "benchmark": "bench", "speed": "bench", "time": "bench",
    "up": "launch up", "down": "launch down", "logs": "launch logs", "stop": "launch stop", "submit": "launch up",
}  # fmt: skip
"""Verbs of other tools, and ours."""
OPTIONS = {"output-dir": "--runs-dir", "out": "--runs-dir", "gpus": "--devices"}
"""Options of other tools, and ours; `other_names` has our keys."""
TARGETS = ("out", "output", "output-dir", "outfile", "o")
"""Options by which other tools name what is written, where that is an argument here."""


class Group(TyperGroup):
    """A group that knows `help`, and names the nearest verb, option or key."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if ctx.parent is None and "--install-completion" in args:
            from dtrain.cli.completion import ask_before_install

            if problem := ask_before_install(args):
                ctx.fail(problem)
        if ctx.parent is None and args[:1] == ["--show-completion"] and len(args) > 1:
            from dtrain.cli.completion import script

            try:
                typer.echo(script(args[1]))
            except KeyError:
                ctx.fail(f"there is no completion for {args[1]}; there is for bash, zsh, fish and powershell")
            ctx.exit()
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        word = args[0]
        if word == "help" and word not in self.commands:
            if len(args) == 1:
                typer.echo(ctx.get_help())
                ctx.exit()
            return super().resolve_command(ctx, [*args[1:], "--help"])
        if word == "version" and ctx.parent is None:
            from dtrain import __version__

            typer.echo(f"dtrain {__version__}")
            ctx.exit()
        if word not in self.commands and ctx.parent is None and word in SYNONYMS:
            ctx.fail(f"No such command '{word}'. Did you mean '{SYNONYMS[word]}'?")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Exception as error:
            name = getattr(error, "option_name", "")
            if type(error).__name__ == "NoSuchOption" and isinstance(name, str):
                near = [one for one in getattr(error, "possibilities", None) or () if one != "--extended"]
                setattr(error, "possibilities", near)  # noqa: B010
                command = getattr(getattr(error, "ctx", None), "command", None)
                params = getattr(command, "params", ())
                if name.lstrip("-") in TARGETS and any(one.name == "target" for one in params):
                    setattr(error, "possibilities", None)  # noqa: B010
                    what = "Write the target without an option: it is an argument"
                    setattr(error, "message", f"No such option: {name}. {what}")  # noqa: B010
                    raise
                keyed = any("KEY=" in str(getattr(one, "metavar", "")) for one in params)
                if keyed and (key := key_of(name.lstrip("-"))):
                    # no list of options that are spelt alike: a key is what was meant
                    setattr(error, "possibilities", None)  # noqa: B010
                    value = "" if key.startswith("--") else "; keys of the recipe are arguments without dashes"
                    ending = key if key.startswith("--") else f"{key}=..."
                    setattr(error, "message", f"No such option: {name}. Write {ending}{value}")  # noqa: B010
            raise


def key_of(name: str) -> str:
    """The key of a recipe that an option of this name means; empty if there is none."""
    from dtrain.recipe.keys import cached_keys
    from dtrain.recipe.other_names import NAMES, own_name

    if known := OPTIONS.get(name) or NAMES.get(name.replace("-", "_")):
        return known
    paths = list(dict.fromkeys(key.path for key in cached_keys() if key.typed))
    words = (name, name.replace("-", "_"), name.replace("-", "."))
    found = [path for path in paths if path in words] or [path for path in paths if path.rpartition(".")[2] in words]
    return min(found, key=lambda path: path.count(".")) if found else own_name(name)
