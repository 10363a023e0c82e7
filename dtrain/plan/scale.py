"""One recipe on several targets: step time, MFU and cost against chips, as a table and as a picture."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from dtrain.explain import size_text
from dtrain.plan.plan import Plan, Timing
from dtrain.plan.report import ms
from dtrain.plan.workers import Outcome
from dtrain.slices import Target

BAR = 20


def table(targets: Sequence[Target], made: Sequence[Outcome]) -> Iterator[str]:
    """A line for each target, and why there is none where there is none."""
    head = f"{'target':<16}{'chips':>7}{'step':>11}{'tokens/s':>14}{'MFU':>7}"
    yield f"{head}{'memory':>11}{'$/hour':>11}{'$/1e9 tokens':>14}"
    for on, plan in zip(targets, made, strict=True):
        start = f"{on.name:<16}{on.chips:>7,}"
        if not isinstance(plan, Plan):
            yield f"{start}  {plan.message}"
        elif not plan.timing:
            reason = "time not known" if plan.fits else "does not fit"
            yield f"{start}  {reason}: {size_text(max(plan.memory.peak, plan.memory.arena))} a device"
        else:
            yield start + _row(plan, plan.timing)


def _row(plan: Plan, timing: Timing) -> str:
    money = plan.money
    rate = f"{money.per_hour:>11,.2f}" if money else f"{'':>11}"
    tokens = f"{money.per_billion_tokens:>14,.2f}" if money and money.per_billion_tokens else f"{'':>14}"
    fits = "" if plan.fits else "  DOES NOT FIT"
    bar = "#" * round(BAR * min(timing.mfu, 1.0))
    numbers = f"{ms(timing.seconds):>11}{timing.tokens / timing.seconds:>14,.0f}{timing.mfu:>7.1%}"
    return f"{numbers}{size_text(plan.memory.peak):>11}{rate}{tokens}  {bar}{fits}"


def draw(made: Sequence[Outcome], path: Path) -> None:
    """Step time, MFU and dollars per billion tokens over chips, into an image file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    plans = sorted(
        (plan for plan in made if isinstance(plan, Plan) and plan.timing), key=lambda plan: plan.target.chips
    )
    figure, panels = pyplot.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    kinds = list(dict.fromkeys(plan.target.chip.name for plan in plans if plan.target.chip))
    for kind in kinds:
        mine = [plan for plan in plans if plan.target.chip and plan.target.chip.name == kind]
        chips = [plan.target.chips for plan in mine]
        timings = [plan.timing for plan in mine if plan.timing]
        series = (
            [1e3 * timing.seconds for timing in timings],
            [100 * timing.mfu for timing in timings],
            [(plan.money.per_billion_tokens or 0.0) if plan.money else 0.0 for plan in mine],
        )
        for panel, values in zip(panels, series, strict=True):
            panel.plot(chips, values, marker="o", label=kind)
            panel.set_ylim(0, max(1.1 * max(values), panel.get_ylim()[1]))
            short = [(x, y) for x, y, plan in zip(chips, values, mine, strict=True) if not plan.fits]
            if short:
                panel.plot(*zip(*short, strict=True), "kx", markersize=10, label="does not fit")
    for panel, name in zip(panels, ("step (ms)", "MFU (%)", "$ per billion tokens"), strict=True):
        panel.set(xlabel="chips", title=name, xscale="log")
        panel.set_xticks(ticks := sorted({plan.target.chips for plan in plans}), [f"{tick:,}" for tick in ticks])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0].legend()
    tiers = " and ".join(sorted({plan.tier for plan in plans}))
    figure.suptitle(f"{plans[0].recipe.name}: predicted, {tiers}" if plans else "nothing to draw")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
