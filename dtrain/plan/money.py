"""What a run would cost, and how old the prices are."""

from dataclasses import dataclass
from datetime import date

from dtrain.core.chips import PRICED
from dtrain.core.slices import Target

STALE = 6
"""Months after which the list prices are shown with a warning."""


@dataclass(frozen=True)
class Money:
    """Dollars, and the hours that they pay for."""

    per_chip_hour: float
    listed: bool
    """Whether the price is the table's, not the caller's."""
    chips: int
    """Chips that are paid for: of GPUs whole machines."""
    per_hour: float
    per_billion_tokens: float | None
    """None where an example has no tokens."""
    per_million_examples: float
    steps: int
    hours: float
    """For all steps of the recipe; compiling, evaluation and saves are left out."""
    total: float


def cost(on: Target, step: float, tokens: int, examples: int, steps: int, price: float | None) -> Money | None:
    """The price of steps of that many seconds, tokens and examples; `price` in dollars for an hour of one chip."""
    listed = price is None
    rate = on.chip.price if on.chip and price is None else price
    if rate is None:
        return None
    chips = on.rented if listed else on.chips
    per_hour, hours = rate * chips, step * steps / 3600
    per_step = per_hour * step / 3600
    per_billion = per_step / tokens * 1e9 if tokens else None
    return Money(
        per_chip_hour=rate,
        listed=listed,
        chips=chips,
        per_hour=per_hour,
        per_billion_tokens=per_billion,
        per_million_examples=per_step / examples * 1e6,
        steps=steps,
        hours=hours,
        total=per_hour * hours,
    )


def stale(today: date) -> str:
    """A warning where the list prices are older than six months; empty where they are not."""
    months = 12 * (today.year - PRICED.year) + today.month - PRICED.month
    if months <= STALE:
        return ""
    return f"warning: the list prices are {months} months old; look them up, and set --price"
