"""The compiled program that gives a model's predictions or samples for the examples of a source."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from dtrain.assembly.assemble import Assembly
from dtrain.assembly.input import eval_batches
from dtrain.assembly.state import State
from dtrain.core.errors import RecipeError
from dtrain.data.source import Source
from dtrain.models.nn.examples import Purpose
from dtrain.weights.load import LoadedRun


class Abandoned(Exception):
    """The run was asked to stop while outputs were computed."""


@dataclass(frozen=True)
class Outputs:
    """A compiled program with the source that it was compiled for."""

    assembly: Assembly
    source: Source
    compiled: jax.stages.Compiled

    def __call__(
        self, state: State, examples: int | None = None, stop: Callable[[], bool] = lambda: False
    ) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
        """Yield the indices of the examples of each batch, and the outputs for them; of the first `examples` alone.

        With several processes, all must iterate to the end. Raises Abandoned if `stop`, asked before each batch, is so.
        """
        size = self.assembly.eval_batch
        count = len(self.source) if examples is None else min(examples, len(self.source))
        for number, batch in enumerate(eval_batches(self.assembly, self.source, -(-count // size))):
            if stop():
                raise Abandoned
            indices = np.arange(number * size, min((number + 1) * size, count))
            values = jax.device_get(jax.block_until_ready(self.compiled(state, batch)))
            yield indices, {name: _plain(value)[: len(indices)] for name, value in values.items()}


def outputs(assembly: Assembly, source: Source, purpose: Purpose = "prediction", state: State | None = None) -> Outputs:
    """Compile the model's `predict` or `sample` for such a state; by default for one of the run itself.

    RecipeError if the model has no such outputs.
    """
    model = assembly.recipe.model
    if purpose == "samples" and model.generates:
        raise RecipeError(f"a model of kind {model.kind} writes texts, and draws no samples", "dtrain generate RUN")
    if purpose == "samples" and not assembly.model.samples:
        hint = "give its class a method sample(params, batch, ctx)"
        raise RecipeError(f"the model of kind {model.kind} draws no samples", hint)
    traced = assembly.predict(assembly.shapes if state is None else state, source.example, purpose)
    return Outputs(assembly, source, assembly.compile(traced))


def state_of(loaded: LoadedRun) -> State:
    """A state with the loaded parameters, as evaluation and prediction take it; it has no optimizer state."""
    return State(jnp.int32(loaded.step), loaded.params, ())


def _plain(values: jax.Array) -> np.ndarray:
    """The values in a dtype of NumPy's own: its files have no bfloat16."""
    return np.asarray(values, np.float32 if values.dtype.kind == "V" else None)
