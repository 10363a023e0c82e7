"""The input pipeline: batches from their source onto the devices."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from typing import Any

import jax
import numpy as np

from dtrain.assembly.assemble import Assembly
from dtrain.assembly.state import State
from dtrain.core.errors import RecipeError
from dtrain.data.batch import ROW, WEIGHT, Batch
from dtrain.data.batches import EvalBatches, TrainBatches, stream
from dtrain.data.class_weights import class_weights
from dtrain.data.source import Source
from dtrain.models.nn.model import Loss
from dtrain.parallel.engine import Put

EXACT, ROUNDED = 1e-4, 3e-2
"""Allowed relative difference of sums that are computed in float32, and in bfloat16."""

FIX = "multiply the loss of each example by batch['weight'] if the batch has one, and return the sum of the weights"
TRAINING = "in training, "
APART = "compare examples with each other by ctx.sum_over_examples or ctx.gather_examples, the same on every mesh"
WHOLE = "if the loss compares examples or uses statistics of several, put all of those into one row of the batch"
PLACES = (
    "draw random numbers from ctx.keys(batch, name), a key for each example, and not by an example's place in the batch"
)
OFF = "; guard.contract: false turns this check off"

Rows = Mapping[str, np.ndarray]


def refuse_broken(
    evaluate: Callable[[dict[str, np.ndarray]], Loss], rows: Rows, exact: bool, when: str = "", whole: str = WHOLE
) -> None:
    """Raise RecipeError if the loss of these rows, this process's part of a batch, is not a sum over examples.

    `when` begins the messages; `whole` is the advice where examples are compared with each other.

    For neighbouring rows a and b, the loss of the batches (a, b), (a, a) and (b, b) is computed. For a sum over
    examples, L(a, a) + L(b, b) = 2 L(a, b), on whatever device each pair is.
    """
    count = len(next(iter(rows.values())))
    rows_ab = np.arange(count)
    rows_aa, rows_bb = rows_ab // 2 * 2, np.minimum(rows_ab // 2 * 2 + 1, count - 1)

    def measured(which: np.ndarray, weight: float) -> dict[str, float]:
        batch = {name: values[which] for name, values in rows.items()}
        batch[WEIGHT] = np.full(count, weight, np.float32)
        loss = jax.device_get(jax.block_until_ready(evaluate(batch)))
        sums = {"sum": loss.sum, "weight": loss.weight, **loss.metrics}
        return {name: float(value) for name, value in sums.items()}

    both = measured(rows_ab, 1.0)
    for name, value in both.items():
        if not math.isfinite(value):
            raise RecipeError(
                f"{when}{name} of the loss is {value} for the first held-out examples",
                f"fix the loss, or the data{OFF}",
            )
    for name, value in measured(rows_ab, 0.0).items():
        if value != 0:
            raise RecipeError(
                f"{when}examples of weight 0 change the loss: its {name} is {value:.4g}, not 0", FIX + OFF
            )
    both_a, both_b = measured(rows_aa, 1.0), measured(rows_bb, 1.0)
    tolerance = EXACT if exact else ROUNDED
    for name, value in both.items():
        separate, size = both_a[name] + both_b[name], abs(both_a[name]) + abs(both_b[name])
        if not abs(separate - 2 * value) <= tolerance * max(size, 1e-6):
            swapped = measured(np.minimum(rows_ab ^ 1, count - 1), 1.0)[name]
            if not abs(swapped - value) <= tolerance * max(size / 2, 1e-6):
                raise _by_place(f"{when}{name}", value, swapped)
            message = f"{when}the loss is not a sum over examples: its {name} is {2 * value:.6g} in pairs of different"
            raise RecipeError(f"{message} examples and {separate:.6g} in pairs of equal ones", whole + OFF)


def refuse_places(evaluate: Callable[[dict[str, np.ndarray]], Loss], rows: Rows, exact: bool) -> None:
    """Raise RecipeError if the training loss of these rows is another one with the rows in the opposite order."""
    losses = [jax.device_get(jax.block_until_ready(evaluate(dict(own)))) for own in (rows, _backwards(rows))]
    one, other = (float(loss.sum) for loss in losses)
    if not abs(one - other) <= (EXACT if exact else ROUNDED) * max(abs(one), 1e-6):
        raise _by_place(f"{TRAINING}sum", one, other)


def refuse_means(
    assembly: Assembly, evaluate: Callable[[State, Batch], Loss], source: Source, state: State, exact: bool
) -> None:
    """Raise RecipeError if the loss of a batch, or one of its metrics, is a mean: examples that stand twice in a batch
    of twice the size must give twice the sum. One more evaluation is compiled, of half the examples if they can be."""
    parts, whole = assembly.layout.parts("batch"), assembly.eval_batch
    small = whole // 2 if whole % (2 * parts) == 0 else whole
    other = 2 * small if small == whole else small
    program = assembly.compile(assembly.evaluate(examples=other))
    found = []
    for size, compiled in sorted(((whole, evaluate), (other, program)), key=lambda one: one[0]):
        put = Put(assembly.engine, assembly.layout, size)
        rows = _weighted(rows_of(source, put.held % small, assembly.keyed))
        found.append(jax.device_get(jax.block_until_ready(compiled(state, put(rows)))))
    once, twice = ({"sum": loss.sum, "weight": loss.weight, **loss.metrics} for loss in found)
    for name, value in once.items():
        one, two = float(value), float(twice[name])
        if math.isfinite(one) and not abs(two - 2 * one) <= (EXACT if exact else ROUNDED) * max(2 * abs(one), 1e-6):
            message = f"{name} of the loss is no sum over examples: it is {one:.6g}, and {two:.6g} in a batch that has"
            hint = "return the sum over the examples, each times its weight: it is divided by the sum of the weights"
            raise RecipeError(f"{message} each of these examples twice", hint + OFF)


def without_constants(state: State, averages: bool) -> State:
    """The state with random numbers added to parameters that are all equal, as zeros and ones are: from them, an error
    in the layers before may not show. The same state if there are none.

    `averages`: whether the optimizer keeps averages of the parameters, which an evaluation takes.
    """
    tree = state if averages else state.params
    leaves, structure = jax.tree.flatten(tree)
    floats = [i for i, leaf in enumerate(leaves) if jax.numpy.issubdtype(leaf.dtype, np.floating) and leaf.size > 1]
    equal = jax.device_get([_is_constant(leaves[i]) for i in floats])
    for i in (i for i, constant in zip(floats, equal, strict=True) if constant):
        leaves[i] = jax.jit(_shaken, static_argnums=1, out_shardings=leaves[i].sharding)(leaves[i], i)
    if not any(equal):
        return state
    changed = jax.tree.unflatten(structure, leaves)
    return changed if averages else dataclasses.replace(state, params=changed)


@jax.jit
def _is_constant(values: jax.Array) -> jax.Array:
    return values.max() == values.min()


def _shaken(values: jax.Array, number: int) -> jax.Array:
    return values + SHAKEN * jax.random.normal(jax.random.key(number), values.shape, values.dtype)


SHAKEN = 0.05
"""Standard deviation of what is added."""


def _weighted(rows: Rows) -> dict[str, np.ndarray]:
    """The rows, each of weight 1."""
    return dict(rows) | {WEIGHT: np.ones(len(next(iter(rows.values()))), np.float32)}


def _backwards(rows: Rows) -> Rows:
    return {name: values[::-1] for name, values in rows.items()}


def _by_place(what: str, value: float, swapped: float) -> RecipeError:
    message = f"{what} of the loss changes if examples change places in the batch: {value:.6g}, {swapped:.6g}"
    return RecipeError(message, PLACES + OFF)


def rows_of(source: Any, local: np.ndarray, keyed: bool = False) -> Rows:
    """Examples for this process's rows of an evaluation batch, repeated if the source has too few."""
    rows = local % len(source)
    return source.rows(rows) | ({ROW: rows.astype(np.uint32)} if keyed else {})


def host_batches(assembly: Assembly, source: Source, local: np.ndarray, start: int, steps: int) -> TrainBatches:
    """Batches `start` to `steps` - 1 in this machine's memory; `local`: the rows of each that this process has."""
    recipe = assembly.recipe
    return TrainBatches(
        source,
        source.order(recipe.seed, recipe.batch),
        recipe.batch,
        local=local,
        start=start,
        steps=steps,
        keyed=ROW in assembly.batch,
        paired=recipe.data.needs_pairs,
        weights=class_weights(recipe.class_weights, source),
    )


def train_batches(
    assembly: Assembly,
    source: Source,
    start: int,
    steps: int,
    warn: Callable[[str], None],
    calls: Iterable[range] | None = None,
) -> Generator[Batch, None, None]:
    """Yield batches `start` to `steps` - 1 on the devices. `warn` receives a message if a worker process dies.

    With several steps per call, `calls` has the steps of each call, whose batches are yielded together.
    """
    recipe = assembly.recipe
    put = Put(assembly.engine, assembly.layout, recipe.batch)
    host = host_batches(assembly, source, put.held, start, steps)
    with closing(stream(host, recipe.data.load, warn)) as batches:
        if (most := recipe.engine.steps_per_call) == 1:
            for batch in batches:
                yield put(batch)
        else:
            for call in calls or ():
                yield put.several(list(itertools.islice(batches, len(call))), most)


def refuse_broken_contract(
    assembly: Assembly, evaluate: Callable[[State, Batch], Loss], source: Source, state: State
) -> str:
    """Raise RecipeError if the loss of a custom model is not a sum over examples (`guard.contract`), in an evaluation
    and in training, where the context's verbs may compare examples with each other.

    Returns a warning if an evaluation has too few examples to check this, else an empty string.
    """
    recipe, put = assembly.recipe, Put(assembly.engine, assembly.layout, assembly.eval_batch)
    if not recipe.model.user_code or not recipe.guard.contract:
        return ""
    exact = recipe.precision.compute == recipe.precision.loss == "float32"
    rows = rows_of(source, put.held, assembly.keyed)
    mixed: list[str] = []
    train = assembly.compile(assembly.train_loss(mixed))
    refuse_broken(lambda batch: evaluate(state, put(batch)), rows, exact)
    refuse_means(assembly, evaluate, source, state, exact)
    states = [state]
    if (other := without_constants(state, recipe.optimizer.averages)) is not state:
        found = jax.device_get(evaluate(other, put(_weighted(rows))))
        states += [other] * math.isfinite(float(found.sum))  # such parameters may have no finite loss
    for of in states[1:]:
        refuse_broken(lambda batch, of=of: evaluate(of, put(batch)), rows, exact)
    if not mixed:
        for of in states:
            refuse_broken(lambda batch, of=of: train(of, put(batch)), rows, exact, when=TRAINING, whole=APART)
    elif recipe.accumulate == 1:
        for of in states:
            refuse_places(lambda batch, of=of: train(of, put(batch)), _weighted(rows), exact)
    else:
        why = f"examples are compared with each other ({', '.join(dict.fromkeys(mixed))}) within microbatches"
        return f"could not check whether the training loss depends on the places of examples: {why}"
    apart = assembly.engine.explicit
    each = assembly.eval_batch // (assembly.layout.parts("batch") if apart else 1)
    missing = "could not check whether the loss compares examples with each other: evaluate.batch has one example"
    return f"{missing}{' per device' * apart}" if each < 2 else ""


def eval_batches(assembly: Assembly, source: Source, limit: int | None) -> Iterator[Batch]:
    """Batches with every held-out example once, on the devices; at most `limit` batches."""
    put = Put(assembly.engine, assembly.layout, assembly.eval_batch)
    host = EvalBatches(source, assembly.eval_batch, put.held, assembly.keyed)
    load = dataclasses.replace(assembly.recipe.data.load, workers=0)
    return (put(batch) for batch in itertools.islice(stream(host, load), limit))
