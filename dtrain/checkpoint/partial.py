"""Restore some arrays of a saved state, without the memory that all of them need, or without knowing its tree."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from dtrain.checkpoint import disk
from dtrain.models.nn.param import dotted

UNREAD = ...
"""Orbax's placeholder in a tree of shapes: an array that is not read."""


def is_partial(shapes: object) -> bool:
    """Whether some arrays of the tree are not read."""
    return any(leaf is UNREAD for leaf in jax.tree.leaves(shapes))


def restore_part(place: Path, shapes: Any) -> Any:
    """Read the arrays that `shapes` describes, with its shardings; the others stay UNREAD.

    Arrays are found by path: the saved tree may have other branches.
    """
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    found = _read(place, {dotted(path): leaf for path, leaf in leaves if leaf is not UNREAD})
    return jax.tree.map_with_path(lambda path, _: found.get(dotted(path), UNREAD), shapes)


def _read(place: Path, wanted: Mapping[str, Any]) -> dict[str, jax.Array]:
    import orbax.checkpoint as ocp

    def restore_args(leaf: Any) -> Any:
        if leaf is UNREAD:
            return ocp.RestoreArgs()
        return ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype)

    tree = jax.tree.map_with_path(lambda path, _: wanted.get(dotted(path), UNREAD), _metadata(place))
    with disk.reading(place), ocp.PyTreeCheckpointer() as checkpointer:
        restored = checkpointer.restore(place, args=ocp.args.PyTreeRestore(tree, jax.tree.map(restore_args, tree)))
    return {dotted(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(restored) if leaf is not UNREAD}


def saved_shapes(checkpoints: Path, step: int) -> dict[str, tuple[int, ...]]:
    """The shape of every array of a saved state, by dotted path. EnvironmentFault if it cannot be read."""
    leaves = jax.tree_util.tree_leaves_with_path(_metadata(checkpoints / str(step) / "state"))
    return {dotted(path): tuple(leaf.shape) for path, leaf in leaves}


def read_arrays(checkpoints: Path, step: int, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Arrays of a saved state by dotted path, in the dtypes and with the shardings of `wanted`.

    Each device reads its own part only. EnvironmentFault if they cannot be read.
    """
    return _read(checkpoints / str(step) / "state", wanted)


def _metadata(place: Path) -> Any:
    import orbax.checkpoint as ocp

    with disk.reading(place), ocp.PyTreeCheckpointer() as checkpointer:
        return checkpointer.metadata(place).item_metadata.tree
