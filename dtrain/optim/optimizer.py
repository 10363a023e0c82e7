"""The optimizers: each gives the direction of a step, to which weight decay and learning rate are applied later."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp

from dtrain.core.errors import RecipeError
from dtrain.core.types import Decay, Natural, PositiveFloat
from dtrain.models.nn.param import Param, Tree
from dtrain.optim.custom import CustomOptimizer
from dtrain.optim.moments import Factored, adam, factored
from dtrain.optim.shared import Shared

if TYPE_CHECKING:
    import optax


@dataclass(frozen=True, kw_only=True)
class AdamW(Shared):
    """Adam with decoupled decay (Loshchilov & Hutter 2019)."""

    kind: Literal["adamw"] = "adamw"
    b1: Decay = 0.9
    """Decay of the mean of the gradients."""
    b2: Decay = 0.999
    """Decay of the mean of their squares."""
    epsilon: PositiveFloat = 1e-8
    """Added to the square root of that mean."""

    def direction(self, declared: Tree) -> "optax.GradientTransformation":
        return adam(self.b1, self.b2, self.epsilon)


@dataclass(frozen=True, kw_only=True)
class SGD(Shared):
    """Stochastic gradient descent with momentum."""

    kind: Literal["sgd"] = "sgd"
    momentum: Decay = 0.9
    """Share of the last update that is kept."""
    nesterov: bool = False
    """Look ahead by one update (Nesterov's momentum)."""

    def direction(self, declared: Tree) -> "optax.GradientTransformation":
        import optax

        return optax.trace(self.momentum, self.nesterov)


@dataclass(frozen=True, kw_only=True)
class Lion(Shared):
    """Lion: the sign of an interpolated momentum (Chen et al. 2023, algorithm 2)."""

    kind: Literal["lion"] = "lion"
    b1: Decay = 0.9
    """Share of the momentum in the update whose sign is taken."""
    b2: Decay = 0.99
    """Decay of the momentum."""

    def direction(self, declared: Tree) -> "optax.GradientTransformation":
        import optax

        return optax.scale_by_lion(self.b1, self.b2)


@dataclass(frozen=True, kw_only=True)
class Adafactor(Shared):
    """Adafactor: second moments factored into rows and columns, updates clipped to unit RMS (Shazeer & Stern 2018)."""

    kind: Literal["adafactor"] = "adafactor"
    factor_from: Natural = 128
    """Fewest rows and columns of a matrix whose moments are factored."""

    def direction(self, declared: Tree) -> "optax.GradientTransformation":
        return factored(declared, self.factor_from)

    def state_dims(self, declared: Tree, state: object) -> Any:
        if not isinstance(state, Factored):
            return None
        return state.dims(declared, lambda param: self.of_group(param.group).factor_from)


@dataclass(frozen=True, kw_only=True)
class Muon(Shared):
    """Muon: orthogonalised momentum for hidden matrices (Jordan et al. 2024), Adam for all other parameters.

    Updates are scaled to the size of Adam's (Liu et al. 2025), so that one learning rate fits both.
    """

    kind: Literal["muon"] = "muon"
    momentum: Decay = 0.95
    """Decay of the momentum of matrices."""
    iterations: Natural = 5
    """Newton-Schulz iterations."""
    b1: Decay = 0.9
    """Adam's, for all other parameters."""
    b2: Decay = 0.999
    """Adam's, for all other parameters."""

    def refuse_unfit(self, declared: Tree) -> None:
        if not any(map(_muon_dims, jax.tree.leaves(declared))):
            message = "optimizer: muon finds no hidden matrix: no trained parameter declares fan_in"
            raise RecipeError(message, "use adamw, or declare matrices with dtrain.Param(..., fan_in=('embed',))")

    def direction(self, declared: Tree) -> "optax.GradientTransformation":
        import optax

        numbers = jax.tree.map(lambda param: _muon_dims(param) or optax.MaskedNode(), declared)
        labels = jax.tree.map(lambda param: "muon" if _muon_dims(param) else "adam", declared)
        muon = optax.contrib.scale_by_muon(
            ns_steps=self.iterations, beta=self.momentum, weight_dimension_numbers=lambda _: numbers
        )
        scales = jax.tree.map(_adam_size, declared, numbers)
        size = optax.stateless(lambda updates, _: jax.tree.map(jnp.multiply, updates, scales))
        return optax.partition({"muon": optax.chain(muon, size), "adam": adam(self.b1, self.b2, 1e-8)}, labels)


Optimizer = AdamW | SGD | Lion | Adafactor | Muon | CustomOptimizer


def _muon_dims(param: Param) -> Any:
    """The dims that are a hidden matrix's rows and columns; None for other parameters, which Adam updates."""
    import optax

    outer = {"layer", "experts", *param.fan_in}
    rows = tuple(i for i, name in enumerate(param.names) if name in param.fan_in)
    columns = tuple(i for i, name in enumerate(param.names) if name not in outer)
    if not (rows and columns and param.decay) or {"classes", "vocab"} & set(param.names):
        return None
    return optax.contrib.MuonDimensionNumbers(rows, columns)


def _adam_size(param: Param, dims: Any) -> Any:
    """The factor that gives an orthogonal update the RMS of a typical Adam update (Liu et al. 2025, section 2.2).

    An orthogonal matrix of (rows, columns) has RMS 1 / sqrt(max(rows, columns)); Adam's updates have about 0.2.
    """
    import optax

    if isinstance(dims, optax.MaskedNode):
        return dims
    rows, columns = (math.prod(param.shape[i] for i in part) for part in dims)
    return 0.2 * math.sqrt(max(rows, columns))
