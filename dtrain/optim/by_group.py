"""The parts of an update that differ between groups of parameters: clipping, settings, when they are updated."""

from collections.abc import Mapping, Set
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from dtrain.models.nn.param import Param, Tree
from dtrain.optim.groups import Group
from dtrain.optim.shared import Shared

if TYPE_CHECKING:
    import optax


def only(tree: Tree, declared: Tree, groups: Set[str]) -> Tree:
    """The tree with None in place of the leaves of parameters in other groups."""
    return jax.tree.map(lambda param, leaf: leaf if param.group in groups else None, declared, tree)


def by_group(
    parts: "Mapping[str, tuple[Set[str], optax.GradientTransformation]]", declared: Tree
) -> "optax.GradientTransformationExtraArgs":
    """Several transformations, each by name for the parameters of some groups; others pass unchanged.

    The state is a dict by those names. Each transformation gets trees with None in place of what is not its own.
    """
    import optax

    made = {name: (groups, optax.with_extra_args_support(part)) for name, (groups, part) in parts.items()}

    def init(params: Tree) -> Any:
        return {name: part.init(only(params, declared, groups)) for name, (groups, part) in made.items()}

    def update(updates: Tree, state: Any, params: Tree = None, **more: Any) -> tuple[Tree, Any]:
        states = {}
        for name, (groups, part) in made.items():
            given = None if params is None else only(params, declared, groups)
            moved, states[name] = part.update(only(updates, declared, groups), state[name], given, **more)

            def chosen(param: Param, own: Any, other: Any, groups: Set[str] = groups) -> Any:
                return own if param.group in groups else other

            updates = jax.tree.map(chosen, declared, moved, updates)
        return updates, states

    return optax.GradientTransformationExtraArgs(init, update)


def clipped(optimizer: Shared, declared: Tree) -> "optax.GradientTransformation | None":
    """Clip gradients by their global norm; those of a group with a limit of its own by the norm of the group."""
    import optax

    limits = {f"group{number}": group for number, group in enumerate(optimizer.groups) if group.clip}
    if not limits:
        return optax.clip_by_global_norm(optimizer.clip) if optimizer.clip else None
    own = {group.match for group in limits.values()}
    parts = {name: ({group.match}, optax.clip_by_global_norm(group.clip or 0)) for name, group in limits.items()}
    if optimizer.clip:
        parts["others"] = groups_of(declared) - own, optax.clip_by_global_norm(optimizer.clip)
    return by_group(parts, declared)


def groups_of(declared: Tree) -> set[str]:
    """The groups that the parameters are in; the empty text stands for none."""
    return {param.group for param in jax.tree.leaves(declared)}


def scheduled(group: Group, update: "optax.GradientTransformation") -> "optax.GradientTransformationExtraArgs":
    """The update at the steps at which the group is updated; at others no change, of the state either."""
    import optax

    inner = optax.with_extra_args_support(update)

    def changed(updates: Tree, state: Any, params: Tree = None, **more: Any) -> tuple[Tree, Any]:
        step = more["step"]
        due = (step >= group.start) & ((step - group.start) % group.every == 0)

        def moved() -> tuple[Tree, Any]:
            return inner.update(updates, state, params, **more)

        def unchanged() -> tuple[Tree, Any]:
            zeros, _ = jax.eval_shape(moved)
            return jax.tree.map(lambda of: jnp.zeros(of.shape, of.dtype), zeros), state

        return jax.lax.cond(due, moved, unchanged)

    always = group.every == 1 and not group.start
    return inner if always else optax.GradientTransformationExtraArgs(inner.init, changed)


def average_decays(optimizer: Shared, declared: Tree) -> Tree:
    """The decay of the average of each parameter; None where none is kept."""
    own = {group.match: group.ema for group in optimizer.groups if group.ema is not None}
    return jax.tree.map(lambda param: own.get(param.group, optimizer.ema) or None, declared)
