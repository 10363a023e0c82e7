"""The command line. Each verb parses its arguments, calls one function, prints and exits.

Heavy modules are imported inside of functions, so that --help stays fast.
"""

import os

import typer

from dtrain import __version__
from dtrain.cli import (
    agree,
    bench,
    check,
    convert,
    data,
    doctor,
    evaluate,
    explain,
    generate,
    help_topics,
    launch,
    ls,
    new,
    plan,
    predict,
    profile,
    recipes,
    replay,
    report,
    run,
    sample,
    sweep,
    verify,
)
from dtrain.cli.synonyms import Group

app = typer.Typer(
    name="dtrain",
    cls=Group,
    help="Train a model from one recipe, on a laptop or a TPU pod.",
    epilog="Example: dtrain run mlp-digits",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(requested: bool) -> None:
    if requested:
        typer.echo(f"dtrain {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    context: typer.Context,
    _: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version and exit."),
) -> None:
    if os.environ.get("NO_COLOR"):
        context.color = False
    from dtrain.parallel.devices import configure_environment

    configure_environment()


new.add_to(app)
run.add_to(app)
check.add_to(app)
plan.add_to(app)
explain.add_to(app)
report.add_to(app)
replay.add_to(app)
ls.add_to(app)
evaluate.add_to(app)
predict.add_to(app)
sample.add_to(app)
generate.add_to(app)
convert.add_to(app)
doctor.add_to(app)
verify.add_to(app)
agree.add_to(app)
sweep.add_to(app)
profile.add_to(app)
bench.add_to(app)
help_topics.add_to(app)
app.add_typer(recipes.app, name="recipes", rich_help_panel="Before a run")
app.add_typer(data.app, name="data", rich_help_panel="Before a run")
app.add_typer(launch.app, name="launch", rich_help_panel="Train")
PANELS = {
    "Train": ("run", "sweep", "verify", "agree", "profile", "bench"),
    "Before a run": ("new", "check", "explain", "plan", "doctor"),
    "Look at runs": ("ls", "report", "replay"),
    "Look things up": ("help",),
    "Use a trained model": ("evaluate", "predict", "sample", "generate", "import", "export"),
}
"""The verbs as `dtrain --help` groups them."""
for _command in app.registered_commands:
    _name = _command.name or (_command.callback.__name__ if _command.callback else "")
    _command.rich_help_panel = next(panel for panel, verbs in PANELS.items() if _name in verbs)


def main() -> None:
    """The `dtrain` command of older installations; newer ones start `dtrain.__main__:main`."""
    import runpy

    runpy.run_module("dtrain", run_name="__main__")
