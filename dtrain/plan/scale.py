"""One recipe on several targets: step time, MFU and price against chips, as a table and as a plot."""

from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path

from dtrain.assembly.explain import size_text
from dtrain.core.counts import ms
from dtrain.core.errors import EnvironmentFault
from dtrain.core.slices import Target
from dtrain.plan.money import Money
from dtrain.plan.plan import Plan, Timing
from dtrain.plan.report import price_warning, unsure, verdict
from dtrain.plan.workers import Outcome

BAR = 20


def table(targets: Sequence[Target], outcomes: Sequence[Outcome], today: date | None = None) -> Iterator[str]:
    """A row for each target, or the reason why it has no plan. The memory column is what must fit."""
    unit, priced = _units(outcomes)
    head = f"{'target':<16}{'chips':>7}{'step':>11}{f'{unit}/s':>14}{'MFU':>7}"
    yield f"{head}{'memory':>11}{'$/hour':>11}{f'$/{priced} {unit}':>14}"
    for on, plan in zip(targets, outcomes, strict=True):
        start = f"{on.name:<16}{on.chips:>7,}"
        if not isinstance(plan, Plan):
            yield f"{start}  {plan.message}"
        elif not plan.may_fit:
            alone = "; state and inputs alone" if plan.tier == "state" else ""
            needed = f"{size_text(plan.memory.needed)} of {size_text(plan.memory.room)} a device"
            yield f"{start}  DOES NOT FIT: {needed}{alone}"
        elif not plan.timing:
            yield f"{start}  step time unknown: {size_text(plan.memory.needed)} a device"
        else:
            yield start + _row(plan, plan.timing)
    reasons = [unsure(plan) for plan in outcomes if isinstance(plan, Plan) and verdict(plan) == "may fit"]
    yield from (f"may fit: {reason}" for reason in dict.fromkeys(reasons))
    yield from price_warning([plan.money for plan in outcomes if isinstance(plan, Plan) and plan.money], today)


def _units(outcomes: Sequence[Outcome]) -> tuple[str, str]:
    """What rates count, and the number of them that the price is for: a billion tokens, or a million examples."""
    units = [plan.timing.unit for plan in outcomes if isinstance(plan, Plan) and plan.timing]
    unit = units[0] if units else "examples"
    return unit, "1e9" if unit == "tokens" else "1e6"


def _each(money: Money) -> float:
    return money.per_million_examples if money.per_billion_tokens is None else money.per_billion_tokens


def _row(plan: Plan, timing: Timing) -> str:
    money = plan.money
    rate = f"{money.per_hour:>11,.2f}{_each(money):>14,.2f}" if money else f"{'':>25}"
    bar = "#" * round(BAR * min(timing.mfu, 1.0))
    numbers = f"{ms(timing.seconds):>11}{timing.amount / timing.seconds:>14,.0f}{timing.mfu:>7.1%}"
    may = "  may fit" if verdict(plan) == "may fit" else ""
    return f"{numbers}{size_text(plan.memory.needed):>11}{rate}  {bar}{may}"


def refuse_undrawable(path: Path) -> None:
    """Raise EnvironmentFault, before anything is planned, if no plot can be written to that path."""
    from matplotlib.backend_bases import FigureCanvasBase

    known = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.lower().removeprefix(".") not in known:
        raise EnvironmentFault(f"--plot {path}: not an image file name", f"it must end in .{', .'.join(known)}")
    if not path.parent.is_dir():
        raise EnvironmentFault(f"--plot {path}: the folder {path.parent} does not exist", f"mkdir -p {path.parent}")


def draw(outcomes: Sequence[Outcome], path: Path) -> None:
    """Plot step time, MFU and price over chips of the plans that fit. Raises EnvironmentFault if there are none."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    fitting = [plan for plan in outcomes if isinstance(plan, Plan) and plan.timing and plan.may_fit]
    plans = sorted(fitting, key=lambda plan: plan.target.chips)
    if not plans:
        raise EnvironmentFault(f"nothing to plot into {path}: no target has a plan that fits and a step time")
    priced = all(plan.money for plan in plans)
    figure, panels = pyplot.subplots(1, 3 if priced else 2, figsize=(12, 3.6), layout="constrained")
    for kind in dict.fromkeys(plan.target.chip.name for plan in plans if plan.target.chip):
        same_kind = [plan for plan in plans if plan.target.chip and plan.target.chip.name == kind]
        timings = [plan.timing for plan in same_kind if plan.timing]
        series = [[1e3 * timing.seconds for timing in timings], [100 * timing.mfu for timing in timings]]
        series += [[_each(plan.money) for plan in same_kind if plan.money]] if priced else []
        for panel, values in zip(panels, series, strict=True):
            panel.plot([plan.target.chips for plan in same_kind], values, marker="o", label=kind)
            panel.set_ylim(0, max(1.1 * max(values), panel.get_ylim()[1]))
    unit, per = _units(plans)
    names = ("step (ms)", "MFU (%)", f"$ per {'billion' if per == '1e9' else 'million'} {unit}")
    for panel, name in zip(panels, names, strict=False):
        panel.set(xlabel="chips", title=name, xscale="log")
        panel.set_xticks(ticks := sorted({plan.target.chips for plan in plans}), [f"{tick:,}" for tick in ticks])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0].legend()
    tiers = " and ".join(sorted({plan.tier for plan in plans}))
    left_out = (
        f"; {len(outcomes) - len(plans)} of {len(outcomes)} targets left out" if len(plans) < len(outcomes) else ""
    )
    figure.suptitle(f"{plans[0].recipe.name}: predicted, {tiers}{left_out}")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
