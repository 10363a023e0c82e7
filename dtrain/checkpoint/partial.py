"""Restore some arrays of a saved state, without the memory that all of them need."""

from pathlib import Path
from typing import Any

import jax

UNREAD = ...
"""Orbax's placeholder in a tree of shapes: an array that is not read."""


def is_partial(shapes: object) -> bool:
    """Whether some arrays of the tree are not read."""
    return any(leaf is UNREAD for leaf in jax.tree.leaves(shapes))


def restore_part(place: Path, shapes: Any) -> Any:
    """Read the arrays that `shapes` describes, with its shardings; the others stay UNREAD."""
    import orbax.checkpoint as ocp

    def restore_args(leaf: Any) -> Any:
        if leaf is UNREAD:
            return ocp.RestoreArgs()
        return ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype)

    with ocp.PyTreeCheckpointer() as checkpointer:
        return checkpointer.restore(place, args=ocp.args.PyTreeRestore(shapes, jax.tree.map(restore_args, shapes)))
