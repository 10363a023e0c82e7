"""Weights & Biases: online, offline or disabled; a resumed run stays one run."""

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from dtrain.errors import DtrainError, EnvironmentFault
from dtrain.track.tracker import About, Tracker


@dataclass(frozen=True, kw_only=True)
class WandB:
    """Mirrors the metrics to Weights & Biases. The key comes from WANDB_API_KEY or `wandb login`."""

    kind: Literal["wandb"] = "wandb"
    project: str = "dtrain"
    entity: str | None = None
    mode: Literal["online", "offline", "disabled"] = "online"
    tags: tuple[str, ...] = ()

    @contextmanager
    def open(self, about: About) -> Iterator[Tracker]:
        import wandb

        os.environ.setdefault("WANDB_SILENT", "true")
        run_id = about.ids.setdefault("wandb", secrets.token_hex(4))
        try:
            run = wandb.init(  # pyright: ignore[reportAttributeAccessIssue]
                project=self.project,
                entity=self.entity,
                name=about.name,
                id=run_id,
                resume="allow",
                mode=self.mode,
                tags=list(self.tags),
                dir=about.folder.path,
                config=dict(about.recipe),
            )
        except DtrainError:
            raise  # a request to stop that came meanwhile
        except Exception as error:  # wandb raises its own, its client's and the network's
            hint = "set WANDB_API_KEY, or set the tracker's mode to offline and send it later with `wandb sync`"
            raise EnvironmentFault(f"Weights & Biases did not start: {error}", hint) from error
        failed = True
        try:
            yield Rows(run)
            failed = False
        finally:
            run.finish(exit_code=int(failed))


@dataclass(frozen=True)
class Rows:
    """A row for each step."""

    run: Any

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)
