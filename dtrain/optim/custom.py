"""Any optimizer that optax has, or that a user's file returns as an optax transformation."""

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal, Self

import jax

from dtrain.core.errors import RecipeError
from dtrain.core.user_code import UserTarget, build_target, named_in, user_errors
from dtrain.models.nn.param import Param, Tree
from dtrain.optim.moments import APART
from dtrain.optim.shared import Shared

if TYPE_CHECKING:
    import optax

RATE, DECAY = "learning_rate", "weight_decay"
"""Arguments of the function: the learning rate, a function of the step, and optax's own weight decay."""
VALUE_BY_VALUE = {
    "adabelief", "adadelta", "adagrad", "adam", "adamax", "adamaxw", "adamw", "amsgrad", "lion", "nadam", "nadamw",
    "optimistic_gradient_descent", "radam", "rmsprop", "sgd", "sign_sgd", "yogi",
}  # fmt: skip
"""Functions of optax whose update of each value depends on that value's own gradients alone."""


@dataclass(frozen=True, kw_only=True)
class CustomOptimizer(UserTarget, Shared):
    """`target: module:function`, called with `learning_rate`, a function of the step, and `args`.

    It returns an optax transformation whose updates are added to the parameters; optax's own optimizers are such
    functions: "optax:lamb". Clipping, weight decay (`decay`), groups and `ema` are dtrain's, as with every optimizer:
    the weight decay that some functions of optax have by default is off unless `args` has it. Each layer of a stack,
    and each expert, is a parameter of its own for the function, as its norm or its factors are those of one matrix.
    """

    kind: Literal["custom"] = "custom"
    target: str = "optax:adam"
    """package.module:function, from the recipe's folder, the working folder or an installed package. Importing it runs
    its code."""

    @property
    def user_code(self) -> str:
        """What the recipe names as code; empty for functions of optax."""
        return "" if self._module.split(".")[0] == "optax" else self.target

    @property
    def _module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def _name(self) -> str:
        return self.target.partition(":")[2]

    @property
    def has_user_args(self) -> bool:
        return True

    def changed(self, args: Mapping[str, object], match: str) -> Self:
        del match
        return replace(self, args=self.args | dict(args))

    def _built(self, arguments: dict[str, object], where: str) -> object:
        """What the target returns. A function of optax is taken from the installed package: no folder is searched."""
        if self.user_code:
            return build_target("optimizer", self.target, arguments, self.folder)
        try:
            function = named_in(import_module(self._module), self._name, where)
        except ImportError as error:
            raise RecipeError(f"{where}: {error}") from error
        off = {DECAY: 0.0} if _decays(function) else {}
        with user_errors(where):
            return function(**off | arguments)

    @property
    def _value_by_value(self) -> bool:
        return self._module == "optax" and self._name in VALUE_BY_VALUE

    def apart(self, declared: Tree) -> Tree:
        """The declared parameters as the function receives them: a list of layers or experts in place of a stack."""
        return declared if self._value_by_value else jax.tree.map(_layers, declared)

    def complete(self, rate: Callable[[Any], jax.Array], declared: Tree) -> "optax.GradientTransformationExtraArgs":
        """The user's transformation with this learning rate; its `update` takes `step`, the number of the step.

        RecipeError if the function returns anything else, or takes no learning rate.
        """
        import optax

        where, now = f"optimizer.target: {self.target}", [0]

        def at(_: object) -> jax.Array:
            return rate(now[0])  # at dtrain's step, which counts updates that were skipped, too

        own: Any = self._built({RATE: at, **self.args}, where)
        if not isinstance(own, optax.GradientTransformation | optax.GradientTransformationExtraArgs):
            hint = "return what optax.chain or an optimizer of optax returns"
            raise RecipeError(f"{where} returns a {type(own).__name__}, no optax transformation", hint)
        extra = optax.with_extra_args_support(own)

        def cut(tree: Tree) -> Tree:
            return tree if self._value_by_value or tree is None else jax.tree.map(_cut, declared, tree)

        def joined(tree: Tree) -> Tree:
            return tree if self._value_by_value else jax.tree.map(_joined, declared, tree)

        def init(params: Tree) -> Any:
            with user_errors(where):
                return extra.init(cut(params))

        def update(updates: Tree, state: Any, params: Tree = None, **more: Any) -> tuple[Tree, Any]:
            now[0] = more.pop("step")
            with user_errors(where):
                moved, state = extra.update(cut(updates), state, cut(params), **more)
            return joined(moved), state

        return optax.GradientTransformationExtraArgs(init, update)


def _decays(function: Callable[..., object]) -> bool:
    """Whether the function has weight decay of its own by default."""
    decay = inspect.signature(function).parameters.get(DECAY)
    return decay is not None and decay.default not in (0, None)


def _stack(param: Param) -> list[int]:
    """The dims of a parameter along which it is a stack."""
    return [dim for dim, name in enumerate(param.names) if name in APART]


def _layers(param: Param) -> Param | list[Param]:
    """The declarations of the matrices in a stack; the parameter itself if it is none."""
    dims = _stack(param)
    if not dims:
        return param
    kept = [dim for dim in range(len(param.shape)) if dim not in dims]
    one = replace(
        param,
        shape=tuple(param.shape[dim] for dim in kept),
        dims=" ".join(param.names[dim] for dim in kept),
        unpadded=param.unpadded and tuple(param.unpadded[dim] for dim in kept),
    )
    return [one] * math.prod(param.shape[dim] for dim in dims)


def _cut(param: Param, x: jax.Array) -> jax.Array | list[jax.Array]:
    """The values of a parameter, a stack as the list of its matrices."""
    dims = _stack(param)
    if not dims:
        return x
    first = jax.numpy.moveaxis(x, dims, range(len(dims)))
    return list(first.reshape(-1, *first.shape[len(dims) :]))


def _joined(param: Param, parts: Any) -> jax.Array:
    """The inverse of `_cut`."""
    dims = _stack(param)
    if not dims:
        return parts
    stack = jax.numpy.stack(parts)
    first = stack.reshape(*(param.shape[dim] for dim in dims), *stack.shape[1:])
    return jax.numpy.moveaxis(first, range(len(dims)), dims)
