"""The settings that every optimizer has."""

from dataclasses import dataclass, field
from typing import Any

from dtrain.core.types import Decay, NonNegative, PositiveFloat, Rate
from dtrain.models.nn.param import Tree
from dtrain.optim.groups import Group
from dtrain.optim.schedule import Constant, Schedule


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Settings of every optimizer."""

    lr: Rate
    """Peak learning rate."""
    schedule: Schedule = field(default_factory=Constant)
    decay: NonNegative = 0.0
    """Decoupled weight decay; each step multiplies it by the learning rate."""
    decay_all: bool = False
    """Apply weight decay to biases and normalisation scales, too."""
    clip: PositiveFloat | None = None
    """Maximum global norm of the gradients: larger ones are scaled down to it."""
    ema: Decay | None = None
    """Decay of an exponential moving average of the parameters; evaluation then uses the average."""
    groups: tuple[Group, ...] = ()
    """Parameters with another learning rate or weight decay, and frozen ones."""

    def apart(self, declared: Tree) -> Tree:
        """The declared parameters in the form in which the optimizer keeps state for them."""
        return declared

    def state_dims(self, declared: Tree, state: object) -> Any:
        """The dim names of each array in a part of the optimizer's state, as a tree of the same structure.

        None for parts whose arrays have the shapes of the parameters: they are sharded like the parameters.
        """
        return None
