"""Any optimizer that optax has, or that a user's file returns as an optax transformation."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import jax

from dtrain.core.errors import RecipeError
from dtrain.core.user_code import build_target, own_code, refuse_malformed
from dtrain.models.nn.param import Tree
from dtrain.optim.shared import Shared

if TYPE_CHECKING:
    import optax

RATE = "learning_rate"
"""The argument of the function that gets the learning rate at each step."""


@dataclass(frozen=True, kw_only=True)
class CustomOptimizer(Shared):
    """`target: module:function`, called with `learning_rate`, a function of the step, and `args`.

    It returns an optax transformation whose updates are added to the parameters; optax's own optimizers are such
    functions: "optax:lamb". Clipping, weight decay (`decay`), groups and `ema` are dtrain's, as with every optimizer.
    """

    kind: Literal["custom"] = "custom"
    target: str = "optax:adam"
    """package.module:function, from the recipe's folder, the working folder or an installed package. Importing it runs
    its code."""
    args: dict[str, object] = field(default_factory=dict)
    """Keyword arguments of the function, besides `learning_rate`."""
    folder: str | None = None
    """Folder that is searched first for the module: the recipe's, if the module is in it."""

    def __post_init__(self) -> None:
        refuse_malformed(self.target)

    @property
    def user_code(self) -> str:
        """What the recipe names as code; empty for functions of optax."""
        return "" if self.target.startswith("optax:") else self.target

    def _built(self, arguments: dict[str, object], where: str) -> object:
        """What the target returns. A function of optax is taken from the installed package: no folder is searched."""
        if self.user_code:
            return build_target("optimizer", self.target, arguments, self.folder)
        import optax

        name = self.target.partition(":")[2]
        if not hasattr(optax, name):
            raise RecipeError(f"{where}: module 'optax' has no attribute {name!r}")
        with own_code(where):
            return getattr(optax, name)(**arguments)

    def complete(self, rate: Callable[[Any], jax.Array]) -> "optax.GradientTransformationExtraArgs":
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

        def init(params: Tree) -> Any:
            with own_code(where):
                return extra.init(params)

        def update(updates: Tree, state: Any, params: Tree = None, **more: Any) -> tuple[Tree, Any]:
            now[0] = more.pop("step")
            with own_code(where):
                return extra.update(updates, state, params, **more)

        return optax.GradientTransformationExtraArgs(init, update)
