"""Trip count of a loop of a compiled program, computed from its bounds."""

import re
from collections.abc import Callable, Sequence

from dtrain.plan.program import Computation, Op, Program

SAME = ("copy", "copy-start", "copy-done", "bitcast", "convert", "reshape", "opt-barrier")
State = Callable[[int], int | None]
"""The integer at each position of a tuple or of a parameter list; None if it is not known."""


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
