"""Parse the text of a compiled program: computations, their operations in order of execution, arrays.

The grammar is that of XLA's HLO text: `%name = type kind(operands), attributes`.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from dtrain.parallel.program_lines import lines_of

SAME = ("copy", "copy-start", "copy-done", "bitcast", "convert", "reshape", "opt-barrier")
State = Callable[[int], int | None]
"""The integer at each position of a tuple or of a parameter list; None if it is not known."""


BITS = {"pred": 8, "s4": 4, "u4": 4, "bf16": 16, "f16": 16, "c64": 64, "c128": 128}
_TILE = re.compile(r"\((\d[\d,]*)\)")
_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_COMMENT = re.compile(r"/\*.*?\*/")


@dataclass(frozen=True)
class Array:
    """One array. Memory space 0 is the device's main memory; others are fast memory or host memory."""

    dtype: str
    shape: tuple[int, ...]
    minor_to_major: tuple[int, ...]
    tile: tuple[int, ...]
    space: int

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @cached_property
    def bytes(self) -> int:
        """Bytes, with dims padded to whole tiles."""
        bits = BITS.get(self.dtype) or int(re.sub(r"\D", "", self.dtype.split("e")[0].split("f8")[0]) or 8)
        shape = [self.shape[dim] for dim in self.minor_to_major]
        for place, side in enumerate(reversed(self.tile)):
            if place < len(shape):
                shape[place] = -(-shape[place] // side) * side
        return math.prod(shape) * bits // 8

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"


@dataclass(frozen=True)
class Op:
    """One operation."""

    name: str
    kind: str
    results: tuple[Array, ...]
    operands: tuple[str, ...]
    attributes: str
    root: bool

    def called(self, role: str = "calls") -> str | None:
        """Name of the computation that it calls in that role: calls, body, condition, to_apply."""
        found = re.search(rf"\b{role}=%?([\w.\-]+)", self.attributes)
        return found.group(1) if found else None

    def number(self, name: str) -> int | None:
        """The attribute of that name as an integer; None if there is none."""
        found = re.search(rf"\b{name}=(-?\d+)", self.attributes)
        return int(found.group(1)) if found else None

    @property
    def label(self) -> str:
        """Its origin in the traced program: `jit(step)/jvp()/while/body/dot_general`."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found.group(1) if found else ""

    @property
    def bytes(self) -> int:
        """Bytes of all results."""
        return sum(array.bytes for array in self.results)


@dataclass
class Computation:
    """Operations in the order of their execution, by name."""

    name: str
    ops: dict[str, Op] = field(default_factory=dict)

    @property
    def root(self) -> Op:
        """The operation whose result it returns."""
        return next(op for op in reversed(self.ops.values()) if op.root)

    @cached_property
    def parameters(self) -> dict[int, Op]:
        """Its parameters by number."""
        return {int(op.operands[0]): op for op in self.ops.values() if op.kind == "parameter"}

    @cached_property
    def users(self) -> dict[str, list[Op]]:
        """Which operations use each value."""
        users: dict[str, list[Op]] = {name: [] for name in self.ops}
        for op in self.ops.values():
            for name in dict.fromkeys(op.operands):
                if name in users:
                    users[name].append(op)
        return users


@dataclass
class Program:
    """A compiled program."""

    computations: dict[str, Computation]
    entry: Computation
    places: dict[int, str]
    """Source file and line of each stack frame."""

    def source(self, op: Op) -> str:
        """`decoder.py:186`: the source line of the operation; empty if it is not known."""
        direct = re.search(r'source_file="([^"]*)" source_line=(\d+)', op.attributes)
        if direct:
            return f"{direct.group(1).rpartition('/')[2]}:{direct.group(2)}"
        return self.places.get(op.number("stack_frame_id") or -1, "")


def read(text: str) -> Program:
    """Parse the text of a program."""
    computations: dict[str, Computation] = {}
    entry, current = None, None
    for line in text.splitlines():
        if line[:1] in ("%", "E") and line.rstrip().endswith("{"):
            name = line.removeprefix("ENTRY ").lstrip("%").split(" ", 1)[0]
            current = computations[name] = Computation(name)
            entry = current if line.startswith("ENTRY") else entry
        elif current is not None and " = " in line and line[:1] == " ":
            op = _op(line.strip())
            current.ops[op.name] = op
    assert entry is not None, "the text holds no program"
    return Program(computations, entry, lines_of(text))


def _op(line: str) -> Op:
    root, line = line.startswith("ROOT "), line.removeprefix("ROOT ")
    name, _, rest = line.partition(" = ")
    rest = _COMMENT.sub("", rest) if "/*" in rest else rest
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    kind, start = rest[end:].lstrip().partition("(")[0], rest.index("(", end)
    close = _closing(rest, start)
    inside = rest[start + 1 : close]
    operands = tuple(part.split(" ")[-1].lstrip("%") for part in _split(inside)) if inside else ()
    return Op(name.lstrip("%"), kind, arrays(rest[:end]), operands=operands, attributes=rest[close + 1 :], root=root)


def arrays(text: str) -> tuple[Array, ...]:
    """Every array of a type, in order."""
    found = []
    for dtype, sizes, layout in _ARRAY.findall(text):
        shape = tuple(int(size.lstrip("<=")) for size in sizes.split(",") if size)
        order, _, rest = layout.partition(":")
        minor = tuple(int(dim) for dim in order.split(",")) if order else tuple(reversed(range(len(shape))))
        space = re.search(r"S\((\d+)\)", rest)
        tile = _TILE.search(rest.partition("T")[2]) if "T(" in rest else None
        sides = tuple(int(side) for side in tile.group(1).split(",")) if tile else ()
        found.append(Array(dtype, shape, minor, sides, int(space.group(1)) if space else 0))
    return tuple(found)


def _closing(text: str, start: int) -> int:
    """Index of the bracket that closes the one at `start`."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i
    raise ValueError(f"unclosed bracket: {text[:80]}")


def _split(text: str) -> Iterator[str]:
    """The parts between commas outside of brackets."""
    depth, start = 0, 0
    for i, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            yield text[start:i].strip()
            start = i + 1
    yield text[start:].strip()


def trips(program: Program, loop: Op, home: Computation) -> int:
    """Number of times that the body runs; 1 if the bounds cannot be read.

    The loop ends by comparing two integers, counter and bound. Both are evaluated before the loop and after one
    iteration; with gap = bound - counter, an iteration reduces the gap by `step`: trips = ceil(gap / step), where
    `<=` adds 1 to the gap.
    """
    known = re.search(r'known_trip_count":\{"n":"(\d+)"', loop.attributes)
    if known:
        return int(known.group(1))
    condition, body = (program.computations[loop.called(role) or ""] for role in ("condition", "body"))
    before = home.ops[loop.operands[0]].operands
    state = _Values(program, home, lambda _: None).numbered(before)
    test = _compared(condition)
    if test is None:
        return 1
    compare, inside = test
    after = _Values(program, body, state).numbered(body.root.operands)
    first, second = ([_Values(program, inside, at).of(name) for name in compare.operands] for at in (state, after))
    if None in first or None in second:
        return 1
    gap = (first[1] or 0) - (first[0] or 0)
    step = gap - ((second[1] or 0) - (second[0] or 0))
    gap += "direction=LE" in compare.attributes
    return max(-(-gap // step), 1) if step > 0 else 1


def _compared(condition: Computation) -> tuple[Op, Computation] | None:
    """The comparison that ends the loop, with the computation that contains it; None if there is none."""
    root = condition.root
    while root.kind in SAME:
        root = condition.ops[root.operands[0]]
    return (root, condition) if root.kind == "compare" else None


class _Values:
    """Integer values of a computation's scalars, given those of its parameters or of the loop's state."""

    def __init__(self, program: Program, home: Computation, state: State) -> None:
        self.program, self.home, self.state = program, home, state
        self.known: dict[str, int | None] = {}

    def numbered(self, names: Sequence[str]) -> State:
        """Look-up by position: the value of the name at that position."""
        return lambda place: self.of(names[place]) if place < len(names) else None

    def of(self, name: str) -> int | None:
        if name not in self.known:
            self.known[name] = self._of(self.home.ops[name]) if name in self.home.ops else None
        return self.known[name]

    def _of(self, op: Op) -> int | None:
        if op.kind == "constant":
            return int(op.operands[0]) if op.operands and re.fullmatch(r"-?\d+", op.operands[0]) else None
        if op.kind in SAME:
            return self.of(op.operands[0])
        if op.kind == "parameter":
            return self.state(int(op.operands[0]))
        if op.kind in ("add", "subtract"):
            a, b = (self.of(operand) for operand in op.operands)
            return None if a is None or b is None else a + b if op.kind == "add" else a - b
        if op.kind == "get-tuple-element":
            return self._element(self.home.ops[op.operands[0]], op.number("index") or 0)
        return self._inside(op, None) if op.kind == "fusion" else None

    def _element(self, source: Op, index: int) -> int | None:
        if source.kind == "parameter":
            return self.state(index)
        if source.kind == "tuple":
            return self.of(source.operands[index])
        return self._inside(source, index) if source.kind == "fusion" else None

    def _inside(self, fusion: Op, index: int | None) -> int | None:
        """The value that a fusion returns, or that element of its tuple."""
        inside = self.program.computations[fusion.called() or ""]
        values, root = _Values(self.program, inside, self.numbered(fusion.operands)), inside.root
        if (root.kind == "tuple") != (index is not None):
            return None
        return values.of(root.name if index is None else root.operands[index])
