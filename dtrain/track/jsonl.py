"""metrics.jsonl: the primary record of a run, one JSON object a line, only ever appended to."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from dtrain.errors import EnvironmentFault
from dtrain.folder import overwrite


@dataclass(frozen=True)
class Lines:
    """Appends a line for each call, on disk before the next."""

    file: IO[str]

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.file.write(json.dumps({"step": step, **values}) + "\n")
        self.file.flush()


@contextmanager
def lines(path: Path, start: int) -> Iterator[Lines]:
    """The record, cut back to step `start`: what came after it is about to be done again."""
    cut(path, start)
    with path.open("a") as file:
        yield Lines(file)


def cut(path: Path, step: int) -> None:
    """Drop the rows after `step`, and a last line that was cut off while being written."""
    if not path.exists():
        return
    overwrite(path, "".join(json.dumps(row) + "\n" for row in read(path) if row["step"] <= step))


def read(path: Path) -> list[dict[str, Any]]:
    """Every whole row; EnvironmentFault where the file cannot be read."""
    rows = []
    try:
        written = path.read_bytes().splitlines() if path.exists() else []
    except OSError as error:
        raise EnvironmentFault(f"{path} cannot be read: {error.strerror}", "move it away to go on") from error
    for line in written:
        try:
            row = json.loads(line)
        except ValueError:
            continue  # a line that a dying process left unfinished
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            rows.append(row)
    return rows
