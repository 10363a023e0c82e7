"""Plan a run: assemble its step for hardware that is not present, and predict memory, time and price."""

import importlib.metadata
import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import jax

from dtrain.assembly.assemble import Assembly, assemble, engine_on, one_step_per_call
from dtrain.assembly.frozen import frozen_models
from dtrain.assembly.state import saved
from dtrain.core.errors import RecipeError
from dtrain.core.slices import Target
from dtrain.data.batch import IMAGE, Example, tokens_in
from dtrain.parallel.mesh import EXPERT, Mesh, mesh_sizes
from dtrain.parallel.rules import Layout
from dtrain.parallel.shard_map import ShardMap
from dtrain.plan import memory, target
from dtrain.plan.compiled import compiled as compile_step
from dtrain.plan.cost import Efficiency
from dtrain.plan.jaxpr_cost import ALL, overlap, step_cost
from dtrain.plan.memory import CLASSES, PEAKS, Memory
from dtrain.plan.money import Money, cost
from dtrain.plan.network import Network
from dtrain.plan.program import read
from dtrain.plan.replay import Replay, StepCost
from dtrain.plan.target import assume_cudnn, places, stand_ins
from dtrain.recipe.load import refuse_conflicts
from dtrain.recipe.recipe import Engine, Recipe

Tier = Literal["compiled", "quick", "state"]
"""`state`: neither compiled nor traced, since the state alone does not fit."""


@dataclass(frozen=True)
class Timing:
    """Predicted time of one step. The parts of `tally` add up to `seconds`."""

    seconds: float
    tally: StepCost
    tokens: int
    examples: int
    unit: str
    """What a rate counts: tokens, images, or examples of another kind."""
    model_flops: float
    """FLOPs of the whole step on all devices, by the model's own convention."""
    convention: str
    peak: float
    """FLOP/s of all devices."""
    devices: int

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: model FLOPs over the peak FLOPs of all devices in the same time (PaLM, app. B)."""
        return self.model_flops / (self.seconds * self.peak)

    @property
    def hfu(self) -> float:
        """Hardware FLOPs utilisation: like MFU, with recomputation counted. At least the MFU, since a program may
        execute less than the model's convention counts."""
        executed = (self.tally.flops + self.tally.kernel_flops) * self.devices
        return max(executed, self.model_flops) / (self.seconds * self.peak)

    @property
    def amount(self) -> int:
        """Tokens in a step, or examples if they have no tokens."""
        return self.tokens or self.examples

    @property
    def bound(self) -> str:
        """The resource that takes most of the step: compute, memory or network."""
        parts = self.tally.parts
        sums = {
            "compute": parts.get("product", 0) + parts.get("kernel", 0),
            "memory": parts.get("memory", 0) + parts.get("copy", 0),
            "network": parts.get("network", 0),
        }
        return max(sums, key=lambda name: sums[name])


@dataclass(frozen=True)
class Plan:
    """Prediction for a recipe on a target."""

    recipe: Recipe
    target: Target
    engine: Engine
    """The recipe's; what `auto` is on the target."""
    tier: Tier
    mesh: dict[str, int]
    parameters: int
    memory: Memory
    timing: Timing | None
    """None if the chip's speed is not known, or if the program does not fit."""
    money: Money | None
    """None if there is no time or no price, or if the run does not fit."""
    took: float = 0.0
    """Seconds that it took to make the plan."""
    steps: int = 0
    """Of the recipe."""
    checkpoint: int = 0
    """Bytes of a checkpoint: each array once, without frozen parameters, which come from elsewhere."""
    note: str = ""
    """Why the program was compiled without some or all of what `engine.overlap: auto` is; empty if with it."""

    @property
    def fits(self) -> bool:
        """Whether the run fits into the device's memory."""
        return self.memory.fits

    @property
    def may_fit(self) -> bool:
        """Whether it fits with the least that a compiler took of what a quick plan counts."""
        lowest = self.peaks[0] if self.peaks else 1.0
        return self.memory.needed * lowest <= self.memory.room

    @property
    def surely_fits(self) -> bool:
        """Whether it fits by the compiler, or with the most that a compiler took beyond a quick plan."""
        highest = self.peaks[1] if self.peaks else math.inf
        return self.fits and self.memory.needed * highest <= self.memory.room

    @property
    def peaks(self) -> tuple[float, float] | None:
        """Lowest and highest ratio of the compiler's peak to this one; None if it is not known."""
        platform = self.target.platform
        if self.tier == "quick" and platform == "gpu" and self.recipe.model.structure.mixture:
            return None  # the compiler lays out a row for each expert
        return PEAKS.get(platform, (1.0, 1.0)) if self.tier == "quick" else (1.0, 1.0)


def plan(recipe: Recipe, on: Target, price: float | None = None) -> Plan:
    """Compiled tier. Raises RecipeError if the recipe cannot run on the target; too little memory is a plan as well."""
    start = time.perf_counter()
    refuse_conflicts(recipe)
    assembly = _assembled(recipe, target.devices(on), on)
    if too_large := _state_too_large(assembly, on, start):
        return too_large
    output = compile_step(assembly)
    program = read(output.text)
    memory_use = memory.memory(output, program, assembly.shapes, assembly.layout, _room(on))
    if not output.fits:  # the compiler's verdict counts, not the chip table's memory size
        memory_use = replace(memory_use, arena=0, refused=max(output.arena, int(memory_use.room) + 1))
    network = _network(assembly.layout, on)
    tally = Replay(program, on.chip, network, _filled(assembly)).run() if on.chip and network and output.fits else None
    made = _plan(assembly, on, "compiled", memory_use, tally, price, time.perf_counter() - start)
    return replace(made, note=output.note)


def quick(recipe: Recipe, on: Target, price: float | None = None) -> Plan:
    """Quick tier: trace the step for stand-in devices and compute its cost by arithmetic."""
    start = time.perf_counter()
    traced = recipe
    with _errors_of(on):
        engine = engine_on(recipe, on.chip, on.devices, on.slices)
    if not engine.explicit:  # its collectives are not in the jaxpr, so trace the step under shard_map
        layout = Layout(recipe.mesh.sizes(on.devices), recipe.mesh.table(), {})
        mesh = _OneAxis(**vars(recipe.mesh))
        traced = recipe if ShardMap().refusal(layout) else replace(recipe, engine=ShardMap(), mesh=mesh)
    placed_by_compiler = traced is not recipe
    assembly = _assembled(traced, stand_ins(on), on)
    recipe = replace(recipe, model=assembly.recipe.model)
    if too_large := _state_too_large(replace(assembly, recipe=recipe, engine=engine), on, start):
        return too_large
    network = _network(assembly.layout, on)
    experts = recipe.model.structure.mixture is not None
    hides = overlap(engine, placed_by_compiler, on.chip, on.devices, experts=experts) if on.chip else ALL
    traced_cost = step_cost(assembly.train(), network, on.devices, _filled(assembly), hides)
    state_bytes = sum(memory.share(leaf) for leaf in jax.tree.leaves(assembly.shapes))
    inputs = sum(memory.share(leaf) for leaf in jax.tree.leaves(assembly.batch))
    classes: dict[str, int] = dict.fromkeys(CLASSES, 0) | {
        "parameters": sum(memory.share(leaf) for leaf in jax.tree.leaves(assembly.shapes.params)),
        "optimizer": sum(memory.share(leaf) for leaf in jax.tree.leaves(assembly.shapes.optimizer)),
        "activations and temporaries": traced_cost.working,
        "inputs": inputs,
    }
    memory_use = Memory(
        classes, state_bytes + inputs + traced_cost.working, _room(on), [], memory.replicated(assembly.shapes)
    )
    tally = traced_cost.tally
    if tally and on.chip:
        updating = Efficiency(on.chip).moving(2.0 * state_bytes)  # the optimizer reads and writes the state once
        tally.parts["memory"] += updating
        tally.seconds += updating
    assembly = replace(assembly, recipe=recipe, engine=engine)
    return _plan(assembly, on, "quick", memory_use, tally, price, time.perf_counter() - start)


def _state_too_large(assembly: Assembly, on: Target, start: float) -> Plan | None:
    """The plan of a run whose state and inputs alone do not fit; None for all others."""
    lower_bound = memory.state_alone(assembly.shapes, assembly.batch, _room(on))
    if lower_bound.fits:
        return None
    return _plan(assembly, on, "state", lower_bound, None, None, time.perf_counter() - start)


def program(recipe: Recipe, on: Target, *, compiled: bool) -> str:
    """Text of the training step: its jaxpr, or with `compiled` the target's HLO."""
    traced_step = _assembled(recipe, target.devices(on) if compiled else stand_ins(on), on)
    if not compiled:
        return f"{traced_step.train().jaxpr}\n"
    return compile_step(traced_step).text


@contextmanager
def _errors_of(on: Target) -> Iterator[None]:
    """Say of each problem of a recipe on which target it is one."""
    try:
        yield
    except RecipeError as error:
        raise RecipeError([f"on {on.name}: {problem}" for problem in error.problems], error.hint) from error


class _OneAxis(Mesh):
    """A mesh whose `fsdp` is one axis of the network, as for a compiler that inserts the collectives itself."""

    def jax_sizes(self, devices: Sequence[object]) -> dict[str, int]:
        return self.sizes(len(devices))


def _assembled(recipe: Recipe, devices: list[object], on: Target) -> Assembly:
    if on.chip and on.chip.platform == "gpu":
        assume_cudnn(on.chip)
    example, examples = _example(recipe)
    with _errors_of(on):
        steps = recipe.total_steps(examples)
        assembly = assemble(one_step_per_call(recipe), devices, example, steps, frozen_models(recipe))
        return replace(assembly, recipe=replace(assembly.recipe, engine=recipe.engine))


def _example(recipe: Recipe) -> tuple[Example, int]:
    """Arrays of one example, and the examples in an epoch; 1 if the recipe counts steps, where it is not used."""
    known = recipe.data.example()
    if known is not None and recipe.steps is not None:
        return known, 1
    source = recipe.data.open("train")
    return source.example, len(source)


def _network(layout: Layout, on: Target) -> Network | None:
    if on.chip is None or layout.mesh is None:
        return None
    coords, slices = places(list(layout.mesh.devices.flat), on)
    return Network(on.chip, on.shape, dict(layout.mesh.shape), coords, slices)


def _plan(
    assembly: Assembly,
    on: Target,
    tier: Tier,
    memory_use: Memory,
    tally: StepCost | None,
    price: float | None,
    took: float,
) -> Plan:
    recipe, layout = assembly.recipe, assembly.layout
    # one step is planned; the batches of the other steps of its call are on the devices at the same time
    memory_use = memory.with_batches(memory_use, assembly.batch, recipe.engine.steps_per_call - 1)
    timing = None
    if tally is not None and on.chip:
        flops = assembly.flops
        tokens = tokens_in(layout.example) * recipe.batch
        peak = on.chip.flops * on.chips
        unit = "tokens" if tokens else ("images" if IMAGE in layout.example else "examples")
        timing = Timing(
            tally.seconds, tally, tokens, recipe.batch, unit, flops.step, flops.convention, peak, on.devices
        )
    sizes = mesh_sizes(layout.sizes)
    kept = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(saved(assembly.shapes, layout.declared)))
    made = Plan(
        recipe, on, assembly.engine, tier, sizes, layout.values, memory_use, timing, None, took, assembly.steps, kept
    )
    if timing is None or not made.may_fit:
        return made
    return replace(made, money=cost(on, timing.seconds, timing.tokens, recipe.batch, assembly.steps, price))


def slots(recipe: Recipe, parts: int) -> float:
    """Rows that are sent to experts for each row that holds a token, assuming even routing (parallel/manual.py).

    `parts`: the size of the axis `expert`. 1 if nothing is sent.
    """
    experts = recipe.model.structure.mixture
    if experts is None or parts == 1:
        return 1.0
    room = parts * min(experts.active, experts.count // parts) / experts.active
    return room if experts.capacity is None else min(room, experts.capacity)


def _filled(assembly: Assembly) -> float:
    return 1 / slots(assembly.recipe, assembly.layout.sizes[EXPERT])


def _room(on: Target) -> float:
    """Bytes of one device's memory that a program may use; CPU devices share this machine's memory."""
    if on.chip:
        return on.chip.room
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // on.devices)


def compilers() -> dict[str, str]:
    """The versions of what compiles a step; empty for one that is not installed."""
    return {name: _version(name) for name in ("jax", "jaxlib", "libtpu")}


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
