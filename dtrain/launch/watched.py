"""What rented machines have beside them: a small one that asks for them again when they are preempted."""

from abc import ABC
from collections.abc import Iterable
from dataclasses import dataclass

from dtrain.errors import FieldError
from dtrain.launch import board
from dtrain.launch.cloud import Cloud
from dtrain.launch.job import Job

WATCHER = ("--machine-type=e2-small", "--image-family=debian-12", "--image-project=debian-cloud")


@dataclass(frozen=True, kw_only=True)
class Watched(Cloud, ABC):
    """Rented machines that may have a watcher. It runs `dtrain launch watch` under the same unit as they."""

    watcher: bool = True
    """A small machine beside them that asks for them again after a preemption, and leaves with them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.watcher and not self.wheel:
            raise FieldError(
                "wheel", "the watcher needs a wheel", "or watcher: false; `dtrain launch watch` does its work"
            )

    def files(self, job: Job) -> dict[str, str]:
        watch = f"-m dtrain launch watch {job.name} --runs-dir /mnt/dtrain"
        beside = {"watch.sh": self.script(job, watch, chips=False), "launch.json": board.entry_of(job).text()}
        return super().files(job) | (beside if self.watcher else {})

    def copying(self, job: Job, files: Iterable[str]) -> list[str]:
        return super().copying(job, (name for name in files if name != board.NAME))

    def notes(self) -> tuple[str, ...]:
        watched = ("a small machine watches over it, for about two cents an hour more",)
        return super().notes() + (watched if self.watcher else ())

    def accompanying(self, job: Job) -> list[list[str]]:
        options = [*WATCHER, *self.machine("watch.sh"), "--no-address"]
        options += [f"--network={self.network}"] if self.network else []
        options += [f"--subnet={self.subnetwork}"] if self.subnetwork else []
        make = ["gcloud", "compute", "instances", "create", f"{job.name}-watch", *self.where(self.zones[0]), *options]
        note = self.place(job).noting("launch.json")
        return [note, make] if self.watcher else []

    def dismissing(self, job: Job) -> list[list[str]]:
        take = ["gcloud", "compute", "instances", "delete", f"{job.name}-watch", *self.where(self.zones[0]), "--quiet"]
        return [take] if self.watcher else []

    def where(self, zone: str) -> list[str]:
        """The options that say where."""
        return [f"--project={self.project}", f"--zone={zone}"]

    def machine(self, script: str) -> list[str]:
        """The options that say who a machine is, and what it starts with."""
        account = [f"--service-account={self.account}"] if self.account else []
        return [f"--metadata-from-file=startup-script={script}", "--scopes=cloud-platform", *account]
