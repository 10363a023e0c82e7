"""Weights & Biases tracker: online, offline or disabled; a resumed run keeps its id."""

import netrc
import os
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dtrain.core.errors import DtrainError, EnvironmentFault, Stopped
from dtrain.track.tracker import Sample, TrackedRun, Tracker, TrackerConfig

PATIENCE = 30.0
"""Timeout in seconds for the service, at the start and at the end of a run."""


@dataclass(frozen=True, kw_only=True)
class WandB(TrackerConfig):
    """Copies the metrics to Weights & Biases. The API key comes from WANDB_API_KEY or `wandb login`."""

    kind: Literal["wandb"] = "wandb"
    project: str = "dtrain"
    """The project in Weights & Biases."""
    entity: str | None = None
    """User or team there; default: that of the API key."""
    mode: Literal["online", "offline", "disabled"] = "online"
    """offline keeps metrics in the run folder, for `wandb sync`; disabled sends and keeps nothing."""
    tags: tuple[str, ...] = ()
    """Tags of the run."""
    group: str | None = None
    """Runs of one group are shown together; default: that of the environment variable WANDB_RUN_GROUP."""
    job_type: str | None = None
    """The kind of job of the run, such as train or sweep."""
    notes: str | None = None
    """A longer description of the run."""
    alerts: bool = True
    """Send an alert, as set up in the user's W&B account, if the run fails."""

    @property
    def packages(self) -> tuple[str, ...]:
        return ("wandb",)

    @property
    def secrets(self) -> tuple[str, ...]:
        return ("WANDB_API_KEY",) if self.mode == "online" else ()

    def check(self) -> None:
        if self.mode == os.environ.get("WANDB_MODE", "online") == "online" and not has_key():
            raise _not_started("no API key is configured")

    @contextmanager
    def open(self, about: TrackedRun) -> Iterator[Tracker]:
        import wandb
        from wandb.errors import AuthenticationError, CommError

        os.environ.setdefault("WANDB_SILENT", "true")
        try:
            run = self._begin(about, self.mode)
        except (AuthenticationError, CommError) as error:  # the key; the network, or the service
            if isinstance(error, AuthenticationError) and not about.start:
                raise _not_started(error) from error
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
        for metric in about.metrics:  # the summary shows the best value
            if metric.higher_is_better is not None:
                best = "max" if metric.higher_is_better else "min"
                run.define_metric(f"eval/{metric.name}", summary=f"{best},last")
        code = 1
        try:
            yield Rows(run)
            code = 0
        except Stopped as error:
            code = error.exit_code
            raise
        except Exception as error:
            if self.alerts:
                run.alert(title=f"{about.name} failed", text=str(error)[:1000])
            raise
        finally:
            run.finish(exit_code=code)

    def _begin(self, about: TrackedRun, mode: Literal["online", "offline", "disabled"]) -> Any:
        import wandb

        return wandb.init(  # pyright: ignore[reportAttributeAccessIssue]
            project=self.project,
            entity=self.entity,
            name=about.name,
            id=about.ids.setdefault("wandb", os.environ.get("WANDB_RUN_ID") or secrets.token_hex(4)),
            group=self.group,
            job_type=self.job_type,
            notes=self.notes,
            resume="allow",
            mode=mode,
            tags=list(self.tags),
            dir=about.folder.path,
            config=dict(about.recipe) | ({"git": about.git} if about.git else {}),
            settings=wandb.Settings(init_timeout=PATIENCE, finish_timeout=PATIENCE),  # pyright: ignore[reportAttributeAccessIssue]
        )


def agent_name(recipe: str, overrides: Sequence[str]) -> list[str]:
    """The name of a run that `wandb agent` starts, as an override: each run of a sweep needs a folder of its own."""
    sweep, run = os.environ.get("WANDB_SWEEP_ID"), os.environ.get("WANDB_RUN_ID")
    if not (sweep and run) or any(override.startswith("name=") for override in overrides):
        return []
    text = re.sub(r"[^a-z0-9]+", "-", f"{Path(recipe).stem}-{run}".lower())
    return [f"name={text.strip('-')[-63:].strip('-')}"]


def has_key() -> bool:
    """Whether this machine has a key of the service: in the environment, or in the file that `wandb login` writes."""
    if any(os.environ.get(name) for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")):
        return True
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").partition("://")[2].partition("/")[0]
    with suppress(OSError, netrc.NetrcParseError):
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host.partition(":")[0]) is not None
    return False


def _not_started(error: Exception | str) -> EnvironmentFault:
    hint = "set WANDB_API_KEY, or set the tracker's mode to offline and upload later with `wandb sync`"
    return EnvironmentFault(f"Weights & Biases did not start: {error}", hint)


@dataclass(frozen=True)
class Rows:
    """A tracker that logs one row per step."""

    run: Any

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=step)

    def samples(self, step: int, rows: Sequence[Sample]) -> None:
        import wandb

        columns: list[Any] = list(rows[0])
        table = wandb.Table(columns=columns, data=[[row[name] for name in columns] for row in rows])
        self.run.log({"samples": table}, step=step)

    def pictures(self, step: int, grids: Mapping[str, Any]) -> None:
        import wandb

        self.run.log({f"samples/{name}": wandb.Image(grid) for name, grid in grids.items()}, step=step)
