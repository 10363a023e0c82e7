"""dtrain evaluate"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dtrain.cli.arguments import RUNS, Best, Debug, Devices, Json, Overrides, Run, RunsDir, Step, use_devices
from dtrain.cli.exits import exits, interruptible

if TYPE_CHECKING:
    from dtrain.core.types import JsonObject
    from dtrain.inference.evaluate import Evaluated
    from dtrain.weights.load import LoadedRun

SHOWN = 3
"""Answers that are printed."""


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command(
        epilog="Examples: dtrain evaluate runs/mlp-digits --best; "
        "dtrain evaluate my-chat --questions questions.jsonl --against my-base"
    )(evaluate)


def evaluate(
    run: Run,
    overrides: Overrides = None,
    split: Annotated[Literal["train", "test"], typer.Option(help="The examples to evaluate on.")] = "test",
    questions: Annotated[
        list[Path] | None,
        typer.Option(
            help="A file of questions for a decoder: JSON lines with prompt and answer, or choices; "
            "default: those of the recipe."
        ),
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens of an answer; default: evaluate.tokens of the recipe.")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(help="Another run, such as the one before tuning, to show beside it."),
    ] = None,
    step: Step = None,
    best: Best = False,
    as_json: Json = False,
    devices: Devices = None,
    runs_dir: RunsDir = RUNS,
    debug: Debug = False,
) -> None:
    """Measure a trained model: metrics, accuracy of each class, confusion matrix, scores of questions.

    Other data is named by overrides, e.g. data.root=photos.
    """
    with exits(debug), interruptible():
        use_devices(devices)
        from dtrain.core.errors import cause
        from dtrain.core.files import overwrite
        from dtrain.core.run_list import find_run
        from dtrain.weights.load import NAMES, load_run

        run_dir = find_run(run, runs_dir)
        loaded = load_run(run_dir, overrides or [], _note, step=step, best=best)
        names = tuple(map(str, questions or ())) or loaded.recipe.evaluate.questions
        tokens = tokens or loaded.recipe.evaluate.tokens
        result, samples = _measured(loaded, loaded, split, names, tokens)
        values: JsonObject = {"run": str(run), "step": loaded.step, "split": split} | result.json()
        values |= {"answers": samples} if names else {}
        if against:
            other = load_run(find_run(against, runs_dir), [], _note)
            before, _ = _measured(other, loaded, split, names, tokens)
            values["against"] = {"run": against, "step": other.step} | before.json()
        text = json.dumps(values, indent=2, ensure_ascii=False)
        for mistake in values.get("mistakes", ()):  # pictures are for the report
            mistake.pop("picture", None)
        if not overrides and not questions:
            try:
                overwrite(run_dir.evaluation, text + "\n")  # for `dtrain report --html`
            except OSError as error:
                _note(f"the result is not kept in the run folder: {cause(error)}")
        elif overrides:
            _note("not kept for `report --html`, which shows the held-out examples of the run's own recipe")
        if as_json:
            typer.echo(json.dumps(values, indent=2, ensure_ascii=False))
            return
        count = f"{result.examples:,} {NAMES[split]} examples" if result.examples else "questions alone"
        typer.secho(f"{run} at {loaded.chosen}: {count}", dim=True, err=True)
        others = [one for one in overrides or () if one.startswith("data.")]
        held_out = split == "test" and not any(one.startswith("data.test") for one in others)
        if others and held_out and loaded.recipe.data.holds_out:
            _note("these are the part of the data that data.test holds out; data.test=1 takes all of it")
        if against:
            _print_beside(loaded, values, against, run)
        else:
            typer.echo("\n".join(result.lines(loaded.recipe.model.metrics)))
        for sample in samples[:SHOWN]:
            _note(f"{sample['prompt']!r} -> {sample['given']!r}, expected {sample['answer']!r}")


def _note(text: str) -> None:
    typer.echo(text, err=True)


def _measured(
    loaded: "LoadedRun", like: "LoadedRun", split: Literal["train", "test"], names: tuple[str, ...], tokens: int
) -> "tuple[Evaluated, list[JsonObject]]":
    """The metrics of a run on the data and the chat template of the run `like`, and its answers to questions."""
    from dataclasses import replace

    from dtrain.core.errors import RecipeError
    from dtrain.data.packed_rows import unused_lines
    from dtrain.data.questions import read_questions
    from dtrain.inference.evaluate import Evaluated, lacks_base
    from dtrain.inference.evaluate import evaluate as measure
    from dtrain.inference.generate import generator_of
    from dtrain.inference.questions import refuse_without_texts, scored
    from dtrain.inference.texts import TextGenerator

    data = like.recipe.data
    read = read_questions(names) if names else []
    if read:
        refuse_without_texts(loaded.recipe.model, loaded.recipe.model.kind)
    result = Evaluated(0, {})
    lacking = lacks_base(loaded, data)
    if lacking and not read and loaded is not like:
        hint = "score both by answers to questions: --questions FILE"
        raise RecipeError("--against: a run that was not trained on such answers gives them no reward", hint)
    if not read or (data.has_examples and not lacking):
        result = measure(loaded, loaded.split(split, _note, None if like is loaded else data))
    if not read:
        return result, []
    texts = TextGenerator(generator_of(replace(loaded, recipe=replace(loaded.recipe, data=data))))
    scores = scored(texts, read, tokens)
    for line in unused_lines(texts.account):
        _note(f"questions: {line}")
    return replace(result, metrics=result.metrics | scores.metrics), scores.samples


def _print_beside(loaded: "LoadedRun", values: "JsonObject", other: str, run: str) -> None:
    from dtrain.cli.tables import print_table
    from dtrain.core.metrics import LOSS, known

    before, after = values["against"]["metrics"], values["metrics"]
    rows = []
    for name in after:
        metric = known(name, loaded.recipe.model.metrics) or LOSS._replace(name=name)
        shown = metric.text(before[name]) if name in before else ""
        rows.append({"metric": name, other: shown, run: metric.text(after[name])})
    print_table(rows)
