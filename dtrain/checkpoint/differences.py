"""Where a saved state and a wanted one differ."""

from typing import Any

import jax

from dtrain.checkpoint.partial import UNREAD
from dtrain.models.nn.param import dotted


def differences(stored: Any, shapes: Any) -> list[str]:
    """Where stored arrays and wanted ones differ: missing, too many, or of other shape or dtype."""
    have = {dotted(path): _kind(x) for path, x in _leaves(stored.tree)}
    want = {dotted(path): _kind(x) for path, x in _leaves(shapes)}
    have |= {name: _kind(UNREAD) for name in have.keys() & want.keys() if want[name] == _kind(UNREAD)}
    found = [f"{name}: saved, but not in the recipe" for name in sorted(have.keys() - want.keys())]
    found += [f"{name}: in the recipe, but not saved" for name in sorted(want.keys() - have.keys())]
    return found + [
        f"{name}: saved as {have[name][1]}{list(have[name][0])}, the recipe has {want[name][1]}{list(want[name][0])}"
        for name in sorted(have.keys() & want.keys())
        if have[name] != want[name]
    ]


def _kind(leaf: Any) -> tuple[tuple[int, ...], str]:
    return ((), "unread") if leaf is UNREAD else (tuple(leaf.shape), str(leaf.dtype))


def _leaves(tree: Any) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda leaf: hasattr(leaf, "dtype"))[0]
