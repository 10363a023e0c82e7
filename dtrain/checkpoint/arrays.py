"""Write and read the arrays of a state with orbax, each process its own shards."""

from pathlib import Path
from typing import Any

import jax

from dtrain.checkpoint.partial import is_partial, restore_part

SLICE = 2**20
"""Fewest bytes of a slice that each replica writes; a smaller array is written by the first one."""


class Arrays:
    """Writes in the background, in place and without a rename; one folder at a time."""

    def __init__(self) -> None:
        import orbax.checkpoint as ocp

        mode = ocp.options.AtomicityMode.COMMIT_FILE
        atomicity = ocp.options.AtomicityOptions(mode=mode, allow_legacy_atomic_rename=True)
        # Orbax's own metadata of arrays is left out: the manifest has a digest of every file.
        # Processes that hold the same values each write a slice of them, if it is large: a program is compiled for each
        # shape of a slice.
        several = jax.process_count() > 1
        arrays = ocp.type_handlers.ArrayHandler(
            use_replica_parallel=several, min_slice_bytes_for_replica_parallel=SLICE if several else None
        )
        registry = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
        # not compressed: trained floats shrink by a tenth at most, and a save takes twice as long
        handler = ocp.PyTreeCheckpointHandler(use_compression=False, type_handler_registry=registry)
        self._orbax = ocp.AsyncCheckpointer(handler, atomicity_options=atomicity)

    def save(self, place: Path, state: object) -> None:
        """Start to save. The arrays may be donated as soon as this returns."""
        import orbax.checkpoint as ocp

        self._orbax.save(place, args=ocp.args.PyTreeSave(state))

    def wait(self) -> None:
        """Wait until the save is on disk. Raises what it failed with."""
        self._orbax.wait_until_finished()

    def metadata(self, place: Path) -> Any:
        """The tree of what was saved, with shapes and dtypes."""
        return self._orbax.metadata(place).item_metadata

    def restore(self, place: Path, shapes: Any) -> Any:
        """The state with the shardings of `shapes`; arrays that are `...` there are not read."""
        import orbax.checkpoint as ocp

        if is_partial(shapes):
            return restore_part(place, shapes)
        how = ocp.checkpoint_utils.construct_restore_args(shapes)
        return self._orbax.restore(place, args=ocp.args.PyTreeRestore(shapes, how))

    def close(self) -> None:
        """Wait for a pending save and end the threads."""
        self._orbax.close()
