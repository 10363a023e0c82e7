"""TPU VMs by the Cloud TPU API, which gcloud speaks: made at once, or asked for in a queue."""

from abc import ABC
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from dtrain.errors import FieldError
from dtrain.fields import Positive
from dtrain.launch.job import Job
from dtrain.launch.rented import Rented

CHIPS_A_HOST = 4


@dataclass(frozen=True, kw_only=True)
class _Tpu(Rented, ABC):
    """What both ways have in common."""

    reserved: bool = False
    """From the project's reservation."""

    def __post_init__(self) -> None:
        super().__post_init__()
        chip = self.shape.chip
        if not chip or not chip.cloud or not chip.cloud.accelerator:
            raise FieldError("on", f"the TPU API does not serve {self.on}", "launch.kind: group, or gke")
        if chip.slices.get(self.shape.chips // self.slices) != self.shape.shape:
            raise FieldError("on", f"the TPU API has no {self.on}", "say it by its number, as v5p-128")
        if self.spot and self.reserved:
            raise FieldError("spot", "spot and reserved are two kinds of capacity: one of them")

    @property
    def hosts(self) -> int:
        """One of up to eight chips where they lie in a plane, else four chips each."""
        chips, planar = self.shape.chips // self.slices, self.shape.chip is not None and self.shape.chip.dims == 2
        return 1 if planar and chips <= 2 * CHIPS_A_HOST else max(1, chips // CHIPS_A_HOST)

    def _slice(self, job: Job) -> list[str]:
        """The options of a creation that both ways know."""
        chip = self.shape.chip
        assert chip
        assert chip.cloud
        count = self.shape.chips // self.slices * chip.counted
        options = [
            f"--accelerator-type={chip.cloud.accelerator}-{count}",
            "--internal-ips",
            f"--labels=dtrain={job.name}",
        ]
        options += [f"--network={self.network}"] if self.network else []
        options += [f"--subnetwork={self.subnetwork}"] if self.subnetwork else []
        options += [f"--{word}" for word in ("spot", "reserved") if getattr(self, word)]
        return options + self.machine("startup.sh")

    @property
    def _runtime(self) -> str:
        chip = self.shape.chip
        assert chip
        assert chip.cloud
        return chip.cloud.runtime


@dataclass(frozen=True, kw_only=True)
class TpuVm(_Tpu):
    """A slice of TPU VMs, made at once or not at all."""

    kind: Literal["tpu-vm"] = "tpu-vm"

    GONE: ClassVar[frozenset[str]] = frozenset(
        {"STOPPED", "STOPPING", "PREEMPTED", "TERMINATED", "HIDING", "HIDDEN", "UNHIDING", "UNKNOWN"}
    )
    UP: ClassVar[frozenset[str]] = frozenset({"READY"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.slices > 1:
            raise FieldError("slices", "TPU VMs are made one slice at a time", "launch.kind: queued")

    def creating(self, job: Job, zone: str) -> list[list[str]]:
        make = ["gcloud", "compute", "tpus", "tpu-vm", "create", job.name, *self.where(zone)]
        return [[*make, f"--version={self._runtime}", *self._slice(job)]]

    def looking(self, job: Job, zone: str) -> list[str]:
        return ["gcloud", "compute", "tpus", "tpu-vm", "describe", job.name, *self.where(zone), "--format=json"]

    def state(self, described: Any) -> str:
        return described.get("state", "UNKNOWN")

    def deleting(self, job: Job, zone: str) -> list[list[str]]:
        return [["gcloud", "compute", "tpus", "tpu-vm", "delete", job.name, *self.where(zone), "--quiet"]]

    def giving_back(self, job: Job) -> list[tuple[str, str, str]]:
        return [("DELETE", "tpu", f"v2/projects/{self.project}/locations/ZONE/nodes/{job.name}")]


@dataclass(frozen=True, kw_only=True)
class Queued(_Tpu):
    """Slices of TPU VMs asked for in a queue, which come when there is room."""

    kind: Literal["queued"] = "queued"
    guaranteed: bool = False
    wait: Positive | None = None
    """Minutes in which they must come, before the next zone is asked."""

    GONE: ClassVar[frozenset[str]] = frozenset({"SUSPENDING", "SUSPENDED"})
    UP: ClassVar[frozenset[str]] = frozenset({"ACTIVE"})
    FAILED: ClassVar[frozenset[str]] = frozenset({"FAILED"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.guaranteed and (self.spot or self.reserved):
            raise FieldError("guaranteed", "guaranteed, spot and reserved are kinds of capacity: one of them")

    def creating(self, job: Job, zone: str) -> list[list[str]]:
        make = ["gcloud", "compute", "tpus", "queued-resources", "create", job.name, *self.where(zone), "--async"]
        several = [f"--node-count={self.slices}", f"--node-prefix={job.name}"]
        options = [f"--node-id={job.name}"] if self.slices == 1 else several
        options += ["--guaranteed"] if self.guaranteed else []
        options += [f"--valid-until-duration={self.wait}m"] if self.wait else []
        return [[*make, f"--runtime-version={self._runtime}", *options, *self._slice(job)]]

    def looking(self, job: Job, zone: str) -> list[str]:
        words = ["gcloud", "compute", "tpus", "queued-resources", "describe", job.name]
        return [*words, *self.where(zone), "--format=json"]

    def state(self, described: Any) -> str:
        return described.get("state", {}).get("state", "UNKNOWN")

    def deleting(self, job: Job, zone: str) -> list[list[str]]:
        take = ["gcloud", "compute", "tpus", "queued-resources", "delete", job.name, *self.where(zone)]
        return [[*take, "--force", "--quiet"]]

    def giving_back(self, job: Job) -> list[tuple[str, str, str]]:
        path = f"v2/projects/{self.project}/locations/ZONE/queuedResources/{job.name}?force=true"
        return [("DELETE", "tpu", path)]
