"""dtrain launch: plan, up, status, logs, stop, down, list"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dtrain.cli.arguments import Debug, Json, Overrides, Recipe, RunsDir
from dtrain.cli.exits import exits
from dtrain.cli.launched import asked, known, refuse_while_alive

if TYPE_CHECKING:
    from dtrain.launch.job import Job, Plan, Target

app = typer.Typer(
    help="Run a recipe elsewhere: without this terminal, on hosts that ssh reaches, on SLURM, on GKE.",
    no_args_is_help=True,
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="The run's name, as `dtrain launch list` shows it.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
HOST_COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "bright_cyan", "bright_magenta", "bright_yellow")


@app.command(epilog="Example: dtrain launch plan recipe.yaml")
def plan(
    recipe: Recipe,
    overrides: Overrides = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show the files, commands, machines and price of `up`, and change nothing."""
    with exits(debug):
        target, job = asked(recipe, overrides or [])
        found = target.plan(job)
        if as_json:
            import dataclasses
            import json

            typer.echo(json.dumps(dataclasses.asdict(found), indent=2))
        else:
            _show(found, whole=True)


@app.command(epilog="Example: dtrain launch up recipe.yaml --yes --detach")
def up(
    recipe: Recipe,
    overrides: Overrides = None,
    yes: Yes = False,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return when it is started; do not follow.")] = False,
    runs_dir: RunsDir = Path("runs"),
    debug: Debug = False,
) -> None:
    """Bring the machines up, start the run on all of them, and follow it. It goes on when this ends."""
    with exits(debug):
        import dataclasses
        import time

        from dtrain.folder import folder
        from dtrain.launch import board
        from dtrain.recipe.load import plain_part

        target, job = asked(recipe, overrides or [])
        _show(target.plan(job), whole=False)
        _be_sure("Start it?", yes)
        before, section = board.find(runs_dir, job.name), plain_part(target)
        if before and before.target == section:
            job = dataclasses.replace(job, handle=before.handle)
        elif before:
            refuse_while_alive(before)
        job = dataclasses.replace(job, handle=target.up(job, _say))
        entry = board.Entry(section, job.name, job.recipe, dict(job.handle), time.time())
        entry.write(folder(runs_dir, job.name))
        typer.secho(f"{job.name} is started", fg="green", err=True)
        if not detach:
            _follow(target, job, None)


@app.command(epilog="Example: dtrain launch status my-run")
def status(name: Name, as_json: Json = False, runs_dir: RunsDir = Path("runs"), debug: Debug = False) -> None:
    """How a launched run stands, machine by machine."""
    with exits(debug):
        target, job = known(runs_dir, name)
        rows = target.status(job)
        if as_json:
            import dataclasses
            import json

            typer.echo(json.dumps([dataclasses.asdict(row) for row in rows], indent=2))
            return
        width = max((len(row.name) for row in rows), default=0)
        for row in rows:
            typer.echo(f"{row.name:<{width}}  {row.state:<8}  {row.what}".rstrip())


@app.command(epilog="Example: dtrain launch logs my-run --follow --host 1")
def logs(
    name: Name,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
    host: Annotated[int | None, typer.Option(min=0, help="Of one machine alone, by its number from 0.")] = None,
    runs_dir: RunsDir = Path("runs"),
    debug: Debug = False,
) -> None:
    """What a launched run says, each line with its machine. Ctrl-C detaches; the run goes on."""
    with exits(debug):
        target, job = known(runs_dir, name)
        if follow:
            _follow(target, job, host)
        else:
            _print(target.logs(job, host, follow=False))


@app.command(epilog="Example: dtrain launch stop my-run")
def stop(name: Name, runs_dir: RunsDir = Path("runs"), debug: Debug = False) -> None:
    """Have a launched run save and leave. `launch up` goes on from there."""
    with exits(debug):
        target, job = known(runs_dir, name)
        target.stop(job, _say)
        typer.secho(f"{name} is stopped; `dtrain launch up` goes on from what it saved", fg="green", err=True)


@app.command(epilog="Example: dtrain launch down my-run --yes")
def down(name: Name, yes: Yes = False, runs_dir: RunsDir = Path("runs"), debug: Debug = False) -> None:
    """Take down all that `up` brought. What the run saved stays."""
    with exits(debug):
        from dtrain.launch import board

        target, job = known(runs_dir, name)
        typer.echo("this removes, without saving first:", err=True)
        for line in target.removes(job):
            typer.echo(f"  {line}", err=True)
        _be_sure("Go on?", yes)
        target.down(job, _say)
        board.forget(runs_dir, name)
        typer.secho(f"{name} is down; what it saved is where it was", fg="green", err=True)


@app.command("list", epilog="Example: dtrain launch list")
def list_(runs_dir: RunsDir = Path("runs"), debug: Debug = False) -> None:
    """The runs that were launched from here."""
    with exits(debug):
        import time

        from dtrain.launch import board

        for one in board.entries(runs_dir):
            since = time.strftime("%Y-%m-%d %H:%M", time.localtime(one.since))
            typer.echo(f"{one.name:<30} {one.target['kind']:<8} since {since}")


def _be_sure(question: str, yes: bool) -> None:
    """Ask, unless that is answered. RecipeError where nobody can be asked."""
    from dtrain.errors import Aborted, RecipeError

    if yes:
        return
    if not sys.stdin.isatty():
        raise RecipeError("nobody can be asked here", "add --yes")
    try:
        agreed = typer.confirm(question, err=True)
    except typer.Abort:
        agreed = False
    if not agreed:
        typer.echo("nothing was changed", err=True)
        raise typer.Exit(Aborted.exit_code)


def _show(found: "Plan", whole: bool) -> None:
    import shlex

    if whole:
        for name, text in found.files.items():
            typer.secho(f"--- {name}", bold=True)
            typer.echo(text.rstrip("\n"))
        typer.secho("--- commands", bold=True)
        for command in found.commands:
            typer.echo(shlex.join(command))
    for note in found.notes:
        typer.echo(note, err=True)
    price = f", {found.dollars_hour:,.2f} dollars an hour" if found.dollars_hour is not None else ""
    chips = f", {found.chips} chips" if found.chips else ""
    typer.secho(f"{found.hosts} host{'s' * (found.hosts != 1)}{chips}{price}", bold=True, err=True)


def _follow(target: "Target", job: "Job", host: int | None) -> None:
    """Until the run has ended everywhere; Ctrl-C leaves it alone."""
    try:
        _print(target.logs(job, host, follow=True))
    except KeyboardInterrupt:
        typer.secho(f"\n{job.name} goes on; to come back: dtrain launch logs {job.name} -f", fg="yellow", err=True)
        return
    bad = next((row.code for row in target.status(job) if row.code), 0)
    if bad:
        raise typer.Exit(bad)


def _print(lines: Any) -> None:
    colours: dict[str, str] = {}
    for name, text in lines:
        colour = colours.setdefault(name, HOST_COLOURS[len(colours) % len(HOST_COLOURS)])
        typer.echo(f"{typer.style(f'[{name}]', fg=colour)} {_plain(text)}")


def _plain(text: str) -> str:
    """Without characters that would steer the terminal."""
    return "".join(one for one in text if one.isprintable() or one == "\t")


def _say(text: str) -> None:
    typer.echo(text, err=True)
