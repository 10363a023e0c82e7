"""A step of a run again: its examples, the loss of each, and what left the range of the steps before it."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dtrain.assembly.assemble import Assembly, assemble, one_step_per_call
from dtrain.assembly.checksum import state_checksum
from dtrain.assembly.frozen import frozen_models
from dtrain.assembly.input import host_batches
from dtrain.assembly.state import State, completed, saved
from dtrain.assembly.step import NORMS
from dtrain.checkpoint import manifest
from dtrain.checkpoint.store import Store
from dtrain.core.counts import counted
from dtrain.core.errors import CheckpointError, DtrainError, RecipeError
from dtrain.core.metrics import SOURCES
from dtrain.core.printable import printable
from dtrain.core.run_dir import Folder, saved_steps
from dtrain.core.types import JsonObject
from dtrain.data.batch import WEIGHT
from dtrain.data.tokenizer import Tokenizer
from dtrain.inference.seen import Seen
from dtrain.inference.seen import seen as seen_by
from dtrain.parallel.engine import Put
from dtrain.runtime.trajectory import initial_state
from dtrain.track.jsonl import read
from dtrain.train import provenance
from dtrain.train.hooks import norms_of
from dtrain.train.locate import origins
from dtrain.weights.checkpoint_choice import select_checkpoint
from dtrain.weights.load import not_saved

Say = Callable[[str], None]
APART = 64
"""Most programs' calls for the losses of single examples: of a larger batch, groups are measured first."""
REFINED = 4
"""Groups of examples with the largest loss whose examples are measured."""
LEAST_BEFORE = 5
"""Steps that tell a range, at least."""
BEYOND = 2.0
"""How many times the largest norm of the steps before, or that part of the smallest, is out of their range."""


@dataclass(frozen=True)
class Example:
    """An example of the step, or several of them whose losses were measured together."""

    rows: tuple[int, ...]
    """Their numbers in the training data."""
    loss: float
    text: str
    """The beginning of what it says, its file, its class; empty for several."""


@dataclass(frozen=True)
class Outlier:
    """A norm that is out of the range of the steps before."""

    step: int
    name: str
    """grad/PATH, update/PATH or param/PATH; of a stack of layers PATH/0 and so on."""
    norm: float
    least: float
    most: float

    @property
    def text(self) -> str:
        """One line."""
        return f"step {self.step}: {self.name} {self.norm:.4g}, before {self.least:.4g} to {self.most:.4g}"


@dataclass(frozen=True)
class Replayed:
    """What a step that was computed again shows."""

    run: str
    step: int
    start: int
    """The step from whose checkpoint it was computed; 0: from what the run started with."""
    guarantee: tuple[str, ...]
    """What is the same as in the run, or differs: lines."""
    compared: int
    """Steps since `start` whose loss the run had logged."""
    largest: float
    """The largest difference of such a loss, relative to it; 0: the same bits."""
    values: dict[str, float]
    """loss, grad_norm, lr and what else the step gives."""
    losses: dict[int, float]
    """Of the steps before it."""
    examples: tuple[Example, ...]
    """The largest losses first."""
    total: int
    """Examples of the step."""
    apart: str
    """Why the loss is not known by example; empty if it is."""
    outliers: tuple[Outlier, ...]
    """In the order of steps, and of how far they are out."""
    found: tuple[str, ...]
    """If the step is not finite: the operation that first gave such a value, as lines."""

    def json(self) -> JsonObject:
        """The result as JSON values."""
        return asdict(self)

    def lines(self, most: int) -> Iterator[str]:
        """The result as text, with so many examples and norms at most."""
        origin = f"the checkpoint of step {self.start:,}" if self.start else "what the run started with"
        yield f"{self.run}: step {self.step:,}, computed again from {origin}"
        yield from (f"  {line}" for line in self.guarantee)
        if self.compared:
            same = "the same bits" if not self.largest else f"different by {self.largest:.1e} of their size at most"
            yield f"  {counted(self.compared, 'logged loss is', 'logged losses are')} {same}"
            if self.largest and provenance.SAME_BITS in self.guarantee:
                yield f"  {UNKNOWN_REASON}"
        else:
            yield "  none of these steps was logged: the losses are not compared"
        yield ", ".join(f"{name} {value:.4g}" for name, value in self.values.items()) + self._before()
        yield from (f"  {line}" for line in self.found)
        yield ""
        if self.apart:
            yield f"the loss of each example is not known: {self.apart}"
        else:
            yield f"examples with the largest losses, of {self.total:,}:"
        for example in self.examples[:most]:
            rows = f"{example.rows[0]}" + (f" to {example.rows[-1]}" if len(example.rows) > 1 else "")
            yield f"  row {rows}  loss {example.loss:.4g}  {example.text[:WIDTH]}".rstrip()
        yield ""
        if len(self.losses) < LEAST_BEFORE:
            yield f"{counted(len(self.losses), 'step')} before it: too few for a range of norms"
        elif not self.outliers:
            yield f"no norm is out of the range of the {len(self.losses)} steps before by a factor of {BEYOND:g}"
        else:
            yield f"norms out of the range of the steps before by a factor of {BEYOND:g}, the first first:"
            yield from (f"  {one.text}" for one in self.outliers[:most])
        if len(self.outliers) > most:
            yield f"  and {len(self.outliers) - most:,} more"

    def _before(self) -> str:
        if not self.losses:
            return ""
        known = list(self.losses.values())
        return f"; the {counted(len(known), 'step')} before: loss {min(known):.4g} to {max(known):.4g}"


def replay(run_dir: Folder, step: int, before: int, abandoned: bool, say: Say) -> Replayed:
    """Compute a step of a run again, from the newest checkpoint that is at least `before` steps older.

    Nothing is written. `abandoned`: with the batches that the step had before a rollback repeated it with others.
    RecipeError if the run did not have such a step, or had another recipe before it; CheckpointError if a checkpoint
    is damaged; DataError if the data is not that of the run.
    """
    if jax.process_count() > 1:
        raise RecipeError("a step is computed again in one process", "run it on one host, with --devices")
    known, tokenizer = seen_by(run_dir, unsaved=True)
    recipe = one_step_per_call(known.recipe)
    total = recipe.total_steps(len(known.source))
    if not 1 <= step <= total:
        raise RecipeError(f"--at {step:,}: the run has {total:,} steps")
    assembly = assemble(recipe, jax.devices(), known.source.example, total, frozen_models(recipe))
    limit = step
    if abandoned:
        again = [skip for skip in known.skips if skip[0] < step]
        if not again:
            raise RecipeError(f"--abandoned: no rollback repeated step {step:,}", "leave it out")
        known, limit = replace(known, skips=again[:-1]), again[-1][0] + 1
    begin = _begin(run_dir, limit, before)
    if (begin or 0) + 1 < known.first:
        message = f"step {step:,} begins before step {known.first:,}, where the recipe was changed"
        raise RecipeError(message, f"the run's steps from {known.first:,} on can be computed again")
    say("making the initial state" if begin is None else f"restoring step {begin:,}")
    state, guarantee = _state(run_dir, assembly, begin)
    say("compiling")
    return _replayed(run_dir, assembly, known, tokenizer, state, step=step, guarantee=guarantee, before=before, say=say)


def _begin(run_dir: Folder, limit: int, before: int) -> int | None:
    """The saved step to begin from, before `limit`: the newest that has `before` steps up to it, or else the oldest.
    None, for the initial state, if no such step is saved."""
    older = [saved for saved in saved_steps(run_dir.checkpoints) if saved < limit]
    return max((saved for saved in older if saved < limit - before), default=min(older, default=None))


def _state(run_dir: Folder, assembly: Assembly, begin: int | None) -> tuple[State, tuple[str, ...]]:
    """The state after a step of the run, and what is the same as there, or differs."""
    now = provenance.conditions(assembly)
    if begin is None:
        return initial_state(assembly, None), tuple(_since_the_beginning(run_dir, assembly, now))
    with Store(run_dir.checkpoints.absolute(), assembly.recipe.checkpoint, reading=True) as store:
        checkpoint, _ = select_checkpoint(run_dir, assembly.recipe, store, lambda _: None, step=begin, best=False)
        state = store.restore(begin, saved(assembly.shapes, assembly.layout.declared))
    state = completed(state, assembly.layout.declared, not_saved(run_dir, assembly, lambda _: None))
    if list(state_checksum(begin, state).checksum()) != list(checkpoint.checksum):
        raise CheckpointError(f"the restored values of step {begin} do not have the checksum of the saved ones")
    guarantee = provenance.resume_guarantee(checkpoint.conditions, now, assembly.recipe, begin)
    return state, tuple(guarantee)


def _since_the_beginning(run_dir: Folder, assembly: Assembly, now: JsonObject) -> list[str]:
    """What is as it was when the run saved its oldest checkpoint, or differs."""
    oldest = min(saved_steps(run_dir.checkpoints), default=None)
    if oldest is None:
        return ["the run has no checkpoint: whether software and devices are the same is not known"]
    try:
        conditions = manifest.read(run_dir.checkpoints / str(oldest)).conditions
    except manifest.CorruptCheckpoint as error:
        return [f"whether software and devices are the same is not known; checkpoint {oldest:,}: {error}"]
    guarantee = provenance.resume_guarantee(conditions, now, assembly.recipe, oldest)
    return [f"compared with the oldest checkpoint, of step {oldest:,}:", *guarantee]


def _replayed(
    run_dir: Folder,
    assembly: Assembly,
    known: Seen,
    tokenizer: Tokenizer | None,
    state: State,
    *,
    step: int,
    guarantee: tuple[str, ...],
    before: int,
    say: Say,
) -> Replayed:
    recipe, begin = assembly.recipe, int(state.step)
    compiled = assembly.compile(assembly.train())
    measured = replace(recipe, track=replace(recipe.track, norms=True, every=1))
    with_norms = assemble(measured, jax.devices(), known.source.example, assembly.steps, assembly.frozen)
    norms_at = with_norms.compile(with_norms.train())
    put = Put(assembly.engine, assembly.layout, recipe.batch)
    host = host_batches(assembly, known.source, put.held, 0, int(known.rows(step)[-1]) // recipe.batch + 1)
    losses, norms, values = dict[int, float](), dict[int, dict[str, float]](), dict[str, float]()
    origin: State | None = None
    batch: Any = None
    last, finite = step, True
    for number in range(begin + 1, step + 1):
        say(f"step {number:,} of {step:,}")
        batch = put(host[int(known.rows(number)[0]) // recipe.batch])
        if number >= step - before:
            _, metrics = norms_at(_copy(state), batch)
            norms[number] = {name.removeprefix("norm/"): norm for name, norm in norms_of(metrics).items()}
        origin = _copy(state)
        state, metrics = compiled(state, batch)
        own = {name: value for name, value in metrics.items() if name not in (NORMS, SOURCES, "finite")}
        values = {name: float(value) for name, value in jax.device_get(jax.block_until_ready(own)).items()}
        losses[number] = values["loss"]
        finite = bool(jax.device_get(metrics["finite"]))
        if not finite and recipe.guard.not_finite != "skip":
            step = number
            break
    assert origin is not None
    if step < last:
        guarantee += (f"step {step:,} is shown: it is the first that is not finite, and step {last:,} follows it",)
    numbers = known.rows(step)
    logged = {row["step"]: row["train/loss"] for row in read(run_dir.metrics) if "train/loss" in row}
    both = [(losses[number], logged[number]) for number in losses if number in logged]
    say("the losses of its examples")
    examples, apart = _examples(assembly, known, tokenizer, origin, numbers, host[int(numbers[0]) // recipe.batch])
    return Replayed(
        run_dir.path.name,
        step,
        begin,
        guarantee,
        len(both),
        max((abs(here - there) / max(abs(there), 1e-12) for here, there in both), default=0.0),
        values,
        {number: loss for number, loss in losses.items() if step - before <= number < step},
        tuple(examples),
        len(numbers),
        apart,
        tuple(outliers(norms)),
        () if finite else tuple(_located(assembly, origin, batch)),
    )


def _copy(state: State) -> State:
    """The same state in other memory: a step reuses that of the one that it gets."""
    return jax.tree.map(jnp.copy, state)


def _located(assembly: Assembly, state: State, batch: Any) -> list[str]:
    try:
        found = [origin.text() for origin in origins(assembly, state.params, batch)]
    except DtrainError:
        raise
    except Exception as error:
        return [f"the operation could not be located: {type(error).__name__}: {str(error).splitlines()[0]}"]
    return found or ["on one device no operation makes NaN or infinity of finite numbers"]


def outliers(norms: dict[int, dict[str, float]]) -> list[Outlier]:
    """The norms that are out of the range of the steps before, each at the first such step; the farthest first."""
    found: dict[str, Outlier] = {}
    distance: dict[str, float] = {}
    steps = sorted(norms)
    for name in dict.fromkeys(name for one in norms.values() for name in one):
        known: list[float] = []
        for step in steps:
            norm = norms[step].get(name, math.nan)
            least, most = (min(known), max(known)) if known else (0.0, 0.0)
            out = not math.isfinite(norm) or norm > BEYOND * most or norm < least / BEYOND
            if len(known) >= LEAST_BEFORE and out and name not in found:
                found[name] = Outlier(step, name, norm, least, most)
                tiny = 1e-30
                distance[name] = (
                    math.inf if not math.isfinite(norm) else max(norm / max(most, tiny), least / max(norm, tiny))
                )
            if math.isfinite(norm):
                known.append(norm)
    return sorted(found.values(), key=lambda one: (one.step, -distance[one.name]))


def _examples(
    assembly: Assembly,
    known: Seen,
    tokenizer: Tokenizer | None,
    state: State,
    numbers: np.ndarray,
    rows: Mapping[str, np.ndarray],
) -> tuple[list[Example], str]:
    """The losses of the examples of a step, as the step computes them; and why they are not known."""
    mixed: list[str] = []
    compiled = assembly.compile(assembly.batch_loss(mixed))
    if mixed:
        return [], f"the loss compares examples with each other ({', '.join(dict.fromkeys(mixed))})"
    indices = known.order(numbers)
    put = Put(assembly.engine, assembly.layout, assembly.recipe.batch)
    weights = np.asarray(rows.get(WEIGHT, np.ones(len(numbers), np.float32)))

    def mean(which: Sequence[int]) -> float:
        """The mean loss of some examples of the step. In place of the others, whose values may not be finite, the batch
        has the first of these again, with weight 0."""
        mine = np.isin(np.arange(len(numbers)), which)
        place = np.where(mine, np.arange(len(numbers)), which[0])
        own = {name: np.asarray(values)[place] for name, values in rows.items()}
        loss = jax.device_get(compiled(state, put(own | {WEIGHT: np.where(mine, weights, 0).astype(np.float32)})))
        return float(loss.sum) / float(loss.weight) if float(loss.weight) else 0.0

    size = math.ceil(len(numbers) / APART)
    groups = [range(at, min(at + size, len(numbers))) for at in range(0, len(numbers), size)]
    losses = {group: mean(group) for group in groups}
    ranked = sorted(groups, key=lambda group: _rank(losses[group]))
    if size > 1:
        losses |= {range(at, at + 1): mean(range(at, at + 1)) for group in ranked[:REFINED] for at in group}
        ranked = [group for group in losses if group not in ranked[:REFINED]]
    found = []
    for group in sorted(ranked, key=lambda group: _rank(losses[group])):
        own = indices[np.asarray(group)].tolist()
        found.append(Example(tuple(own), losses[group], _text(known, own[0], tokenizer) if len(own) == 1 else ""))
    return found, ""


def _rank(loss: float) -> float:
    return -loss if math.isfinite(loss) else -math.inf


def _text(known: Seen, index: int, tokenizer: Tokenizer | None) -> str:
    return printable(" ".join(known.text(index, tokenizer).split())[:KEPT])


UNKNOWN_REASON = (
    "why is not known: what dtrain records of the recipe, code, software and devices is as it was; devices that sum "
    "in another order each time, such as GPUs, and libraries beside those recorded can change them"
)
"""Of losses that differ where nothing that is recorded does."""
WIDTH, KEPT = 100, 1000
"""Most characters of an example's text in a line, and in JSON."""
