"""The settings that every optimizer has."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal, Self

import jax
import jax.numpy as jnp
from annotated_types import Gt, Lt

from dtrain.core.errors import RecipeError
from dtrain.core.metrics import Watch
from dtrain.core.types import Decay, Fraction, Natural, NonNegative, Positive, PositiveFloat, Rate, Share
from dtrain.models.nn.param import Tree
from dtrain.optim.groups import Group


@dataclass(frozen=True, kw_only=True)
class WarmUp:
    """The part that every schedule has."""

    kind: Any = ""
    """The form of the learning rate over the run."""
    warmup: Natural | Share = 0
    """Steps of linear warm-up from zero; or below 1 their share of the run, such as 0.05."""

    def warmup_steps(self, steps: int) -> int:
        """The steps of the warm-up in a run of `steps`."""
        if isinstance(self.warmup, int):
            return self.warmup
        return min(round(self.warmup * steps), steps - 1)


class ByStep(WarmUp):
    """A schedule by the number of the step alone."""

    @property
    def watch(self) -> Watch | None:
        """The metric by which it changes the learning rate; None if it depends on the step alone."""
        return None

    def lowered(self, scale: float) -> float:
        """What multiplies the learning rate after a plateau, and `scale` before it."""
        return scale


@dataclass(frozen=True, kw_only=True)
class Constant(ByStep):
    """The peak learning rate after the warm-up."""

    kind: Literal["constant"] = "constant"

    def fraction(self, step: jax.Array, steps: int) -> jax.Array:
        return jnp.ones_like(step)


@dataclass(frozen=True, kw_only=True)
class Cosine(ByStep):
    """Half a cosine from the peak to `final` times the peak, once or in equal cycles (Loshchilov & Hutter 2017)."""

    kind: Literal["cosine"] = "cosine"
    final: Fraction = 0.0
    """The final learning rate, as a fraction of the peak."""
    cycles: Positive = 1
    """How often it falls; after each cycle but the last it begins again at the peak."""

    def fraction(self, step: jax.Array, steps: int) -> jax.Array:
        progress = _progress(step, self.warmup_steps(steps), steps)
        if self.cycles > 1:
            progress = progress * self.cycles
            progress = progress - jnp.minimum(jnp.floor(progress), self.cycles - 1)  # within the cycle; 1 at the end
        return self.final + (1 - self.final) * 0.5 * (1 + jnp.cos(jnp.pi * progress))


@dataclass(frozen=True, kw_only=True)
class Linear(ByStep):
    """Linear decay from the peak to `final` times the peak."""

    kind: Literal["linear"] = "linear"
    final: Fraction = 0.0
    """The final learning rate, as a fraction of the peak."""

    def fraction(self, step: jax.Array, steps: int) -> jax.Array:
        return 1 - (1 - self.final) * _progress(step, self.warmup_steps(steps), steps)


@dataclass(frozen=True, kw_only=True)
class WSD(ByStep):
    """Warm-up, stable, decay: constant at the peak, then linear decay at the end (Hu et al. 2024)."""

    kind: Literal["wsd"] = "wsd"
    cooldown: Fraction = 0.2
    """The fraction of the run, at its end, over which the learning rate decays."""
    final: Fraction = 0.0
    """The final learning rate, as a fraction of the peak."""

    def fraction(self, step: jax.Array, steps: int) -> jax.Array:
        start = steps - max(1, round(self.cooldown * steps))
        return 1 - (1 - self.final) * _progress(step, start, steps)


@dataclass(frozen=True, kw_only=True)
class Plateau(Watch, WarmUp):
    """The peak learning rate, multiplied by `factor` each time that a metric of the evaluation stops improving.

    The factor so far is part of the optimizer's state, and so of every checkpoint.
    """

    kind: Literal["plateau"] = "plateau"
    factor: Annotated[float, Gt(0), Lt(1)] = 0.1
    """Multiplies the learning rate."""
    final: Fraction = 0.0
    """The learning rate does not fall below this fraction of the peak."""

    @property
    def watch(self) -> Watch:
        return self

    def lowered(self, scale: float) -> float:
        """What multiplies the learning rate after a plateau, and `scale` before it."""
        return max(scale * self.factor, self.final)

    def fraction(self, step: jax.Array, steps: int) -> jax.Array:
        return jnp.ones_like(step)


@dataclass(frozen=True, kw_only=True)
class Steps(ByStep):
    """The peak learning rate, multiplied by `factor` at each of some steps."""

    kind: Literal["steps"] = "steps"
    at: tuple[Natural | Share, ...] = (0.5, 0.75)
    """The numbers of these steps; or below 1 their shares of the run, such as [0.5, 0.75]."""
    factor: Annotated[float, Gt(0), Lt(1)] = 0.1
    """Multiplies the learning rate."""

    def fraction(self, step: jax.Array, steps: int) -> jax.Array:
        reached = [step >= (at if isinstance(at, int) else round(at * steps)) for at in self.at]
        return jnp.float32(self.factor) ** sum((one.astype(jnp.float32) for one in reached), jnp.zeros_like(step))


Schedule = Constant | Cosine | Linear | WSD | Steps | Plateau


def _progress(step: jax.Array, start: int, end: int) -> jax.Array:
    """From 0 at step `start` to 1 at step `end`, clipped."""
    return jnp.clip((step - start) / max(end - start, 1), 0.0, 1.0)


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Settings of every optimizer."""

    lr: Rate
    """Peak learning rate."""
    schedule: Schedule = field(default_factory=Constant)
    """How the learning rate changes during the run."""
    decay: NonNegative = 0.0
    """Decoupled weight decay; each step multiplies it by the learning rate."""
    decay_all: bool = False
    """Apply weight decay to biases and normalisation scales, too."""
    clip: PositiveFloat | None = None
    """Maximum global norm of the gradients: larger ones are scaled down to it."""
    ema: Decay | None = None
    """Decay of an exponential moving average of the parameters; evaluation then uses the average."""
    groups: tuple[Group, ...] = ()
    """Parameters with other settings of the optimizer, and frozen ones."""

    @property
    def user_code(self) -> str:
        """What the recipe names as code that runs when it is built; empty for optimizers of dtrain and of optax."""
        return ""

    @property
    def averages(self) -> bool:
        """Whether it keeps averages of parameters."""
        return bool(self.ema or any(group.ema for group in self.groups))

    def of_group(self, match: str) -> Self:
        """The optimizer with the settings of a group; itself for the empty text, which stands for no group."""
        args = next((group.args for group in self.groups if group.match == match), {})
        return self.changed(args, match) if args else self

    def changed(self, args: Mapping[str, object], match: str) -> Self:
        """The optimizer with other settings of its kind. RecipeError, with the group `match`, if it has no such one."""
        own = [f.name for f in fields(self) if f.name not in Shared.__dataclass_fields__ and f.name != "kind"]
        if unknown := next((name for name in args if name not in own), None):
            hint = f"its settings are {', '.join(own)}; lr, clip, ema and others are keys of the group itself"
            raise RecipeError(f"optimizer.groups: args of {match}: {unknown!r} is no setting of it", hint)
        return replace(self, **args)  # pyright: ignore[reportArgumentType]

    def refuse_unfit(self, declared: Tree) -> None:
        """RecipeError if it is of no use for such parameters."""

    @property
    def has_user_args(self) -> bool:
        """Whether the `args` of groups are arguments of code that only a run imports."""
        return False

    def apart(self, declared: Tree) -> Tree:
        """The declared parameters in the form in which the optimizer keeps state for them."""
        return declared

    def state_dims(self, declared: Tree, state: object) -> Any:
        """The dim names of each array in a part of the optimizer's state, as a tree of the same structure.

        None for parts whose arrays have the shapes of the parameters: they are sharded like the parameters.
        """
        return None
