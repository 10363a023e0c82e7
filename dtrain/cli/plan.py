"""dtrain plan"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dtrain.cli import completion
from dtrain.cli.arguments import RUNS, Debug, Json, Overrides, Recipe, RunCode, RunsDir, refuse_code
from dtrain.cli.exits import cancel_interrupt, exits, interruptible
from dtrain.cli.plan_bill import Budget, Deadline, PriceFile, Tokens, WhatIf, show_bills
from dtrain.core.errors import Aborted, DtrainError, EnvironmentFault, RecipeError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from dtrain.core.slices import Target
    from dtrain.core.types import JsonObject
    from dtrain.plan.plan import Plan
    from dtrain.plan.search import SearchResult
    from dtrain.plan.variants import Candidate
    from dtrain.recipe.recipe import Recipe as Loaded

EXAMPLE = "Examples: dtrain plan recipe.yaml --on v5p-128; dtrain plan recipe.yaml --on v5p-128 --against budget.json"
WITHIN, GREW = 0.01, 1
"""By how much quantities may grow, and the exit code if one grew by more."""
ON = "A slice or GPUs: v5e-16, v5p-128, v5p:4x4x12, h100-8, cpu-8. Separate several by commas."
On = Annotated[str, typer.Option("--on", autocompletion=completion.targets, help=ON)]


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command(epilog=EXAMPLE)(plan)


def plan(
    recipe: Recipe,
    overrides: Overrides = None,
    on: On = "",
    slices: Annotated[int, typer.Option(min=1, help="Number of such slices, joined by the data-center network.")] = 1,
    quick: Annotated[
        bool, typer.Option("--quick", help="Estimate by arithmetic, in about two seconds; nothing is compiled.")
    ] = False,
    search: Annotated[
        bool,
        typer.Option("--search", help="Search for a faster mesh, remat policy, microbatches and compiler options."),
    ] = False,
    tries: Annotated[int, typer.Option(min=1, help="Largest number of variants that a search compiles.")] = 12,
    jobs: Annotated[int, typer.Option(min=1, help="Number of compilers that run at once.")] = 1,
    out: Annotated[Path | None, typer.Option(help="File for the winner of a search, as a recipe.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Image file for a plot of step time, MFU and price.")] = None,
    price: Annotated[
        float | None, typer.Option(min=0, max=1e6, help="Dollars per hour for one chip; default: the list price.")
    ] = None,
    tokens: Tokens = "",
    deadline: Deadline = "",
    budget: Budget = "",
    price_file: PriceFile = None,
    what_if: WhatIf = False,
    against: Annotated[
        str,
        typer.Option(
            metavar="RUN|FILE",
            help="A run's plan, or a file of `plan --json`: exit with 1 if memory, time, FLOPs or a collective grew.",
            autocompletion=completion.runs,
        ),
    ] = "",
    within: Annotated[
        float | None, typer.Option(min=0, help="The share by which a quantity may grow, with --against; default: 0.01.")
    ] = None,
    advice: Annotated[bool, typer.Option(help="If it does not fit, search for the nearest recipe that does.")] = True,
    run_code: RunCode = False,
    runs_dir: RunsDir = RUNS,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Predict whether a run fits on hardware that is not present, how fast it is and what it costs."""
    with exits(debug), interruptible():
        from dtrain.core.shipped import find
        from dtrain.core.slices import target

        wanted = (tokens, deadline, budget)
        if (price_file or what_if) and not any(wanted):
            option = f"--price-file {price_file}" if price_file else "--what-if"
            raise RecipeError(f"{option} goes with --tokens, --deadline or --budget", "add one")
        if any(wanted):
            _refuse_with_limits(
                {"--search": search, "--plot": plot, "--out": out, "--against": against, "--jobs": jobs > 1}
                | {"--price": price is not None, "--within": within is not None}
            )
            settle(())
            raise typer.Exit(
                show_bills(recipe, overrides or [], run_code, on, slices, wanted, price_file, what_if, as_json)
            )
        if not on:
            raise RecipeError("--on is missing: --on names a slice or GPUs", "e.g. --on v5e-16, v5p-128, h100-8, cpu-8")
        targets = [target(name.strip(), slices) for name in on.split(",")]
        _refuse_together(targets, quick, search, plot, out)
        _refuse_with_budget(targets, search, against, within)
        settle(targets)
        if plot:
            from dtrain.plan.scale import refuse_undrawable

            refuse_undrawable(plot)
        from dtrain.recipe.load import load

        path = find(recipe)
        loaded = [load(path, overrides or [], None if len(targets) > 1 else on.devices) for on in targets]
        refuse_code(loaded[0].user_code, run_code)
        if len(targets) > 1:
            raise typer.Exit(_curve(loaded[0], targets, quick, jobs, price, plot, as_json))
        if search:
            result = _search(loaded[0], targets[0], tries, jobs, price, as_json)
            if result.winner:
                _store(result.winner[1], runs_dir)
                if result.stopped and not result.winner[0].changes:
                    typer.echo("nothing written: no faster variant was compiled before the search was ended", err=True)
                    raise typer.Exit(Aborted.exit_code)
                _write(result.winner[0], path, overrides or [], out or _default_file(loaded[0], targets[0]))
            code = 0 if result.winner else EnvironmentFault.exit_code
            raise typer.Exit(Aborted.exit_code if result.stopped else code)
        kept = _kept(against, targets[0], quick, runs_dir) if against else None
        outcome = _one(loaded[0], targets[0], quick, price)
        if kept:
            raise typer.Exit(_hold(outcome, *kept, WITHIN if within is None else within, as_json))
        _show(outcome, as_json)
        _store(outcome, runs_dir)
        if plot and outcome.may_fit:
            _draw([outcome], plot)
        if advice and not outcome.fits and not as_json:
            _advise(outcome, jobs)
        raise typer.Exit(0 if outcome.may_fit else EnvironmentFault.exit_code)


def _refuse_together(
    targets: "Sequence[Target]", quick: bool, search: bool, plot: Path | None, out: Path | None
) -> None:
    """Raise RecipeError for options that cannot be combined, before anything is planned."""
    if search and (quick or len(targets) > 1):
        raise RecipeError("--search compiles for one target", "remove --quick, and name one slice")
    if search and plot:
        raise RecipeError("--plot cannot be combined with --search", "plan the winner of the search with --plot")
    if out and not search:
        raise RecipeError(f"--out {out}: only a search writes a recipe", "add --search, or remove --out")


def _refuse_with_budget(targets: "Sequence[Target]", search: bool, against: str, within: float | None) -> None:
    """Raise RecipeError for options that do not go with --against, or need it."""
    if against and (search or len(targets) > 1):
        raise RecipeError("--against compares one plan with one", "remove --search, and name one slice")
    if within is not None and not against:
        raise RecipeError(f"--within {within:g} goes with --against RUN|FILE", "name what the plan is compared with")


def _refuse_with_limits(others: Mapping[str, object]) -> None:
    """Raise RecipeError for options, by name, that do not go with --tokens, --deadline and --budget."""
    if given := [name for name, value in others.items() if value]:
        hint = "use --price-file" if given[0] == "--price" else "plan one slice with it"
        raise RecipeError(f"{given[0]} cannot be combined with --tokens, --deadline and --budget", hint)


def _kept(against: str, on: "Target", quick: bool, runs: Path) -> "tuple[str, JsonObject]":
    """The plan to compare with, and where it is."""
    from dtrain.core.run_dir import Folder
    from dtrain.core.run_list import find_run
    from dtrain.plan.against import kept_plan

    planned = Folder(runs / against)  # it may have plans, and no run yet
    run = planned if Path(against).is_file() or planned.plans.is_dir() else find_run(against, runs)
    return kept_plan(against, run, f"{_slug(on)}-{'quick' if quick else 'compiled'}.json")


def _hold(result: "Plan", source: str, before: "JsonObject", within: float, as_json: bool) -> int:
    """Print how a plan compares with one that was kept; the exit code."""
    import json

    from dtrain.plan.against import compared
    from dtrain.plan.report import lines, values, verdict

    now = values(result)
    if result.tier == "state":  # nothing was planned beyond the state, which does not fit
        typer.echo(json.dumps(now, indent=2) if as_json else "\n".join(lines(result)))
        typer.echo(f"not compared with {source}: the state alone does not fit", err=True)
        return EnvironmentFault.exit_code
    found = compared(source, before, now, within)
    if as_json:
        typer.echo(json.dumps(now | {"against": found.values()}, indent=2))
    else:
        typer.echo(f"{result.recipe.name} on {result.target}: {verdict(result)} [{result.tier}]")
        for line in found.lines():
            typer.echo(line)
    if not result.may_fit:
        return EnvironmentFault.exit_code
    return GREW if found.grew else 0


def settle(targets: "Sequence[Target]") -> None:
    """Set what JAX reads when it is imported: the CPU as platform, and the simulated devices of cpu-N."""
    import os

    from dtrain.parallel.devices import fake_devices

    simulated = [on.devices for on in targets if on.chip is None]
    if simulated and len(targets) > 1:
        raise RecipeError("--on: cpu-N cannot be planned together with other targets", "plan it separately")
    if simulated:
        fake_devices(simulated[0])
    os.environ["JAX_PLATFORMS"] = "cpu"


def _one(loaded: "Loaded", on: "Target", quick: bool, price: float | None) -> "Plan":
    from dtrain.plan.workers import PlanJob, outcomes

    job = PlanJob(loaded, on, quick, price)
    if quick:
        outcome = job.make()
    else:
        with _waiting(f"compiling the step for {on.name} (--quick estimates it)"):
            outcome = next(outcomes([job], 1))[1]
    if isinstance(outcome, DtrainError):
        raise outcome
    return outcome


def _waiting(text: str) -> "AbstractContextManager[object]":
    """On a terminal, what is being done and for how long, on a line that goes when it is done."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True, highlight=False)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    progress.add_task(text, total=None)
    return progress


def _store(result: "Plan", runs: Path) -> None:
    """Store the plan where `dtrain run` compares its step with it; a quick plan only if the run folder exists."""
    import json

    from dtrain.core.files import overwrite
    from dtrain.core.run_dir import folder
    from dtrain.plan.report import values

    run_dir = folder(runs, result.recipe.name)
    if not result.timing or not (result.tier == "compiled" or run_dir.path.is_dir()):
        return
    try:
        run_dir.plans.mkdir(parents=True, exist_ok=True)
        overwrite(run_dir.plans / f"{_slug(result.target)}-{result.tier}.json", json.dumps(values(result), indent=2))
    except OSError as error:
        message = f"warning: the run cannot be compared with this plan, which was not stored: {run_dir.plans}"
        typer.echo(f"{message}: {error.strerror}", err=True)


def _slug(on: "Target") -> str:
    several = f"{on.slices}x" if on.slices > 1 else ""
    return several + on.name.replace(":", "-").lower()


def _default_file(loaded: "Loaded", on: "Target") -> Path:
    return Path(f"{loaded.name}-{_slug(on)}.yaml")


def _show(result: "Plan", as_json: bool) -> None:
    import json

    from dtrain.plan.report import lines, saving, values

    cheaper = saving(result) if result.may_fit else None
    if as_json:
        more = {"cheaper_sums": cheaper.values} if cheaper else {}
        typer.echo(json.dumps(values(result) | more, indent=2))
        return
    for line in (*lines(result), *([cheaper.text] if cheaper else [])):
        typer.echo(line)


def _advise(result: "Plan", jobs: int) -> None:
    from dtrain.plan.advice import advice

    typer.echo("looking for the nearest recipe that fits ...", err=True)
    for line in advice(result.recipe, result.target, jobs, result.tier == "compiled"):
        typer.echo(line)


def _search(
    loaded: "Loaded", on: "Target", tries: int, jobs: int, price: float | None, as_json: bool
) -> "SearchResult":
    import json

    from dtrain.plan.report import saving, search_report, values
    from dtrain.plan.search import NOTHING, search

    nothing = json.dumps({"ranked": [], "stopped": True}, indent=2) if as_json else NOTHING
    say = partial(typer.echo, err=True)
    result = search(loaded, on, tries, jobs, price, say, cancel_interrupt, f"{nothing}\n")
    if as_json:
        ranked: list[Any] = [{"changes": candidate.changes, **values(plan)} for candidate, plan in result.ranked]
        typer.echo(json.dumps({"ranked": ranked, "stopped": result.stopped}, indent=2))
    else:
        cheaper = saving(result.winner[1]) if result.winner else None
        for line in (*search_report(result), *([cheaper.text] if cheaper else [])):
            typer.echo(line)
    return result


def _write(winner: "Candidate", path: Path, overrides: "Sequence[str]", target: Path) -> None:
    from dtrain.plan.search import overlay

    if not winner.changes:
        typer.echo("nothing written: the given recipe is the fastest", err=True)
        return
    try:
        target.write_text(overlay(path, target.parent, overrides, winner))
    except OSError as error:
        raise EnvironmentFault(f"cannot write {target}: {error.strerror}", "choose another with --out") from error
    typer.echo(f"wrote {target}; to train it: dtrain run {target}", err=True)


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
    from dtrain.plan.report import values
    from dtrain.plan.scale import table
    from dtrain.plan.workers import PlanJob, outcomes

    plan_jobs = [PlanJob(loaded, on, quick, price) for on in targets]
    results: list[Any] = [None] * len(plan_jobs)
    for number, outcome in outcomes(plan_jobs, jobs):
        results[number] = outcome
        typer.echo(f"{targets[number].name} done", err=True)
    plans = [plan for plan in results if isinstance(plan, Plan)]
    if as_json:
        named = zip(targets, results, strict=True)
        entries = [
            values(plan) if isinstance(plan, Plan) else {"target": on.name, "error": plan.message} for on, plan in named
        ]
        typer.echo(json.dumps(entries, indent=2))
    else:
        typer.echo("\n".join(table(targets, results)))
    if plot:
        _draw(results, plot)
    return 0 if len(plans) == len(results) and all(plan.may_fit for plan in plans) else EnvironmentFault.exit_code


def _draw(results: "Sequence[Any]", path: Path) -> None:
    from dtrain.plan.scale import draw

    try:
        draw(results, path)
    except (OSError, ValueError) as error:
        raise EnvironmentFault(f"cannot write the plot {path}: {error}", "choose another with --plot") from error
    typer.echo(f"wrote {path}", err=True)
