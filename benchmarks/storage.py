"""Save, restore and read published weights: dtrain, orbax alone, torch.save, safetensors and the disk itself.

A state of 1 GB in ten arrays on one device. Every write ends on the disk (fsync), every read starts from the disk: the
page cache is dropped first, where the program may do so. The variants alternate; medians of wall time are printed.

- `disk` writes and reads one file in pieces of 16 MB; `direct` reads it past the page cache, as `dd iflag=direct` does;
- `orbax` is its synchronous checkpointer, with its defaults; `safetensors` and `torch` write and read one file;
- `dtrain` is what a run does: to commit, a save is digested and its manifest written; a restore checks the digests;
- `weights` is what `init.weights` does with the same values in a safetensors file.

    python benchmarks/storage.py [MEGABYTES]     target: restore and weights at most 1.2x the slower of disk and orbax
"""

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import timing  # noqa: F401 - configures JAX as `dtrain run` does

from dtrain.assembly.checksum import state_checksum
from dtrain.assembly.state import State
from dtrain.checkpoint.policy import Checkpoint
from dtrain.checkpoint.store import Store
from dtrain.checkpoint.tensors import opened
from dtrain.models.nn.param import Param, zeros
from dtrain.weights.read import Located, own_names, read

ROUNDS, PIECE = 5, 16 * 2**20


def cold() -> bool:
    """Write everything to the disk and drop the page cache; False if this user may not."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("1")
    except OSError:
        return False
    return True


def synced(path: Path) -> None:
    for one in [path, *path.rglob("*")] if path.is_dir() else [path]:
        handle = os.open(one, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


Actions = dict[str, Callable[[], Any]]


def disk(folder: Path, values: dict[str, np.ndarray]) -> tuple[Callable[[], None], Callable[[], None]]:
    def save() -> None:
        with (folder / "raw").open("wb") as file:
            for array in values.values():
                data = memoryview(array).cast("B")
                for start in range(0, len(data), PIECE):
                    file.write(data[start : start + PIECE])
        synced(folder / "raw")

    def load() -> None:
        buffer = bytearray(PIECE)
        with (folder / "raw").open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    return save, load


def direct(folder: Path) -> Callable[[], None]:
    def load() -> None:
        import mmap

        buffer = mmap.mmap(-1, PIECE)  # aligned, as direct reads require
        handle = os.open(folder / "raw", os.O_RDONLY | os.O_DIRECT)
        try:
            while os.readv(handle, [buffer]) == PIECE:
                pass
        finally:
            os.close(handle)

    return load


def orbax(folder: Path, state: State, shapes: State) -> Actions:
    import orbax.checkpoint as ocp

    checkpointer, path = ocp.StandardCheckpointer(), folder / "orbax"

    def save() -> None:
        shutil.rmtree(path, ignore_errors=True)
        checkpointer.save(path, state)
        checkpointer.wait_until_finished()
        synced(path)

    return {
        "orbax: save": save,
        "orbax: restore": lambda: jax.block_until_ready(checkpointer.restore(path, shapes)),
    }


def files(folder: Path, host: dict[str, np.ndarray]) -> Actions:
    from safetensors.numpy import load_file, save_file

    path = folder / "model.safetensors"

    def save() -> None:
        save_file(host, path)
        synced(path)

    found: Actions = {"safetensors: save": save, "safetensors: load": lambda: load_file(path)}
    try:
        import torch
    except ImportError:
        print("torch is not installed: left out")
        return found
    tensors, other = {name: torch.from_numpy(array) for name, array in host.items()}, folder / "model.pt"

    def torch_save() -> None:
        torch.save(tensors, other)
        synced(other)

    return found | {"torch: save": torch_save, "torch: load": lambda: torch.load(other)}


def dtrain(folder: Path, store: Store, state: State, shapes: State) -> Actions:
    step = [0]

    def stall() -> None:
        step[0] += 1
        found = state_checksum(step[0], state)
        store.save(step[0], state, {}, {}, found.checksum)

    def restore() -> None:
        newest = store.newest(print)
        assert newest is not None
        jax.block_until_ready(store.restore(newest.step, shapes))

    declared = {name: Param(array.shape, "_ _", zeros) for name, array in state.params.items()}

    def weights() -> None:
        with opened(folder / "model.safetensors") as found:
            jax.block_until_ready(read(found, Located(own_names(declared), ""), declared, shapes.params))

    return {
        "dtrain: save, loop blocked": stall,
        "dtrain: save, to the commit": store.wait,
        "dtrain: digests checked": lambda: store.newest(print),
        "dtrain: restore": restore,
        "dtrain: weights": weights,
    }


def main() -> None:
    megabytes = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    keys = jax.random.split(jax.random.key(0), 10)
    arrays = {f"w{i}": jax.random.normal(key, (megabytes * 25, 1000)) for i, key in enumerate(keys)}
    state = jax.block_until_ready(State(jnp.int32(1), arrays, ()))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    host = {name: np.asarray(array) for name, array in arrays.items()}
    with tempfile.TemporaryDirectory(prefix="dtrain-storage-") as name:
        folder = Path(name)
        save, load = disk(folder, host)
        actions: Actions = {"disk: write": save, "disk: read": load, "direct: read": direct(folder)}
        with Store(folder / "ours", Checkpoint(keep=1)) as store:
            actions |= orbax(folder, state, shapes) | files(folder, host) | dtrain(folder, store, state, shapes)
            found: dict[str, list[float]] = {action: [] for action in actions}
            at_disk = True
            for turn in range(ROUNDS + 1):
                for action, work in actions.items():
                    if "commit" not in action:  # it ends the save that the action before began
                        at_disk &= cold()
                    start = time.perf_counter()
                    work()
                    if turn:
                        found[action].append(time.perf_counter() - start)
    print(f"{megabytes} MB, medians of {ROUNDS}; reads start {'at the disk' if at_disk else 'in the page cache'}")
    for action, times in found.items():
        middle = statistics.median(times)
        print(f"{action:<28} {middle:6.2f} s  {megabytes / middle:7,.0f} MB/s   {min(times):.2f} to {max(times):.2f} s")


if __name__ == "__main__":
    main()
