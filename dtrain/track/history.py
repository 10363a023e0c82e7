"""The metrics of a run, read from metrics.jsonl in one pass with little memory: last and best values, and curves."""

import io
import math
import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dtrain.core import extras
from dtrain.core.errors import EnvironmentFault, cause
from dtrain.core.files import open_regular
from dtrain.core.types import JsonObject
from dtrain.track.jsonl import row_of

POINTS = 1000
"""A curve keeps from this many points up to twice as many."""
BLOCK = 4 << 20
"""Bytes that are read and parsed at a time."""
FEW = 2000
"""Lines up to which Python's own parser is faster than importing another."""
HEAD = 4096
"""Bytes at the start of the file that are compared."""
SPEED = ("time/step_ms", "rate/examples_per_s", "rate/tokens_per_s")


@dataclass
class Curve:
    """One metric over the steps. Each point stands for `stride` rows (the last for fewer).

    Values that are not finite are left out and counted in `not_finite`.
    """

    stride: int = 1
    points: np.ndarray = field(default_factory=lambda: np.zeros((5, 0)))
    """Shape (5, points): step, sum, number of finite rows, lowest, highest."""
    not_finite: int = 0

    def add(self, steps: np.ndarray, values: np.ndarray) -> None:
        """Add rows in the order of the file."""
        finite = np.isfinite(values)
        self.not_finite += int(len(values) - finite.sum())
        rows = np.stack([
            steps,
            np.where(finite, values, 0.0),
            finite,
            np.where(finite, values, np.inf),
            np.where(finite, values, -np.inf),
        ])  # fmt: skip
        self.points = np.concatenate([self.points, _merged(rows, self.stride)], axis=1)
        while self.points.shape[1] > 2 * POINTS:
            self.stride *= 2
            self.points = _merged(self.points, 2)

    def shown(self, most: int = 2 * POINTS) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Step, mean, lowest and highest value of each point that has a finite value; of at most so many points."""
        points = _merged(self.points, self.merged(most))
        step, total, count, low, high = points[:, (points[2] > 0) & np.isfinite(points[1])]  # a sum may overflow
        return step, total / count, low, high

    def merged(self, most: int) -> int:
        """How many of the kept points are one in at most so many."""
        return max(1, -(-self.points.shape[1] // most))


def _merged(rows: np.ndarray, size: int) -> np.ndarray:
    """Each `size` columns of (step, sum, count, lowest, highest) as one."""
    if size == 1 or not rows.shape[1]:
        return rows
    starts = np.arange(0, rows.shape[1], size)
    step, total, count, low, high = rows
    ends = np.append(starts[1:], rows.shape[1]) - 1
    with np.errstate(over="ignore", invalid="ignore"):
        sums = np.add.reduceat(total, starts)
    return np.stack([
        step[ends],
        sums,
        np.add.reduceat(count, starts),
        np.minimum.reduceat(low, starts),
        np.maximum.reduceat(high, starts),
    ])  # fmt: skip


@dataclass
class History:
    """What was read of a metrics.jsonl so far; `update` reads what was appended since."""

    path: Path
    last: dict[str, float] = field(default_factory=dict)
    """The newest value of each metric."""
    extremes: dict[str, dict[str, tuple[float, int]]] = field(default_factory=dict)
    """For each metric of evaluations its lowest (`min`) and highest (`max`) value with the newest step that has it."""
    evaluations: int = 0
    curves: dict[str, Curve] = field(default_factory=dict)
    rows: int = 0
    damaged: list[int] = field(default_factory=list)
    """Numbers of the lines that are not valid."""
    last_step: int = 0
    _lines: int = 0
    _offset: int = 0
    _inode: int = -1
    _head: bytes = b""
    """The first bytes of the file, which tell whether it was written anew."""
    _speeds: list[np.ndarray] = field(default_factory=list)

    def update(self) -> "History":
        """Read what was appended; all again if the file was replaced, as a resume does. Returns self.

        Raises EnvironmentFault if the file cannot be read. A last line without a newline is being written.
        """
        if not self.path.exists():
            if self._offset:
                self.__init__(self.path)
            return self
        try:
            with open_regular(self.path) as file:
                about = os.fstat(file.fileno())
                head = file.read(HEAD)
                replaced = self._inode not in (-1, about.st_ino) or not head.startswith(self._head)
                if replaced or about.st_size < self._offset:
                    self.__init__(self.path)
                self._inode, self._head = about.st_ino, head
                file.seek(self._offset)
                rest = b""
                while block := file.read(BLOCK):
                    self._offset += len(block)
                    whole, newline, rest = (rest + block).rpartition(b"\n")
                    self._add(whole + newline)
                self._offset -= len(rest)
        except OSError as error:
            hint = "move it away to resume without it"
            raise EnvironmentFault(f"{self.path} cannot be read: {cause(error)}", hint) from error
        return self

    def speed(self) -> dict[str, float]:
        """Rates at the median step time, without the first logged interval, which includes the warm-up."""
        if not self._speeds:
            return {}
        rows = np.concatenate(self._speeds, axis=1)
        rows = rows[:, 1:] if rows.shape[1] > 1 else rows
        step_ms, examples, tokens = rows[:, np.argsort(rows[0], kind="stable")[rows.shape[1] // 2]]
        step_ms = max(float(step_ms), 1e-6)
        found = {"step_ms": step_ms, "steps_per_s": 1e3 / step_ms, "examples_per_s": float(examples)}
        return found | ({"tokens_per_s": float(tokens)} if math.isfinite(tokens) else {})

    def _add(self, text: bytes) -> None:
        lines = text.count(b"\n")
        first, self._lines = self._lines + 1, self._lines + lines
        columns = _columns(text, lines)
        if columns is None:
            rows = []
            for number, line in enumerate(text.splitlines(keepends=True), first):
                row = row_of(line)
                rows += [row] if row else []
                self.damaged += [] if row else [number]
            columns = _columns_of(rows)
        steps = columns.pop("step", np.zeros(0))
        if not len(steps):
            return
        self.rows, self.last_step = self.rows + len(steps), int(steps[-1])
        evaluated = np.zeros(len(steps), bool)
        for name, (present, values) in columns.items():
            self._metric(name, steps[present], values[present])
            evaluated |= present if name.startswith("eval/") else False
        self.evaluations += int(evaluated.sum())
        if all(name in columns for name in SPEED[:2]):
            here = columns[SPEED[0]][0] & columns[SPEED[1]][0]
            tokens = columns[SPEED[2]][1] if SPEED[2] in columns else np.full(len(steps), np.nan)
            self._speeds.append(np.stack([columns[SPEED[0]][1][here], columns[SPEED[1]][1][here], tokens[here]]))

    def _metric(self, name: str, steps: np.ndarray, values: np.ndarray) -> None:
        if not len(values):
            return
        self.last[name] = float(values[-1])
        self.curves.setdefault(name, Curve()).add(steps, values)
        finite = np.isfinite(values)
        if not name.startswith("eval/") or not finite.any():
            return
        known, steps, values = self.extremes.setdefault(name, {}), steps[finite], values[finite]
        last = len(values) - 1  # of equal values the newest, which `--best` takes, too
        for kind, index in (("min", last - int(values[::-1].argmin())), ("max", last - int(values[::-1].argmax()))):
            sign = 1 if kind == "max" else -1
            if kind not in known or sign * values[index] >= sign * known[kind][0]:
                known[kind] = float(values[index]), int(steps[index])


def _columns(text: bytes, lines: int) -> JsonObject | None:
    """The rows of so many complete lines by column: for each metric (present, values), for "step" the values.

    None if a line is not a flat object of numbers with a step: then each line is looked at alone.
    """
    if lines < FEW or extras.missing(["pyarrow"]):
        return None
    import pyarrow as pa
    from pyarrow import json as reader

    try:
        table = reader.read_json(io.BytesIO(text), read_options=reader.ReadOptions(block_size=1 << 20))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return None
    kinds = {name: table.schema.field(name).type for name in table.column_names}
    numbers = all(pa.types.is_integer(kind) or pa.types.is_floating(kind) for kind in kinds.values())
    if not numbers or "step" not in kinds or table["step"].null_count or table.num_rows != lines:
        return None
    steps = table["step"].to_numpy()
    if steps.dtype.kind != "i" or steps.min() < 0:
        return None
    columns: JsonObject = {"step": steps}
    for name in (name for name in kinds if name != "step"):
        present = table[name].is_valid().to_numpy()
        columns[name] = present, table[name].to_numpy().astype(np.float64)
    return columns


def _columns_of(rows: list[JsonObject]) -> JsonObject:
    """The same of rows."""
    names = dict.fromkeys(name for row in rows for name in row if name != "step")
    columns: JsonObject = {"step": np.array([row["step"] for row in rows], np.int64)}
    for name in names:
        present = np.array([name in row for row in rows], bool)
        columns[name] = present, np.array([float(row.get(name, math.nan)) for row in rows])
    return columns
