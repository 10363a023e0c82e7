"""dtrain sweep"""

import signal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dtrain.cli import completion
from dtrain.cli.arguments import RUNS, Debug, Devices, Json, Recipe, RunsDir
from dtrain.cli.exits import exits

if TYPE_CHECKING:
    from dtrain.core.run_dir import Folder
    from dtrain.runtime.sweep import Sweep, Trial
    from dtrain.track.summary import Summary

RESULTS = (0, 7)
"""Exit codes of a run that are a result of the sweep: it finished, or its loss was not finite."""


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command(epilog="Example: dtrain sweep mlp-digits optimizer.lr=1e-4,1e-3,1e-2 seed=0,1")(sweep)


def sweep(
    recipe: Recipe,
    overrides: Annotated[
        list[str],
        typer.Argument(
            metavar="KEY=A,B,...",
            help="Values to try; with --trials also ranges: 0.1..0.9, log:1e-5..1e-2, int:2..8.",
            autocompletion=completion.overrides,
        ),
    ],
    trials: Annotated[int | None, typer.Option(min=1, help="Draw this many random combinations; else all.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random combinations.")] = 0,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs at a time; default: one for each GPU, or 1. GPUs are divided.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the folder of the runs; default: RECIPE-sweep.")] = None,
    metric: Annotated[
        str | None,
        typer.Option(help="Rank by this metric: eval/loss; default: checkpoint.best, or the model's first metric."),
    ] = None,
    devices: Devices = None,
    runs_dir: RunsDir = RUNS,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Train once for each combination of values, and compare the results. The same command resumes a sweep."""
    with exits(debug):
        import json

        from dtrain.cli.tables import print_table
        from dtrain.core.errors import EnvironmentFault
        from dtrain.core.run_dir import Folder
        from dtrain.core.run_dir import folder as run_folder
        from dtrain.core.signals import requests
        from dtrain.runtime.sweep import gpus, keep, parse, run_all
        from dtrain.track.summary import summarise

        for number in requests():
            signal.signal(number, signal.default_int_handler)
        plan = parse(recipe, overrides, trials, seed)
        runs = plan.trials()
        folder = run_folder(runs_dir, name or f"{_stem(recipe)}-sweep").path
        _check(plan, runs, devices, metric)
        keep(plan, folder)
        options = ["--devices", str(devices)] if devices else []
        typer.echo(f"{len(runs)} runs in {folder}: {', '.join(plan.axes)}", err=True)
        done: list[str] = []

        def started(trial: "Trial") -> None:
            typer.secho(f"{trial.name} starts; what it prints: {folder / trial.name}.out", dim=True, err=True)

        def ended(trial: "Trial", code: int, output: str) -> None:
            done.append(trial.name)
            result = (
                summarise(Folder(folder / trial.name)).result if code == 0 else f"exit code {code}: {_reason(output)}"
            )
            typer.echo(f"{len(done)}/{len(runs)}  {trial.name}  {result}", err=True)

        codes = run_all(
            plan, runs, folder, jobs=jobs or len(gpus()) or 1, options=options, started=started, ended=ended
        )
        places = {one.name: Folder(folder / one.name) for one in runs}
        found = {name: summary for name, run_dir in places.items() if (summary := _summary(run_dir))}
        if metric:
            found = {name: summary.by(metric) for name, summary in found.items() if summary.values["last"]}
        ranked = _ranked(runs, found)
        if as_json:
            values = {trial.name: found[trial.name].values for trial in ranked if trial.name in found}
            rows = [dict(trial.values) | {"name": trial.name} | values.get(trial.name, {}) for trial in ranked]
            typer.echo(json.dumps(rows, indent=2))
        else:
            print_table([_row(trial, found.get(trial.name), codes[trial.name]) for trial in ranked], spare=("best",))
        _picture(plan, ranked, found, folder)
        failed = [(name, code) for name, code in codes.items() if code not in RESULTS]
        if failed:
            message = f"{len(failed)} of {len(runs)} runs failed, {failed[0][0]} with exit code {failed[0][1]}"
            hint = f"what each printed is in {folder}/NAME.out; the same command tries them again"
            raise EnvironmentFault(message, hint)


def _stem(recipe: str) -> str:
    return Path(recipe).stem.lower().replace("_", "-")


def _summary(run_dir: "Folder") -> "Summary | None":
    """The summary of a run; None if there is none, or it cannot be read."""
    from dtrain.core.errors import DtrainError
    from dtrain.track.summary import summarise

    try:
        return summarise(run_dir)
    except DtrainError:
        return None


def _check(sweep: "Sweep", trials: "list[Trial]", devices: int | None, metric: str | None) -> None:
    """Check the recipe of every run, its data and the metric to rank by, before the first one starts."""
    from dtrain.core.errors import DataError, RecipeError
    from dtrain.core.shipped import find
    from dtrain.recipe.crosscheck import evaluated_metrics
    from dtrain.recipe.examine import examine, inspect_once

    inspect, warnings = inspect_once(), dict[str, None]()
    for trial in trials:
        overrides = [*sweep.fixed, *trial.overrides, f"name={trial.name}"]
        try:
            checked = examine(find(sweep.recipe), overrides, devices, data=True, inspect=inspect)
            warnings |= dict.fromkeys(checked.warnings)
            known = evaluated_metrics(checked.recipe)
            if (
                metric
                and known is not None
                and not metric.startswith("train/")
                and not {metric, f"eval/{metric}"} & known
            ):
                raise RecipeError(
                    f"--metric {metric}: the runs do not measure it", f"one of {', '.join(sorted(known))}"
                )
        except RecipeError as error:
            raise RecipeError(
                [f"{' '.join(trial.overrides)}:", *error.message.splitlines()], error.hint, error.topic
            ) from error
        except DataError as error:
            raise DataError(f"{' '.join(trial.overrides)}:\n{error.message}", error.hint) from error
    for warning in warnings:
        typer.secho(f"warning: {warning}", fg="yellow", err=True)


def _reason(output: str) -> str:
    lines = [line for line in output.splitlines() if line.startswith(("error:", "stopped:"))]
    return lines[-1].partition(": ")[2] if lines else output.strip().rpartition("\n")[2]


def _ranked(trials: "list[Trial]", found: "dict[str, Summary]") -> "list[Trial]":
    """The runs, best result first; those without one last."""

    def rank(trial: "Trial") -> tuple[bool, float]:
        summary = found.get(trial.name)
        name, rises = summary.main_metric if summary else ("", None)
        if summary is None or not name or rises is None or summary.values["state"] != "finished":
            return True, 0.0
        return False, -summary.values["last"][name] if rises else summary.values["last"][name]

    return sorted(trials, key=rank)


def _row(trial: "Trial", summary: "Summary | None", code: int) -> dict[str, str]:
    from dtrain.track.text import duration

    values = summary.values if summary else {}
    return dict(trial.values) | {
        "result": summary.result if summary else "",
        "best": summary.best if summary else "",
        "state": values.get("state", f"exit code {code}"),
        "step": f"{values['step']:,}" if values else "",
        "time": duration(values["wall"]) if values else "",
        "run": trial.name,
    }


def _picture(sweep: "Sweep", trials: "list[Trial]", found: "dict[str, Summary]", folder: Path) -> None:
    from dtrain.cli.next_commands import program
    from dtrain.track.picture import draw_results

    shown = [(trial.values, found[trial.name]) for trial in trials if trial.name in found]
    if shown and draw_results(list(sweep.axes), shown, folder / "sweep.png"):
        typer.echo(f"picture: {folder / 'sweep.png'}", err=True)
    if shown:
        typer.secho(f"next: {program()} report {folder} --html sweep.html", dim=True, err=True)
