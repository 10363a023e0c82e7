"""A tracker of one's own: metrics as a CSV file with a row for each step that was logged.

    track: {to: [{kind: custom, target: csv_tracker:Csv}]}

The same contract serves any other service: MLflow's `log_metrics(values, step)` takes what `log` gets.
"""

import csv
from collections.abc import Mapping

from dtrain.track.tracker import TrackedRun


class Csv:
    """Writes metrics.csv into the run folder: step, name, value."""

    def __init__(self, run: TrackedRun, name: str = "metrics.csv") -> None:
        path = run.folder.path / name
        old = [row for row in csv.reader(path.open()) if row[:1] and row[0].isdigit()] if path.exists() else []
        self.file = path.open("w", newline="")
        self.rows = csv.writer(self.file)
        self.rows.writerow(["step", "name", "value"])
        self.rows.writerows(row for row in old if int(row[0]) <= run.start)  # later steps are computed again

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.rows.writerows([step, name, value] for name, value in values.items())

    def close(self) -> None:
        self.file.close()
