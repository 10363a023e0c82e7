"""dtrain plan"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dtrain.cli.arguments import Debug, Json, Overrides, Recipe, RunCode, RunsDir, refuse_code
from dtrain.cli.exits import cancel_interrupt, exits, interruptible
from dtrain.core.errors import Aborted, DtrainError, EnvironmentFault, RecipeError

if TYPE_CHECKING:
    from dtrain.core.slices import Target
    from dtrain.plan.plan import Plan
    from dtrain.plan.search import SearchResult
    from dtrain.plan.variants import Candidate
    from dtrain.recipe.recipe import Recipe as Loaded

EXAMPLE = "Example: dtrain plan recipe.yaml --on v5p-128"
On = Annotated[
    str, typer.Option("--on", help="A slice or GPUs: v5e-16, v5p-128, v5p:4x4x12, h100-8, cpu-8; several with commas.")
]


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command(epilog=EXAMPLE)(plan)


def plan(
    recipe: Recipe,
    overrides: Overrides = None,
    on: On = "",
    slices: Annotated[int, typer.Option(min=1, help="Slices of that kind, joined by the slow network.")] = 1,
    quick: Annotated[bool, typer.Option("--quick", help="Arithmetic alone, in about two seconds.")] = False,
    search: Annotated[
        bool, typer.Option("--search", help="Look for a better mesh, remat policy, microbatch and compiler options.")
    ] = False,
    tries: Annotated[int, typer.Option(min=1, help="Variants that a search compiles.")] = 12,
    jobs: Annotated[int, typer.Option(min=1, help="Compilers at work at once.")] = 1,
    out: Annotated[Path | None, typer.Option(help="Where a search writes its winner, as a recipe.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw step time, MFU and price into this file.")] = None,
    price: Annotated[float | None, typer.Option(min=0, help="Dollars an hour for one chip.")] = None,
    advice: Annotated[bool, typer.Option(help="Where it does not fit, look for the nearest recipe that does.")] = True,
    run_code: RunCode = False,
    runs_dir: RunsDir = Path("runs"),
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Say whether a run fits on hardware that is not there, how fast it goes and what it costs."""
    with exits(debug), interruptible():
        from dtrain.cli.recipes import find
        from dtrain.core.slices import target

        if not on:
            raise RecipeError("plan for what? --on names a slice or GPUs", "as in --on v5e-16, v5p-128, h100-8, cpu-8")
        targets = [target(name.strip(), slices) for name in on.split(",")]
        _refuse_together(targets, quick, search, plot, out)
        settle(targets)
        if plot:
            from dtrain.plan.scale import refuse_undrawable

            refuse_undrawable(plot)
        from dtrain.recipe.load import load

        path = find(recipe)
        loaded = [load(path, overrides or [], None if len(targets) > 1 else on.devices) for on in targets]
        refuse_code(loaded[0].model, run_code)
        if len(targets) > 1:
            raise typer.Exit(_curve(loaded[0], targets, quick, jobs, price, plot, as_json))
        if search:
            found = _search(loaded[0], targets[0], tries, jobs, price, as_json)
            if found.winner:
                _keep(found.winner[1], runs_dir)
                _write(found.winner[0], path, overrides or [], out or _named(loaded[0], targets[0]))
            code = 0 if found.winner else EnvironmentFault.exit_code
            raise typer.Exit(Aborted.exit_code if found.stopped else code)
        made = _one(loaded[0], targets[0], quick, price)
        _show(made, as_json)
        _keep(made, runs_dir)
        if plot and made.fits:
            _draw([made], plot)
        if advice and not made.fits and not as_json:
            _advise(made, jobs)
        raise typer.Exit(0 if made.fits else EnvironmentFault.exit_code)


def _refuse_together(
    targets: "Sequence[Target]", quick: bool, search: bool, plot: Path | None, out: Path | None
) -> None:
    """RecipeError for options that do not go together, before anything is planned."""
    if search and (quick or len(targets) > 1):
        raise RecipeError("--search compiles for one target", "leave --quick out, and name one slice")
    if search and plot:
        raise RecipeError("--plot draws plans, and a search makes many", "plan its winner with --plot")
    if out and not search:
        raise RecipeError(f"--out {out}: only a search writes a recipe", "add --search, or leave --out out")


def settle(targets: "Sequence[Target]") -> None:
    """What JAX must hear before it is imported."""
    import os

    from dtrain.parallel.devices import pretend

    pretended = [on.devices for on in targets if on.chip is None]
    if pretended and len(targets) > 1:
        raise RecipeError("cpu-N is planned alone", "leave it out of the list")
    if pretended:
        pretend(pretended[0])
    os.environ["JAX_PLATFORMS"] = "cpu"


def _one(loaded: "Loaded", on: "Target", quick: bool, price: float | None) -> "Plan":
    from dtrain.plan.workers import PlanJob, outcomes

    job = PlanJob(loaded, on, quick, price)
    outcome = job.make() if quick else next(outcomes([job], 1))[1]
    if isinstance(outcome, DtrainError):
        raise outcome
    return outcome


def _keep(made: "Plan", runs: Path) -> None:
    """Where `dtrain run` finds it, to hold its own step against; of the quick tier, where there is a run already."""
    import json

    from dtrain.core.run_dir import folder, overwrite
    from dtrain.plan.values import values

    place = folder(runs, made.recipe.name)
    if not made.timing or not (made.tier == "compiled" or place.path.is_dir()):
        return
    try:
        place.plans.mkdir(parents=True, exist_ok=True)
        overwrite(place.plans / f"{_slug(made.target)}-{made.tier}.json", json.dumps(values(made), indent=2))
    except OSError as error:
        typer.echo(f"the plan is not kept for the run to compare: {place.plans}: {error.strerror}", err=True)


def _slug(on: "Target") -> str:
    several = f"{on.slices}x" if on.slices > 1 else ""
    return several + on.name.replace(":", "-").lower()


def _named(loaded: "Loaded", on: "Target") -> Path:
    return Path(f"{loaded.name}-{_slug(on)}.yaml")


def _show(made: "Plan", as_json: bool) -> None:
    import json

    from dtrain.plan.report import lines
    from dtrain.plan.values import values

    typer.echo(json.dumps(values(made), indent=2) if as_json else "\n".join(lines(made)))


def _advise(made: "Plan", jobs: int) -> None:
    from dtrain.plan.advice import advice

    typer.echo("looking for the nearest recipe that fits ...", err=True)
    for line in advice(made.recipe, made.target, jobs, made.tier == "compiled"):
        typer.echo(line)


def _search(
    loaded: "Loaded", on: "Target", tries: int, jobs: int, price: float | None, as_json: bool
) -> "SearchResult":
    import json

    from dtrain.plan.report import search_report
    from dtrain.plan.search import search
    from dtrain.plan.values import values

    found = search(loaded, on, tries, jobs, price, lambda text: typer.echo(text, err=True), cancel_interrupt)
    if as_json:
        ranked: list[Any] = [{"changes": one.changes, **values(plan)} for one, plan in found.ranked]
        typer.echo(json.dumps({"ranked": ranked, "stopped": found.stopped}, indent=2))
    else:
        typer.echo("\n".join(search_report(found)))
    return found


def _write(winner: "Candidate", path: Path, overrides: "Sequence[str]", target: Path) -> None:
    from dtrain.plan.search import overlay

    if not winner.changes:
        typer.echo("nothing is written: the recipe as it is was the fastest", err=True)
        return
    try:
        target.write_text(overlay(path, target.parent, overrides, winner))
    except OSError as error:
        raise EnvironmentFault(f"cannot write {target}: {error.strerror}", "choose another with --out") from error
    typer.echo(f"written to {target}: dtrain run {target}", err=True)


def _curve(
    loaded: "Loaded",
    targets: "Sequence[Target]",
    quick: bool,
    jobs: int,
    price: float | None,
    plot: Path | None,
    as_json: bool,
) -> int:
    import json

    from dtrain.plan.plan import Plan
    from dtrain.plan.scale import table
    from dtrain.plan.values import values
    from dtrain.plan.workers import PlanJob, outcomes

    wanted = [PlanJob(loaded, on, quick, price) for on in targets]
    made: list[Any] = [None] * len(wanted)
    for number, outcome in outcomes(wanted, jobs):
        made[number] = outcome
        typer.echo(f"{targets[number].name} done", err=True)
    plans = [plan for plan in made if isinstance(plan, Plan)]
    if as_json:
        named = zip(targets, made, strict=True)
        found = [
            values(plan) if isinstance(plan, Plan) else {"target": on.name, "error": plan.message} for on, plan in named
        ]
        typer.echo(json.dumps(found, indent=2))
    else:
        typer.echo("\n".join(table(targets, made)))
    if plot:
        _draw(made, plot)
    return 0 if len(plans) == len(made) and all(plan.fits for plan in plans) else EnvironmentFault.exit_code


def _draw(made: "Sequence[Any]", path: Path) -> None:
    from dtrain.plan.scale import draw

    try:
        draw(made, path)
    except (OSError, ValueError) as error:
        raise EnvironmentFault(f"cannot draw into {path}: {error}", "choose another with --plot") from error
    typer.echo(f"drawn into {path}", err=True)
