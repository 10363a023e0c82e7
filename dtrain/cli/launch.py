"""dtrain launch: plan, up, status, logs, stop, down, list"""

from pathlib import Path
from typing import Annotated

import typer

from dtrain.cli.arguments import Debug, Json, Overrides, Recipe, RunsDir
from dtrain.cli.exits import exits
from dtrain.cli.foretold import foretell
from dtrain.cli.launch_output import be_sure, follow_run, print_lines, say, show
from dtrain.cli.launched import applied, asked, kept, known, refuse_while_alive, rented

app = typer.Typer(
    help="Run a recipe elsewhere: without this terminal, on hosts that ssh reaches, on SLURM, on GKE.",
    no_args_is_help=True,
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="The run's name, as `dtrain launch list` shows it.")]
On = Annotated[str | None, typer.Option("--on", help="What to rent, as v5e-64 or h100-16: the recipe's launch.on.")]
Spot = Annotated[bool, typer.Option("--spot", help="As spot capacity: the recipe's launch.spot.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


@app.command(epilog="Example: dtrain launch plan recipe.yaml")
def plan(
    recipe: Recipe,
    overrides: Overrides = None,
    on: On = None,
    spot: Spot = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show the files, commands, machines and price of `up`, and change nothing."""
    with exits(debug):
        target, job = asked(recipe, rented(on, spot) + (overrides or []))
        found = target.plan(job)
        if as_json:
            import dataclasses
            import json

            typer.echo(json.dumps(dataclasses.asdict(found), indent=2))
        else:
            show(found, whole=True)


@app.command(epilog="Example: dtrain launch up recipe.yaml --yes --detach")
def up(
    recipe: Recipe,
    overrides: Overrides = None,
    on: On = None,
    spot: Spot = False,
    terraform: Annotated[
        str | None, typer.Option(metavar="FOLDER", help="Apply this Terraform first; its output `launch` says where.")
    ] = None,
    var: Annotated[list[str] | None, typer.Option(metavar="NAME=VALUE", help="A variable of the Terraform.")] = None,
    plan_first: Annotated[
        bool,
        typer.Option(
            "--plan/--no-plan", help="Foretell memory, time and price of what is rented, and hold it to that."
        ),
    ] = True,
    yes: Yes = False,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return when it is started; do not follow.")] = False,
    runs_dir: RunsDir = Path("runs"),
    debug: Debug = False,
) -> None:
    """Bring the machines up, start the run on all of them, and follow it. It goes on when this ends."""
    with exits(debug):
        import dataclasses

        from dtrain.folder import folder
        from dtrain.launch import board
        from dtrain.launch.terraform import Ground

        ground = Ground(str(Path(terraform).absolute()), tuple(var or ())) if terraform else None
        with kept(ground):
            made = applied(ground, yes) if ground else []
            target, job = asked(recipe, made + rented(on, spot) + (overrides or []))
            show(target.plan(job), whole=False)
            if plan_first:
                foretell(job)
            be_sure("Start it?", yes)
            before = board.find(runs_dir, job.name)
            if before and before.target == job.section:
                job = dataclasses.replace(job, handle=before.handle)
            elif before:
                refuse_while_alive(before)
            job = dataclasses.replace(job, handle=target.begins(job))
            made_on = dataclasses.asdict(ground) if ground else before.ground if before else {}
            entry = dataclasses.replace(board.entry_of(job), ground=made_on)
            with board.noted(runs_dir, entry, before):  # so that what is half made can be found and taken down
                job = dataclasses.replace(job, handle=target.up(job, say))
            dataclasses.replace(entry, handle=dict(job.handle)).write(folder(runs_dir, job.name))
        typer.secho(f"{job.name} is started", fg="green", err=True)
        if not detach:
            follow_run(target, job, None)


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
            follow_run(target, job, host)
        else:
            print_lines(target.logs(job, host, follow=False))


@app.command(epilog="Example: dtrain launch watch my-run")
def watch(
    name: Name,
    pause: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 30.0,
    runs_dir: RunsDir = Path("runs"),
    debug: Debug = False,
) -> None:
    """Ask for TPU VMs again when they are preempted, until the run is over: what the watcher does that `up` leaves."""
    with exits(debug):
        from dtrain.errors import RecipeError
        from dtrain.launch.rented import Rented
        from dtrain.launch.watch import Watch

        target, job = known(runs_dir, name)
        if not isinstance(target, Rented) or not target.GONE:
            raise RecipeError(f"nothing to watch: with {target.kind} machines come back by themselves")
        try:
            code = Watch(target, job, say).run(pause)
        except KeyboardInterrupt:
            typer.secho(f"\n{name} is not watched any more; it goes on until it is preempted", fg="yellow", err=True)
            return
        if code:
            raise typer.Exit(code)


@app.command(epilog="Example: dtrain launch stop my-run")
def stop(name: Name, runs_dir: RunsDir = Path("runs"), debug: Debug = False) -> None:
    """Have a launched run save and leave. `launch up` goes on from there."""
    with exits(debug):
        target, job = known(runs_dir, name)
        target.stop(job, say)
        typer.secho(f"{name} is stopped; `dtrain launch up` goes on from what it saved", fg="green", err=True)


@app.command(epilog="Example: dtrain launch down my-run --yes")
def down(name: Name, yes: Yes = False, runs_dir: RunsDir = Path("runs"), debug: Debug = False) -> None:
    """Take down all that `up` brought. What the run saved stays."""
    with exits(debug):
        from dtrain.launch import board
        from dtrain.launch.terraform import Ground

        target, job = known(runs_dir, name)
        ground = board.entry(runs_dir, name).ground
        typer.echo("this removes, without saving first:", err=True)
        for line in (*target.removes(job), *(Ground(**ground).holds() if ground else ())):
            typer.echo(f"  {line}", err=True)
        be_sure("Go on?", yes)
        target.down(job, say)
        others = [one.name for one in board.entries(runs_dir) if one.name != name and one.ground == ground]
        if ground and others:
            say(f"{ground['folder']} stays: {', '.join(others)} stands on it")
        elif ground:
            Ground(**ground).destroy(say)
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
