"""Sums of gradients over devices in the compute dtype: `precision.reduce: compute`."""

from contextlib import suppress
from dataclasses import replace

from dtrain.core.errors import RecipeError
from dtrain.recipe.load import refuse_conflicts
from dtrain.recipe.recipe import Recipe


def with_sums(recipe: Recipe) -> Recipe | None:
    """The recipe with that setting; None if it has it, computes in float32, or cannot have it."""
    precision = recipe.precision
    if precision.reduce == "compute" or precision.compute == "float32":
        return None
    changed = replace(recipe, precision=replace(precision, reduce="compute"))
    with suppress(RecipeError):
        refuse_conflicts(changed)
        return changed
    return None
