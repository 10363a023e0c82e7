"""What a step saves if gradients are summed over devices in the compute dtype (`precision.reduce: compute`)."""

from dataclasses import dataclass

from dtrain.core.types import JsonObject
from dtrain.plan.plan import Plan
from dtrain.plan.workers import PlanJob
from dtrain.recipe.sums import with_sums

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
