"""Where the values of parameters come from: a checkpoint of a run, or files of published weights."""

from dataclasses import dataclass
from typing import Literal

from dtrain.core.errors import FieldError
from dtrain.core.types import Natural


@dataclass(frozen=True, kw_only=True)
class WeightsSource:
    """Parameters of another model: `run` or `weights`."""

    run: str = ""
    """Folder of a run."""
    weights: str = ""
    """Folder or file of published parameters (safetensors), in place of a run."""
    step: Natural | Literal["newest", "best"] = "newest"
    """Of a run: a saved step, the newest one, or the best by the run's checkpoint.best."""

    def __post_init__(self) -> None:
        if not self.run and not self.weights:
            raise FieldError("run", "missing: the folder of a run, or weights: a folder of published parameters")
        if self.run and self.weights:
            raise FieldError("weights", f"run = {self.run} is given as well", "leave one of them out")
        if self.weights and self.step != "newest":
            raise FieldError("step", f"step = {self.step}: files of parameters have no steps", "leave it out")

    @property
    def packages(self) -> tuple[str, ...]:
        """The optional package that reads it; see `core.extras`."""
        return ("safetensors",) if self.weights else ()

    @property
    def text(self) -> str:
        """The path, for messages."""
        return self.run or self.weights
