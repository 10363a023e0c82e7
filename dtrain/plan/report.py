"""A plan in words and numbers, for a person and for a program."""

from collections.abc import Iterator, Sequence
from typing import Any

from dtrain.explain import size_text
from dtrain.hardware import PRICED
from dtrain.introduction import mesh_text
from dtrain.parallel.mesh import MEMORY_AXES
from dtrain.plan.memory import Memory
from dtrain.plan.money import Money
from dtrain.plan.plan import HIDDEN, Plan, Timing
from dtrain.plan.search import Candidate, Found

PARTS = {
    "product": "matrix products",
    "kernel": "kernels",
    "memory": "memory traffic",
    "network": "network, exposed",
    "copy": "copies, exposed",
}
TIERS = {
    "compiled": "read from the program that the compiler made of the run's own step",
    "quick": "worked out from the traced step; nothing was compiled",
}


def lines(plan: Plan) -> Iterator[str]:
    """The report of one plan."""
    recipe, held = plan.recipe, plan.memory
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    yield f"{recipe.name} on {plan.target}: {verdict}"
    by = f"mesh {mesh_text(plan.mesh)}, engine {recipe.engine.kind}, batch {recipe.batch}"
    parts = f" in {recipe.accumulate} microbatches" if recipe.accumulate > 1 else ""
    said = recipe.engine.xla
    options = f", {len(said)} compiler option{'s' * (len(said) > 1)}" if said else ""
    yield f"{recipe.model.kind} of {plan.parameters:,} parameters; {by}{parts}{options}"
    yield f"[{plan.tier}] {TIERS[plan.tier]}"
    yield ""
    yield from _memory(held, plan.tier == "compiled")
    if plan.timing:
        yield ""
        yield from _timing(plan.timing, plan)
    elif plan.fits:
        yield ""
        yield "time: not told; the peak speed of this device is not known"
    if plan.money:
        yield ""
        yield from _money(plan.money)


def _memory(held: Memory, compiled: bool) -> Iterator[str]:
    yield "memory of a device"
    for kind, size in held.classes.items():
        if size:
            yield f"  {kind:<28}{size_text(size):>11}"
    used = max(held.peak, held.arena)
    yield f"  {'at the peak':<28}{size_text(held.peak):>11}  of {size_text(held.room)} ({held.peak / held.room:.0%})"
    if held.arena > held.peak:
        yield f"  {'as it is laid out':<28}{size_text(held.arena):>11}  what the device sets aside"
    if used > held.room:
        yield f"  {'too much by':<28}{size_text(used - held.room):>11}"
    if held.replicated:
        yield f"  {'of it held elsewhere, too':<28}{size_text(held.replicated):>11}"
    if compiled and held.largest:
        yield "largest at the peak"
        for buffer in held.largest:
            where = f"  {buffer.line}" if buffer.line else ""
            yield f"  {size_text(buffer.bytes):>10}  {buffer.shape:<26}{buffer.kind}: {buffer.what}{where}"


def _timing(timing: Timing, plan: Plan) -> Iterator[str]:
    tally, step = timing.tally, timing.seconds
    yield f"time of a step {ms(step)}, bound by {timing.bound}"
    for part, name in PARTS.items():
        if tally.parts.get(part, 0) > 5e-4 * step:
            yield f"  {name:<28}{ms(tally.parts[part]):>11}  {tally.parts[part] / step:4.0%}"
    if plan.tier == "quick" and tally.parts.get("network"):
        yield f"  ({HIDDEN:.0%} of the network's time is taken to be hidden)"
    rate = timing.tokens or timing.examples
    unit = "tokens" if timing.tokens else "examples"
    yield f"  {rate / step:,.0f} {unit}/s, {rate / step / plan.target.chips:,.0f} a chip"
    hardware = (tally.flops + tally.kernel_flops) * plan.target.devices / (step * timing.peak)
    yield f"  MFU {timing.mfu:.1%} ({timing.convention}); with what is computed again {hardware:.1%}"
    costs = sorted(_costs(timing), key=lambda item: -item[1])[:3]
    if costs:
        yield "costs most: " + "; ".join(f"{name} {seconds / step:.0%}" for name, seconds in costs)
    talk = [(key, told) for key, told in tally.talk.items() if told.seconds > 1e-3 * step]
    if talk:
        yield "network of a step"
        for (kind, axes), told in sorted(talk, key=lambda item: -item[1].seconds)[:8]:
            over = " and ".join(dict.fromkeys("fsdp" if axis in MEMORY_AXES else axis for axis in axes))
            exposed = f", {ms(told.exposed)} exposed" if plan.tier == "compiled" else ""
            volume = f"{told.calls:>7,.0f} calls {size_text(told.bytes):>10}"
            yield f"  {kind:<20}over {over or 'all':<10}{volume} in all  {ms(told.seconds)}{exposed}"


def _costs(timing: Timing) -> Iterator[tuple[str, float]]:
    if timing.tally.lines:
        for (part, line), seconds in timing.tally.lines.items():
            yield f"{PARTS[part]}{f' of {line}' if line else ''}", seconds
    else:
        yield from ((PARTS[part], seconds) for part, seconds in timing.tally.parts.items())


def _money(money: Money) -> Iterator[str]:
    source = f"list price of {PRICED}; --price sets yours" if money.listed else "your price"
    yield f"money at ${money.per_chip_hour:,.2f} a chip and hour ({source})"
    tokens = f"${money.per_billion_tokens:,.2f} a billion tokens; " if money.per_billion_tokens else ""
    yield f"  ${money.per_hour:,.2f} an hour; {tokens}the whole run {duration(money.hours)}, ${money.total:,.2f}"


def ms(seconds: float) -> str:
    """0.8861 → 886 ms."""
    return f"{1e3 * seconds:,.0f} ms" if seconds >= 0.1 else f"{1e3 * seconds:.3g} ms"


def duration(hours: float) -> str:
    """26.5 → 26.5 hours; 0.2 → 12 minutes."""
    if hours >= 1:
        return f"{hours:,.1f} hours"
    return f"{60 * hours:.0f} minutes" if hours > 1.5 / 60 else "a minute at most"


def values(plan: Plan) -> dict[str, Any]:
    """The plan for a program: bytes in bytes, times in seconds."""
    held, timing, money = plan.memory, plan.timing, plan.money
    found: dict[str, Any] = {
        "name": plan.recipe.name,
        "target": plan.target.name,
        "slices": plan.target.slices,
        "chips": plan.target.chips,
        "devices": plan.target.devices,
        "device_kinds": list(plan.target.chip.kinds) if plan.target.chip else ["cpu"],
        "tier": plan.tier,
        "mesh": plan.mesh,
        "engine": plan.recipe.engine.kind,
        "batch": plan.recipe.batch,
        "accumulate": plan.recipe.accumulate,
        "compiler_options": dict(plan.recipe.engine.xla),
        "parameters": plan.parameters,
        "fits": plan.fits,
        "memory_bytes": {**held.classes, "peak": held.peak, "laid_out": held.arena, "room": int(held.room)},
        "replicated_bytes": held.replicated,
        "largest_buffers": [vars(buffer) for buffer in held.largest],
        "plan_seconds": plan.took,
    }
    if timing:
        tally = timing.tally
        found["step_seconds"] = timing.seconds
        found["seconds_by_part"] = {name: tally.parts.get(name, 0.0) for name in PARTS}
        found["tokens_per_second"] = timing.tokens / timing.seconds
        found["mfu"], found["mfu_convention"], found["bound"] = timing.mfu, timing.convention, timing.bound
        found["flops_per_device"] = {"products": tally.flops, "kernels": tally.kernel_flops}
        found["memory_traffic_bytes_per_device"] = tally.moved
        found["network"] = [
            {"kind": kind, "axes": list(axes), **vars(talk)} for (kind, axes), talk in tally.talk.items()
        ]
    return found | ({"dollars": vars(money)} if money else {})


def advised(found: Sequence[tuple[Candidate, Plan]]) -> Iterator[str]:
    """Recipes near the given one that fit."""
    if not found:
        yield "no change of microbatches, remat or mesh was found that fits: take more chips"
        return
    how = "compiled" if found[0][1].tier == "compiled" else "by arithmetic; not compiled"
    yield f"what fits ({how}):"
    for candidate, plan in found:
        step = f", {ms(plan.timing.seconds)} a step" if plan.timing else ""
        yield f"  {candidate.text}: {size_text(max(plan.memory.peak, plan.memory.arena))}{step}"


def found_lines(found: Found) -> Iterator[str]:
    """What a search came to, the best first, against the recipe as it stands."""
    if found.stopped:
        yield "interrupted; of what was tried:" if found.tried else "interrupted before anything was compiled"
    base = found.base.timing.seconds if found.base and found.base.timing and found.base.fits else None
    for candidate, plan in found.ranked:
        assert plan.timing
        against = f"  {base / plan.timing.seconds:.2f}x as fast" if base and candidate.changes else ""
        step = f"{ms(plan.timing.seconds):>9}  MFU {plan.timing.mfu:>5.1%}"
        yield f"{step}  {size_text(plan.memory.peak):>10}  {candidate.text}{against}"
    for candidate, reason in found.failed:
        yield f"   failed  {candidate.text}: {reason}"
    if found.tried and not found.ranked:
        yield "nothing that was tried fits"
