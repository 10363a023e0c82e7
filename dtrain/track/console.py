"""Console output: a progress bar on a terminal, plain lines elsewhere; the lines are also written to log.txt."""

import io
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console as Rich
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.text import Text

from dtrain.core.metrics import Metric, known
from dtrain.core.printable import printable
from dtrain.core.types import JsonObject
from dtrain.track.appender import Appender
from dtrain.track.text import clock_time, short

REFRESH = 0.1
"""Seconds between two updates of the progress bar."""
LEAST = 6
"""The rank of what matters least in the line of a step; 0 is always shown."""
WIDE = 80
"""Columns of a terminal from which on the bar has its percentage beside it."""


@dataclass
class Console:
    """Prints lines on stderr and writes them to the log."""

    silent: bool = False
    """Print and log nothing; for all processes but the first."""
    rich: Rich = field(default_factory=lambda: Rich(stderr=True, highlight=False))
    log: Path | None = None
    """Path of the log; None for no log."""
    _bar: Progress | None = None
    _file: Appender | None = None
    _next_tick: float = 0.0
    _rank: int = LEAST
    """What matters less than this is left out of the lines of steps: what did not fit once is not shown again."""

    def say(self, text: str, style: str = "") -> None:
        """Print a line and write it to the log."""
        if self.silent:
            return
        text = printable(text)
        self._show(text, style)
        self.note(text)

    def _show(self, text: str, style: str) -> None:
        """Print a line. A terminal that is gone, or a full disk, does not end the run, which has its log as well."""
        try:
            self._print(text, style)
        except OSError:
            self.rich = Rich(file=io.StringIO(), highlight=False)
            self._bar = None

    def _print(self, text: str, style: str) -> None:
        rich = self._bar.console if self._bar else self.rich
        if rich.is_terminal or rich.is_jupyter:  # a terminal breaks lines between words; elsewhere they are not broken
            rich.print(Text(text, style=style), soft_wrap=not self.width)
        else:  # the same line, in a tenth of the time
            rich.file.write(f"{text}\n")
            rich.file.flush()

    def note(self, text: str) -> None:
        """Write a line to the log only."""
        if self.log and not self.silent:
            if self._file is None or self._file.path != self.log:
                self.close()
                self._file = Appender(self.log, lambda text: self._show(f"warning: {text}", "yellow"))
            self._file.write(text + "\n")

    def close(self) -> None:
        """Close the log; the next line reopens it."""
        if self._file:
            self._file.close()
            self._file = None

    def warn(self, text: str) -> None:
        """Print and log a warning."""
        self.say(f"warning: {text}", "yellow")

    @property
    def width(self) -> int:
        """Characters in a line of the terminal; 0 if there is no terminal."""
        return self.rich.width if self.rich.is_terminal else 0

    def step(self, step: int, steps: int, values: dict[str, float], eta: float) -> None:
        """Print the line for a training step, as much of it as fits the terminal, and log the whole line."""
        if self.silent:
            return
        line = shown = step_line(step, steps, values, eta)
        if self.width:
            parts, self._rank = _fitting(_parts(step, steps, values, eta), self.width, self._rank)
            shown = _joined(parts)
        self._show(shown, "")
        self.note(line)
        if self._bar:
            self._bar.update(self._bar.task_ids[0], description=f"loss {values['train/loss']:z.4f}")

    def tick(self, step: int) -> None:
        """Set the progress bar to this step, at most every `REFRESH` seconds."""
        if self._bar and ((now := time.monotonic()) >= self._next_tick or step == self._bar.tasks[0].total):
            self._next_tick = now + REFRESH
            self._bar.update(self._bar.task_ids[0], completed=step)

    @contextmanager
    def progress(self, start: int, steps: int) -> Iterator[None]:
        """Show a progress bar within the context, if stderr is a terminal."""
        if self.silent or not self.rich.is_terminal:
            yield
            return
        columns = (
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(None),
            *([TextColumn("{task.percentage:.0f}%")] if self.width >= WIDE else []),
            TextColumn("{task.description}", table_column=Column(no_wrap=True)),
            _Speed(Column(no_wrap=True)),
        )
        with Progress(*columns, console=self.rich, transient=True, refresh_per_second=4) as bar:
            bar.add_task("", total=steps, completed=start)
            self._bar, self._next_tick = bar, 0.0
            try:
                yield
            finally:
                self._bar = None


class _Speed(ProgressColumn):
    """Steps per second and the time left, once they are known."""

    def render(self, task: Task) -> Text:
        speed, left = task.speed, task.time_remaining
        if not speed or left is None:
            return Text("")
        rate = f"{short(speed)} steps/s" if speed >= 1 else f"{1 / speed:.1f} s/step"
        return Text(f"{rate}  eta {clock_time(left)}")


def step_line(step: int, steps: int, values: dict[str, float], eta: float) -> str:
    """The line for a training step: loss, gradient norm, learning rate, step time, speed and time left (`eta`, s)."""
    return _joined(_parts(step, steps, values, eta))


def _parts(step: int, steps: int, values: dict[str, float], eta: float) -> list[tuple[int, str]]:
    """The parts of the line, each with its rank."""
    parts = [(0, f"step {step}/{steps}"), (0, f"loss {values['train/loss']:z.4f}")]
    if "train/accuracy" in values:
        parts.append((1, f"acc {values['train/accuracy']:.1%}"))
    parts += [(5, f"grad {values['train/grad_norm']:.2f}"), (4, f"lr {values['train/lr']:.1e}")]
    parts += [(2, f"{values['time/step_ms']:.1f} ms"), (6, f"(data {values['time/data_ms']:.1f})")]
    rate, unit = ("rate/tokens_per_s", "tok") if "rate/tokens_per_s" in values else ("rate/examples_per_s", "ex")
    parts += [(3, f"{short(values[rate])} {unit}/s")]
    if "rate/mfu" in values:
        parts.append((3, f"mfu {values['rate/mfu']:.1%}"))
    if "memory/peak_bytes" in values:
        share = f" ({values['memory/peak_fraction']:.0%})" if "memory/peak_fraction" in values else ""
        parts.append((4, f"mem {values['memory/peak_bytes'] / 2**30:.1f} GiB{share}"))
    parts.append((0, f"eta {clock_time(eta)}"))
    return parts


def _fitting(parts: list[tuple[int, str]], width: int, most: int) -> tuple[list[tuple[int, str]], int]:
    """The parts with ranks up to `most` that fit that many characters, and the rank up to which they do."""
    kept = [part for part in parts if part[0] <= most]
    while most and len(_joined(kept)) > width:
        most -= 1
        kept = [part for part in kept if part[0] <= most]
    return kept, most


def _joined(parts: list[tuple[int, str]]) -> str:
    return "  ".join(text for _, text in parts).replace("  (data", " (data")


def eval_line(step: int, values: JsonObject, declared: Iterable[Metric] = ()) -> str:
    """The line for an evaluation: its metrics with the units that the model declares, and its time."""
    values_of = {name.removeprefix("eval/"): value for name, value in values.items() if name.startswith("eval/")}
    shown = [f"{name} {(known(name, declared) or Metric(name, None)).text(value)}" for name, value in values_of.items()]
    return "  ".join([f"evaluated at {step}", *shown, f"{values['time/evaluate_s']:.1f} s"])
