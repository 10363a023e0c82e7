"""A plan: the step of a run assembled for hardware that is not there, read, timed and priced."""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax

from dtrain.core.errors import RecipeError
from dtrain.core.slices import Target
from dtrain.data.batch import Example, tokens_in
from dtrain.models.nn.param import count
from dtrain.parallel.mesh import Mesh, mesh_sizes
from dtrain.parallel.rules import Layout
from dtrain.parallel.shard_map import ShardMap
from dtrain.plan import memory, target
from dtrain.plan.compiled import compiled as compile_step
from dtrain.plan.cuda import take_cudnn_as_there
from dtrain.plan.efficiency import Efficiency
from dtrain.plan.jaxpr_cost import ALL, step_cost
from dtrain.plan.memory import CLASSES, Memory
from dtrain.plan.money import Money, cost
from dtrain.plan.network import Network
from dtrain.plan.overlap import overlap
from dtrain.plan.program import read
from dtrain.plan.replay import Replay, StepCost
from dtrain.plan.target import places, stand_ins
from dtrain.recipe.recipe import Recipe
from dtrain.train.assembly import Assembly, assemble

Tier = Literal["compiled", "quick", "state"]
"""`state`: neither compiled nor traced, as the state alone leaves no room."""


@dataclass(frozen=True)
class Timing:
    """One step. Seconds of one device, whose parts add up to the step."""

    seconds: float
    tally: StepCost
    tokens: int
    examples: int
    unit: str
    """What a rate counts: tokens, images, or examples of another kind."""
    model_flops: float
    """Of the whole step, by the model's own convention."""
    convention: str
    peak: float
    """FLOP/s of all devices."""
    devices: int

    @property
    def mfu(self) -> float:
        """Model FLOPs over what the devices could have done meanwhile."""
        return self.model_flops / (self.seconds * self.peak)

    @property
    def hfu(self) -> float:
        """The same with what is computed again. Of a program that does less than the convention counts, the MFU."""
        executed = (self.tally.flops + self.tally.kernel_flops) * self.devices
        return max(executed, self.model_flops) / (self.seconds * self.peak)

    @property
    def amount(self) -> int:
        """Tokens of a step, or examples where they have none."""
        return self.tokens or self.examples

    @property
    def bound(self) -> str:
        """What takes most of the step: compute, memory or network."""
        parts = self.tally.parts
        sums = {
            "compute": parts.get("product", 0) + parts.get("kernel", 0),
            "memory": parts.get("memory", 0) + parts.get("copy", 0),
            "network": parts.get("network", 0),
        }
        return max(sums, key=lambda name: sums[name])


@dataclass(frozen=True)
class Plan:
    """What would come of a recipe on a target."""

    recipe: Recipe
    target: Target
    tier: Tier
    mesh: dict[str, int]
    parameters: int
    memory: Memory
    timing: Timing | None
    """None where the chip's speed is not known, or where the program does not fit."""
    money: Money | None
    """None where there is no time or no price, or where the run does not fit."""
    took: float = 0.0
    """Seconds that the plan took to make."""

    @property
    def fits(self) -> bool:
        """Whether the run finds room."""
        return self.memory.fits


def plan(recipe: Recipe, on: Target, price: float | None = None) -> Plan:
    """The compiled tier. RecipeError where recipe and target do not go together; running out of memory is a plan."""
    start = time.perf_counter()
    assembly = _assembled(recipe, target.devices(on), on)
    if short := _short(assembly, on, start):
        return short
    found = compile_step(assembly)
    program = read(found.text)
    held = memory.memory(found, program, assembly.shapes, assembly.layout, _room(on))
    if not found.fits:  # whatever the table says of the device, its compiler has the last word
        held = replace(held, arena=max(held.arena, int(held.room) + 1))
    network = _network(assembly.layout, on)
    tally = Replay(program, on.chip, network, _filled(assembly)).run() if on.chip and network and found.fits else None
    return _plan(assembly, on, "compiled", held, tally, price, time.perf_counter() - start)


def quick(recipe: Recipe, on: Target, price: float | None = None) -> Plan:
    """The quick tier: the step traced for devices that nobody describes, and arithmetic."""
    start = time.perf_counter()
    by_hand = recipe
    if recipe.engine.kind == "jit":
        layout = Layout(recipe.mesh.sizes(on.devices), recipe.mesh.table(), {})
        mesh = _OneAxis(**vars(recipe.mesh))
        by_hand = recipe if ShardMap().refusal(layout, 1) else replace(recipe, engine=ShardMap(), mesh=mesh)
    assembly = _assembled(by_hand, stand_ins(on), on)
    if short := _short(replace(assembly, recipe=recipe), on, start):
        return short
    network = _network(assembly.layout, on)
    hides = overlap(recipe.engine, by_hand is not recipe, on.chip) if on.chip else ALL
    found = step_cost(assembly.train(), network, on.devices, _filled(assembly), hides)
    held = sum(memory.share(leaf) for leaf in jax.tree.leaves(assembly.shapes))
    inputs = sum(memory.share(leaf) for leaf in jax.tree.leaves(assembly.batch))
    classes: dict[str, int] = dict.fromkeys(CLASSES, 0) | {
        "parameters": sum(memory.share(leaf) for leaf in jax.tree.leaves(assembly.shapes.params)),
        "optimizer": sum(memory.share(leaf) for leaf in jax.tree.leaves(assembly.shapes.optimizer)),
        "activations and temporaries": found.working,
        "inputs": inputs,
    }
    filled = Memory(classes, held + inputs + found.working, _room(on), [], memory.replicated(assembly.shapes))
    tally = found.tally
    if tally and on.chip:
        updating = Efficiency(on.chip).moving(2.0 * held)  # the optimizer's pass over the state
        tally.parts["memory"] += updating
        tally.seconds += updating
    assembly = replace(assembly, recipe=recipe)
    return _plan(assembly, on, "quick", filled, tally, price, time.perf_counter() - start)


def _short(assembly: Assembly, on: Target, start: float) -> Plan | None:
    """The plan of a run whose state alone finds no room; None of any other."""
    alone = memory.state_alone(assembly.shapes, assembly.batch, _room(on))
    return None if alone.fits else _plan(assembly, on, "state", alone, None, None, time.perf_counter() - start)


def program(recipe: Recipe, on: Target, *, compiled: bool) -> str:
    """The text of the training step: traced, or compiled for the target."""
    traced_step = _assembled(recipe, target.devices(on) if compiled else stand_ins(on), on)
    if not compiled:
        return f"{traced_step.train().jaxpr}\n"
    return compile_step(traced_step).text


class _OneAxis(Mesh):
    """A mesh whose `fsdp` is one axis to the network, as the compiler has it that places by itself."""

    def laid(self, devices: Sequence[Any]) -> dict[str, int]:
        return self.sizes(len(devices))


def _assembled(recipe: Recipe, devices: list[Any], on: Target) -> Assembly:
    if on.chip and on.chip.platform == "gpu":
        take_cudnn_as_there(on.chip)
    example, examples = _example(recipe)
    try:
        return assemble(recipe, devices, example, recipe.total_steps(examples))
    except RecipeError as error:
        raise RecipeError([f"on {on.name}: {problem}" for problem in error.problems], error.hint) from error


def _example(recipe: Recipe) -> tuple[Example, int]:
    """What one example holds, and how many an epoch has where the recipe counts in epochs."""
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
    held: Memory,
    tally: StepCost | None,
    price: float | None,
    took: float,
) -> Plan:
    recipe, layout = assembly.recipe, assembly.layout
    timing, money = None, None
    if tally is not None and on.chip:
        flops = recipe.model.flops(layout.example, recipe.batch)
        tokens = tokens_in(layout.example) * recipe.batch
        peak = on.chip.flops * on.chips
        unit = "tokens" if tokens else ("images" if "image" in layout.example else "examples")
        timing = Timing(
            tally.seconds, tally, tokens, recipe.batch, unit, flops.step, flops.convention, peak, on.devices
        )
        money = cost(on, timing.seconds, tokens, recipe.batch, assembly.steps, price) if held.fits else None
    sizes = mesh_sizes(layout.sizes)
    return Plan(recipe, on, tier, sizes, count(layout.declared), held, timing, money, took)


def _filled(assembly: Assembly) -> float:
    """The part of the rows sent to experts that hold a token, where routing is even (parallel/experts.py)."""
    experts, parts = getattr(assembly.recipe.model, "experts", None), assembly.layout.sizes["expert"]
    if experts is None or parts == 1:
        return 1.0
    room = parts * min(experts.active, experts.count // parts) / experts.active
    return 1 / (room if experts.capacity is None else min(room, experts.capacity))


def _room(on: Target) -> float:
    """Bytes that one device lends to a program."""
    if on.chip:
        return on.chip.room
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // on.devices)
