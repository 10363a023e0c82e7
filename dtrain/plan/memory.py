"""Peak memory of one device, by what it is used for.

The compiled tier takes the values that are alive at the peak from the compiler's dump and sorts them into CLASSES;
what the compiler does not name counts as temporaries. A run fits if max(peak, reserved) is at most `room`.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from dtrain.data.batch import Batch
from dtrain.parallel.rules import Layout
from dtrain.plan.compiled import Compiled
from dtrain.plan.program import Array, Op, Program
from dtrain.train.state import State

RESERVED = (1.01, 1.31)
"""Reserved memory over the peak, lowest and highest of five programs compiled for TPU v5e and v5p. The quick tier
predicts only the peak."""

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
    """Reserved bytes: arguments, program, and the block that contains all temporaries; 0 if not known."""

    @property
    def needed(self) -> int:
        """Bytes that must fit: what is reserved if that is known, else the peak."""
        return max(self.peak, self.arena)

    @property
    def fits(self) -> bool:
        """Whether the needed bytes fit."""
        return self.needed <= self.room


def fits_with_reserve(found: Memory, platform: str) -> bool:
    """Whether a predicted peak leaves room for the smallest reserve that TPU compilers added to it."""
    return found.needed * (RESERVED[0] if platform == "tpu" else 1.0) <= found.room


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
    return replace(found, classes=classes, peak=found.peak + size, arena=found.arena + size * bool(found.arena))


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
