"""What a run would cost."""

from dataclasses import dataclass

from dtrain.slices import Target


@dataclass(frozen=True)
class Money:
    """Dollars, and the hours that they pay for."""

    per_chip_hour: float
    listed: bool
    """Whether the price is the table's, not the caller's."""
    per_hour: float
    per_billion_tokens: float | None
    hours: float
    """For all steps of the recipe, compiling and saving left out."""
    total: float


def cost(on: Target, step: float, tokens: int, steps: int, price: float | None) -> Money | None:
    """The price of a target for steps of that many seconds and tokens; `price` in dollars per chip-hour."""
    listed = price is None
    rate = on.chip.price if on.chip and price is None else price
    if rate is None:
        return None
    per_hour, hours = rate * on.chips, step * steps / 3600
    per_billion = per_hour * step / 3600 / tokens * 1e9 if tokens else None
    return Money(rate, listed, per_hour, per_billion, hours, per_hour * hours)
