"""What a run does at its evaluations besides measuring the held-out examples: answers, samples, measures, decisions."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax

from dtrain.assembly.assemble import Assembly
from dtrain.assembly.state import State
from dtrain.core.errors import RecipeError
from dtrain.core.metrics import Metric, higher_is_better
from dtrain.core.types import JsonObject
from dtrain.data.questions import Question, read_questions
from dtrain.data.source import Source
from dtrain.inference.measures import Measurement, declared, measurements
from dtrain.inference.outputs import Outputs, outputs
from dtrain.inference.questions import Questioner, refuse_without_texts, score_names
from dtrain.inference.samples import Rows, drawn, write_samples
from dtrain.parallel.engine import Traced
from dtrain.recipe.recipe import Recipe, watched
from dtrain.track.tracker import Sample, Tracker
from dtrain.train.progress import Improvement, Progress
from dtrain.train.session import Session

ANSWERS = 50
"""Most answers that trackers get at a time; answers.jsonl has all."""


@dataclass(frozen=True)
class AtEvaluations:
    """What the recipe's `evaluate` asks for, made before the first step."""

    assembly: Assembly
    questions: Sequence[Question]
    samples: Outputs | None
    measures: Sequence[Measurement]

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Those that the model and the measures declare."""
        return (*self.assembly.model.metrics, *declared(self.measures))

    @property
    def scores(self) -> set[str]:
        """The names of the metrics that questions and measures give."""
        return score_names(self.questions) | {metric.name for metric in declared(self.measures)}

    def each(
        self, session: Session, trackers: Sequence[Tracker], end: int
    ) -> Iterator[Callable[[int, State], dict[str, float]]]:
        """What to call with each step and state that is evaluated, in a run that ends with step `end`."""
        section, run_dir = session.recipe.evaluate, session.run_dir
        if self.measures:
            yield partial(_measured, session, self.measures, end)
        if session.dry:
            return
        if self.questions:
            answers = run_dir.path / "answers.jsonl"
            send = partial(_send_answers, trackers)
            yield Questioner(self.assembly, self.questions, section.tokens, answers, send)
        if self.samples:
            draw = partial(drawn, self.samples, count=section.samples)
            yield partial(_sampled, draw, run_dir.samples, trackers)


def at_evaluations(session: Session, assembly: Assembly, test: Source) -> AtEvaluations:
    """Read the questions, make the measures, compile what they need.

    RecipeError if the model cannot answer, or draws nothing, or if a measure cannot be made.
    """
    section, recipe = session.recipe.evaluate, session.recipe
    if section.questions:
        refuse_without_texts(recipe.model, recipe.model.kind)
    questions = read_questions(section.questions) if section.questions else ()
    with session.clock("compile"):
        samples = outputs(assembly, test, "samples") if section.samples else None
        measures = measurements(assembly, section.measures, test)
    return AtEvaluations(assembly, questions, samples, measures)


def _send_answers(trackers: Sequence[Tracker], step: int, answers: Sequence[Sample]) -> None:
    for tracker in trackers:
        tracker.samples(step, answers[:ANSWERS])


def _measured(session: Session, measures: Sequence[Measurement], end: int, step: int, state: State) -> dict[str, float]:
    """The values of the measures that are due. An error of one is reported, and its values are missing; it ends a dry
    run, whose purpose is to find it."""
    values: dict[str, float] = {}
    for measure in measures:
        if not measure.due(step, end):
            continue
        try:
            values |= measure(step, state, session.interrupt.agreed)
        except RecipeError as error:
            if session.dry:
                raise
            names = ", ".join(f"eval/{metric.name}" for metric in measure.measured.metrics)
            session.console.warn(f"no {names} at step {step}: {error.message}")
    return values


def _sampled(
    draw: Callable[[State], Rows], folder: Path, trackers: Sequence[Tracker], step: int, state: State
) -> dict[str, float]:
    """Draw samples, write them and send the pictures; they give no metrics."""
    rows = draw(state)
    if jax.process_index() == 0:
        grids = write_samples(rows, folder, f"{step:08}-")
        for tracker in trackers if grids else ():
            tracker.pictures(step, grids)
    return {}


def progress_of(session: Session, metrics: Sequence[Metric], saved: Mapping[str, JsonObject]) -> Progress:
    """What evaluations decide. `metrics` are declared; `saved` is in the checkpoint that the run starts from."""
    recipe = session.recipe
    parts = {
        key: Improvement(watch, bool(higher_is_better(watch.metric, metrics))) for key, watch in watched(recipe).items()
    }
    return Progress(
        parts.get("stop"),
        parts.get("optimizer.schedule"),
        recipe.optimizer.schedule.lowered,
        say=session.console.say,
        saved=saved,
    )


def metrics_named(recipe: Recipe) -> dict[str, str]:
    """The metrics of the evaluation that keys of a recipe name, by key."""
    best = {"checkpoint.best": recipe.checkpoint.best} if recipe.checkpoint.best else {}
    return best | {f"{key}.metric": watch.metric for key, watch in watched(recipe).items()}


def refuse_unmeasured(
    key: str,
    metric: str,
    evaluation: Traced,
    bytes_per_token: float | None,
    declared: Iterable[Metric],
    scores: Iterable[str] = (),
) -> None:
    """Raise RecipeError if no evaluation measures the metric that `key` names, or it is unknown whether higher or lower
    is better.

    `bytes_per_token`: as in `inference.evaluate.evaluated`. `scores`: those of the recipe's questions and measures.
    """
    sums = jax.tree.unflatten(evaluation.out_tree, range(evaluation.out_tree.num_leaves))
    names = {"eval/loss", *(f"eval/{name}" for name in sums.metrics)}
    names |= {"eval/perplexity"} if bytes_per_token is not None else set()
    names |= {"eval/bits_per_byte"} if bytes_per_token else set()
    names |= {f"eval/{name}" for name in scores}
    if metric not in names:
        raise RecipeError(f"{key}: {metric} is not measured", f"one of {', '.join(sorted(names))}")
    if higher_is_better(metric, declared) is None:
        short = metric.partition("/")[2]
        hint = f"declare it where it is returned: metrics = (dtrain.Metric({short!r}, higher_is_better=True),)"
        raise RecipeError(f"{key}: it is not known whether a higher or a lower {metric} is better", hint)
