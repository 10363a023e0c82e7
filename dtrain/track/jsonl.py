"""metrics.jsonl: the primary record of a run's metrics, append-only, with one JSON object per line."""

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from dtrain.core.errors import EnvironmentFault, cause
from dtrain.core.files import overwrite, read_regular
from dtrain.core.types import JsonObject
from dtrain.track.appender import Appender


@dataclass(frozen=True)
class Lines:
    """A tracker that appends a line per call; readers can read it at once, and it is on disk after the next sync."""

    file: Appender

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.file.write(json.dumps({"step": step, **values}) + "\n")

    def sync(self) -> None:
        """Sync all rows to the disk or the bucket; OSError if that fails."""
        self.file.sync()


@contextmanager
def lines(path: Path, start: int, warn: Callable[[str], None]) -> Iterator[Lines]:
    """Open the record and truncate it to step `start`, because later steps are about to be recomputed."""
    cut(path, start, warn)
    with closing(Appender(path, warn)) as file:
        yield Lines(file)


def cut(path: Path, step: int, warn: Callable[[str], None]) -> None:
    """Remove the rows after `step`, and an incomplete last line. If other lines are damaged, keep a copy of the
    original file and warn."""
    if not path.exists():
        return
    rows, bad = rows_of(path)
    if bad:
        backup = path.with_name(f"{path.name}.bad-{time.strftime('%Y%m%d-%H%M%S')}")
        shutil.copyfile(path, backup)
        warn(f"{path}: {damage(bad)}; a copy of the file is kept as {backup.name}")
    overwrite(path, "".join(json.dumps(row) + "\n" for row in rows if row["step"] <= step))


def damage(bad: list[int]) -> str:
    """The message about damaged lines with these numbers."""
    return f"{len(bad)} damaged line{'s' * (len(bad) > 1)} skipped, the first is line {bad[0]}"


def read(path: Path) -> list[JsonObject]:
    """All valid rows; EnvironmentFault if the file cannot be read."""
    return rows_of(path)[0]


def rows_of(path: Path) -> tuple[list[JsonObject], list[int]]:
    """The valid rows, and the line numbers of damaged lines; EnvironmentFault if the file cannot be read.

    A last line without a newline was interrupted when its process died; it does not count as damaged.
    """
    try:
        content = read_regular(path).splitlines(keepends=True) if path.exists() else []
    except OSError as error:
        raise EnvironmentFault(f"{path} cannot be read: {cause(error)}", "move it away to resume without it") from error
    rows, bad = [], []
    for number, line in enumerate(content, 1):
        row = row_of(line)
        if row is not None:
            rows.append(row)
        elif line.endswith(b"\n"):
            bad.append(number)
    return rows, bad


def row_of(line: bytes) -> dict[str, object] | None:
    """A row: a step and other numbers by name; None if the line is not valid."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    numbers = isinstance(row, dict) and all(
        isinstance(value, int | float) and not isinstance(value, bool) for value in row.values()
    )
    step = row.get("step") if numbers else None
    return row if isinstance(step, int) and 0 <= step < 2**63 else None
