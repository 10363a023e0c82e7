"""Where the time of a step goes: the loop of `dtrain run`, its compiled step alone, its batches alone, the products.

Segments of these alternate, so that a machine whose speed changes slows all of them, and medians are compared.
"""

import io
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
from rich.console import Console as Rich

from dtrain.assembly.assemble import Assembly, assemble, one_step_per_call, with_sums
from dtrain.assembly.frozen import frozen_models
from dtrain.assembly.input import host_batches, train_batches
from dtrain.assembly.state import create_state
from dtrain.core.leftovers import temporary_folder
from dtrain.core.types import Device, JsonObject
from dtrain.data.batch import Batch, Example
from dtrain.data.batches import TrainBatches
from dtrain.data.source import Source
from dtrain.parallel.engine import Put
from dtrain.recipe.recipe import Recipe
from dtrain.runtime.speed import matrix_rate
from dtrain.track.console import Console
from dtrain.track.meters import peak_of
from dtrain.train.run import run

LEAST, MOST = 12, 20_000
"""Steps of a segment, at least and at most."""
LOGGED = 4
"""Fewest logged steps in a segment of `dtrain run`; the time up to the first one is left out."""


@dataclass(frozen=True)
class Cost:
    """Wall time and CPU time of one step, in milliseconds."""

    ms: float
    cpu_ms: float


@dataclass(frozen=True)
class Bench:
    """The measured costs of a recipe's step, medians over rounds."""

    name: str
    devices: str
    batch: int
    steps: int
    rounds: int
    run: Cost
    """A step of `dtrain run`: batches read, prefetched and put on the devices, guards, logging."""
    step: Cost
    """The compiled step alone, on one batch that is on the devices already."""
    read: Cost
    """Reading one batch in this process, without prefetching."""
    put: Cost
    """Copying one batch to the devices."""
    product_ms: float
    """The model's FLOPs at `rate`."""
    rate: float
    """FLOP/s of all devices."""
    rate_of: str
    """How the rate is known."""
    convention: str
    """How the model's FLOPs are counted."""
    per_call: int = 1
    """Steps that one call of `dtrain run` runs; the compiled step alone is called for every step."""
    cheaper_sums: Cost | None = None
    """The compiled step with `precision.reduce: compute`; None if that changes nothing or is not possible."""
    faster: int = 0
    """Rounds in which that was faster."""
    dtype: str = ""
    """What gradients are summed in then."""
    warnings: list[str] = field(default_factory=list)

    @property
    def loop_ms(self) -> float:
        """What the loop adds to the compiled step."""
        return self.run.ms - self.step.ms

    @property
    def values(self) -> JsonObject:
        """The measurements as JSON values."""
        return asdict(self) | {"loop_ms": self.loop_ms, "step_share": self.step.ms / self.run.ms}

    @property
    def lines(self) -> Iterator[str]:
        """The measurements as text."""
        whole = self.run.ms
        measured = f"{self.rounds} rounds of {self.steps:,} steps, medians"
        yield f"{self.name} on {self.devices}, batch {self.batch:,}: {measured}"
        for name, cost in (("dtrain run", self.run), ("its compiled step alone", self.step)):
            yield f"  {name:<28}{_ms(cost.ms)}  CPU {_ms(cost.cpu_ms)}  {cost.ms / whole:5.1%} of the step"
        yield "where the step goes"
        rest = min(self.step.ms, whole) - self.product_ms
        if rest > 0:
            yield f"  {'matrix products at full speed':<28}{_ms(self.product_ms)}  {self.product_ms / whole:5.1%}"
            yield f"  {'the rest of the compiled step':<28}{_ms(rest)}  {rest / whole:5.1%}"
        else:
            yield f"  {'the compiled step':<28}{_ms(self.step.ms)}  {self.step.ms / whole:5.1%}"
        if self.loop_ms > 0:
            yield f"  {'the loop around it':<28}{_ms(self.loop_ms)}  {self.loop_ms / whole:5.1%}"
        elif self.per_call > 1:
            less = _ms(-self.loop_ms).strip()
            yield f"  {self.per_call} steps in one call take {less} a step less than in calls of one"
        else:
            yield "  the loop around it: not visible, it runs while the devices compute"
        yield f"  full speed: {self.rate / 1e12:.3g} TFLOP/s, {self.rate_of}; FLOPs by {self.convention}"
        yield f"  a batch alone: {self.read.ms:.3g} ms to read, {self.put.ms:.3g} ms to the devices"
        if self.cheaper_sums:
            less = 1 - self.cheaper_sums.ms / self.step.ms
            amount = f"{abs(less):.1%} {'less' if less > 0 else 'more'} than its compiled step alone"
            yield f"  with precision.reduce: compute {self.cheaper_sums.ms:.3g} ms, {amount}, which sums gradients over"
            yield f"  devices in float32 and not in {self.dtype}; faster in {self.faster} of {self.rounds} rounds"
        yield self._advice()
        yield from (f"  warning: {text}" for text in self.warnings)

    def _advice(self) -> str:
        if self.loop_ms > 0.1 * self.run.ms:
            if self.read.ms + self.put.ms > self.step.ms:
                return "  reading the data takes longer than the step: data.load.workers, or `dtrain data prepare`"
            return "  the step is short for its loop: engine.steps_per_call=32, a larger batch, or a larger track.every"
        return "  `dtrain profile` lists the operations of the compiled step"


def assemblies(recipe: Recipe, devices: list[Device], example: Example) -> tuple[Assembly, Assembly | None]:
    """The recipe's step, and that with `precision.reduce: compute` if it has not got it and could have it."""
    single = one_step_per_call(recipe)
    changed = with_sums(single) if len(devices) > 1 else None
    frozen = frozen_models(recipe)
    own = assemble(single, devices, example, MOST, frozen)
    return own, assemble(changed, devices, example, MOST, frozen) if changed else None


def bench(recipe: Recipe, rounds: int, seconds: float, say: Callable[[str], None]) -> Bench:
    """Measure `rounds` rounds of segments of about so many seconds each. `say` receives the progress."""
    source, devices = recipe.data.open("train"), jax.devices()
    assembly, changed = assemblies(recipe, devices, source.example)
    pieces = _Pieces(assembly, source)
    say("compiling")
    pieces.step(2)
    work = {"step": pieces.step, "read": pieces.read, "put": pieces.put}
    if changed:
        cheaper = _Pieces(changed, source, pieces)
        cheaper.step(2)
        work["cheaper_sums"] = cheaper.step
    start = time.perf_counter()
    pieces.step(2)
    count = max(LEAST, min(MOST, int(2 * seconds / (time.perf_counter() - start))))
    most = recipe.engine.steps_per_call
    every = -(-min(recipe.track.every, max(1, count // LOGGED)) // most) * most  # a mark is made at the end of a call
    count = max(count, LOGGED * every) if most > 1 else count
    found: dict[str, list[Cost]] = {name: [] for name in ("run", *work)}
    warnings: dict[str, None] = {}
    with temporary_folder("bench") as folder:
        for number in range(rounds):
            say(f"round {number + 1} of {rounds}: {count:,} steps each")
            local = tuple(tracker for tracker in recipe.track.to if not tracker.remote)
            track = replace(recipe.track, every=every, to=local)
            short = replace(recipe, name=f"round-{number}", steps=count + every, epochs=None, track=track)
            console = Marks(rich=Rich(file=io.StringIO()))
            run(short, folder, console)
            warnings |= dict.fromkeys(console.warnings)
            found["run"].append(console.cost)
            for name, piece in work.items():
                found[name].append(_timed(piece, count))
    dtype = recipe.precision.compute
    flops, peak = assembly.flops, peak_of(devices)
    rate, rate_of = (peak, "the chips' published peak") if peak else _measured(devices, dtype)
    medians = {name: _median(costs) for name, costs in found.items()}
    kinds = f"{len(devices)} x {devices[0].device_kind}"
    about = {"rate": rate, "rate_of": rate_of, "convention": flops.convention, "warnings": list(warnings)}
    pairs = zip(found["step"], found.get("cheaper_sums", []), strict=False)
    about |= {"per_call": most, "dtype": dtype, "faster": sum(other.ms < own.ms for own, other in pairs)}
    about["product_ms"] = 1e3 * flops.step / rate
    return Bench(recipe.name, kinds, recipe.batch, count, rounds, **medians, **about)


def _measured(devices: list[Device], dtype: str) -> tuple[float, str]:
    """Fake devices share one processor: the rate of one is that of all."""
    rate, text = matrix_rate(devices[0], dtype)
    return rate * (1 if devices[0].platform == "cpu" else len(devices)), f"measured with {text}"


class _Pieces:
    """What a step consists of, each on its own; the work is repeated so many times. `other`: whose state is trained."""

    def __init__(self, assembly: Assembly, source: Source, other: "_Pieces | None" = None) -> None:
        recipe = assembly.recipe
        self.assembly, self.source = assembly, source
        self.held = Put(assembly.engine, assembly.layout, recipe.batch)
        self.batch: Batch = next(train_batches(assembly, source, 0, 1, lambda _: None))
        self.other = other
        self.one_at_a_time = jax.default_backend() == "cpu" and jax.device_count() > 1  # as in the loop of a run

    @cached_property
    def compiled(self) -> Any:
        return self.assembly.compile(self.assembly.train())

    @cached_property
    def state(self) -> list[Any]:
        return self.other.state if self.other else [create_state(self.assembly.make, self.assembly.shapes)]

    @cached_property
    def host(self) -> TrainBatches:
        return host_batches(self.assembly, self.source, self.held.held, 0, MOST)

    def step(self, times: int) -> None:
        state, before = self.state, None
        for _ in range(times):
            state[0], metrics = self.compiled(state[0], self.batch)
            jax.block_until_ready(metrics if self.one_at_a_time else before)
            before = metrics
        jax.block_until_ready(state[0])

    def read(self, times: int) -> None:
        for number in range(times):
            self.host[number]

    def put(self, times: int) -> None:
        rows = self.host[0]
        for _ in range(times):
            jax.block_until_ready(self.held(rows))


def _timed(work: Callable[[int], None], times: int) -> Cost:
    wall, cpu = time.perf_counter(), time.process_time()
    work(times)
    return Cost(1e3 * (time.perf_counter() - wall) / times, 1e3 * (time.process_time() - cpu) / times)


def _median(costs: list[Cost]) -> Cost:
    return Cost(statistics.median(cost.ms for cost in costs), statistics.median(cost.cpu_ms for cost in costs))


def _ms(value: float) -> str:
    return f"{value:8.3f} ms" if value < 10 else f"{value:8.1f} ms"


@dataclass
class Marks(Console):
    """Notes when each step is logged, and the warnings; the lines go nowhere but to the log."""

    marks: list[tuple[int, float, float]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def step(self, step: int, steps: int, values: Mapping[str, float], eta: float) -> None:
        self.marks.append((step, time.perf_counter(), time.process_time()))
        super().step(step, steps, dict(values), eta)

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    @property
    def cost(self) -> Cost:
        """From the first logged step to the last but one: the last is logged after the loop."""
        (first, wall, cpu), (last, wall_end, cpu_end) = self.marks[0], self.marks[-2]
        steps = last - first
        return Cost(1e3 * (wall_end - wall) / steps, 1e3 * (cpu_end - cpu) / steps)
