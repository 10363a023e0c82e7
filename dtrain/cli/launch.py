"""Commands of `dtrain launch`: plan, up, status, logs, stop, down, list."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dtrain.cli import completion
from dtrain.cli.arguments import RUNS, Debug, Json, Overrides, Recipe, RunsDir
from dtrain.cli.exits import exits
from dtrain.cli.launch_lookup import known, launchable, refuse_while_alive, rented
from dtrain.cli.launch_output import confirm, follow_run, print_logs, say, show, start_lines
from dtrain.cli.preflight_plan import predict, refuse_layout, refuse_too_large, require_limit
from dtrain.cli.synonyms import Group
from dtrain.cli.tables import print_table

if TYPE_CHECKING:
    from dtrain.launch.job import LaunchJob, MachineState

AT_ONCE = 16
"""Targets that are queried in parallel."""
DAY, HOUR, MINUTE = 86400, 3600, 60


def launches(runs: Path, state: bool) -> list[dict[str, str]]:
    """A row of strings for each record, newest first; with `state`, the targets are queried in parallel."""
    from concurrent.futures import ThreadPoolExecutor

    from dtrain.launch import registry

    records = registry.records(runs)
    if not state:
        return [_row(record, [], "") for record in records]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return [_row(record, *answer) for record, answer in zip(records, list(pool.map(_answer, records)), strict=True)]


def _answer(record: "LaunchJob") -> "tuple[list[MachineState], str]":
    """The target's rows, and the problem if it could not be queried."""
    from dtrain.cli.launch_lookup import target_of
    from dtrain.core.errors import DtrainError

    try:
        return target_of(record).status(record), ""
    except DtrainError as error:
        return [], f"unknown: {error.message.splitlines()[0]}"


def _row(record: "LaunchJob", rows: "list[MachineState]", problem: str) -> dict[str, str]:
    states = sorted({row.state for row in rows})
    paid = next((row.seconds for row in rows if row.seconds is not None), None)
    cost = f"${paid / HOUR * record.dollars_hour:,.2f}" if paid is not None and record.dollars_hour else ""
    return {
        "name": record.name,
        "target": record.target.get("kind", ""),
        "state": problem or ", ".join(states),
        "owner": record.owner,
        "age": age(time.time() - record.since),
        "cost": cost,
    }


def age(seconds: float) -> str:
    """A duration in its two largest units: 3d 4h, 2h 5m, 12m."""
    whole = max(int(seconds), 0)
    if whole >= DAY:
        return f"{whole // DAY}d {whole % DAY // HOUR}h"
    if whole >= HOUR:
        return f"{whole // HOUR}h {whole % HOUR // MINUTE}m"
    return f"{whole // MINUTE}m"


app = typer.Typer(
    cls=Group,
    help="Run a recipe in the background, on hosts that ssh reaches, or on SLURM, GKE or SkyPilot.",
    no_args_is_help=True,
)

Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="The run's name, as `dtrain launch list` shows it, or its recipe file.",
        autocompletion=completion.runs_and_recipes,
    ),
]
RENT = "What to rent, as v5e-64 or h100-16; sets launch.on."
On = Annotated[str | None, typer.Option("--on", autocompletion=completion.targets, help=RENT)]
Spot = Annotated[bool, typer.Option("--spot", help="Use spot capacity; sets launch.spot.")]
PlanFirst = Annotated[
    bool, typer.Option("--plan/--no-plan", help="Predict memory, time and price, and refuse what does not fit.")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
Terraform = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="Use output `launch` of this applied Terraform folder as launch section."),
]


@app.command(epilog="Example: dtrain launch plan recipe.yaml")
def plan(
    recipe: Recipe,
    overrides: Overrides = None,
    on: On = None,
    spot: Spot = False,
    terraform: Terraform = None,
    plan_first: PlanFirst = True,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show the files, commands, machines, prediction and price of `up`, and change nothing."""
    with exits(debug):
        target, job = launchable(recipe, rented(on, spot) + (overrides or []), terraform)
        launch_plan = target.plan(job)
        if as_json:
            import dataclasses
            import json

            prediction = predict(job, launch_plan) if plan_first else None
            values = dataclasses.asdict(launch_plan) | {"needs": job.needs, "prediction": prediction}
            typer.echo(json.dumps(values, indent=2))
        else:
            show(launch_plan, whole=True)
            for line in job.needs:
                say(line)
            prediction = predict(job, launch_plan) if plan_first else None
        refuse_layout(job, launch_plan)
        refuse_too_large(job, prediction)


@app.command(epilog="Example: dtrain launch up recipe.yaml --yes --detach")
def up(
    recipe: Recipe,
    overrides: Overrides = None,
    on: On = None,
    spot: Spot = False,
    terraform: Terraform = None,
    plan_first: PlanFirst = True,
    limit: Annotated[
        bool, typer.Option("--limit/--no-limit", help="Require a limit in hours or dollars for what is rented.")
    ] = True,
    allow_changes: Annotated[
        bool, typer.Option("--allow-changes", help="Resume from saved state even if the recipe changed.")
    ] = False,
    yes: Yes = False,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return when it is started; do not follow.")] = False,
    runs_dir: RunsDir = RUNS,
    debug: Debug = False,
) -> None:
    """Start the run on all machines, and follow it. It keeps running when this command ends."""
    with exits(debug):
        import dataclasses
        import secrets

        from dtrain.core.run_dir import folder
        from dtrain.launch import registry

        target, job = launchable(recipe, rented(on, spot) + (overrides or []), terraform)
        job = dataclasses.replace(job, launch=secrets.token_hex(4), folder=folder(runs_dir, job.name).path)
        job = dataclasses.replace(job, allow_changes=allow_changes)
        launch_plan = target.plan(job)
        refuse_layout(job, launch_plan)
        if limit:
            require_limit(launch_plan)
        notes = target.check(job)
        show(launch_plan, whole=False)
        if plan_first:
            refuse_too_large(job, predict(job, launch_plan))
        for line in [*start_lines(target, job), *job.needs, *notes]:
            say(line)
        confirm("Start it?", yes)
        with registry.alone(runs_dir, job.name):
            before = registry.find(runs_dir, job.name)
            if before and before.target != job.target:
                refuse_while_alive(before)
            job = registry.start(runs_dir, target, job, launch_plan.dollars_hour, before, say)
        typer.secho(f"{job.name} is started", fg="green", err=True)
        if not detach:
            follow_run(target, job, None)


@app.command(epilog="Example: dtrain launch status my-run")
def status(
    name: Name,
    overrides: Overrides = None,
    terraform: Terraform = None,
    as_json: Json = False,
    runs_dir: RunsDir = RUNS,
    debug: Debug = False,
) -> None:
    """Show the state of a launched run, machine by machine."""
    with exits(debug):
        target, job = known(runs_dir, name, overrides, terraform)
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
    overrides: Overrides = None,
    terraform: Terraform = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue until the run ends.")] = False,
    host: Annotated[int | None, typer.Option(min=0, help="Show one machine only, by its number from 0.")] = None,
    runs_dir: RunsDir = RUNS,
    debug: Debug = False,
) -> None:
    """Show what a launched run prints, each line with its machine. Ctrl-C detaches; the run continues."""
    with exits(debug):
        target, job = known(runs_dir, name, overrides, terraform)
        if follow:
            follow_run(target, job, host)
        else:
            print_logs(target, job, host, follow=False)


@app.command(epilog="Example: dtrain launch stop my-run")
def stop(
    name: Name,
    overrides: Overrides = None,
    terraform: Terraform = None,
    runs_dir: RunsDir = RUNS,
    debug: Debug = False,
) -> None:
    """Make a launched run save and end. `launch up` resumes it."""
    with exits(debug):
        target, job = known(runs_dir, name, overrides, terraform)
        target.stop(job, say)
        typer.secho(f"{job.name} is stopped; `dtrain launch up` resumes from what it saved", fg="green", err=True)


@app.command(epilog="Example: dtrain launch down my-run --yes")
def down(
    name: Name,
    overrides: Overrides = None,
    terraform: Terraform = None,
    yes: Yes = False,
    runs_dir: RunsDir = RUNS,
    debug: Debug = False,
) -> None:
    """Remove everything that `up` created, without waiting for a save. Checkpoints saved before are kept."""
    with exits(debug):
        from dtrain.launch import registry

        target, job = known(runs_dir, name, overrides, terraform)
        typer.echo("this removes, without waiting for a save:", err=True)
        for line in target.removes(job):
            typer.echo(f"  {line}", err=True)
        confirm("Remove it?", yes)
        target.down(job, say)
        registry.forget(runs_dir, job.name)
        typer.secho(f"{job.name} is removed; its saved checkpoints are kept", fg="green", err=True)


@app.command("list", epilog="Example: dtrain launch list")
def list_(
    state: Annotated[bool, typer.Option("--state/--no-state", help="Ask each target for the run's state.")] = True,
    as_json: Json = False,
    runs_dir: RunsDir = RUNS,
    debug: Debug = False,
) -> None:
    """List the launched runs: target, state, owner, age and, if known, the cost so far."""
    with exits(debug):
        from dtrain.launch import registry

        rows = launches(runs_dir, state)
        for path, why in registry.unused(runs_dir):
            say(f"launch record {path}: {why}")
        if as_json:
            import json

            typer.echo(json.dumps(rows, indent=2))
            return
        if not rows:
            say(f"no launch is recorded in {runs_dir}; `dtrain launch up RECIPE` starts one")
            return
        print_table(rows)
