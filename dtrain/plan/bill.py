"""From a number of tokens to days and dollars: the slices that train it in time and within a budget."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dtrain.assembly.assemble import with_sums
from dtrain.core.chips import CHIPS, PER_HOST, Chip
from dtrain.core.errors import RecipeError
from dtrain.core.slices import Target, target
from dtrain.plan.capacity import StateSize, family, fit_to_slice, room, state, with_tensor
from dtrain.plan.plan import Plan
from dtrain.plan.rates import Rates, Reliability
from dtrain.plan.report import Interval, any_interval, interval
from dtrain.plan.variants import Candidate, engine_variants, meshes, remat_variants
from dtrain.plan.workers import PlanJob
from dtrain.recipe.crosscheck import problems_of
from dtrain.recipe.recipe import FORWARD, Recipe, watched

Say = Callable[[str], None]
TRIES = 6
"""Most sizes of a chip that are planned."""
LARGER = 2
"""How many sizes above the smallest that meets the limits are planned: they are faster, and cost a little more."""
TPU_HOST = 4
"""Chips of a host of TPUs, in slices of several hosts."""
ENGINES, MESHES = 1, 3
"""How many other engines and meshes a table of changes has, the simplest first."""
MAY_FIT = "may fit: compile it"
GB = 1e9
MONTH = 730.0
"""Hours."""


@dataclass(frozen=True)
class Wanted:
    """What a training shall be: a number of tokens, a time, a price. None: not limited."""

    tokens: float | None = None
    hours: float | None = None
    dollars: float | None = None


@dataclass(frozen=True)
class Bill:
    """The time and the price of a whole training on one target, each from the least to the most that is expected."""

    plan: Plan
    steps: int
    rates: Rates
    changes: Mapping[str, Any]
    """The keys of `mesh`, `model` and `accumulate` that are not the recipe's own, as a plain tree."""

    @property
    def name(self) -> str:
        """The target with its number of slices: 2 x v5e-256."""
        on = self.plan.target
        return f"{on.slices} x {on.name}" if on.slices > 1 else on.name

    @property
    def step(self) -> Interval:
        """Seconds of a step, as published runs on the chip compared with their plans; on all chips, if none did."""
        assert self.plan.timing
        seconds = self.plan.timing.seconds
        return interval(self.plan.target.chip, seconds) or any_interval(seconds)

    @property
    def hosts(self) -> int:
        """Hosts that hold the state."""
        on = self.plan.target
        return on.slices * max(on.chips // on.slices // (PER_HOST if on.platform == "gpu" else TPU_HOST), 1)

    @property
    def upload(self) -> float:
        """Seconds until a save is in the bucket, or is read from there."""
        return self.plan.checkpoint / (self.hosts * self.rates.upload * GB)

    @property
    def interval(self) -> float:
        """Seconds between two saves, as the recipe has them; those of the whole run if it saves only at the end."""
        policy, step = self.plan.recipe.checkpoint, self.step.least
        by_step = policy.every * step if policy.every else math.inf
        return min(by_step, 60 * policy.minutes if policy.minutes else math.inf, self.steps * step)

    def reliability(self, rate: float) -> Reliability:
        """How the run fares at this rate of failures per chip and hour."""
        stall = self.plan.checkpoint / (self.hosts * self.rates.staging * GB)
        failures = rate * self.plan.target.chips / 3600
        return Reliability(failures, stall, 60 * self.rates.restart + self.upload)

    @property
    def goodput(self) -> tuple[float, float]:
        """Share of the wall time that is steps which count, lowest and highest."""
        low, high = (1 / self.reliability(rate).stretch(self.interval) for rate in reversed(self.rates.failing))
        return low, high

    @property
    def passes(self) -> int:
        """How many times the data is used: as the recipe's epochs say, else once."""
        return self.plan.recipe.epochs or 1 if self.steps == self.plan.steps else 1

    @property
    def evaluations(self) -> tuple[int, float] | None:
        """How many times the held-out examples are evaluated, and the time of that over the time of the steps; None if
        the recipe does not say how many there are: a share of texts, of which there may be few, only bounds what
        evaluations take by default."""
        recipe, share = self.plan.recipe, self.plan.recipe.data.held_share
        if share is None or share == 1 or (recipe.evaluate.every and not recipe.data.token_bytes):
            return None
        rows = self.steps * recipe.batch
        train = rows / self.passes
        test = train * share / (1 - share)
        if not test:
            return 0, 0.0
        every = recipe.evaluate.interval(self.steps, recipe.batch, train, test, bool(watched(recipe)))
        count = math.ceil(self.steps / every) if every else 1
        return count, count * test / (FORWARD * rows)

    @property
    def read_bytes(self) -> float:
        """Bytes of the files of tokens, all of which each host reads once before the first step."""
        timing, data = self.plan.timing, self.plan.recipe.data
        assert timing
        return self.steps / self.passes * timing.tokens * data.token_bytes / (1 - (data.held_share or 0.0))

    @property
    def read(self) -> float:
        """Seconds of that."""
        return self.read_bytes / (self.rates.upload * GB)

    @property
    def hours(self) -> tuple[float, float]:
        """Wall time, least and most."""
        low, high = self.goodput
        work = self.steps * (1 + (self.evaluations or (0, 0.0))[1]) / 3600
        before = self.read / 3600
        least, most = work * self.step.least, work * self.step.most
        return least / high + before if high else math.inf, most / low + before if low else math.inf

    @property
    def failures(self) -> tuple[float, float]:
        """Failures of the whole training, least and most."""
        chips = self.plan.target.chips
        return tuple(rate * chips * hours for rate, hours in zip(self.rates.failing, self.hours, strict=True))  # pyright: ignore[reportReturnType]

    @property
    def per_hour(self) -> float | None:
        """Dollars of all chips for an hour; None without a price."""
        on = self.plan.target
        price = self.rates.price(on.chip) if on.chip else None
        own = on.chip is not None and on.chip.name in self.rates.prices
        return None if price is None else price * (on.chips if own else on.rented)

    @property
    def storage(self) -> float:
        """Dollars for the checkpoints that are kept, over the whole training."""
        months = self.hours[1] / MONTH
        kept = self.plan.checkpoint / GB * self.plan.recipe.checkpoint.keep
        return 0.0 if math.isinf(months) else kept * self.rates.storage * months

    @property
    def dollars(self) -> tuple[float, float] | None:
        """The price, least and most; None without a price."""
        if self.per_hour is None:
            return None
        least, most = (hours * self.per_hour for hours in self.hours)
        return least + self.storage, most + self.storage

    def misses(self, wanted: Wanted) -> list[str]:
        """Which limits it may miss, at the most that is expected."""
        found = [] if self.plan.surely_fits else [MAY_FIT]
        found += ["never ends"] if math.isinf(self.hours[1]) else []
        if wanted.hours is not None and self.hours[1] > wanted.hours:
            found.append("may be late" if self.hours[0] <= wanted.hours else "late")
        if wanted.dollars is not None and self.dollars and self.dollars[1] > wanted.dollars:
            found.append("may cost more" if self.dollars[0] <= wanted.dollars else "costs more")
        if wanted.dollars is not None and self.dollars is None:
            found.append("no price is known")
        return found


def targets(names: str, slices: int) -> list[Target | Chip]:
    """Targets and whole families of chips: v5e-16, v5p; every chip that has a price if none is named."""
    if not names:
        return [chip for chip in CHIPS if chip.price is not None]
    by_name = {name: chip for chip in CHIPS for name in (chip.name, *chip.aliases)}
    return [by_name.get(name.lower()) or target(name, slices) for name in map(str.strip, names.split(","))]


def bills(
    recipe: Recipe, on: Sequence[Target | Chip], slices: int, wanted: Wanted, rates: Rates, say: Say
) -> tuple[list[Bill], list[str]]:
    """The bills of what was planned, the cheapest first of those that meet the limits, then the others; and what could
    not be planned, with the reason. Quick plans; nothing is compiled. RecipeError for a number of tokens of a run whose
    examples have none."""
    found: list[Bill] = []
    failed: list[str] = []
    for one in on:
        try:
            if isinstance(one, Target):
                found += [_bill(recipe, one, wanted, rates, say)]
            else:
                found += _of_family(recipe, one, slices, wanted, rates, say, failed)
        except _TooLarge as error:
            failed.append(f"{one.name}: {error.message}")
    return sorted(found, key=lambda bill: _rank(bill, wanted)), failed


def _rank(bill: Bill, wanted: Wanted) -> tuple[bool, float, float]:
    """Those that meet the limits first; the cheapest, then the fastest."""
    return bool(bill.misses(wanted)), bill.dollars[1] if bill.dollars else math.inf, bill.hours[1]


def _of_family(
    recipe: Recipe, chip: Chip, slices: int, wanted: Wanted, rates: Rates, say: Say, failed: list[str]
) -> Iterator[Bill]:
    """Bills of a chip's sizes: the smallest that holds the run, then the first that is in time, and a few more. The
    smaller ones that were planned, or not even planned, are added to `failed`."""
    smallest = next(iter(chip.slices)) if chip.dims else 1
    first = target(f"{chip.name}-{smallest * chip.units_per_chip}", slices)
    sizes = [on for on in family(first) if (count := on.chips // on.slices) & (count - 1) == 0]  # powers of two
    needed: StateSize | None = None
    tried, met, reasons, small = 0, 0, list[str](), list[str]()
    hours = 0.0
    for on in sizes:
        if needed and needed.total > on.devices * chip.room:
            small.append(on.name)  # parameters and optimizer state alone are larger
            continue
        if hours and wanted.hours and hours / on.chips > 1.1 * wanted.hours:
            continue  # late even if it were as fast for each chip as the size before
        if tried == TRIES or met > LARGER:
            return
        try:
            bill = _bill(recipe, on, wanted, rates, say)
        except _TooLarge as error:
            needed, tried = error.needed, tried + (error.needed is None)
            reasons.append(error.message)
            small += [on.name] if error.needed else []
            continue
        if small and not hours:
            failed.append(f"{' to '.join(dict.fromkeys((small[0], small[-1])))}: too small for the run")
        tried, hours = tried + 1, bill.hours[0] * on.chips
        met += not (wanted.hours and bill.hours[1] > wanted.hours)
        yield bill
    if not tried or (reasons and not hours):
        raise _TooLarge(reasons[-1] if reasons else "no size of it holds the run", needed)


class _TooLarge(RecipeError):
    """A run does not fit, or its batch does not split."""

    def __init__(self, message: str, needed: StateSize | None) -> None:
        super().__init__(message)
        self.needed = needed


def _bill(recipe: Recipe, on: Target, wanted: Wanted, rates: Rates, say: Say) -> Bill:
    """The bill on one target, with the first mesh that surely fits: the recipe's own, all devices on fsdp, fsdp x
    tensor; else with the first of them and another remat policy or more microbatches; else with what may fit.

    _TooLarge if none does."""
    say(f"planning {on.name}")
    candidates = itertools.chain(fit_to_slice(recipe, on), with_tensor(recipe, on))
    reason = f"a batch of {recipe.batch:,} does not split over the {on.devices:,} devices of {on.name}"
    needed: StateSize | None = None
    first: Candidate | None = None
    perhaps: tuple[Candidate, Plan] | None = None
    for candidate in (one for one in candidates if "batch" not in one.changes):
        plan = PlanJob(candidate.recipe, on, quick=True).make()
        if not isinstance(plan, Plan):
            reason = plan.message
        elif plan.timing and plan.surely_fits:
            return Bill(plan, _steps(plan, wanted), rates, _changes(recipe, candidate))
        else:
            reason, needed = f"does not fit on {on.name}", state(plan.memory, on)
            first = first or candidate
            perhaps = perhaps or ((candidate, plan) if plan.timing and plan.fits else None)
    if first and needed and needed.total <= on.devices * room(on):
        say(f"planning {on.name} with less memory")
        found = _with_less_memory(first, on)
        if found and (perhaps is None or found[1].surely_fits):
            perhaps = found
    if perhaps:
        candidate, plan = perhaps
        return Bill(plan, _steps(plan, wanted), rates, _changes(recipe, candidate))
    raise _TooLarge(reason, needed)


def _changes(recipe: Recipe, candidate: Candidate) -> dict[str, Any]:
    own, chosen = vars(recipe.mesh), vars(candidate.recipe.mesh)
    mesh = {key: value for key, value in chosen.items() if value != own[key]}
    rest = {name: candidate.changes[name] for name in ("model", "accumulate") if name in candidate.changes}
    return ({"mesh": mesh} if mesh else {}) | rest


def _with_less_memory(candidate: Candidate, on: Target) -> tuple[Candidate, Plan] | None:
    """The fastest that surely fits, else that fits, with one setting changed: what a layer saves, how the loss is
    split, the number of microbatches; None if none fits."""
    one = (
        other
        for other in remat_variants(candidate, on)
        if len(other.changes.get("model", {})) + ("accumulate" in other.changes) == 1
    )
    planned = ((other, PlanJob(other.recipe, on, quick=True).make()) for other in one)
    fitting = [(other, plan) for other, plan in planned if isinstance(plan, Plan) and plan.timing and plan.fits]

    def rank(pair: tuple[Candidate, Plan]) -> tuple[bool, float]:
        return not pair[1].surely_fits, pair[1].timing.seconds if pair[1].timing else math.inf

    return min(fitting, key=rank, default=None)


def what_if(bill: Bill, say: Say) -> Iterator[tuple[str, Bill | str]]:
    """The same training with one thing changed, as text, and its bill or why it has none: spot machines, the batch, the
    precision, the engine, the mesh. As many tokens or examples as before."""
    on, recipe = bill.plan.target, bill.plan.recipe
    if on.chip and (spot := bill.rates.of_spot(on.chip)):
        yield "spot machines", dataclasses.replace(bill, rates=spot)
    for text, changed in _changed(recipe, on):
        say(f"planning {text}")
        problems = problems_of(changed, on.devices)
        plan = PlanJob(changed, on, quick=True).make() if not problems else None
        if isinstance(plan, Plan) and plan.timing and plan.fits:
            assert bill.plan.timing
            amount = bill.steps * bill.plan.timing.amount
            yield text, dataclasses.replace(bill, plan=plan, steps=math.ceil(amount / plan.timing.amount))
        elif isinstance(plan, Plan):
            yield text, "does not fit"
        else:
            yield text, problems[0][1] if problems else str(plan and plan.message)


def _changed(recipe: Recipe, on: Target) -> Iterator[tuple[str, Recipe]]:
    """A recipe with one thing changed, and what as text."""
    precision, replace = recipe.precision, dataclasses.replace
    for batch in filter(None, (2 * recipe.batch, recipe.batch // 2)):
        yield f"batch={batch}", replace(recipe, batch=batch)
    compute = "float32" if precision.compute == "bfloat16" else "bfloat16"
    yield f"precision.compute={compute}", replace(recipe, precision=replace(precision, compute=compute))
    rates = on.chip.rates if on.chip and precision.matmul == "default" else {}
    for name in (name for name, rate in rates.items() if rate > 1):
        yield f"precision.matmul={name}", replace(recipe, precision=replace(precision, matmul=name))
    if (sums := with_sums(recipe)) is not None:
        yield "precision.reduce=compute", sums
    for candidate in itertools.islice(engine_variants(Candidate(recipe, {}), recipe, on), ENGINES):
        yield candidate.text, candidate.recipe
    for candidate in itertools.islice(meshes(recipe, on), MESHES):
        yield candidate.text, candidate.recipe


def _steps(plan: Plan, wanted: Wanted) -> int:
    """Steps of the training."""
    assert plan.timing
    if wanted.tokens is None:
        return plan.steps
    if not plan.timing.tokens:
        raise RecipeError(f"--tokens: {plan.timing.unit} have no tokens", "use steps=N or epochs=N")
    return math.ceil(wanted.tokens / plan.timing.tokens)
