"""Peak memory of one device, by what it is used for.

The compiled tier takes the values that are alive at the peak from the compiler's dump and sorts them into CLASSES;
what the compiler does not name counts as temporaries. A run fits if the compiler compiles it and the
peak is at most `room`.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from dtrain.assembly.state import State
from dtrain.data.batch import Batch
from dtrain.parallel.rules import Layout
from dtrain.plan.compiled import Compiled
from dtrain.plan.program import Array, Op, Program

PEAKS = {"tpu": (0.69, 1.3), "gpu": (0.84, 1.28)}
"""The compiler's peak over that of the quick tier by platform, lowest and highest. TPU v5e, v5p and v6e, decoders of
0.1 to 47 billion parameters on 1 to 256 chips: the highest of 37 programs with layers of one kind (1.22) by the sum of
the arrays in the compiler's dump, which is at least its own peak, of 3 with layers of several kinds (1.30) by its own,
and the lowest own peak that was read. GPUs: of 44 programs for 8 to 512 A100,
H100, H200 and B200, decoders of 0.1 to 70 billion without experts."""

CLASSES = ("parameters", "optimizer", "gradients", "activations and temporaries", "inputs", "program")
SHOWN = 10


@dataclass(frozen=True)
class Buffer:
    """One array in memory at the peak."""

    bytes: int
    shape: str
    kind: str
    """One of CLASSES."""
    what: str
    """A parameter's path, or the operation that produced it."""
    line: str = ""


@dataclass(frozen=True)
class Memory:
    """Bytes on one device."""

    classes: dict[str, int]
    peak: int
    room: float
    """Bytes of the device's memory that a program may use."""
    largest: list[Buffer] = field(default_factory=list)
    replicated: int = 0
    """Bytes of parameters and optimizer state beyond an even share of each array: copies of other devices' shards."""
    arena: int = 0
    """Bytes of arguments, program and the block of all temporaries as the compiler lays them out; 0 if not known. Not
    what a device must have: TPU compilers pack the peak below the device's memory, and refuse what they cannot pack."""
    refused: int = 0
    """Bytes that the compiler asked for when it refused the program; 0 if it compiled it, or was not asked."""

    @property
    def needed(self) -> int:
        """Bytes that must fit: the peak, or what the compiler asked for where it refused."""
        return max(self.peak, self.refused)

    @property
    def fits(self) -> bool:
        """Whether the needed bytes fit."""
        return self.needed <= self.room


def memory(compiled: Compiled, program: Program, shapes: State, layout: Layout, room: float) -> Memory:
    """Memory of a compiled program. Values that the compiler does not name count as temporaries."""
    buffers = sorted(_buffers(compiled, program, layout), key=lambda buffer: (-buffer.bytes, buffer.kind, buffer.what))
    classes: dict[str, int] = dict.fromkeys(CLASSES, 0)
    for buffer in buffers:
        classes[buffer.kind] += buffer.bytes
    classes["program"] = compiled.program
    rest = "activations and temporaries"
    classes[rest] += max(compiled.peak - sum(classes.values()), 0)
    return Memory(
        classes, compiled.peak, room, largest=buffers[:SHOWN], replicated=replicated(shapes), arena=compiled.arena
    )


def with_batches(found: Memory, batch: Batch, more: int) -> Memory:
    """The memory with so many more batches on the devices."""
    size = more * sum(share(leaf) for leaf in jax.tree.leaves(batch))
    classes = found.classes | {"inputs": found.classes["inputs"] + size}
    held = {name: getattr(found, name) + size * bool(getattr(found, name)) for name in ("arena", "refused")}
    return replace(found, classes=classes, peak=found.peak + size, **held)


def state_alone(shapes: State, batch: Batch, room: float) -> Memory:
    """Memory of parameters, optimizer state and inputs: a lower bound for every program of the step."""
    classes = dict.fromkeys(CLASSES, 0) | {
        "parameters": sum(map(share, jax.tree.leaves(shapes.params))),
        "optimizer": sum(map(share, jax.tree.leaves(shapes.optimizer))),
        "inputs": sum(map(share, jax.tree.leaves(batch))),
    }
    return Memory(classes, sum(classes.values()), room, replicated=replicated(shapes))


def _buffers(compiled: Compiled, program: Program, layout: Layout) -> Iterator[Buffer]:
    ops = {op.name: op for computation in program.computations.values() for op in computation.ops.values()}
    shares = set(_shard_shapes(layout))
    live = compiled.live or {f"{op.name}{{}}": op.bytes for op in program.entry.parameters.values()}
    for value, size in live.items():
        name, _, place = value.rstrip("}").partition("{")
        op = ops.get(name)
        if op is None or size == 0:
            continue
        array = op.results[int(place.split(",")[0]) if place and int(place.split(",")[0]) < len(op.results) else 0]
        argument = name in program.entry.ops and op.kind == "parameter"  # the state of a loop is a parameter as well
        kind = _argument_class(op) if argument else _computed_class(op, array, shares)
        yield Buffer(size, str(array), kind, _name_of(op), program.source(op))


def _argument_class(op: Op) -> str:
    """Class of an argument of the program, by its label."""
    kinds = {"state.params": "parameters", "state.optimizer": "optimizer"}
    return next((kind for start, kind in kinds.items() if op.label.startswith(start)), "inputs")


def _computed_class(op: Op, array: Array, shares: set[tuple[int, ...]]) -> str:
    """Class of a computed value: a gradient if the backward pass made it in the shape of a parameter's shard."""
    backward = "transpose(" in op.label
    return "gradients" if backward and _squeezed(array.shape) in shares else "activations and temporaries"


def _name_of(op: Op) -> str:
    """Name of a value for the report: a parameter's path, or the last telling part of the operation's label."""
    if op.kind == "parameter":
        return (
            re.sub(r"\\?\[\\?'|\\?'\]", ".", op.label.removeprefix("state.")).replace("..", ".").strip(".") or "input"
        )
    parts = [
        part for part in re.split(r"[/;]", op.label) if part and not re.match(r"(jit|jvp|transpose)\(|while|body", part)
    ]
    plain = [part for part in parts if part not in ("closed_call", "checkpoint", "shard_map", "rematted_computation")]
    return plain[-1] if plain else op.kind


def _shard_shapes(layout: Layout) -> Iterator[tuple[int, ...]]:
    """Shape of each parameter's shard on one device, sorted, without dims of size 1."""
    for param in jax.tree.leaves(layout.declared):
        parts = [size // layout.parts(dim) for size, dim in zip(param.shape, param.names, strict=True)]
        if math.prod(parts) > 1:
            yield _squeezed(tuple(parts))


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(size for size in shape if size > 1))


def replicated(shapes: State) -> int:
    """Bytes of one device's parameters and optimizer state beyond its even share of each array."""
    waste = 0
    for leaf in jax.tree.leaves((shapes.params, shapes.optimizer)):
        part, devices = share(leaf), leaf.sharding.num_devices
        waste += part - leaf.size * leaf.dtype.itemsize // devices
    return waste


def share(leaf: Any) -> int:
    """Bytes of a sharded array on one device."""
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
