"""Console output: a progress bar on a terminal, plain lines elsewhere; the lines are also written to log.txt."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console as Rich
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

from dtrain.core.metrics import Metric, known
from dtrain.core.types import JsonObject
from dtrain.track.appender import Appender


@dataclass
class Console:
    """Prints lines on stderr and writes them to the log."""

    silent: bool = False
    """Print and log nothing; for all processes but the first."""
    rich: Rich = field(default_factory=lambda: Rich(stderr=True, highlight=False, soft_wrap=True))
    log: Path | None = None
    """Path of the log; None for no log."""
    _bar: Progress | None = None
    _file: Appender | None = None

    def say(self, text: str, style: str = "") -> None:
        """Print a line and write it to the log."""
        if self.silent:
            return
        self._show(text, style)
        self.note(text)

    def _show(self, text: str, style: str) -> None:
        (self._bar.console if self._bar else self.rich).print(Text(text, style=style))

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

    def tick(self, step: int) -> None:
        """Set the progress bar to this step."""
        if self._bar:
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
            TextColumn("{task.percentage:.0f}%"),
        )
        with Progress(*columns, console=self.rich, transient=True, refresh_per_second=4) as bar:
            bar.add_task("", total=steps, completed=start)
            self._bar = bar
            try:
                yield
            finally:
                self._bar = None


def step_line(step: int, steps: int, values: dict[str, float], eta: float) -> str:
    """The line for a training step: loss, gradient norm, learning rate, step time, speed and time left (`eta`, s)."""
    parts = [f"step {step}/{steps}", f"loss {values['train/loss']:.4f}"]
    if "train/accuracy" in values:
        parts.append(f"acc {values['train/accuracy']:.1%}")
    parts += [f"grad {values['train/grad_norm']:.2f}", f"lr {values['train/lr']:.1e}"]
    parts += [f"{values['time/step_ms']:.1f} ms (data {values['time/data_ms']:.1f})"]
    rate, unit = ("rate/tokens_per_s", "tok") if "rate/tokens_per_s" in values else ("rate/examples_per_s", "ex")
    parts += [f"{short(values[rate])} {unit}/s"]
    parts += [f"mfu {values['rate/mfu']:.1%}" if "rate/mfu" in values else "mfu n/a"]
    if "memory/peak_bytes" in values:
        share = f" ({values['memory/peak_fraction']:.0%})" if "memory/peak_fraction" in values else ""
        parts.append(f"mem {values['memory/peak_bytes'] / 2**30:.1f} GiB{share}")
    return "  ".join([*parts, f"eta {clock_time(eta)}"])


def eval_line(step: int, values: JsonObject, declared: Iterable[Metric] = ()) -> str:
    """The line for an evaluation: its metrics with the units that the model declares, and its time."""
    values_of = {name.removeprefix("eval/"): value for name, value in values.items() if name.startswith("eval/")}
    shown = [f"{name} {(known(name, declared) or Metric(name, None)).text(value)}" for name, value in values_of.items()]
    return "  ".join([f"evaluated at {step}", *shown, f"{values['time/evaluate_s']:.1f} s"])


def short(number: float) -> str:
    """A number with an SI suffix: 82512 → 82.5k."""
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.1f}{suffix}"
    return f"{number:.0f}"


def clock_time(seconds: float) -> str:
    """A duration as minutes:seconds or hours:minutes:seconds: 192 → 3:12."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
