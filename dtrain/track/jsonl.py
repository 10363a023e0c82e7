"""metrics.jsonl: the primary record of a run, one JSON object a line, only ever appended to."""

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtrain.core.errors import EnvironmentFault, cause
from dtrain.core.run_dir import overwrite, read_regular
from dtrain.track.appender import Appender


@dataclass(frozen=True)
class Lines:
    """Appends a line for each call: readers see it at once, and a loss of the machine spares what was synced."""

    file: Appender

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.file.write(json.dumps({"step": step, **values}) + "\n")

    def sync(self) -> None:
        """All rows are on the disk, or in the bucket, when this returns; OSError where they are not."""
        self.file.sync()


@contextmanager
def lines(path: Path, start: int, warn: Callable[[str], None]) -> Iterator[Lines]:
    """The record, cut back to step `start`: what came after it is about to be computed again."""
    cut(path, start, warn)
    with closing(Appender(path, warn)) as file:
        yield Lines(file)


def cut(path: Path, step: int, warn: Callable[[str], None]) -> None:
    """Drop the rows after `step`, and a last line that was cut off while being written. Where other lines cannot
    be read, the file as it was is kept beside it."""
    if not path.exists():
        return
    rows, bad = rows_of(path)
    if bad:
        aside = path.with_name(f"{path.name}.bad-{time.strftime('%Y%m%d-%H%M%S')}")
        shutil.copyfile(path, aside)
        warn(f"{path}: {damage(bad)}; a copy of the file is kept as {aside.name}")
    overwrite(path, "".join(json.dumps(row) + "\n" for row in rows if row["step"] <= step))


def damage(bad: list[int]) -> str:
    """What to say of lines that cannot be read."""
    return f"{len(bad)} damaged line{'s' * (len(bad) > 1)} left out, the first is line {bad[0]}"


def read(path: Path) -> list[dict[str, Any]]:
    """Every row that can be read; EnvironmentFault where the file cannot."""
    return rows_of(path)[0]


def rows_of(path: Path) -> tuple[list[dict[str, Any]], list[int]]:
    """The rows, and the numbers of the lines that are none; EnvironmentFault where the file cannot be read.

    A last line without an end is what a dying process left unfinished, and no damage.
    """
    try:
        written = read_regular(path).splitlines(keepends=True) if path.exists() else []
    except OSError as error:
        raise EnvironmentFault(f"{path} cannot be read: {cause(error)}", "move it away to resume without it") from error
    rows, bad = [], []
    for number, line in enumerate(written, 1):
        row = _row(line)
        if row is not None:
            rows.append(row)
        elif line.endswith(b"\n"):
            bad.append(number)
    return rows, bad


def _row(line: bytes) -> dict[str, Any] | None:
    """A step and numbers, by name; None where the line is anything else."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    numbers = isinstance(row, dict) and all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in row.values()
    )
    step = row.get("step") if numbers else None
    return row if isinstance(step, int) and 0 <= step < 2**63 else None
