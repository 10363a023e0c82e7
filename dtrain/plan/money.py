"""Price of a run, and the age of the list prices."""

from dataclasses import dataclass
from datetime import date

from dtrain.core.chips import PRICED
from dtrain.core.slices import Target

STALE = 6
"""Age in months above which list prices are shown with a warning."""


@dataclass(frozen=True)
class Money:
    """Price of a run in US dollars, with the rates and hours that it is computed from."""

    per_chip_hour: float
    listed: bool
    """Whether the price is the list price of the chip table, not the caller's."""
    chips: int
    """Chips that are billed; GPUs are billed by the machine."""
    per_hour: float
    per_billion_tokens: float | None
    """None if examples have no tokens."""
    per_million_examples: float
    steps: int
    hours: float
    """Of all steps of the recipe; compiling, evaluation and checkpoints are not included."""
    total: float


def cost(on: Target, step: float, tokens: int, examples: int, steps: int, price: float | None) -> Money | None:
    """Price of `steps` steps of `step` seconds, `tokens` tokens and `examples` examples each; None without a price.

    `price` is in dollars for an hour of one chip; None takes the list price.
    """
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
    """A warning if the list prices are more than six months old, else empty."""
    months = 12 * (today.year - PRICED.year) + today.month - PRICED.month
    if months <= STALE:
        return ""
    return f"warning: the list prices are {months} months old; look up the current price and pass it with --price"
