"""Event files for TensorBoard, written without TensorFlow."""

import html
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from dtrain.track.tracker import Sample, TrackedRun, Tracker, TrackerConfig


@dataclass(frozen=True, kw_only=True)
class TensorBoard(TrackerConfig):
    """Event files under the run folder: `tensorboard --logdir runs`."""

    kind: Literal["tensorboard"] = "tensorboard"
    remote: ClassVar[bool] = False

    @property
    def packages(self) -> tuple[str, ...]:
        return ("tensorboardX",)

    @contextmanager
    def open(self, about: TrackedRun) -> Iterator[Tracker]:
        from tensorboardX import SummaryWriter

        first_step = about.start + 1 if about.start else None
        writer = SummaryWriter(str(about.folder.path / "tensorboard"), purge_step=first_step)
        try:
            yield Scalars(writer)
        finally:
            writer.close()


@dataclass(frozen=True)
class Scalars:
    """A tracker that writes each value as a scalar, those of a step in one event."""

    writer: Any

    def log(self, step: int, values: Mapping[str, float]) -> None:
        # protobuf makes this class when the module is imported, so that a type checker does not see it
        from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

        # one event for all values: add_scalar writes an event, and computes two checksums, for each of them
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self.writer.file_writer.add_summary(Summary(value=scalars), step)

    def samples(self, step: int, rows: Sequence[Sample]) -> None:
        lines = [list(rows[0]), ["---"] * len(rows[0]), *(map(_cell, row.values()) for row in rows)]
        self.writer.add_text("samples", "\n".join(f"| {' | '.join(line)} |" for line in lines), step)

    def pictures(self, step: int, grids: Mapping[str, Any]) -> None:
        for name, grid in grids.items():
            self.writer.add_image(f"samples/{name}", grid, step, dataformats="HWC")


def _cell(text: str) -> str:
    """The text as a cell of a Markdown table."""
    return html.escape(text).replace("|", "&#124;").replace("\n", "<br>")
