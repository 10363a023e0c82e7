"""Report of the bills of a training: a table, and how the first of them comes about."""

import math
import shlex
from collections.abc import Iterable, Iterator, Sequence
from datetime import date

from dtrain.assembly.explain import size_text
from dtrain.core.counts import ms
from dtrain.core.types import JsonObject
from dtrain.parallel.mesh import mesh_text
from dtrain.plan.bill import MAY_FIT, Bill, Wanted
from dtrain.plan.money import stale

SHOWN = 12
LONG = 0.02
"""Share of the time from which evaluations have a line on how to shorten them."""
SHORT = 60.0
"""Seconds of reading that are not worth a line."""
UNITS = {"days": 24.0, "hours": 1.0, "minutes": 1 / 60}


def bill_lines(
    bills: Sequence[Bill], failed: Sequence[str], wanted: Wanted, today: date | None = None
) -> Iterator[str]:
    """The table of the bills, what was not planned, and the first bill in detail. `today` decides whether prices are
    old."""
    unit = _unit(bills)
    if bills:
        yield f"{'target':<14}{'mesh':<24}{'step':>9}{'MFU':>7}{unit:>18}{'goodput':>14}{'dollars':>22}"
    for bill in bills[:SHOWN]:
        yield _row(bill, wanted, unit)
    if len(bills) > SHOWN:
        yield f"and {len(bills) - SHOWN} more"
    yield from (f"not planned: {reason}" for reason in failed)
    if bills and set(bills[0].misses(wanted)) <= {MAY_FIT}:
        yield ""
        yield from _detail(bills[0])
    if any(bill.plan.target.chip and bill.plan.target.chip.name not in bill.rates.prices for bill in bills):
        yield from filter(None, [stale(today or date.today()).replace("--price", "--price-file")])


def _row(bill: Bill, wanted: Wanted, unit: str) -> str:
    plan = bill.plan
    assert plan.timing
    mesh = mesh_text(plan.mesh)
    low, high = bill.goodput
    good = f"{low:.0%}" if round(low, 2) == round(high, 2) else f"{low:.0%} to {high:.0%}"
    price = _range(bill.dollars, "$") if bill.dollars else "no price"
    days = _times(bill, unit)
    notes = [*bill.misses(wanted), *(f"with {override}" for override in _overrides(bill) if override[:5] != "mesh=")]
    return (
        f"{bill.name:<14}{mesh:<24}{ms(plan.timing.seconds):>9}{plan.timing.mfu:>7.1%}{days:>18}{good:>14}"
        f" {price:>21}{'  ' + ', '.join(notes) if notes else ''}"
    )


def _unit(bills: Sequence[Bill]) -> str:
    """What the times of a table are in."""
    most = max((bill.hours[0] for bill in bills), default=0.0)
    return next(unit for unit, hours in UNITS.items() if most >= hours or unit == "minutes")


def _times(bill: Bill, unit: str) -> str:
    return _range(hours / UNITS[unit] for hours in bill.hours)


def _range(bounds: Iterable[float], sign: str = "") -> str:
    """12.3 to 15.6; $1,234 to 1,567."""
    bounds = tuple(bounds)
    if math.isinf(bounds[-1]):
        return "never ends"
    texts = [f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in bounds]
    return f"{sign}{texts[0]}" if texts[0] == texts[1] else f"{sign}{texts[0]} to {texts[1]}"


def _detail(bill: Bill) -> Iterator[str]:
    """How one bill comes about."""
    plan, rates, on = bill.plan, bill.rates, bill.plan.target
    assert plan.timing and on.chip
    unit = plan.timing.unit
    amount = plan.timing.amount
    yield f"{on}: {bill.steps:,} steps of {amount:,} {unit}, {bill.steps * amount:,} {unit} in all"
    step = bill.step
    by = f"{step.runs} published runs on {on.chip.name}" if step.runs else "published runs on other chips"
    yield f"  step           {ms(plan.timing.seconds)} by arithmetic; {ms(step.least)} to {ms(step.most)} by {by}"
    price = rates.price(on.chip)
    if price is not None and bill.per_hour is not None:
        yield f"  price          ${price:,.2f} a chip-hour ({rates.source(on.chip)}): ${bill.per_hour:,.2f} an hour"
    rate = _range(value * 1e6 for value in rates.failing)
    source = "Meta's H100 and A100, 2024" if rates.failures is None else "--price-file"
    yield f"  failures       {_range(bill.failures)} in the whole run, at {rate} a million chip-hours ({source})"
    best = [bill.reliability(value).best_interval / 60 for value in reversed(rates.failing)]
    stall = bill.reliability(0.0).stall
    size = f"{size_text(plan.checkpoint)} by {bill.hosts} host{'s' * (bill.hosts > 1)}"
    yield f"  checkpoint     {size}: training waits {stall:.3g} s, the bucket has it after {bill.upload:,.3g} s"
    yield f"                 one each {bill.interval / 60:.3g} minutes; each {_range(best)} loses least (Young/Daly)"
    if bill.upload > bill.interval:
        yield "                 that is before the save before it is in the bucket: raise checkpoint.minutes"
    reading = f"{bill.upload:,.3g} s to read the checkpoint"
    yield f"  restart        {rates.restart:g} minutes and {reading}, for each failure"
    months = f"{plan.recipe.checkpoint.keep} checkpoints at ${rates.storage:g} a GB and month"
    yield f"  storage        ${bill.storage:,.2f}: {months}"
    rate = plan.timing.amount / plan.timing.seconds
    width = f", {4 * rate / bill.hosts / 1e6:.3g} MB/s of int32" if plan.timing.tokens else ""
    yield f"  data           {rate:,.0f} {unit}/s, {rate / bill.hosts:,.0f} for each host{width}"
    yield from _evaluation(bill)
    yield from _reading(bill)
    without = "" if bill.evaluations else "evaluation, "
    data = "copying data to the hosts" if bill.read_bytes else "copying, reading and tokenising data"
    yield f"  not counted    {without}{data}, waiting for machines, traffic between regions"
    changes = "".join(f" {override}" for override in _overrides(bill))
    slices = f" --slices {on.slices}" if on.slices > 1 else ""
    yield f"next: dtrain plan RECIPE --on {on.name}{slices} steps={bill.steps}{changes}   (compiles the step)"


def _evaluation(bill: Bill) -> Iterator[str]:
    """How much time the evaluations take."""
    if not bill.evaluations:
        return
    count, share = bill.evaluations
    held = bill.plan.recipe.data.held_share
    how = "" if bill.passes > 1 else ", if the data is used once"
    times = f"{count} time{'s' * (count > 1)}"
    yield f"  evaluation     {times} the {held:.3g} of the data that is held out: {share:.1%} of the steps' time{how}"
    if share > LONG:
        yield "                 a smaller data.test, or data.test_files, takes less"


def _reading(bill: Bill) -> Iterator[str]:
    """How long the files of tokens are read before the first step."""
    if bill.read < SHORT:
        return
    minutes = f"{bill.read / 60:,.3g} minutes"
    yield f"  first start    each host reads {bill.read_bytes / 1e9:,.0f} GB of tokens for their digests: {minutes}"
    if bill.hosts > 1:
        yield f"                 a data.cache that all hosts share divides that by their number, {bill.hosts}"


def _overrides(bill: Bill) -> list[str]:
    """What the bill changes of its recipe, as words of a command line."""
    model = bill.changes.get("model", {})
    texts = {f"model.{name}": str(_listed(value)).replace("'", "") for name, value in model.items()}
    texts |= {key: str(bill.changes[key]) for key in ("accumulate",) if key in bill.changes}
    if mesh := bill.changes.get("mesh"):
        texts["mesh"] = str(dict(mesh)).replace("'", "")  # names and numbers alone: as YAML has them
    return [f"{key}={shlex.quote(text)}" for key, text in texts.items()]


def _listed(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def what_if_lines(bill: Bill, others: Iterable[tuple[str, Bill | str]]) -> Iterator[str]:
    """A table of changes of a bill's recipe, each alone; as they are planned."""
    unit = _unit([bill])
    yield ""
    yield f"{'what if':<52}{'step':>9}{unit:>18}{'dollars':>22}"
    yield f"{'  nothing':<52}{_changes(bill, bill, unit)}"
    for text, other in others:
        yield f"{'  ' + text:<52}{other if isinstance(other, str) else _changes(other, bill, unit)}"


def _changes(bill: Bill, base: Bill, unit: str) -> str:
    """Step, time and dollars of a bill, and by how much its time is longer than that of another."""
    assert bill.plan.timing
    days, price = _times(bill, unit), _range(bill.dollars, "$") if bill.dollars else "no price"
    share = bill.hours[1] / base.hours[1] - 1
    against = "" if bill is base else f"  {share:+.0%}{'' if bill.plan.surely_fits else ', may fit'}"
    return f"{ms(bill.plan.timing.seconds):>9}{days:>18}{price:>22}{against}"


def bill_values(bill: Bill, wanted: Wanted) -> JsonObject:
    """A bill as JSON values: times in hours and seconds, sizes in bytes."""
    plan = bill.plan
    assert plan.timing
    return {
        "target": plan.target.name,
        "slices": plan.target.slices,
        "chips": plan.target.chips,
        "mesh": plan.mesh,
        "changes": dict(bill.changes),
        "step_seconds": plan.timing.seconds,
        "step_seconds_range": [bill.step.least, bill.step.most],
        "mfu": plan.timing.mfu,
        "steps": bill.steps,
        plan.timing.unit: bill.steps * plan.timing.amount,
        "hours": _finite(bill.hours),
        "goodput": list(bill.goodput),
        "failures": _finite(bill.failures),
        "failures_per_chip_hour": list(bill.rates.failing),
        "dollars": _finite(bill.dollars) if bill.dollars else None,
        "dollars_hour": bill.per_hour,
        "price_of": bill.rates.source(plan.target.chip) if plan.target.chip else "",
        "storage_dollars": bill.storage,
        "checkpoint_bytes": plan.checkpoint,
        "checkpoint_stall_seconds": bill.reliability(0.0).stall,
        "checkpoint_upload_seconds": bill.upload,
        "checkpoint_seconds": bill.interval,
        "best_checkpoint_seconds": _finite([bill.reliability(rate).best_interval for rate in bill.rates.failing]),
        "evaluations": bill.evaluations[0] if bill.evaluations else None,
        "evaluation_share": bill.evaluations[1] if bill.evaluations else None,
        "read_bytes": bill.read_bytes,
        "read_seconds": bill.read,
        "misses": bill.misses(wanted),
    }


def _finite(values: Sequence[float]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values]
