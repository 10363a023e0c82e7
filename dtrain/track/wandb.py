"""Weights & Biases tracker: online, offline or disabled; a resumed run keeps its id."""

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from dtrain.core.errors import DtrainError, EnvironmentFault
from dtrain.track.tracker import TrackedRun, Tracker

PATIENCE = 30.0
"""Timeout in seconds for the service, at the start and at the end of a run."""


@dataclass(frozen=True, kw_only=True)
class WandB:
    """Copies the metrics to Weights & Biases. The API key comes from WANDB_API_KEY or `wandb login`."""

    kind: Literal["wandb"] = "wandb"
    project: str = "dtrain"
    entity: str | None = None
    mode: Literal["online", "offline", "disabled"] = "online"
    tags: tuple[str, ...] = ()

    @contextmanager
    def open(self, about: TrackedRun) -> Iterator[Tracker]:
        import wandb
        from wandb.errors import AuthenticationError, CommError

        os.environ.setdefault("WANDB_SILENT", "true")
        try:
            run = self._begin(about, self.mode)
        except AuthenticationError as error:
            raise _not_started(error) from error
        except CommError as error:  # the network, or the service
            reason = (str(error) or type(error).__name__).splitlines()[0]
            about.warn(
                f"Weights & Biases cannot be reached ({reason}): metrics are stored in {about.folder.path / 'wandb'}; "
                "upload them later with `wandb sync`"
            )
            wandb.teardown(exit_code=0)  # releases the run's id
            run = self._begin(about, "offline")
        except DtrainError:
            raise  # a stop request that arrived in the meantime
        except Exception as error:
            raise _not_started(error) from error
        failed = True
        try:
            yield Rows(run)
            failed = False
        finally:
            run.finish(exit_code=int(failed))

    def _begin(self, about: TrackedRun, mode: Literal["online", "offline", "disabled"]) -> Any:
        import wandb

        return wandb.init(  # pyright: ignore[reportAttributeAccessIssue]
            project=self.project,
            entity=self.entity,
            name=about.name,
            id=about.ids.setdefault("wandb", secrets.token_hex(4)),
            resume="allow",
            mode=mode,
            tags=list(self.tags),
            dir=about.folder.path,
            config=dict(about.recipe),
            settings=wandb.Settings(init_timeout=PATIENCE, finish_timeout=PATIENCE),  # pyright: ignore[reportAttributeAccessIssue]
        )


def _not_started(error: Exception) -> EnvironmentFault:
    hint = "set WANDB_API_KEY, or set the tracker's mode to offline and upload later with `wandb sync`"
    return EnvironmentFault(f"Weights & Biases did not start: {error}", hint)


@dataclass(frozen=True)
class Rows:
    """A tracker that logs one row per step."""

    run: Any

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)
