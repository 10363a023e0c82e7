"""A plan in words and numbers, for a person and for a program."""

from collections.abc import Iterator, Sequence
from datetime import date

from dtrain.core.chips import PRICED
from dtrain.core.slices import Target
from dtrain.parallel.mesh import MEMORY_AXES
from dtrain.plan.capacity import state
from dtrain.plan.memory import RESERVED
from dtrain.plan.money import Money, stale
from dtrain.plan.plan import Plan, Timing
from dtrain.plan.replay import CollectiveCost
from dtrain.plan.search import SearchResult
from dtrain.train.banner import mesh_text
from dtrain.train.explain import size_text

RESERVING = (
    f"a compiler reserved {RESERVED[0]} to {RESERVED[1]} times the peak of other programs: compile it to be sure"
)
SHOWN = 2**10
"""Bytes from which on replicated state is shown; less is step counts and rounding."""

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
    "state": "the size of parameters, optimizer state and inputs; nothing was compiled",
}


def lines(plan: Plan, today: date | None = None) -> Iterator[str]:
    """The report of one plan; `today` decides whether its prices are old."""
    recipe, memory = plan.recipe, plan.memory
    yield f"{recipe.name} on {plan.target}: {verdict(plan)}"
    by = f"mesh {mesh_text(plan.mesh)}, engine {recipe.engine.kind}, batch {recipe.batch}"
    parts = f" in {recipe.accumulate} microbatches" if recipe.accumulate > 1 else ""
    count = len(recipe.engine.xla)
    options = f", {count} compiler option{'s' * (count > 1)}" if count else ""
    yield f"{recipe.model.kind} of {plan.parameters:,} parameters; {by}{parts}{options}"
    yield f"[{plan.tier}] {TIERS[plan.tier]}"
    yield ""
    yield from _memory(plan)
    if not memory.fits:
        return
    yield ""
    if plan.timing:
        yield from _timing(plan.timing, plan)
    else:
        yield "step time unknown: there is no figure for the peak speed of this device"
    if plan.money:
        yield ""
        yield from _money(plan.money, plan.timing.unit if plan.timing else "examples", plan.target)
        yield from price_warning([plan.money], today)


def verdict(plan: Plan) -> str:
    """Whether it fits. By arithmetic only the peak is known, of which a TPU's compiler reserves more."""
    if not plan.fits:
        return "DOES NOT FIT"
    reserved = RESERVED[1] if plan.tier == "quick" and plan.target.platform == "tpu" else 1.0
    return "fits" if plan.memory.needed * reserved <= plan.memory.room else "may fit"


def _memory(plan: Plan) -> Iterator[str]:
    memory = plan.memory
    yield "memory of a device"
    for kind, size in memory.classes.items():
        if size:
            yield f"  {kind:<28}{size_text(size):>11}"
    share = f"  of {size_text(memory.room)} ({memory.peak / memory.room:.0%})"
    if plan.tier == "state":
        yield f"  {'state and inputs':<28}{size_text(memory.peak):>11}{share}, activations left out"
    else:
        yield f"  {'at the peak':<28}{size_text(memory.peak):>11}{share}"
    if memory.arena > memory.peak:
        yield f"  {'reserved':<28}{size_text(memory.arena):>11}  by the compiler; this must find room"
    if verdict(plan) == "may fit":
        yield f"  ({RESERVING})"
    if not memory.fits:
        yield f"  {'over by':<28}{size_text(memory.needed - memory.room):>11}"
    if memory.replicated >= SHOWN:
        yield f"  {'replicated':<28}{size_text(memory.replicated):>11}  of parameters and optimizer state"
    if plan.tier == "state":
        yield from _state(plan)
    if plan.tier == "quick" and getattr(plan.recipe.model, "remat", "") == "offload":
        yield "  (what remat offload moves to the host is counted as if it stayed, and its transfers are not counted)"
    if plan.tier == "compiled" and memory.largest:
        yield "largest at the peak"
        for buffer in memory.largest:
            where = f"  {buffer.line}" if buffer.line else ""
            yield f"  {size_text(buffer.bytes):>10}  {buffer.shape:<26}{buffer.kind}: {buffer.what}{where}"


def _state(plan: Plan) -> Iterator[str]:
    """What the state takes where no byte is replicated, and the smallest slice with room for it."""
    found = state(plan.memory, plan.target)
    yield f"state split evenly over {plan.target.devices} devices: {size_text(found.share)} each"
    if found.share <= plan.memory.room:
        yield "  that has room: a mesh with more fsdp holds it"
    elif found.smallest:
        share = size_text(found.total / found.smallest.devices)
        yield f"  the smallest slice that holds it is {found.smallest}: {share} a device"
    elif plan.target.chip:
        yield f"  no slice of {plan.target.chip.name} holds it"


def _timing(timing: Timing, plan: Plan) -> Iterator[str]:
    tally, step = timing.tally, timing.seconds
    yield f"time of a step {ms(step)}, bound by {timing.bound}"
    for part, name in PARTS.items():
        if tally.parts.get(part, 0) > 5e-4 * step:
            yield f"  {name:<28}{ms(tally.parts[part]):>11}  {tally.parts[part] / step:4.0%}"
    if plan.tier == "quick" and tally.parts.get("network"):
        yield "  (the network by rule: a compiled plan reads what is hidden)"
    rate = timing.amount / step
    yield f"  {rate:,.0f} {timing.unit}/s, {rate / plan.target.chips:,.0f} a chip"
    again = f"; HFU {timing.hfu:.1%}, with what is computed again" if timing.hfu > timing.mfu else ""
    yield f"  MFU {timing.mfu:.1%} ({timing.convention}){again}"
    costs = sorted(_costs(timing), key=lambda item: -item[1])[:3]
    if costs:
        yield "costs most: " + "; ".join(f"{name} {seconds / step:.0%}" for name, seconds in costs)
    yield from _network(timing, plan)


def _network(timing: Timing, plan: Plan) -> Iterator[str]:
    """Collectives by kind and axes as a recipe names them, the slowest first."""
    rows: dict[tuple[str, str], CollectiveCost] = {}
    for (kind, axes), collective in timing.tally.collectives.items():
        over = " and ".join(dict.fromkeys("fsdp" if axis in MEMORY_AXES else axis for axis in axes)) or "all"
        row = rows.setdefault((kind, over), CollectiveCost())
        for name, value in vars(collective).items():
            setattr(row, name, getattr(row, name) + value)
    shown = [(key, row) for key, row in rows.items() if row.seconds > 1e-3 * timing.seconds]
    if not shown:
        return
    chip, on = plan.target.chip, plan.target
    between = (
        f"; {on.machine} has {chip.far / 1e9:.3g} GB/s for each GPU between hosts" if chip and on.hosts > 1 else ""
    )
    yield f"network of a step{between}"
    for (kind, over), row in sorted(shown, key=lambda item: -item[1].seconds)[:8]:
        exposed = f", {ms(row.exposed)} exposed"
        volume = f"{row.calls:>7,.0f} calls {size_text(row.bytes):>10}"
        yield f"  {kind:<20}over {over:<10}{volume} in all  {ms(row.seconds)}{exposed}"


def _costs(timing: Timing) -> Iterator[tuple[str, float]]:
    if timing.tally.lines:
        for (part, line), seconds in timing.tally.lines.items():
            yield f"{PARTS[part]}{f' of {line}' if line else ''}", seconds
    else:
        yield from ((PARTS[part], seconds) for part, seconds in timing.tally.parts.items())


def _money(money: Money, unit: str, on: Target) -> Iterator[str]:
    machine = f" of {on.machine}" if on.machine else ""
    listed = f"on-demand list price{machine}, {PRICED:%Y-%m}; --price sets yours"
    yield f"money at ${money.per_chip_hour:,.2f} a chip and hour ({listed if money.listed else 'your price'})"
    whole = f" for the {money.chips} chips of a whole {on.machine}" if money.chips != on.chips else ""
    rate = money.per_billion_tokens
    each = f"${money.per_million_examples:,.2f} a million" if rate is None else f"${rate:,.2f} a billion"
    yield f"  ${money.per_hour:,.2f} an hour{whole}; {each} {unit}"
    steps = f"{money.steps:,} step{'s take' if money.steps > 1 else ' takes'}"
    yield f"  {steps} {duration(money.hours)}, ${money.total:,.2f}; compiling, evaluation and saves come on top"


def price_warning(money: Sequence[Money], today: date | None = None) -> Iterator[str]:
    """A line where list prices are used and are old."""
    warning = stale(today or date.today()) if any(one.listed for one in money) else ""
    if warning:
        yield warning


def ms(seconds: float) -> str:
    """0.8861 → 886 ms."""
    return f"{1e3 * seconds:,.0f} ms" if seconds >= 0.1 else f"{1e3 * seconds:.3g} ms"


def duration(hours: float) -> str:
    """26.53 → 26.5 hours; 0.2 → 12 minutes; 0.0225 → 81 seconds. Three figures, so that it agrees with its price."""
    value, unit = (hours, "hours") if hours >= 1 else (60 * hours, "minutes")
    value, unit = (60 * value, "seconds") if unit == "minutes" and value < 2 else (value, unit)
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def search_report(found: SearchResult) -> Iterator[str]:
    """What a search came to, the best first, against the recipe as it stands."""
    if found.stopped:
        yield "interrupted; of what was tried:" if found.tried else "interrupted before anything was compiled"
    base = found.base.timing.seconds if found.base and found.base.timing and found.base.fits else None
    for candidate, plan in found.ranked:
        assert plan.timing
        against = f"  {base / plan.timing.seconds:.2f}x as fast" if base and candidate.changes else ""
        step = f"{ms(plan.timing.seconds):>9}  MFU {plan.timing.mfu:>5.1%}"
        yield f"{step}  {size_text(plan.memory.needed):>10}  {candidate.text}{against}"
    for candidate, reason in found.failed:
        yield f"   failed  {candidate.text}: {reason}"
    if found.tried and not found.ranked:
        yield "nothing that was tried fits"
