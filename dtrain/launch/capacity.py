"""What is asked for by name and paid by the hour: `on`, how many slices of it, and how much it may cost."""

from dataclasses import dataclass

from dtrain.errors import FieldError, RecipeError
from dtrain.fields import Positive, PositiveFloat
from dtrain.hardware import PER_HOST
from dtrain.launch.job import Common
from dtrain.launch.names import Word
from dtrain.slices import Target as Slice
from dtrain.slices import target

CHIPS_A_HOST = 4
"""TPU chips of one host of a slice of several."""


@dataclass(frozen=True, kw_only=True)
class Capacity(Common):
    """Chips that are rented."""

    on: Word
    """What is asked for: v5e-64, v5p-128, tpu7x-32, h100-16."""
    slices: Positive = 1
    spot: bool = False
    budget: PositiveFloat | None = None
    """Dollars that all starts together may cost, by list prices; the run saves and ends then."""

    def __post_init__(self) -> None:
        try:
            shape = self.shape
        except RecipeError as error:
            raise FieldError("on", error.message, error.hint) from error
        if self.budget and not self.rate:
            raise FieldError("budget", f"no price of {shape.name} is known", "set launch.hours in its place")

    @property
    def shape(self) -> Slice:
        """The slice, or the GPUs."""
        return target(self.on, self.slices)

    @property
    def hosts(self) -> int:
        """Of one slice."""
        chips = self.shape.chips // self.slices
        return max(1, -(-chips // (CHIPS_A_HOST if self.shape.platform == "tpu" else PER_HOST)))

    @property
    def rate(self) -> float | None:
        """Dollars an hour by list prices, all slices together; GPUs by whole machines."""
        price = self.shape.chip.price if self.shape.chip else None
        return price * self.shape.rented if price else None

    def limit(self) -> float | None:
        """The hours that `hours` and `budget` allow."""
        bought = self.budget / self.rate if self.budget and self.rate else None
        return min((hours for hours in (self.hours, bought) if hours), default=None)

    def price_notes(self) -> tuple[str, ...]:
        """What a reader of the price should know."""
        spot = ("spot capacity: the price is that of the list, of which it costs a part",)
        return spot if self.spot and self.rate else ()
