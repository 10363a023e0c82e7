"""Groups of parameters, by patterns of their paths: another learning rate, no weight decay, or frozen."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax

from dtrain.core.errors import RecipeError
from dtrain.core.types import NonNegative
from dtrain.models.nn.param import Param, Tree, paths
from dtrain.models.nn.patterns import matched


@dataclass(frozen=True, kw_only=True)
class Group:
    """The parameters whose dotted path matches a pattern."""

    match: str
    """Pattern of paths, in which `*` stands for any characters: "layers.*.bias". A path may match one group only."""
    lr: NonNegative = 1.0
    """Multiplies the learning rate."""
    decay: bool | None = None
    """Whether weight decay applies; default: as the model declares it."""
    frozen: bool = False
    """Never changed; the optimizer keeps no state for it, and no gradient is computed."""


def grouped(declared: Tree, groups: Sequence[Group]) -> Tree:
    """The declared parameters with what the groups set.

    RecipeError if a pattern matches no parameter, a path matches two patterns, or every parameter is frozen.
    """
    if not groups:
        return declared
    table = {group.match: group for group in groups}
    if len(table) < len(groups):
        raise RecipeError("optimizer.groups: two groups have the same pattern", "make them one")
    chosen = matched(table, jax.tree.leaves(paths(declared)), "optimizer.groups")

    def changed(name: str, param: Param) -> Param:
        if name not in chosen:
            return param
        group = table[chosen[name]]
        decay = param.weight_decay if group.decay is None else group.decay
        return replace(param, lr=param.lr * group.lr, weight_decay=decay, trained=param.trained and not group.frozen)

    changed_tree = jax.tree.map(changed, paths(declared), declared)
    if not any(param.trained for param in jax.tree.leaves(changed_tree)):
        raise RecipeError("optimizer.groups: every parameter is frozen", "leave some of them out of the patterns")
    return changed_tree
