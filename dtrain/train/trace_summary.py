"""Read a trace of JAX's profiler: which operations of the compiled step took the time, in words.

The operations of the trace are those of the compiled step, whose text gives the kind of each and the line of code that
it comes from.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from dtrain.parallel.program_lines import lines_of

INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = .*?\s([a-z][\w-]*)\(")
METADATA = re.compile(r'op_name="([^"]*)"(?:.*?stack_frame_id=(\d+))?')
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")
HOST = "cpu"
"""The device of all operations on a CPU."""
LOOP = "loop"
"""The kind of instructions that only contain others, which are counted themselves."""
SHOWN = 8
"""Most kinds of operations that are shown."""


@dataclass(frozen=True)
class Instruction:
    """An instruction of the compiled step."""

    kind: str
    place: str
    """file:line that it was traced from, JAX's name for it, and whether it belongs to the backward pass."""


@dataclass(frozen=True)
class Op:
    """One execution of an instruction on one device, in seconds."""

    device: str
    name: str
    start: float
    end: float


def instructions_of(text: str) -> dict[str, Instruction]:
    """The instructions in the text of a compiled program, by name."""
    found, frames = {}, lines_of(text)
    for line in text.splitlines():
        if match := INSTRUCTION.match(line):
            about = METADATA.search(line)
            named, frame = about.groups() if about else ("", None)
            backward = " backward" if "transpose(" in named else ""
            place = f"{frames.get(int(frame or -1), '')} {named.rpartition('/')[2]}{backward}".strip()
            found[match[1]] = Instruction(_kind(match[2], match[1], named), place)
    return found


def _kind(opcode: str, name: str, named: str) -> str:
    collective = next((kind for kind in COLLECTIVES if opcode.startswith(kind) or name.startswith(kind)), "")
    if collective:
        return collective
    if opcode in ("dot", "convolution") or "dot_general" in named or "conv_general" in named or "gemm" in name:
        return "product"
    return {"custom-call": "kernel", "while": LOOP, "conditional": LOOP, "call": LOOP}.get(opcode, opcode)


def read(folder: Path, known: Mapping[str, Instruction]) -> list[Op]:
    """The executions of known instructions in the newest trace of a folder."""
    files = sorted(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    if not files:
        return []
    planes = list(jax.profiler.ProfileData.from_file(str(files[-1])).planes)
    devices = [plane for plane in planes if re.match(r"/device:(TPU|GPU)", plane.name)]
    ops = []
    for plane in devices or planes:
        for line in plane.lines:
            for event in line.events:
                name = event.name.partition(" ")[0].lstrip("%")
                if name not in known and devices:
                    name = next((str(value) for key, value in event.stats if key == "hlo_op"), name)
                if name in known and known[name].kind != LOOP:
                    where = plane.name if devices else HOST
                    ops.append(Op(where, name, event.start_ns * 1e-9, (event.start_ns + event.duration_ns) * 1e-9))
    return ops


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    return total


@dataclass(frozen=True)
class Summary:
    """Where the time of some steps went. Fractions are of the wall time, averaged over the devices that were seen."""

    steps: int
    step_ms: float
    busy: float
    exposed: float
    """Collectives while nothing else was computed."""
    collectives: float
    data: float
    """Waiting for batches, by the clock of the loop."""
    operations: tuple[tuple[float, str, str], ...]
    """(fraction of the time of all operations, kind, place), the largest first."""

    def lines(self) -> list[str]:
        """The summary in words, with what to change."""
        lines = [f"{self.steps} steps of {self.step_ms:.2f} ms"]
        if self.operations:
            lines[0] += f"; devices busy {self.busy:.0%}, idle {max(1 - self.busy, 0):.0%} of the time"
            lines += [f"  {share:6.1%}  {kind:<14} {place}".rstrip() for share, kind, place in self.operations]
        if self.collectives:
            lines.append(f"  collectives {self.collectives:.1%}, of which {self.exposed:.1%} are not hidden")
        return [*lines, *(f"  -> {line}" for line in self._advice())]

    def _advice(self) -> list[str]:
        advice = []
        if self.data > 0.1:
            advice.append(f"input: {self.data:.0%} of the time is waiting for batches: data.load.workers")
        if self.exposed > 0.1:
            advice.append("collectives: a larger batch for each device, precision.reduce: compute, or another mesh")
        if self.operations and self.busy < 0.7 and self.data <= 0.1:
            advice.append("idle: the step is too short for its dispatch: engine.steps_per_call=32, or a larger batch")
        copies = sum(share for share, kind, _ in self.operations if kind in ("copy", "transpose"))
        if copies > 0.15:
            advice.append(f"copies: {copies:.0%} of the operations' time only moves data: other layouts or shapes")
        return advice


def summarised(
    ops: Sequence[Op], known: Mapping[str, Instruction], steps: int, seconds: float, waited: float
) -> Summary:
    """Sum up the executions in `seconds` of wall time, `waited` of which the loop waited for batches."""
    devices = sorted({op.device for op in ops})
    busy = exposed = collectives = 0.0
    for device in devices:
        own = [op for op in ops if op.device == device]
        moving = [(op.start, op.end) for op in own if known[op.name].kind in COLLECTIVES]
        computing = [(op.start, op.end) for op in own if known[op.name].kind not in COLLECTIVES]
        whole = covered([*moving, *computing])
        busy, collectives = busy + whole, collectives + covered(moving)
        exposed += whole - covered(computing)
    if devices == [HOST]:  # fake devices share the threads of one host: what waits and what is hidden means nothing
        exposed = collectives = 0.0
    total = sum(op.end - op.start for op in ops)
    by_kind: dict[tuple[str, str], float] = {}
    for op in ops:
        key = known[op.name].kind, known[op.name].place
        by_kind[key] = by_kind.get(key, 0.0) + (op.end - op.start) / total
    largest = sorted(((share, *key) for key, share in by_kind.items()), reverse=True)[:SHOWN]
    scale = max(len(devices), 1) * seconds
    return Summary(
        steps,
        1e3 * seconds / steps,
        busy=min(busy / scale, 1.0),
        exposed=exposed / scale,
        collectives=collectives / scale,
        data=waited / seconds,
        operations=tuple(largest),
    )
