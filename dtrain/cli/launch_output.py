"""What `dtrain launch` asks and shows."""

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from dtrain.launch.job import LaunchJob, LaunchPlan, LaunchTarget

HOST_COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "bright_cyan", "bright_magenta", "bright_yellow")


def confirm(question: str, yes: bool) -> None:
    """Ask, unless `yes` answers. RecipeError where standard input is not a terminal."""
    from dtrain.core.errors import Aborted, RecipeError

    if yes:
        return
    if not sys.stdin.isatty():
        raise RecipeError("standard input is not a terminal, so this question cannot be answered", "add --yes")
    try:
        agreed = typer.confirm(question, err=True)
    except typer.Abort:
        agreed = False
    if not agreed:
        typer.echo("not done", err=True)
        raise typer.Exit(Aborted.exit_code)


def show(found: "LaunchPlan", whole: bool) -> None:
    """A plan; its files and commands too where it is shown whole."""
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
    chips = f", {found.chips} chips" if found.chips else ""
    typer.secho(f"{found.hosts} host{'s' * (found.hosts != 1)}{chips}{_price(found)}", bold=True, err=True)


def _price(found: "LaunchPlan") -> str:
    """Dollars an hour, and what bounds the sum."""
    price = f", {found.dollars_hour:,.2f} dollars an hour" if found.dollars_hour is not None else ""
    if found.hours is None:
        return f"{price}, no limit in time" if price else ""
    most = f", about {found.hours * found.dollars_hour:,.2f} dollars" if found.dollars_hour is not None else ""
    return f"{price}, at most {found.hours:g} hours of `dtrain run`{most}"


def start_lines(target: "LaunchTarget", job: "LaunchJob") -> list[str]:
    """What agreeing starts: on which hosts, which program, with which environment variables, and whose model."""
    import shlex

    from dtrain.recipe.yaml import parse

    lines = target.describe()
    if target.sends_environment:
        lines.append(f"environment variables sent: {', '.join(target.environment) or 'none'}")
    recipe = parse(job.recipe, "recipe").plain()
    lines += [f"model code: {recipe['model']['target']}"] if recipe["model"]["kind"] == "custom" else []
    notify = recipe.get("track", {}).get("notify", {}).get("command", [])
    lines += [f"command run at the run's events: {shlex.join(notify)}"] if notify else []
    return [_plain(line) for line in lines]


def follow_run(target: "LaunchTarget", job: "LaunchJob", host: int | None) -> None:
    """Until the run has ended everywhere; Ctrl-C leaves it alone."""
    try:
        print_lines(target.logs(job, host, follow=True))
    except KeyboardInterrupt:
        typer.secho(
            f"\n{job.name} continues; to follow it again: dtrain launch logs {job.name} -f", fg="yellow", err=True
        )
        return
    bad = next((row.code for row in target.status(job) if row.code), 0)
    if bad:
        raise typer.Exit(bad)


def print_lines(lines: Iterable[tuple[str, str]]) -> None:
    """Each line with its machine, in a colour of its own."""
    colours: dict[str, str] = {}
    for name, text in lines:
        colour = colours.setdefault(name, HOST_COLOURS[len(colours) % len(HOST_COLOURS)])
        typer.echo(f"{typer.style(f'[{name}]', fg=colour)} {_plain(text)}")


def _plain(text: str) -> str:
    """Without characters that would steer the terminal."""
    return "".join(one for one in text if one.isprintable() or one == "\t")


def say(text: str) -> None:
    """A line beside the data."""
    typer.echo(text, err=True)
