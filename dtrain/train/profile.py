"""Profile some steps of a run with JAX's profiler, and say in words where their time went.

The trace (XPlane for XProf and TensorBoard, and a Perfetto trace) lies in the run folder.
"""

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from dtrain.core.files import overwrite, read_json
from dtrain.core.run_dir import Folder
from dtrain.core.types import JsonObject
from dtrain.parallel.program_lines import lines_of
from dtrain.recipe.recipe import Profile
from dtrain.train.loop import StepEvent
from dtrain.train.timers import Clock

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


LOOK = 1.0
"""Seconds between two looks for a request."""
MOST = 1000
"""Most steps of one profile: traces grow by megabytes a step."""


@dataclass
class Profiler:
    """Traces the steps that the recipe names, and those that `dtrain profile` asks for while the run trains."""

    run_dir: Folder
    program: Callable[[], str | None]
    """The text of the compiled step."""
    section: Profile | None
    clock: Clock
    say: Callable[[str], object]
    _until: int = 0
    _began: tuple[int, float, float] = (0, 0.0, 0.0)
    _next: float = field(default=0.0)

    def begin(self, step: int) -> None:
        """Called before the first step of a start, which follows `step`."""
        if self.section and self.section.start == step + 1:
            self._start(step, self.section.steps)

    def ends(self, step: int) -> bool:
        """Whether the recipe's profile begins or ends after this step."""
        return bool(self.section) and step - self.section.start + 1 in (0, self.section.steps)

    def waits(self, step: int) -> bool:
        """Whether the hook must be called before a next step is dispatched."""
        return bool(self._until) or self.ends(step) or self.run_dir.profile_request.exists()

    def __call__(self, event: StepEvent) -> None:
        if event.state is None:
            return
        if self._until:
            if event.step >= self._until or event.last or event.stopping:
                jax.block_until_ready(event.metrics)
                self._stop(event.step)
        elif self.section and event.step + 1 == self.section.start and not event.last:
            jax.block_until_ready(event.metrics)
            self._start(event.step, self.section.steps)
        elif (now := time.monotonic()) >= self._next:
            self._next = now + LOOK
            if self.run_dir.profile_request.exists() and not event.last:
                jax.block_until_ready(event.metrics)
                self._start(event.step, _asked(self.run_dir.profile_request))

    def _start(self, step: int, steps: int) -> None:
        self._until = step + steps
        jax.profiler.start_trace(str(self.run_dir.profile), create_perfetto_trace=True)
        self._began = step, time.perf_counter(), self.clock.of("data")

    def _stop(self, step: int) -> None:
        first, since, waited = self._began
        seconds = time.perf_counter() - since
        with self.clock("profile"):
            jax.profiler.stop_trace()
            known = instructions_of(self.program() or "")
            found = summarised(
                read(self.run_dir.profile, known), known, step - first, seconds, self.clock.of("data") - waited
            )
            text = [f"profile of steps {first + 1} to {step}: {found.lines()[0]}", *found.lines()[1:]]
            files = self.run_dir.profile.rglob("perfetto_trace.json.gz")
            newest = max(files, key=lambda path: path.stat().st_mtime, default=self.run_dir.profile)
            text.append(f"  trace: {newest.parent}; ui.perfetto.dev opens {newest.name}")
            for line in text:
                self.say(line)
            values: JsonObject = {"first": first + 1, "last": step, "text": text, **vars(found)}
            overwrite(self.run_dir.profile / "summary.json", json.dumps(values, indent=2) + "\n")
            with suppress(OSError):
                self.run_dir.profile_request.unlink(missing_ok=True)
        self._until = 0


def _asked(path: Path) -> int:
    """The number of steps in a request."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        values: Any = read_json(path)
        return min(max(int(values["steps"]), 1), MOST)
    return 5
