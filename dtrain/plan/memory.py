"""What fills a device's memory when it is fullest, told apart by what it is for."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jax

from dtrain.data.batch import Batch
from dtrain.parallel.rules import Layout
from dtrain.plan.compiled import Compiled
from dtrain.plan.program import Array, Op, Program
from dtrain.train.state import State

RESERVED = (1.01, 1.31)
"""What TPU compilers reserved for a device, over the peak: the least and the most of five programs that were
compiled for v5e and v5p. The quick tier knows the peak alone."""

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
    """A parameter's path, or the operation that made it."""
    line: str = ""


@dataclass(frozen=True)
class Memory:
    """Bytes on one device."""

    classes: dict[str, int]
    peak: int
    room: float
    """What the device lends to a program."""
    largest: list[Buffer] = field(default_factory=list)
    replicated: int = 0
    """Bytes of parameters and optimizer state that other devices hold, too."""
    arena: int = 0
    """What is reserved: arguments, program, and the block that temporaries are laid out in; 0 where not known."""

    @property
    def needed(self) -> int:
        """The figure that must find room: what is reserved where that is known, else the peak."""
        return max(self.peak, self.arena)

    @property
    def fits(self) -> bool:
        """Whether what is needed finds room."""
        return self.needed <= self.room


def roomy(found: Memory, platform: str) -> bool:
    """Whether a peak by arithmetic leaves room for the least that a TPU's compiler reserved over it."""
    return found.needed * (RESERVED[0] if platform == "tpu" else 1.0) <= found.room


def memory(found: Compiled, program: Program, shapes: State, layout: Layout, room: float) -> Memory:
    """The compiled program's memory. Values that the compiler does not name count as temporaries."""
    buffers = sorted(_buffers(found, program, layout), key=lambda buffer: (-buffer.bytes, buffer.kind, buffer.what))
    classes: dict[str, int] = dict.fromkeys(CLASSES, 0)
    for buffer in buffers:
        classes[buffer.kind] += buffer.bytes
    classes["program"] = found.program
    rest = "activations and temporaries"
    classes[rest] += max(found.peak - sum(classes.values()), 0)
    return Memory(classes, found.peak, room, buffers[:SHOWN], replicated(shapes), found.arena)


def state_alone(shapes: State, batch: Batch, room: float) -> Memory:
    """Parameters, optimizer state and inputs, which any program of the step holds at least."""
    classes = dict.fromkeys(CLASSES, 0) | {
        "parameters": sum(map(share, jax.tree.leaves(shapes.params))),
        "optimizer": sum(map(share, jax.tree.leaves(shapes.optimizer))),
        "inputs": sum(map(share, jax.tree.leaves(batch))),
    }
    return Memory(classes, sum(classes.values()), room, replicated=replicated(shapes))


def _buffers(found: Compiled, program: Program, layout: Layout) -> Iterator[Buffer]:
    ops = {op.name: op for computation in program.computations.values() for op in computation.ops.values()}
    shares = set(_shares(layout))
    live = found.live or {f"{op.name}{{}}": op.bytes for op in program.entry.parameters.values()}
    for value, size in live.items():
        name, _, place = value.rstrip("}").partition("{")
        op = ops.get(name)
        if op is None or size == 0:
            continue
        array = op.results[int(place.split(",")[0]) if place and int(place.split(",")[0]) < len(op.results) else 0]
        given = name in program.entry.ops and op.kind == "parameter"  # a loop's state is called one, too
        kind = _given(op) if given else _made(op, array, shares)
        yield Buffer(size, str(array), kind, _what(op), program.source(op))


def _given(op: Op) -> str:
    kinds = {"state.params": "parameters", "state.optimizer": "optimizer"}
    return next((kind for start, kind in kinds.items() if op.label.startswith(start)), "inputs")


def _made(op: Op, array: Array, shares: set[tuple[int, ...]]) -> str:
    backward = "transpose(" in op.label
    return "gradients" if backward and _squeezed(array.shape) in shares else "activations and temporaries"


def _what(op: Op) -> str:
    if op.kind == "parameter":
        return (
            re.sub(r"\\?\[\\?'|\\?'\]", ".", op.label.removeprefix("state.")).replace("..", ".").strip(".") or "input"
        )
    parts = [
        part for part in re.split(r"[/;]", op.label) if part and not re.match(r"(jit|jvp|transpose)\(|while|body", part)
    ]
    plain = [part for part in parts if part not in ("closed_call", "checkpoint", "shard_map", "rematted_computation")]
    return plain[-1] if plain else op.kind


def _shares(layout: Layout) -> Iterator[tuple[int, ...]]:
    """The shape of each parameter's part on one device, dims of one left out."""
    for param in jax.tree.leaves(layout.declared):
        parts = [size // layout.parts(dim) for size, dim in zip(param.shape, param.names, strict=True)]
        if math.prod(parts) > 1:
            yield _squeezed(tuple(parts))


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(size for size in shape if size > 1))


def replicated(shapes: State) -> int:
    """Bytes of one device's parameters and optimizer state, less what would be its even share of each array."""
    waste = 0
    for leaf in jax.tree.leaves((shapes.params, shapes.optimizer)):
        part, devices = share(leaf), leaf.sharding.num_devices
        waste += part - leaf.size * leaf.dtype.itemsize // devices
    return waste


def share(leaf: Any) -> int:
    """Bytes of a sharded array on one device."""
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
