"""Predictions of a trained model, for files or for examples of its data."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dtrain.core.errors import DataError
from dtrain.core.metrics import NLL
from dtrain.core.types import JsonObject
from dtrain.data.batch import LABEL
from dtrain.data.prediction_inputs import Inputs
from dtrain.data.source import Source
from dtrain.inference.outputs import outputs, state_of
from dtrain.models.nn.model import PROBABILITY, TOKENS
from dtrain.weights.load import LoadedRun


@dataclass(frozen=True)
class Names:
    """Names of the classes, where the data has them; else their numbers."""

    classes: Sequence[str] = ()

    def __call__(self, label: int) -> str:
        return self.classes[label] if label < len(self.classes) else str(label)


def predictions(loaded: LoadedRun, given: Inputs | Source, top: int) -> Iterator[JsonObject]:
    """Yield a row for each example, or for each text file.

    A classifier gives `class`, `probability` and the `top` classes with their probabilities; a model of tokens `loss`,
    `perplexity` and `bits_per_byte`; any other model its outputs by name; a file that cannot be used has `error`.
    DataError if a value is not finite.
    """
    classes = Names(loaded.classes)
    source = given.source if isinstance(given, Inputs) else given
    state, sums = state_of(loaded), dict[str, np.ndarray]()
    for indices, values in outputs(loaded.assembly, source, state=state)(state):
        label = source.rows(indices).get(LABEL) if not isinstance(given, Inputs) else None
        for row, index in enumerate(indices.tolist()):
            origin = dict(given.origins[index] if isinstance(given, Inputs) else source.origin_of(index))
            if label is not None and PROBABILITY in values:
                origin["label"] = classes(int(label[row]))
            own = {name: value[row] for name, value in values.items()}
            if any(not np.isfinite(value).all() for value in own.values() if np.issubdtype(value.dtype, np.floating)):
                raise DataError(f"the prediction for {next(iter(origin.values()))} is not finite", "")
            if own.keys() == {NLL.name, TOKENS} and isinstance(given, Inputs):
                pair = np.array([own[NLL.name], own[TOKENS]], np.float64)
                sums[origin["file"]] = sums.get(origin["file"], np.zeros(2)) + pair
            else:
                yield origin | _row(own, classes, top)
    if isinstance(given, Inputs):
        yield from ({"file": name, "error": problem} for name, problem in given.unread.items())
    for name, (nll, tokens) in sums.items():
        assert isinstance(given, Inputs)
        yield {"file": name} | _score(nll, tokens, given.sizes.get(name))


def _row(own: dict[str, np.ndarray], classes: Names, top: int) -> JsonObject:
    if PROBABILITY in own:
        probability = own.pop(PROBABILITY)
        order = np.argsort(-probability, kind="stable")
        best = int(order[0])
        shares = {classes(int(i)): round(float(probability[i]), 6) for i in order[:top]}
        return {"class": classes(best), "probability": round(float(probability[best]), 6), "top": shares} | _plain(own)
    if own.keys() == {NLL.name, TOKENS}:
        return _score(float(own[NLL.name]), float(own[TOKENS]), None)
    return _plain(own)


def _plain(own: dict[str, np.ndarray]) -> JsonObject:
    return {name: value.tolist() for name, value in own.items()}


def _score(nll: float, tokens: float, size: int | None) -> JsonObject:
    """The mean loss of a text per token; `size` in bytes."""
    loss = nll / max(tokens, 1)
    row = {"tokens": int(tokens), "loss": round(loss, 6), "perplexity": round(math.exp(min(loss, 700.0)), 4)}
    return row | ({"bits_per_byte": round(nll / math.log(2) / size, 4)} if size else {})
