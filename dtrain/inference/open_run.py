"""A trained run in Python: its parameters, metrics, predictions and samples, on one device or its mesh."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from dtrain.core.errors import DataError
from dtrain.core.run_dir import Folder
from dtrain.core.run_list import find_run
from dtrain.core.types import JsonObject
from dtrain.data.arrays import Arrays
from dtrain.data.batch import TARGET, Feature
from dtrain.data.prediction_inputs import records_given
from dtrain.data.source import Source, Split
from dtrain.inference.evaluate import evaluate
from dtrain.inference.generate import Sampling, generator_of
from dtrain.inference.outputs import Outputs, outputs, state_of
from dtrain.inference.samples import drawn
from dtrain.inference.texts import TextGenerator
from dtrain.models.nn.examples import Purpose
from dtrain.models.nn.param import Tree
from dtrain.recipe.recipe import Recipe
from dtrain.track.jsonl import read
from dtrain.weights.load import LoadedRun, load_run

Columns = Mapping[str, Any] | Sequence[JsonObject]
"""Arrays (examples, ...) by name, as the run's data has them: {"image": uint8 (n, 28, 28, 1)}. With data of kind
records also a list of records: [{"text": "a red circle"}]."""


class OpenRun:
    """A run that was opened by `dtrain.open` or trained by `dtrain.run`.

    Parameters are read when they are first asked for. Outputs are NumPy arrays by name, one row for each example.
    Errors are those of the command line, `dtrain.errors`, each with a hint.
    """

    def __init__(
        self,
        run_dir: Folder,
        step: int | Literal["best"] | None = None,
        overrides: Sequence[str] = (),
        say: Callable[[str], None] = print,
    ) -> None:
        self._run_dir, self._asked, self._overrides, self._say = run_dir, step, tuple(overrides), say
        self._programs: dict[object, Outputs] = {}

    def __repr__(self) -> str:
        record = self.record
        return f"<run {record.get('name')}: {record.get('state')} at step {record.get('step')}, {self.path}>"

    @property
    def path(self) -> Path:
        """The run folder."""
        return self._run_dir.path

    @property
    def record(self) -> JsonObject:
        """run.json: state, step, versions, devices, times."""
        return self._run_dir.read_record()

    @property
    def metrics(self) -> dict[str, np.ndarray]:
        """metrics.jsonl as columns of equal length, `step` first, NaN where a row has no value: pandas.DataFrame takes
        them as they are."""
        rows = read(self._run_dir.metrics)
        names = dict.fromkeys(["step", *(name for row in rows for name in row)])
        columns = {name: np.array([row.get(name, np.nan) for row in rows], np.float64) for name in names}
        return columns | {"step": columns["step"].astype(np.int64)}

    @cached_property
    def _loaded(self) -> LoadedRun:
        best = self._asked == "best"
        step = self._asked if isinstance(self._asked, int) else None
        return load_run(self._run_dir, self._overrides, self._say, step=step, best=best)

    @property
    def recipe(self) -> Recipe:
        """The recipe, with the overrides."""
        return self._loaded.recipe

    @property
    def step(self) -> int:
        """The step of the parameters."""
        return self._loaded.step

    @property
    def params(self) -> Tree:
        """The parameters as a tree of jax arrays, on the run's mesh; their average with `optimizer.ema`."""
        return self._loaded.params

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, by label; empty if the data has none."""
        return self._loaded.classes

    def data(self, split: Split = "test") -> Source:
        """The examples of a split: `len(...)`, and `rows(indices)` as host arrays by name."""
        return self._loaded.split(split, self._say)

    def predict(
        self, rows: Columns | None = None, *, split: Split = "test", examples: int | None = None
    ) -> dict[str, np.ndarray]:
        """What the model's `predict` gives for these rows, or for a split of the run's data, of which `examples` takes
        the first ones. DataError if an array is none of the run's data, or of another shape.
        """
        source = self.data(split) if rows is None else self._source(rows)
        return self._drawn(source, "prediction", examples)

    def sample(
        self, rows: Columns | None = None, *, split: Split = "test", examples: int = 32, seed: int | None = None
    ) -> dict[str, np.ndarray]:
        """What the model's `sample` draws for all of these rows, or for the first `examples` of a split.

        `seed` draws other numbers than the evaluations of the run did.
        """
        source = self.data(split) if rows is None else self._source(rows)
        return self._drawn(source, "samples", examples if rows is None else None, seed)

    def evaluate(self, split: Split = "test") -> dict[str, float]:
        """The metrics over a split, with those of the recipe's measures."""
        return evaluate(self._loaded, self.data(split)).metrics

    def generate(
        self,
        prompts: str | Sequence[str],
        *,
        tokens: int = 100,
        temperature: float = 0.8,
        seed: int = 0,
        stop: Sequence[str] = (),
    ) -> list[str]:
        """The texts with which a decoder continues the prompts, of at most so many tokens each; where one of `stop`
        appears, a text ends before it."""
        texts = replace(self._texts, stop=tuple(stop))
        given = [texts.prompt(prompt) for prompt in ([prompts] if isinstance(prompts, str) else prompts)]
        return list(texts.completed(given, tokens, Sampling(temperature=temperature, seed=seed)))

    @cached_property
    def _texts(self) -> TextGenerator:
        return TextGenerator(generator_of(self._loaded))

    def _drawn(
        self, source: Source, purpose: Purpose, examples: int | None, seed: int | None = None
    ) -> dict[str, np.ndarray]:
        """The outputs for the first examples of a source; None: for all."""
        if examples is not None and examples < 1:
            raise DataError(f"examples = {examples}", "at least 1; None takes all")
        return drawn(self._program(source, purpose, seed), state_of(self._loaded), examples or len(source))

    def _program(self, source: Source, purpose: Purpose, seed: int | None = None) -> Outputs:
        """The program for such examples, compiled once."""
        key = (purpose, seed, tuple((name, of.shape, of.dtype) for name, of in source.example.items()))
        if key not in self._programs:
            assembly = self._loaded.assembly
            if seed is not None:
                assembly = replace(assembly, recipe=replace(assembly.recipe, seed=seed))
            self._programs[key] = outputs(assembly, source, purpose, state_of(self._loaded))
        return replace(self._programs[key], source=source)

    def _source(self, rows: Columns) -> Source:
        """The rows in the dtypes of the run's data."""
        if not isinstance(rows, Mapping):
            return records_given(self.recipe.data, rows)
        example = self._loaded.assembly.layout.example
        unknown = [name for name in rows if name not in example]
        if unknown or not rows:
            found = repr(unknown[0]) if unknown else "nothing"
            raise DataError(f"expected arrays by name, of {', '.join(example)}; found {found}", "run.data() has some")
        arrays = {name: _checked(name, values, example[name]) for name, values in rows.items()}
        counts = {name: len(values) for name, values in arrays.items()}
        if len(set(counts.values())) > 1 or not min(counts.values()):
            found = ", ".join(f"{name} {count}" for name, count in counts.items())
            raise DataError(f"the arrays have different numbers of rows, or none: {found}", "one row for each example")
        return Arrays(arrays, {name: example[name] for name in arrays}, "")


def _checked(name: str, values: Any, feature: Feature) -> np.ndarray:
    """The values in the dtype of the feature. DataError if that changes them, or if they have another shape."""
    found = np.asarray(jax.device_get(values))
    wanted = f"{name} is {feature.dtype} (examples{''.join(f', {size}' for size in feature.shape)})"
    if found.shape[1:] != feature.shape or not found.ndim:
        raise DataError(f"{wanted} in the run's data; found the shape {found.shape}", "give it in that form")
    kept = found.astype(feature.dtype)
    if np.dtype(feature.dtype).kind in "iu" and not np.array_equal(kept, found):
        raise DataError(f"{wanted} in the run's data; found {found.dtype} with other values", "give it in that form")
    least = -1 if name == TARGET else 0  # -1 where no token is predicted
    if feature.values is not None and kept.size and not (kept.min() >= least and kept.max() < feature.values):
        hint = f"{least} to {feature.values - 1} are allowed"
        raise DataError(f"{name} has values from {kept.min()} to {kept.max()}", hint)
    return kept


def open(  # noqa: A001
    run: str | Path,
    step: int | Literal["best"] | None = None,
    *,
    overrides: Sequence[str] = (),
    runs: str | Path = "runs",
) -> OpenRun:
    """Open a run by its folder, or by its name in `runs`: its newest checkpoint, its best one, or that of a step.

    `overrides` change its recipe: "data.root=other", or "mesh={data: 4}", on whose devices the parameters then are.
    RecipeError if there is no such run; an error of its checkpoint is raised by what first needs the parameters.
    """
    return OpenRun(find_run(run, Path(runs)), step, overrides)
