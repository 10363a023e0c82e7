"""Measures of a run: made once, called at evaluations with the outputs of the run's mesh."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from dtrain.assembly.assemble import Assembly
from dtrain.assembly.state import State
from dtrain.core.errors import DtrainError, RecipeError
from dtrain.core.metrics import LOSS, Metric
from dtrain.data.batch import LABEL
from dtrain.data.source import Source
from dtrain.inference.outputs import Abandoned, Outputs, outputs
from dtrain.models.measures import Columns, Measure, Measured, Needs
from dtrain.models.nn.examples import Purpose


def no_stop() -> bool:
    """Never stop."""
    return False


@dataclass(frozen=True)
class Measurement:
    """One measure of the recipe with the program whose outputs it gets."""

    section: Measure
    measured: Measured
    program: Outputs

    def due(self, step: int, last: int) -> bool:
        """Whether an evaluation after this step has it, in a run that ends with step `last`."""
        return step == last or not self.section.every or step % self.section.every == 0

    def __call__(self, step: int, state: State, stop: Callable[[], bool] = no_stop) -> dict[str, float]:
        """Measure such a state: metrics of an evaluation, by name with the prefix `eval/`, without values that are not
        finite. The same in every process: process 0 calls the measure, all must call this.

        RecipeError if the measure fails, in every process; Abandoned if `stop` is so.
        """
        names = [metric.name for metric in self.measured.metrics]
        rows = self._rows(state, stop)
        found: Mapping[str, float] = {}
        failed: DtrainError | None = None
        if jax.process_index() == 0:
            try:
                found = self.measured(step, rows.each)
            except DtrainError as error:
                failed = error
            except Exception as error:
                failed = RecipeError(f"{type(error).__name__}: {error}", "--debug shows the whole traceback")
        for _ in rows.each:
            pass  # with several processes, each must run the program for every batch
        if rows.abandoned:
            raise Abandoned
        values = _from_process_0(
            np.array([float(failed is not None), *(found.get(name, math.nan) for name in names)], np.float64)
        ).tolist()
        if values[0]:
            raise failed or RecipeError("a measure failed in process 0", "its log has the error")
        return {f"eval/{name}": value for name, value in zip(names, values[1:], strict=True) if math.isfinite(value)}

    def _rows(self, state: State, stop: Callable[[], bool]) -> "_Pass":
        return _Pass(self.program(state, self.section.examples or None, stop), self.program.source)


class _Pass:
    """One pass over the examples; it remembers whether it was abandoned, as code of a user's own may catch that."""

    def __init__(self, batches: Iterator[tuple[np.ndarray, dict[str, np.ndarray]]], source: Source) -> None:
        self.abandoned = False
        self.each = self._iterate(batches, source)

    def _iterate(
        self, batches: Iterator[tuple[np.ndarray, dict[str, np.ndarray]]], source: Source
    ) -> Iterator[tuple[Columns, Columns]]:
        try:
            for indices, values in batches:
                yield (source.rows(indices) if jax.process_index() == 0 else {}), values
        except Abandoned:
            self.abandoned = True
            raise


def _from_process_0(values: np.ndarray) -> np.ndarray:
    """The float64 values of process 0, bit for bit."""
    if jax.process_count() == 1:
        return values
    from jax.experimental import multihost_utils

    halves = multihost_utils.broadcast_one_to_all(values.view(np.uint32))  # JAX has no float64 by default
    return np.asarray(halves, np.uint32).view(np.float64)


def measurements(
    assembly: Assembly, sections: Sequence[Measure], source: Source, state: State | None = None
) -> tuple[Measurement, ...]:
    """Make the measures and compile what they need, for such a state; by default for one of the run itself.

    RecipeError if one cannot be made, has outputs or examples that it cannot use, or if two have one metric.
    """
    programs: dict[Purpose, Outputs] = {}
    made = []
    for number, section in enumerate(sections):
        try:
            measured = section.open()
            if section.purpose not in programs:
                programs[section.purpose] = outputs(assembly, source, section.purpose, state)
            program = programs[section.purpose]
            if section.needs:
                _refuse_other_outputs(program, section.needs)
        except DtrainError as error:
            error.message = f"evaluate.measures.{number}: {error.message.removeprefix('evaluate.measures.')}"
            raise
        made.append(Measurement(section, measured, program))
    _refuse_equal([LOSS, *assembly.model.metrics, *declared(made)])
    return tuple(made)


def declared(made: Sequence[Measurement]) -> tuple[Metric, ...]:
    """The metrics that measures return."""
    return tuple(metric for one in made for metric in one.measured.metrics)


def _refuse_other_outputs(program: Outputs, needs: Needs) -> None:
    """RecipeError if the outputs lack what a measure reads, or the data has no labels."""
    if LABEL not in program.source.example:
        raise RecipeError(f"it needs labels that are {needs.of}, and the examples have none", "leave it out")
    names = program.compiled.out_tree.unflatten(range(program.compiled.out_tree.num_leaves))
    if needs.output not in names:
        hint = f"return {{'{needs.output}': array}} from the model's predict, {needs.what}"
        raise RecipeError(f"it needs {needs.what}; the model predicts {', '.join(names)}", hint)


def _refuse_equal(metrics: Sequence[Metric]) -> None:
    names = [metric.name for metric in metrics]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise RecipeError(f"evaluate.measures: two metrics are called {twice}", "give one of them another name")
