"""Replay a compiled program in its scheduled order on queues: the cores, the network, the copies.

`X-start` puts work into a queue, `X-done` makes the cores wait for it: that time is exposed, the rest overlaps. With t
the time of the cores:
  computation: t += max(FLOPs / FLOP rate, bytes / bandwidth); what the bytes take beyond the FLOPs counts as memory
  X-start: end = queue = max(queue, t) + seconds
  X-done: exposed = max(end - t, 0); t += exposed
A loop body counts once per trip. Not modelled: vector units, padding of matrices, contention for memory, the host.
"""

from collections import defaultdict
from dataclasses import dataclass, field

from dtrain.core.chips import Chip
from dtrain.plan import kernels
from dtrain.plan.cost import COLLECTIVES, FREE, Costs, Efficiency
from dtrain.plan.network import Network, dims_used, members
from dtrain.plan.program import Computation, Op, Program, trips


@dataclass
class CollectiveCost:
    """Collectives of one kind along the same mesh axes: calls, bytes, seconds on the network, exposed seconds."""

    calls: float = 0.0
    bytes: float = 0.0
    seconds: float = 0.0
    exposed: float = 0.0

    def add_call(self, times: float, size: float, seconds: float) -> None:
        """Add `times` calls, each of that size and time."""
        self.calls += times
        self.bytes += times * size
        self.seconds += times * seconds


@dataclass
class StepCost:
    """Cost of a part of a program on one device."""

    seconds: float = 0.0
    flops: float = 0.0
    kernel_flops: float = 0.0
    moved: float = 0.0
    """Bytes to and from main memory."""
    parts: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds of `product`, `kernel`, `memory`, `network` (exposed) and `copy` (exposed); they add up."""
    collectives: dict[tuple[str, tuple[str, ...]], CollectiveCost] = field(
        default_factory=lambda: defaultdict(CollectiveCost)
    )
    """By kind and mesh axes."""
    lines: dict[tuple[str, str], float] = field(default_factory=lambda: defaultdict(float))
    """Seconds by part and source line."""

    def compute(self, part: str, busy: float, moving: float, line: str | None = None) -> None:
        """Add work that moves its bytes while it computes: `busy` seconds count as `part`, what its bytes take longer
        as memory. Both tiers file time by this rule."""
        for name, seconds in ((part, busy), ("memory", max(moving - busy, 0.0))):
            self.seconds += seconds
            self.parts[name] += seconds
            if line is not None and seconds:
                self.lines[name, line] += seconds

    def add(self, other: "StepCost", times: int) -> None:
        """Add the cost of another part, `times` times."""
        self.seconds += times * other.seconds
        self.flops += times * other.flops
        self.kernel_flops += times * other.kernel_flops
        self.moved += times * other.moved
        for name, seconds in other.parts.items():
            self.parts[name] += times * seconds
        for spot, seconds in other.lines.items():
            self.lines[spot] += times * seconds
        for key, collective in other.collectives.items():
            total = self.collectives[key]
            for name, value in vars(collective).items():
                setattr(total, name, getattr(total, name) + times * value)


@dataclass
class _Pending:
    """Work in a queue: when it ends, and what it is."""

    end: float
    part: str
    line: str
    collective: CollectiveCost | None = None


@dataclass(frozen=True)
class Replay:
    """Predicts how long a program takes on a chip in a network."""

    program: Program
    chip: Chip
    network: Network
    filled: float = 1.0
    """Fraction of the rows sent to experts that hold a token."""

    def run(self) -> StepCost:
        """Cost of the whole program."""
        return _Clock(self).computation(self.program.entry)


class _Clock:  # shared by all passes; the cost of each computation is reused
    def __init__(self, replay: Replay) -> None:
        self.program, self.network, self.filled = replay.program, replay.network, replay.filled
        self.costs, self.efficiency = Costs(replay.program), Efficiency(replay.chip)
        self.known: dict[str, StepCost] = {}

    def computation(self, home: Computation) -> StepCost:
        if home.name not in self.known:
            self.known[home.name] = _Pass(self, home).run()
        return self.known[home.name]


class _Pass:
    """One pass through a computation. `free`: when each queue is empty; `pending`: work that was started."""

    def __init__(self, clock: _Clock, home: Computation) -> None:
        self.clock, self.home, self.total = clock, home, StepCost()
        self.free: dict[str, float] = defaultdict(float)
        self.pending: dict[str, _Pending] = {}

    def run(self) -> StepCost:
        for op in self.home.ops.values():
            self._step(op)
        return self.total

    def _step(self, op: Op) -> None:
        program = self.clock.program
        if op.kind in FREE:
            return
        if op.kind == "while":
            body = program.computations[op.called("body") or ""]
            self.total.add(self.clock.computation(body), trips(program, op, self.home))
        elif op.kind == "conditional":
            branch = op.called("true_computation") or (op.called("branch_computations") or "").strip("{%")
            if branch in program.computations:
                self.total.add(self.clock.computation(program.computations[branch]), 1)
        elif op.kind == "call" and (called := op.called("to_apply") or op.called()):
            self.total.add(self.clock.computation(program.computations[called]), 1)
        elif op.kind.endswith(("-start", "-done", "-update")):
            self._asynchronous(op)
        elif op.kind in COLLECTIVES:  # synchronous: fully exposed
            self._wait(self._collective(op, op, self.home))
        elif op.kind in ("send", "recv"):
            self._send(op)
        elif op.kind == "fusion" and self._fused_collective(op):
            return
        else:
            self._compute(op)

    def _asynchronous(self, op: Op) -> None:
        """Queue the work of a start, or wait for the work that a done refers to; updates are links between both."""
        if op.kind.endswith("-update"):
            return
        if op.kind.endswith("-done"):
            origin = op.operands[0]
            while origin in self.home.ops and self.home.ops[origin].kind.endswith("-update"):
                origin = self.home.ops[origin].operands[0]
            self._wait(self.pending.pop(origin, None))
            return
        kind = op.kind.removesuffix("-start")
        if kind in COLLECTIVES:
            self.pending[op.name] = self._collective(op, op, self.home)
        elif kind in ("async", "call") and (called := op.called("to_apply") or op.called()):  # call: on the SparseCore
            inside = self.clock.program.computations[called]
            collective = next((inner for inner in inside.ops.values() if inner.kind in COLLECTIVES), None)
            other = self._queue(op, "async", "copy", 0 if collective else self.clock.computation(inside).seconds)
            self.pending[op.name] = self._collective(op, collective, inside) if collective else other
        else:  # the results are destination, source and a scalar; the smaller array is what is copied
            moved = max((array.bytes for array in op.results), default=0)
            moved = min(moved, min((array.bytes for array in op.results if array.size > 1), default=moved))
            self.pending[op.name] = self._queue(op, "copy", "copy", self.clock.efficiency.moving(moved))

    def _fused_collective(self, op: Op) -> bool:
        """Handle a fusion with a collective in it; False if it only computes while a collective is running."""
        inside = self.clock.program.computations[op.called() or ""]
        collective = next((inner for inner in inside.ops.values() if inner.kind in COLLECTIVES), None)
        if collective is None or inside.name.startswith("async_collective_fusion"):
            return False  # computation that overlaps with a collective started by another operation
        channel = f"channel {collective.number('channel_id')}"
        targets = {inner.attributes.partition("custom_call_target=")[2][:24] for inner in inside.ops.values()}
        if any("AsyncCollectiveStart" in target for target in targets):
            self.pending[channel] = self._collective(op, collective, inside)
            return True
        if any("AsyncCollectiveDone" in target for target in targets):
            self._wait(self.pending.pop(channel, None))
            return True
        self._wait(self._collective(op, collective, inside))
        self._compute(op)
        return True

    def _collective(self, op: Op, collective: Op, home: Computation) -> _Pending:
        """Put a collective into the network's queue; the two directions of permutations have queues of their own."""
        network, kind = self.clock.network, collective.kind.removesuffix("-start")
        sent = float(sum(home.ops[name].bytes for name in collective.operands if name in home.ops))
        size = max(sent, _received(collective)) if kind == "all-gather" else sent
        listed = members(collective)
        group = network.group(list(range(network.devices)) if listed is None else listed)
        if kind == "all-reduce" and home is not self.home and _keeps_a_part(collective, home, sent / group.size):
            kind = "reduce-scatter"
        seconds = network.time(kind, group, size, dims_used(collective) or dims_used(op))
        direction = collective.operands and _direction(collective)
        queue = f"network {direction}" if kind == "collective-permute" else "network"
        spent = self.total.collectives[kind, group.axes]
        spent.add_call(1, size, seconds)
        return self._queue(op, queue, "network", seconds, spent)

    def _send(self, op: Op) -> None:
        """Put bytes that the hosts send to another slice into a queue."""
        size = float(max((array.bytes for array in op.results), default=0))
        spent = self.total.collectives["send to other slices", ()]
        seconds = self.clock.network.between_slices(size)
        if op.kind == "send":
            spent.add_call(1, size, seconds)
        self.pending[op.name] = self._queue(op, f"far {op.kind}", "network", seconds, spent)

    def _queue(
        self, op: Op, queue: str, part: str, seconds: float, collective: CollectiveCost | None = None
    ) -> _Pending:
        self.free[queue] = max(self.free[queue], self.total.seconds) + seconds
        return _Pending(self.free[queue], part, self.clock.program.source(op), collective)

    def _wait(self, work: _Pending | None) -> None:
        if work is None or work.end <= self.total.seconds:
            return
        waited = work.end - self.total.seconds
        self.total.seconds = work.end
        self.total.parts[work.part] += waited
        self.total.lines[work.part, work.line] += waited
        if work.collective:
            work.collective.exposed += waited

    def _compute(self, op: Op) -> None:
        clock, cost = self.clock, self.clock.costs.of(op, self.home)
        kernel, hidden = kernels.hidden(op, self.home, clock.program, clock.filled)
        flops = {kernel: hidden} if kernel else cost.products
        busy = sum(clock.efficiency.computing(kind, count) for kind, count in flops.items())
        moving = clock.efficiency.moving(cost.bytes)
        self.total.flops += cost.flops
        self.total.kernel_flops += hidden
        self.total.moved += cost.bytes
        self.total.compute("kernel" if kernel else "product", busy, moving, clock.program.source(op))


def _received(op: Op) -> float:
    """Bytes of a gathered result; a start operation also lists its operand, so take the largest."""
    largest = max((array.bytes for array in op.results), default=0)
    return float(largest if op.kind.endswith("-start") else op.bytes)


def _keeps_a_part(collective: Op, home: Computation, part: float) -> bool:
    """Whether a fusion ("all-reduce-scatter") keeps only this device's part, of so many bytes, of a sum."""
    users = [op for op in home.ops.values() if collective.name in op.operands]
    return any(op.kind == "dynamic-slice" and op.bytes <= part for op in users)


def _direction(op: Op) -> str:
    """Direction in which a permutation sends around the ring; the links of both can be used at once."""
    found = members(op) or [0, 1]
    return "up" if found[1] == found[0] + 1 else "down"
