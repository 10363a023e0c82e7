"""Differences between a saved state and the state that a recipe needs."""

from typing import Any

import jax

from dtrain.checkpoint.partial import UNREAD
from dtrain.models.nn.param import dotted


def differences(stored: Any, shapes: Any) -> list[str]:
    """One line for each array that is missing, unexpected, or of another shape or dtype."""
    have = {dotted(path): _kind(x) for path, x in _leaves(stored.tree)}
    want = {dotted(path): _kind(x) for path, x in _leaves(shapes)}
    have |= {name: _kind(UNREAD) for name in have.keys() & want.keys() if want[name] == _kind(UNREAD)}
    lines = [f"{name}: saved, but not in the recipe" for name in sorted(have.keys() - want.keys())]
    lines += [f"{name}: in the recipe, but not saved" for name in sorted(want.keys() - have.keys())]
    return lines + [
        f"{name}: saved as {have[name][1]}{list(have[name][0])}, the recipe has {want[name][1]}{list(want[name][0])}"
        for name in sorted(have.keys() & want.keys())
        if have[name] != want[name]
    ]


def _kind(leaf: Any) -> tuple[tuple[int, ...], str]:
    return ((), "unread") if leaf is UNREAD else (tuple(leaf.shape), str(leaf.dtype))


def _leaves(tree: object) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda leaf: hasattr(leaf, "dtype"))[0]
