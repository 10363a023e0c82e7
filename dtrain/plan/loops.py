"""How often a loop of a compiled program goes round, worked out from its bounds."""

import re
from collections.abc import Callable, Sequence

from dtrain.plan.program import Computation, Op, Program

SAME = ("copy", "copy-start", "copy-done", "bitcast", "convert", "reshape", "opt-barrier")
State = Callable[[int], int | None]
"""The whole number in each place of a tuple or of a list of parameters; None where it is not known."""


def trips(program: Program, loop: Op, home: Computation) -> int:
    """Times that the body runs; 1 where the bounds cannot be read."""
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
    ends, then = ([_Values(program, inside, at).of(name) for name in compare.operands] for at in (state, after))
    if None in ends or None in then:
        return 1
    gap = (ends[1] or 0) - (ends[0] or 0)
    step = gap - ((then[1] or 0) - (then[0] or 0))
    gap += "direction=LE" in compare.attributes
    return max(-(-gap // step), 1) if step > 0 else 1


def _compared(condition: Computation) -> tuple[Op, Computation] | None:
    """The comparison that ends the loop, and where it stands; its operands are those of the condition."""
    root = condition.root
    while root.kind in SAME:
        root = condition.ops[root.operands[0]]
    return (root, condition) if root.kind == "compare" else None


class _Values:
    """Whole numbers that a computation's scalars hold, those of its parameters or of the loop's state being known."""

    def __init__(self, program: Program, home: Computation, state: State) -> None:
        self.program, self.home, self.state = program, home, state
        self.known: dict[str, int | None] = {}

    def numbered(self, names: Sequence[str]) -> State:
        """The value of the name in each place."""
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
        """What a fusion gives, or the element of that number."""
        inside = self.program.computations[fusion.called() or ""]
        values, root = _Values(self.program, inside, self.numbered(fusion.operands)), inside.root
        if (root.kind == "tuple") != (index is not None):
            return None
        return values.of(root.name if index is None else root.operands[index])
