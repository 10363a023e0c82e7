"""Copies of the state in the memory of the hosts, from which a run resumes without reading a checkpoint.

    /dev/shm/dtrain-1000/4f1d.../2/120/0         the blocks of process 2 after step 120, one after the other
    /dev/shm/dtrain-1000/4f1d.../2/120/1         those of another host's process, which has its copy here
    /dev/shm/dtrain-1000/4f1d.../2/120/COPY.json what they are, written last

A process that is killed leaves its files to the one that replaces it. After the loss of a host, the process that
replaces the one of it has none: those that hold its copy load it onto their devices, and it travels back to it.
"""

import errno
import hashlib
import json
import os
import shutil
import socket
import stat
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from dtrain.checkpoint.policy import InMemory
from dtrain.core import fault_injection
from dtrain.core.errors import EnvironmentFault, cause
from dtrain.core.files import overwrite, read_json
from dtrain.core.run_dir import Folder, is_step
from dtrain.core.types import JsonObject

HEAD = "COPY.json"
PATIENCE = 1_200_000
"""Milliseconds that a process waits for what another one tells."""
READ = 4
"""Exchanges after which all have read a value: every process waits for the others in each of them."""
KEPT = 2
"""Steps that each process keeps: the others may not have finished the newest one."""


@dataclass(frozen=True)
class Copy:
    """What a copy is of: like the manifest of a checkpoint."""

    step: int
    conditions: JsonObject
    checksum: Sequence[int]
    blocks: Sequence[Sequence[object]] = ()
    """Shape and dtype of each block, in the order of the arrays and their devices."""


class Copies:
    """The copies of a run in the memory of its hosts. All processes call the same methods in the same order."""

    def __init__(self, run_dir: Folder, started: float, how: InMemory, shapes: Any) -> None:
        """`started`: when the run was started first, by process 0. `shapes`: the state to copy.

        EnvironmentFault if the memory has no room for the copies.
        """
        self._how, self._shapes = how, jax.tree.leaves(shapes)
        self._rank, self._processes = jax.process_index(), jax.process_count()
        assert all(isinstance(leaf.sharding, NamedSharding) for leaf in self._shapes), "a mesh places the state"
        place = hashlib.sha256(str(run_dir.path.absolute()).encode()).hexdigest()[:16]
        self._exchange = Exchange()
        begun, host = zip(*self._exchange([started, socket.gethostname()]), strict=True)
        run_id = hashlib.sha256(repr(begun[0]).encode()).hexdigest()[:16]
        self._all = Path(how.folder) / f"dtrain-{os.getuid()}" / place
        self._path = self._all / run_id / str(self._rank)
        self._expected = self._blocks(self._rank)
        self._stride = _processes_of_a_host(host)
        self._others = min(how.copies, self._processes // self._stride - 1)
        self._hosts = len(set(host))
        self._movers: dict[int, Any] = {}
        self._saving: threading.Thread | None = None
        self._failed: OSError | None = None
        self._prepare(run_id)

    def _prepare(self, run_id: str) -> None:
        try:
            self._make()
            for other in self._all.iterdir():  # those of an earlier run in this folder
                if other.name != run_id:
                    shutil.rmtree(other, ignore_errors=True)
            held = sum(file.stat().st_size for file in self._path.rglob("*") if file.is_file())
            free = shutil.disk_usage(self._path).free + held
        except OSError as error:
            message = f"cannot keep copies in {self._how.folder}: {error.strerror}"
            raise EnvironmentFault(message, "set checkpoint.memory.folder to a folder of each host") from error
        needed = (KEPT + 1) * (1 + self._others) * self.bytes * self._stride
        if free < needed:
            message = (
                f"checkpoint.memory: {KEPT + 1} steps of the processes of a host take {needed / 1e9:,.1f} GB in "
                f"{self._how.folder}, which has {free / 1e9:,.1f} GB free"
            )
            hint = "a container's is set by --shm-size; or checkpoint.memory.folder on a disk of each host"
            raise EnvironmentFault(message, hint)

    @property
    def fewer(self) -> str:
        """Why there are fewer copies on other hosts than the recipe asks for; empty if there are not. Of a run on one
        host nobody expects any."""
        if self._others >= self._how.copies or self._hosts == 1:
            return ""
        uneven = self._stride == self._processes
        why = "the hosts do not have equally many processes, in order" if uneven else f"there are {self._hosts} hosts"
        return f"checkpoint.memory.copies: {self._others} on other hosts in place of {self._how.copies}, since {why}"

    def _make(self) -> None:
        """Create this process's folder. OSError if another user has made the one that is this user's."""
        own = self._all.parent
        own.parent.mkdir(parents=True, exist_ok=True)
        own.mkdir(mode=0o700, exist_ok=True)
        about = own.lstat()
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o022:
            raise PermissionError(errno.EACCES, f"{own} is not a folder of this user alone")
        self._path.mkdir(mode=0o700, parents=True, exist_ok=True)

    @property
    def bytes(self) -> int:
        """Bytes of the state that this process holds."""
        return sum(_size(shape, dtype) for shape, dtype in self._expected)

    def _blocks(self, process: int) -> list[list[Any]]:
        """Shape and dtype of each block that a process holds."""
        return [
            [list(leaf.sharding.shard_shape(leaf.shape)), str(leaf.dtype)]
            for leaf in self._shapes
            for _ in dict.fromkeys(_parts(leaf, process))
        ]

    def _source_of(self, number: int) -> int:
        """The process whose copy with this number is here; 0: this process itself."""
        return (self._rank - number * self._stride) % self._processes

    def save(self, step: int, state: object, conditions: JsonObject, checksum: Sequence[int]) -> None:
        """Copy the state, which may be donated as soon as this returns."""
        self._wait()
        leaves = jax.tree.leaves(state)
        moved = [leaves, *(self._moved(leaves, number) for number in range(1, self._others + 1))]
        copied = [self._held(carried, self._source_of(number)) for number, carried in enumerate(moved)]
        head = Copy(step, conditions, list(checksum), self._expected)
        self._saving = threading.Thread(target=self._write, args=(head, copied), name=f"copy {step}", daemon=True)
        self._saving.start()

    def problem(self) -> str:
        """Why a process could not write the copy before; empty if all could."""
        self._wait()
        found = self._exchange(cause(self._failed) if self._failed else "")
        where = next((rank for rank, why in enumerate(found) if why), None)
        return "" if where is None else f"process {where} cannot copy to {self._how.folder}: {found[where]}"

    def _wait(self) -> None:
        if self._saving:
            self._saving.join()
            self._saving = None

    def clear(self) -> None:
        """Remove all copies of the run on this host, those of other processes, too: none of them is needed any more."""
        self._wait()
        self._failed = None  # another process may have removed what this one was writing
        shutil.rmtree(self._path.parent, ignore_errors=True)
        with suppress(OSError):  # another run is there
            self._all.rmdir()

    def newest(self, above: int) -> Copy | None:
        """The newest step above this one that every process has, itself or by a copy on another host. Newer ones, which
        some processes lack, are removed."""
        own = {step: self._complete(step) for step in self._steps()}
        sets = [[step for step, head in own.items() if head and (self._path / str(step) / str(number)).exists()]
                for number in range(self._others + 1)]  # fmt: skip
        limits, found = zip(*self._exchange([above, sets]), strict=True)
        above = max(limits)  # a mounted bucket may not show the newest checkpoint to all of them
        common = [
            step
            for step in {step for process in found for steps in process for step in steps}
            if step > above and all(self._source(found, rank, step) is not None for rank in range(self._processes))
        ]
        step = max(common, default=-1)
        for other in own:  # of steps that are trained again, perhaps with another recipe: they must not be mixed
            if other > step:
                shutil.rmtree(self._path / str(other), ignore_errors=True)
        if not common:
            return None
        heads = self._exchange(asdict(head) if (head := own.get(step)) else None)
        return next(Copy(**head) for head in heads if head)

    def _source(self, found: Sequence[Sequence[Sequence[int]]], rank: int, step: int) -> int | None:
        """0 if that process has the step itself, else the number of the copy elsewhere; None if it is lost."""
        holders = enumerate((rank + number * self._stride) % self._processes for number in range(self._others + 1))
        return next((number for number, holder in holders if step in found[holder][number]), None)

    def restore(self, step: int) -> list[Any]:
        """The arrays of that step, in the order of the shapes' leaves."""
        here = self._path / str(step)
        parts = [here / str(number) for number in range(self._others + 1)]
        complete = self._complete(step) is not None
        have = self._exchange([complete and path.exists() for path in parts])
        lost = [rank for rank in range(self._processes) if not have[rank][0]]
        arrays = self._read(0, parts[0]) if have[self._rank][0] else None
        for number, path in enumerate(parts[1:], 1):
            sources = {rank: (rank + number * self._stride) % self._processes for rank in lost}
            helped = [rank for rank, holder in sources.items() if have[holder][number]]
            if not helped:
                continue
            lost = [rank for rank in lost if rank not in helped]
            returned = self._moved(self._read(number, path if have[self._rank][number] else None), -number)
            if self._rank in helped:
                arrays = returned
        assert arrays is not None, "newest() gives a step that every process can have"
        return arrays

    def _moved(self, leaves: Sequence[Any], number: int) -> list[Any]:
        """Arrays in which each device has the block of the device with the same place in the process `number` hosts
        before: not the values of one array any more, only their carrier."""
        if number not in self._movers:
            specs = tuple(leaf.sharding.spec for leaf in self._shapes)
            self._movers[number] = _mover(self._shapes[0].sharding.mesh, specs, number * self._stride)
        return list(self._movers[number](*leaves))

    def _held(self, leaves: Sequence[Any], process: int) -> list[np.ndarray]:
        """What the devices of this process have of blocks that belong to a process, each once."""
        parts = []
        for leaf, shape in zip(leaves, self._shapes, strict=True):
            local = {shard.device: shard.data for shard in leaf.addressable_shards}
            places = _parts(shape, process)
            parts += [local[_devices(shape, self._rank)[places.index(part)]] for part in dict.fromkeys(places)]
        for part in parts:
            part.copy_to_host_async()
        return [np.array(part) for part in parts]  # a copy: on the CPU the array may be the device's own memory

    def _write(self, head: Copy, copied: Sequence[Sequence[np.ndarray]]) -> None:
        place = self._path / str(head.step)
        self._failed = None
        try:
            self._make()
            place.mkdir(exist_ok=True)
            (place / HEAD).unlink(missing_ok=True)
            fault_injection.strike("copy:begin", self._rank)
            for number, blocks in enumerate(copied):
                with (place / str(number)).open("wb") as file:
                    for block in blocks:
                        file.write(block.reshape(-1).view(np.uint8).data)
            overwrite(place / HEAD, json.dumps(asdict(head)))
            fault_injection.strike("copy:committed", self._rank)
        except OSError as error:
            self._failed = error
            shutil.rmtree(place, ignore_errors=True)
        kept = sorted((step for step in self._steps() if step <= head.step), reverse=True)[:KEPT]
        for step in self._steps():  # higher ones are of an earlier start, which got further
            if step not in kept:
                shutil.rmtree(self._path / str(step), ignore_errors=True)

    def _steps(self) -> list[int]:
        return [int(path.name) for path in self._path.iterdir() if is_step(path.name)] if self._path.is_dir() else []

    def _complete(self, step: int) -> Copy | None:
        """What the copy of a step is of; None if it was not finished, or is not of these shapes."""
        with suppress(OSError, ValueError, TypeError):
            head = Copy(**read_json(self._path / str(step) / HEAD))
            return head if head.blocks == self._expected and head.step == step else None
        return None

    def _read(self, number: int, path: Path | None) -> list[Any]:
        """Arrays whose blocks on the devices of this process are those of the copy with this number, or 0 without a
        file."""
        process = self._source_of(number)
        values = np.memmap(path, np.uint8, "r") if path and path.stat().st_size else None
        arrays, offset = [], 0
        for leaf in self._shapes:
            shape, dtype = leaf.sharding.shard_shape(leaf.shape), leaf.dtype
            size, places, blocks = _size(shape, dtype), _parts(leaf, process), dict[str, np.ndarray]()
            for part in dict.fromkeys(places):
                found = np.zeros(size, np.uint8) if values is None else np.array(values[offset : offset + size])
                blocks[part], offset = found.view(dtype).reshape(shape), offset + size
            devices = _devices(leaf, self._rank)
            placed = [jax.device_put(blocks[part], device) for part, device in zip(places, devices, strict=True)]
            arrays.append(jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, placed))
        return arrays


def _size(shape: Any, dtype: Any) -> int:
    return int(np.prod(shape, dtype=np.int64)) * jax.numpy.dtype(dtype).itemsize


def _devices(leaf: Any, process: int) -> list[Any]:
    """The devices of a process, in the order of the mesh."""
    return [device for device in leaf.sharding.mesh.devices.flatten() if device.process_index == process]


def _parts(leaf: Any, process: int) -> list[str]:
    """Which part of an array each of the devices of a process holds: equal texts for equal parts."""
    indices = leaf.sharding.devices_indices_map(leaf.shape)
    return [str(indices[device]) for device in _devices(leaf, process)]


def _processes_of_a_host(names: Sequence[str]) -> int:
    """Processes on each host, by the host of each; all of them if the hosts do not have equally many, in order."""
    each = names.count(names[0])
    even = len(names) % each == 0 and all(
        len({*names[first : first + each]}) == 1 and names.count(names[first]) == each
        for first in range(0, len(names), each)
    )
    return each if even else len(names)


@dataclass
class Exchange:
    """Gathers a JSON value of every process through JAX's coordination service, without a program for the devices."""

    count: int = 0

    def __call__(self, value: Any) -> list[Any]:
        """The values by rank. All processes must call this equally often."""
        rank, processes, self.count = jax.process_index(), jax.process_count(), self.count + 1
        if processes == 1:
            return [json.loads(json.dumps(value))]
        from jax._src import distributed  # JAX has no public name for it; orbax uses it, too

        client = distributed.global_state.client
        assert client is not None, "jax.distributed is initialised"
        client.key_value_set(f"dtrain/copies/{self.count}/{rank}", json.dumps(value))
        if self.count > READ:
            client.key_value_delete(f"dtrain/copies/{self.count - READ}/{rank}")
        keys = (f"dtrain/copies/{self.count}/{other}" for other in range(processes))
        return [json.loads(client.blocking_key_value_get(key, PATIENCE)) for key in keys]


def _mover(mesh: Any, specs: tuple[PartitionSpec, ...], processes: int) -> Any:
    """A program that moves every block to the device with the same place in the process so many ranks later."""
    devices = list(mesh.devices.flatten())
    owned: dict[int, list[int]] = {}
    for place, device in enumerate(devices):
        owned.setdefault(device.process_index, []).append(place)
    count = len(owned)
    pairs = [
        (place, owned[(process + processes) % count][number])
        for process, places in owned.items()
        for number, place in enumerate(places)
    ]

    def move(*blocks: Any) -> tuple[Any, ...]:
        return tuple(jax.lax.ppermute(block, mesh.axis_names, pairs) for block in blocks)

    return jax.jit(jax.shard_map(move, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=False))
