"""Some of a saved state's arrays, without the memory that all of it takes."""

from pathlib import Path
from typing import Any

import jax

UNREAD = ...
"""In a tree of shapes: an array that is not read. Orbax's placeholder."""


def is_partial(shapes: Any) -> bool:
    """Whether some of the arrays are not to be read."""
    return any(leaf is UNREAD for leaf in jax.tree.leaves(shapes))


def restore_part(place: Path, shapes: Any) -> Any:
    """The arrays that have a shape, laid out as it says; UNREAD in place of the others."""
    import orbax.checkpoint as ocp

    def how(leaf: Any) -> Any:
        if leaf is UNREAD:
            return ocp.RestoreArgs()
        return ocp.ArrayRestoreArgs(sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype)

    with ocp.PyTreeCheckpointer() as checkpointer:
        return checkpointer.restore(place, args=ocp.args.PyTreeRestore(shapes, jax.tree.map(how, shapes)))
