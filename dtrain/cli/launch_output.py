"""Questions and output of `dtrain launch`."""

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

import typer

from dtrain.core.counts import counted, hours_text
from dtrain.core.printable import printable

if TYPE_CHECKING:
    from dtrain.launch.job import LaunchJob, LaunchPlan, LaunchTarget

HOST_COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "bright_cyan", "bright_magenta", "bright_yellow")


def confirm(question: str, yes: bool) -> None:
    """Ask for confirmation, unless `yes`. RecipeError if standard input is not a terminal."""
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
        typer.echo("cancelled; nothing was changed", err=True)
        raise typer.Exit(Aborted.exit_code)


def show(plan: "LaunchPlan", whole: bool) -> None:
    """Print a plan; with `whole`, also its files and commands."""
    import shlex

    chips = f", {plan.chips} chips" if plan.chips else ""
    typer.secho(f"{counted(plan.hosts, 'host')}{chips}{_price(plan)}", bold=True, err=True)
    for note in plan.notes:
        typer.echo(note, err=True)
    if whole:
        typer.secho("--- commands", bold=True)
        for command in plan.commands:
            typer.echo(shlex.join(command))
        for name, text in plan.files.items():
            typer.secho(f"--- {name}", bold=True)
            typer.echo(text.rstrip("\n"))


def _price(plan: "LaunchPlan") -> str:
    """Dollars an hour, and the limits on hours and dollars."""
    price = f", {plan.dollars_hour:,.2f} dollars an hour" if plan.dollars_hour is not None else ""
    if plan.hours is None:
        return f"{price}, no time limit" if price else ""
    most = f", about {plan.hours * plan.dollars_hour:,.2f} dollars" if plan.dollars_hour is not None else ""
    return f"{price}, at most {hours_text(plan.hours)} of `dtrain run`{most}"


def start_lines(target: "LaunchTarget", job: "LaunchJob") -> list[str]:
    """What will be started: hosts, program, environment variables, custom code, notification command."""
    import shlex

    from dtrain.recipe.yaml import parse

    lines = target.describe()
    if target.sends_environment:
        lines.append(f"environment variables sent: {', '.join(target.environment) or 'none'}")
    recipe = parse(job.recipe, "recipe").plain()
    sections = {name: recipe[name] for name in ("model", "data", "optimizer")}
    sections |= {f"tracker {i}": one for i, one in enumerate(recipe.get("track", {}).get("to", ()), 1)}
    custom = {name: one for name, one in sections.items() if one["kind"] == "custom"}
    lines += [f"{name} code: {one['target']}" for name, one in custom.items()]
    notify = recipe.get("track", {}).get("notify", {}).get("command", [])
    lines += [f"command run at the run's events: {shlex.join(notify)}"] if notify else []
    return [_plain(line) for line in lines]


def follow_run(target: "LaunchTarget", job: "LaunchJob", host: int | None) -> None:
    """Print the logs until the run has ended on every machine; Ctrl-C does not stop the run."""
    try:
        print_logs(target, job, host, follow=True)
    except KeyboardInterrupt:
        typer.secho(
            f"\n{job.name} continues; to follow it again: dtrain launch logs {job.name} -f", fg="yellow", err=True
        )
        return
    bad = next((row.code for row in target.status(job) if row.code), 0)
    if bad:
        raise typer.Exit(bad)


def print_logs(target: "LaunchTarget", job: "LaunchJob", host: int | None, follow: bool) -> None:
    """Print the lines of one host or of all, and say so if there are none."""
    if not print_lines(target.logs(job, host, follow)):
        of = "" if host is None else f" of host {host}"
        text = f"there is no line{of}; its machines, numbered from 0: dtrain launch status {job.name}"
        typer.secho(text, fg="yellow", err=True)


def print_lines(lines: Iterable[tuple[str, str]]) -> int:
    """Print each line with the name of its machine, in a colour for each machine; how many there were."""
    colours: dict[str, str] = {}
    number = 0
    for number, (name, text) in enumerate(lines, 1):  # noqa: B007
        colour = colours.setdefault(name, HOST_COLOURS[len(colours) % len(HOST_COLOURS)])
        typer.echo(f"{typer.style(f'[{name}]', fg=colour)} {_plain(text)}")
    return number


def _plain(text: str) -> str:
    """The text without control characters for the terminal."""
    return "".join(char for char in text if char.isprintable() or char == "\t")


def say(text: str) -> None:
    """Print a line to standard error, apart from the data."""
    typer.echo(printable(text), err=True)
