"""Instance groups of Compute Engine: for the TPUs that the TPU API does not serve, and for GPUs."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from dtrain.errors import FieldError
from dtrain.hardware import PER_HOST, Cloud
from dtrain.launch.job import Job
from dtrain.launch.names import Word
from dtrain.launch.rented import Rented

CHIPS_A_HOST = 4
SYSTEMS = "ubuntu-os-accelerator-images"
DISK = "200GB"
LOST = {"STOPPED", "SUSPENDED", "TERMINATED"}
AT_WORK = {"CREATING", "CREATING_WITHOUT_RETRIES", "RECREATING", "STARTING", "RESUMING", "RESTARTING"}


@dataclass(frozen=True, kw_only=True)
class Group(Rented):
    """A managed instance group: one slice of TPUs, or hosts of eight GPUs."""

    kind: Literal["group"] = "group"
    reservation: Word | None = None
    """The capacity that is set aside, by its name or path."""
    family: Word | None = None
    """The image family of the machines' system, where the usual one will not do."""

    GONE: ClassVar[frozenset[str]] = frozenset({"LOST"})
    UP: ClassVar[frozenset[str]] = frozenset({"CREATING", "RUNNING"})
    SETTLED: ClassVar[float] = 300.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.slices > 1:
            raise FieldError("slices", "a group is one slice", "launch.kind: queued or gke, for several")
        if not self._cloud.machine:
            raise FieldError("on", f"Compute Engine has no machines with {self.on}", "launch.kind: queued")
        if not self.family and not self._cloud.family:
            raise FieldError("family", f"say which image family of {SYSTEMS} machines with {self.on} start")
        if self.spot and self.reservation:
            raise FieldError("spot", "spot and a reservation are two kinds of capacity: one of them")

    @property
    def hosts(self) -> int:
        return max(1, self.shape.chips // self._chips)

    @property
    def _tpu(self) -> bool:
        return self.shape.platform == "tpu"

    @property
    def _chips(self) -> int:
        """Of one host."""
        if not self._tpu:
            return min(PER_HOST, self.shape.chips)
        planar = self.shape.chip is not None and self.shape.chip.dims == 2
        return self.shape.chips if planar and self.shape.chips <= 2 * CHIPS_A_HOST else CHIPS_A_HOST

    @property
    def _cloud(self) -> Cloud:
        chip = self.shape.chip
        assert chip
        assert chip.cloud
        return chip.cloud

    def group(self, job: Job) -> str:
        return job.name

    def creating(self, job: Job, zone: str) -> list[list[str]]:
        region = zone.rpartition("-")[0]
        where = self.where(zone)
        make = ["gcloud", "compute", "instance-groups", "managed", "create", job.name, *where]
        # a slice is made again as a whole, by the watcher; a host of GPUs by the group
        make += [f"--size={self.hosts}", f"--template={job.name}"]
        make += [f"--default-action-on-vm-failure={'do-nothing' if self._tpu else 'repair'}"]
        if not self._tpu or self.hosts == 1:
            return [self._template(job, region), make]
        topology = "x".join(map(str, self.shape.shape))
        policy = ["gcloud", "compute", "resource-policies", "create", "workload-policy", job.name]
        policy += [f"--project={self.project}", f"--region={region}"]
        policy += ["--type=HIGH_THROUGHPUT", f"--accelerator-topology={topology}"]
        path = f"projects/{self.project}/regions/{region}/resourcePolicies/{job.name}"
        return [policy, self._template(job, region), [*make, f"--workload-policy={path}"]]

    def _template(self, job: Job, region: str) -> list[str]:
        last = "t" if self._tpu else "g"
        machine = f"{self._cloud.machine.rpartition('-')[0]}-{self._chips}{last}"
        make = ["gcloud", "compute", "instance-templates", "create", job.name, f"--project={self.project}"]
        make += [f"--machine-type={machine}", f"--image-project={SYSTEMS}"]
        make += [f"--image-family={self.family or self._cloud.family}", f"--boot-disk-size={DISK}"]
        make += ["--maintenance-policy=TERMINATE", f"--labels=dtrain={job.name}", "--no-address"]
        make += [f"--network={self.network}"] if self.network else []
        make += [f"--subnet={self.subnetwork}", f"--region={region}"] if self.subnetwork else []
        make += ["--provisioning-model=SPOT", "--instance-termination-action=STOP"] if self.spot else []
        if self.reservation:
            make += ["--reservation-affinity=specific", f"--reservation={self.reservation}"]
            make += ["--provisioning-model=RESERVATION_BOUND"]
        return make + self.machine("startup.sh")

    def looking(self, job: Job, zone: str) -> list[str]:
        words = ["gcloud", "compute", "instance-groups", "managed", "list-instances", job.name]
        return [*words, *self.where(zone), "--format=json"]

    def state(self, described: Any) -> str:
        """LOST where an instance is, and the group does nothing about it."""
        states = [(one.get("instanceStatus", ""), one.get("currentAction", "NONE")) for one in described]
        if any(status in LOST and action not in AT_WORK for status, action in states):
            return "LOST"
        there = sum(status == "RUNNING" for status, _ in states)
        return "RUNNING" if there == self.hosts else "CREATING"

    def deleting(self, job: Job, zone: str) -> list[list[str]]:
        region, here = zone.rpartition("-")[0], f"--project={self.project}"
        compute = ["gcloud", "compute"]
        take = [
            [*compute, "instance-groups", "managed", "delete", job.name, *self.where(zone), "--quiet"],
            [*compute, "instance-templates", "delete", job.name, here, "--quiet"],
        ]
        policy = [*compute, "resource-policies", "delete", job.name, here, f"--region={region}", "--quiet"]
        return [*take, policy] if self._tpu and self.hosts > 1 else take

    def giving_back(self, job: Job) -> list[tuple[str, str, str]]:
        """The machines; template and policy cost nothing, and go with the watcher or `down`."""
        return [("DELETE", "compute", f"projects/{self.project}/zones/ZONE/instanceGroupManagers/{job.name}")]
