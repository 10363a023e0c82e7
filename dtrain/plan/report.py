"""Report of a plan or a search as text."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

from dtrain.assembly.assemble import with_sums
from dtrain.assembly.explain import size_text
from dtrain.core.chips import PRICED, Chip
from dtrain.core.counts import ms
from dtrain.core.slices import Target
from dtrain.core.types import JsonObject
from dtrain.parallel.mesh import EXPERT, FSDP, FSDP_AXES, PIPELINE, mesh_text
from dtrain.parallel.pipeline import bubble_text
from dtrain.plan.capacity import state
from dtrain.plan.money import Money, stale
from dtrain.plan.plan import Plan, Timing, compilers, slots
from dtrain.plan.replay import CollectiveCost
from dtrain.plan.search import NOTHING, SearchResult
from dtrain.plan.workers import PlanJob


@dataclass(frozen=True)
class Checks:
    """The range of measured over predicted step times in so many published runs."""

    least: float
    most: float
    runs: int


CHECKS = {
    "v5e": Checks(0.97, 1.06, 2),
    "v5p": Checks(0.97, 1.11, 5),
    "v6e": Checks(0.84, 1.14, 17),
    "tpu7x": Checks(0.95, 1.30, 5),
    "a100": Checks(0.93, 0.96, 4),
    "h100": Checks(0.88, 1.29, 4),
}
"""By chip: what benchmarks/plan_vs_published.py prints; a chip with one run is left out."""


@dataclass(frozen=True)
class Interval:
    """Seconds of a step, if it compares with its prediction as published runs on its chip did."""

    least: float
    most: float
    runs: int


def interval(chip: Chip | None, seconds: float) -> Interval | None:
    """The interval of a predicted step; None if fewer than two published runs on that chip were compared."""
    checks = CHECKS.get(chip.name) if chip else None
    return Interval(checks.least * seconds, checks.most * seconds, checks.runs) if checks else None


def any_interval(seconds: float) -> Interval:
    """The interval of a predicted step on a chip with fewer than two published runs: that of all others."""
    least, most = min(one.least for one in CHECKS.values()), max(one.most for one in CHECKS.values())
    return Interval(least * seconds, most * seconds, 0)


LEAST = 0.02
"""Smallest part of a step that is worth a line."""


@dataclass(frozen=True)
class Saving:
    """The difference of two quick plans, and the dtype of the sums."""

    seconds: float
    part: float
    dtype: str

    @property
    def text(self) -> str:
        """One line: the setting, what it saves, what it changes."""
        saves = f"saves about {1e3 * self.seconds:,.3g} ms a step ({self.part:.0%}; two quick plans compared)"
        return f"precision.reduce: compute {saves}; gradients are then summed over devices in {self.dtype}"

    @property
    def values(self) -> JsonObject:
        """The same as JSON values."""
        return {"set": "precision.reduce=compute", "seconds": self.seconds, "part": self.part}


def saving(plan: Plan) -> Saving | None:
    """What the setting saves of this plan's step; None if `with_sums` is, or if it is less than LEAST."""
    seconds, changed = plan.timing.seconds if plan.timing else 0.0, with_sums(plan.recipe)
    if not seconds or changed is None:
        return None
    now, then = (PlanJob(recipe, plan.target, quick=True).make() for recipe in (plan.recipe, changed))
    if not (isinstance(now, Plan) and isinstance(then, Plan) and now.timing and then.timing):
        return None
    part = 1 - then.timing.seconds / now.timing.seconds
    return Saving(part * seconds, part, plan.recipe.precision.compute) if part >= LEAST else None


def values(plan: Plan) -> JsonObject:
    """The plan as JSON values: sizes in bytes, times in seconds."""
    memory, timing, money = plan.memory, plan.timing, plan.money
    smallest = state(memory, plan.target).smallest if plan.tier == "state" else None
    result: dict[str, Any] = {
        "name": plan.recipe.name,
        "target": plan.target.name,
        "slices": plan.target.slices,
        "chips": plan.target.chips,
        "devices": plan.target.devices,
        "device_kinds": list(plan.target.chip.kinds) if plan.target.chip else ["cpu"],
        "tier": plan.tier,
        "mesh": plan.mesh,
        "engine": plan.engine.kind,
        "batch": plan.recipe.batch,
        "accumulate": plan.recipe.accumulate,
        "compiler_options": _options(plan),
        "parameters": plan.parameters,
        "fits": plan.fits,
        "verdict": verdict(plan).lower(),
        "note": plan.note,
        "memory_bytes": {
            **memory.classes,
            "peak": memory.peak,
            "reserved": memory.arena,
            "needed": memory.needed,
            "room": int(memory.room),
        },
        "replicated_bytes": memory.replicated,
        **({"smallest_slice": smallest.name} if smallest else {}),
        "largest_buffers": [vars(buffer) for buffer in memory.largest],
        "plan_seconds": plan.took,
        "versions": compilers(),
    }
    if timing:
        tally = timing.tally
        result["step_seconds"] = timing.seconds
        if found := interval(plan.target.chip, timing.seconds):
            result["step_seconds_as_published"] = vars(found)
        result["seconds_by_part"] = {name: tally.parts.get(name, 0.0) for name in PARTS}
        result["examples_per_second"] = timing.examples / timing.seconds
        if timing.tokens:
            result["tokens_per_second"] = timing.tokens / timing.seconds
        result["mfu"], result["hfu"], result["mfu_convention"] = timing.mfu, timing.hfu, timing.convention
        result["bound"] = timing.bound
        result["flops_per_device"] = {"products": tally.flops, "kernels": tally.kernel_flops}
        result["memory_traffic_bytes_per_device"] = tally.moved
        slowest = sorted(tally.lines.items(), key=lambda one: -one[1])[:LINES]
        result["seconds_by_line"] = [
            {"part": part, "line": line, "seconds": seconds} for (part, line), seconds in slowest if line
        ]
        result["network"] = [
            {"kind": kind, "axes": list(axes), **vars(collective)}
            for (kind, axes), collective in tally.collectives.items()
        ]
    if money:
        result["dollars"] = vars(money) | ({"list_price_of": f"{PRICED:%Y-%m}"} if money.listed else {})
    return result


LINES = 50
"""Most lines of source code whose time a plan has as JSON."""
SHOWN = 2**10
"""Bytes from which replicated state is shown; smaller amounts are step counters and rounding."""

MANY = 2.0
"""Rows sent for each that holds a token, from which a plan says so."""

PARTS = {
    "product": "matrix products",
    "kernel": "kernels",
    "memory": "memory traffic",
    "network": "network, exposed",
    "copy": "copies, exposed",
}
TIERS = {
    "compiled": "read from the compiled program of the run's own step",
    "quick": "estimated from the traced step; nothing was compiled",
    "state": "the size of parameters, optimizer state and inputs; nothing was compiled",
}


def _options(plan: Plan, *, experts: bool | None = None) -> dict[str, bool | str]:
    """The options that the engine asks of the compiler, for a model with experts or without; default: the plan's."""
    own = plan.recipe.model.structure.mixture is not None
    on = plan.target
    return plan.engine.chosen(on.platform, on.chip, experts=own if experts is None else experts)


def lines(plan: Plan, today: date | None = None) -> Iterator[str]:
    """Lines of the report of one plan. `today` decides whether its prices are old."""
    recipe = plan.recipe
    yield f"{recipe.name} on {plan.target}: {verdict(plan)}"
    overlap = plan.engine.overlapped(plan.target.platform, plan.target.chip)
    some = ", in part" if plan.note or len(_options(plan)) < len(_options(plan, experts=False)) else ""
    engine = plan.engine.kind + (
        f" with overlap {overlap}{some}"
        if overlap != "none" and _options(plan).keys() - recipe.engine.xla.keys()
        else ""
    )
    by = f"mesh {mesh_text(plan.mesh)}, engine {engine}, batch {recipe.batch}"
    parts = f" in {recipe.accumulate} microbatches" if recipe.accumulate > 1 else ""
    count = len(recipe.engine.xla)
    options = f", {count} compiler option{'s' * (count > 1)}" if count else ""
    yield f"{recipe.model.kind} of {plan.parameters:,} parameters; {by}{parts}{options}"
    yield f"[{plan.tier}] {TIERS[plan.tier]}"
    if plan.note:
        yield plan.note
    yield ""
    yield from _memory(plan)
    if not plan.may_fit:
        return
    yield ""
    if plan.timing:
        yield from _timing(plan.timing, plan)
    else:
        yield "step time unknown: the chip table has no peak speed for this device"
    if plan.money:
        yield ""
        yield from _money(plan.money, plan.timing.unit if plan.timing else "examples", plan.target)
        yield from price_warning([plan.money], today)


def verdict(plan: Plan) -> str:
    """Whether the plan fits: by the compiler, or as far as a peak that was not compiled tells."""
    if not plan.may_fit:
        return "DOES NOT FIT"
    return "fits" if plan.surely_fits else "may fit"


def unsure(plan: Plan) -> str:
    """Why a plan that may fit does not say that it fits."""
    if plan.peaks is None:
        return "on GPUs experts take memory that a quick plan does not count; compile to be sure"
    least, most = plan.peaks
    return f"the compiler's peak was {least} to {most} times that of quick plans; compile to be sure"


def _memory(plan: Plan) -> Iterator[str]:
    memory = plan.memory
    yield "memory per device"
    for kind, size in memory.classes.items():
        if size:
            yield f"  {kind:<28}{size_text(size):>11}"
    share = f"  of {size_text(memory.room)} ({memory.peak / memory.room:.0%})"
    if plan.tier == "state":
        yield f"  {'state and inputs':<28}{size_text(memory.peak):>11}{share}, activations not included"
    else:
        yield f"  {'peak':<28}{size_text(memory.peak):>11}{share}"
    if memory.refused:
        yield f"  {'asked for':<28}{size_text(memory.refused):>11}  by the compiler, which refused the program"
    if verdict(plan) == "may fit":
        yield f"  ({unsure(plan)})"
    if not plan.may_fit:
        yield f"  {'over by':<28}{size_text(memory.needed - memory.room):>11}"
    if memory.replicated >= SHOWN:
        yield f"  {'replicated':<28}{size_text(memory.replicated):>11}  of parameters and optimizer state"
    if plan.tier == "state":
        yield from _state(plan)
    if plan.tier == "quick" and plan.recipe.model.structure.offloads:
        yield "  (remat offload: what it moves to the host is counted as device memory; transfers are not counted)"
    if plan.tier == "compiled" and memory.largest:
        yield "largest arrays at the peak"
        for buffer in memory.largest:
            where = f"  {buffer.line}" if buffer.line else ""
            yield f"  {size_text(buffer.bytes):>10}  {buffer.shape:<26}{buffer.kind}: {buffer.what}{where}"


def _state(plan: Plan) -> Iterator[str]:
    """Size of the state without any replication, and the smallest slice with room for it."""
    needed = state(plan.memory, plan.target)
    yield f"state split evenly over {plan.target.devices} devices: {size_text(needed.share)} each"
    if needed.share <= plan.memory.room:
        yield "  that fits: use a mesh with a larger fsdp axis"
    elif needed.smallest:
        share = size_text(needed.total / needed.smallest.devices)
        yield f"  the smallest slice that holds it is {needed.smallest}: {share} a device"
    elif plan.target.chip:
        yield f"  no slice of {plan.target.chip.name} holds it"


def _timing(timing: Timing, plan: Plan) -> Iterator[str]:
    tally, step = timing.tally, timing.seconds
    yield f"step time {ms(step)}, bound by {timing.bound}"
    yield f"  {_interval(plan, step)}"
    for part, name in PARTS.items():
        if tally.parts.get(part, 0) > 5e-4 * step:
            yield f"  {name:<28}{ms(tally.parts[part]):>11}  {tally.parts[part] / step:4.0%}"
    if plan.tier == "quick" and tally.parts.get("network"):
        yield "  (network overlap by rule; a compiled plan reads it from the schedule)"
    if (stages := plan.mesh.get(PIPELINE, 1)) > 1:
        yield f"  {bubble_text(stages, plan.recipe.accumulate)}, which the parts above include"
    rate = timing.amount / step
    yield f"  {rate:,.0f} {timing.unit}/s, {rate / plan.target.chips:,.0f} a chip"
    hfu = f"; HFU {timing.hfu:.1%} (with recomputation)" if timing.hfu > timing.mfu else ""
    narrow = plan.recipe.precision.narrow
    yield f"  MFU {timing.mfu:.1%} ({timing.convention}){hfu}{'; both of the peak in bfloat16' if narrow else ''}"
    costs = sorted(_costs(timing), key=lambda item: -item[1])[:3]
    if costs:
        yield "most expensive: " + "; ".join(f"{name} {seconds / step:.0%}" for name, seconds in costs)
    yield from _network(timing, plan)


def _interval(plan: Plan, step: float) -> str:
    """What the step would take if it compared with its prediction as published runs did."""
    chip, found = plan.target.chip, interval(plan.target.chip, step)
    assert chip
    if found is None:
        return f"(fewer than two published runs on {chip.name} were compared with their predictions: no range)"
    times = f"{found.least / step:.2f} to {found.most / step:.2f} times their plans"
    of = "" if plan.timing and plan.timing.unit == "tokens" else " of language models"
    return f"{ms(found.least)} to {ms(found.most)} by {found.runs} published runs{of} on {chip.name}: {times}"


def _network(timing: Timing, plan: Plan) -> Iterator[str]:
    """Collectives by kind and by axes as a recipe names them, the slowest first."""
    rows: dict[tuple[str, str], CollectiveCost] = {}
    for (kind, axes), collective in timing.tally.collectives.items():
        over = " and ".join(dict.fromkeys(FSDP if axis in FSDP_AXES else axis for axis in axes)) or "all"
        row = rows.setdefault((kind, over), CollectiveCost())
        for name, value in vars(collective).items():
            setattr(row, name, getattr(row, name) + value)
    shown = [(key, row) for key, row in rows.items() if row.seconds > 1e-3 * timing.seconds]
    if not shown:
        return
    chip, on = plan.target.chip, plan.target
    between = (
        f"; {on.machine} has {chip.network_bandwidth / 1e9:.3g} GB/s for each GPU between hosts"
        if chip and on.hosts > 1
        else ""
    )
    yield f"network per step{between}"
    experts, sent = plan.recipe.model.structure.mixture, slots(plan.recipe, plan.mesh.get(EXPERT, 1))
    if experts and experts.capacity is None and sent >= MANY:
        yield f"  (experts without a capacity are sent {sent:.3g} rows for each that holds a token, for the worst case;"
        yield "  model.experts.capacity bounds that, and a mesh without the axis expert sends none)"
    for (kind, over), row in sorted(shown, key=lambda item: -item[1].seconds)[:8]:
        exposed = f", {ms(row.exposed)} exposed"
        volume = f"{row.calls:>7,.0f} calls {size_text(row.bytes):>10}"
        yield f"  {kind:<20}over {over:<10}{volume} in total  {ms(row.seconds)}{exposed}"


def _costs(timing: Timing) -> Iterator[tuple[str, float]]:
    if timing.tally.lines:
        for (part, line), seconds in timing.tally.lines.items():
            yield f"{PARTS[part]}{f' of {line}' if line else ''}", seconds
    else:
        yield from ((PARTS[part], seconds) for part, seconds in timing.tally.parts.items())


def _money(money: Money, unit: str, on: Target) -> Iterator[str]:
    machine = f" of {on.machine}" if on.machine else ""
    listed = f"on-demand list price{machine}, {PRICED:%Y-%m}; --price sets another"
    yield f"price at ${money.per_chip_hour:,.2f} a chip-hour ({listed if money.listed else 'from --price'})"
    whole = f" for the {money.chips} chips of a whole {on.machine}" if money.chips != on.chips else ""
    rate = money.per_billion_tokens
    each = f"${money.per_million_examples:,.2f} a million" if rate is None else f"${rate:,.2f} a billion"
    yield f"  ${money.per_hour:,.2f} an hour{whole}; {each} {unit}"
    steps = f"{money.steps:,} step{'s take' if money.steps > 1 else ' takes'}"
    yield f"  {steps} {duration(money.hours)}, ${money.total:,.2f}; compiling, evaluation and checkpoints not included"


def price_warning(money: Sequence[Money], today: date | None = None) -> Iterator[str]:
    """A warning if list prices are used and are old."""
    warning = stale(today or date.today()) if any(part.listed for part in money) else ""
    if warning:
        yield warning


def duration(hours: float) -> str:
    """26.53 → 26.5 hours; 0.2 → 12 minutes; 0.0225 → 81 seconds. Three figures, so that time and price agree."""
    value, unit = (hours, "hours") if hours >= 1 else (60 * hours, "minutes")
    value, unit = (60 * value, "seconds") if unit == "minutes" and value < 2 else (value, unit)
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def search_report(result: SearchResult) -> Iterator[str]:
    """Lines of the result of a search: the variants that fit, the fastest first, compared with the given recipe."""
    if result.stopped:
        yield "interrupted; results so far:" if result.tried else NOTHING
    base = result.base.timing.seconds if result.base and result.base.timing and result.base.fits else None
    for candidate, plan in result.ranked:
        assert plan.timing
        against = f"  {base / plan.timing.seconds:.2f}x as fast" if base and candidate.changes else ""
        step = f"{ms(plan.timing.seconds):>9}  MFU {plan.timing.mfu:>5.1%}"
        yield f"{step}  {size_text(plan.memory.needed):>10}  {candidate.text}{against}"
    for candidate, reason in result.failed:
        yield f"   failed  {candidate.text}: {reason}"
    if result.tried and not result.ranked:
        yield "none of the compiled variants fits"
