"""What is asked for by name and paid by the hour, and how much it may cost."""

from abc import abstractmethod
from dataclasses import dataclass

from dtrain.errors import FieldError, RecipeError
from dtrain.fields import PositiveFloat
from dtrain.launch.job import Target
from dtrain.slices import Target as Slice
from dtrain.slices import target

CHIPS_A_HOST = 4
"""TPU chips of one host of a slice of several."""


def shape_of(on: str, slices: int = 1) -> Slice:
    """The slices, or the GPUs, of that name. FieldError where there are none."""
    try:
        return target(on, slices)
    except RecipeError as error:
        raise FieldError("on", error.message, error.hint) from error


@dataclass(frozen=True, kw_only=True)
class Rented(Target):
    """A target whose machines are paid by the hour."""

    budget: PositiveFloat | None = None
    """Dollars that all starts together may cost, at the price that `up` shows; the run saves and ends then."""

    @property
    @abstractmethod
    def rate(self) -> float | None:
        """Dollars an hour at most, all machines together; None where that is not known."""

    def limit(self) -> float | None:
        """The hours that `hours` and `budget` allow."""
        bought = self.budget / self.rate if self.budget and self.rate else None
        return min((hours for hours in (self.hours, bought) if hours), default=None)
