"""Groups of parameters, by patterns of their paths: other settings of the optimizer, averages, and frozen ones."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import jax

from dtrain.core.errors import FieldError, RecipeError
from dtrain.core.types import Decay, Natural, NonNegative, Positive, PositiveFloat
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
    args: dict[str, object] = field(default_factory=dict)
    """Other values of the settings of the optimizer's kind: {b1: 0.5}; of a custom one, of its `args`."""
    clip: PositiveFloat | None = None
    """Maximum norm of the gradients of this group; the optimizer's `clip` is then for the norm of the others."""
    every: Positive = 1
    """It is updated at every so many steps; at others its values and its state do not change."""
    start: Natural = 0
    """It is updated from this step on, counted from 0."""
    ema: Decay | None = None
    """Decay of the average of these parameters, in place of the optimizer's; 0 keeps none."""

    def __post_init__(self) -> None:
        others = self.args or self.clip or self.every > 1 or self.start or self.ema is not None
        if self.frozen and others:
            raise FieldError("frozen", "a frozen group is never updated", "leave its other settings out")

    @property
    def apart(self) -> bool:
        """Whether its update is computed by itself."""
        return bool(self.args) or self.every > 1 or self.start > 0


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
        return replace(
            param,
            lr=param.lr * group.lr,
            weight_decay=decay,
            trained=param.trained and not group.frozen,
            group=group.match,
        )

    changed_tree = jax.tree.map(changed, paths(declared), declared)
    if not any(param.trained for param in jax.tree.leaves(changed_tree)):
        raise RecipeError("optimizer.groups: every parameter is frozen", "leave some of them out of the patterns")
    return changed_tree
