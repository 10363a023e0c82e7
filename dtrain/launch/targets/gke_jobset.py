"""The JobSet that a launch on GKE submits, with a Job for each slice and a pod for each host; and its state."""

import json
import shlex
import time
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any

from annotated_types import Ge

from dtrain.core.chips import PER_HOST
from dtrain.core.errors import DtrainError, RecipeError
from dtrain.core.process_info import exports
from dtrain.core.slices import Target as Slice
from dtrain.core.types import JsonObject, Positive
from dtrain.launch.job import CHIPS_A_HOST, LaunchJob, Rented, Row, shape_of
from dtrain.launch.names import Bucket, Resource, Word, refuse
from dtrain.launch.templates import fill_template

LABEL = "dtrain-launch"
"""Label with the launch id, on every object that a launch creates."""
SECRET = "dtrain"
"""The Kubernetes secret that holds the values of `environment`."""
SIDECAR = {"volumes": "true", "cpu-limit": "0", "memory-limit": "0", "ephemeral-storage-limit": "0"}
"""Annotations gke-gcsfuse/...: mount buckets, without default limits (a checkpoint being saved may exceed 5 GiB)."""
COUNTS = ("active", "ready", "succeeded", "failed")


@dataclass(frozen=True, kw_only=True)
class JobSet(Rented):
    """The pods of a launch: settings, machines and manifest."""

    on: Word
    """Slices or GPUs to request: v5e-64, v5p-128, tpu7x-32, h100-16."""
    slices: Positive = 1
    spot: bool = False
    image: Word
    """Container image with dtrain, as built by `launch/Dockerfile`."""
    claim: Resource | None = None
    """Persistent volume claim for the run folders, writable by all pods."""
    bucket: Bucket | None = None
    """Or a bucket for the run folders, mounted by the Cloud Storage FUSE driver."""
    queue: Resource | None = None
    """Local queue of Kueue."""
    namespace: Resource = "default"
    account: Resource = "default"
    """The Kubernetes service account of the pods."""
    grace: Annotated[int, Ge(10)] = 60
    """Seconds that a pod has to save after SIGTERM."""

    def __post_init__(self) -> None:
        cloud, folders = self.shape.chip and self.shape.chip.cloud, (self.claim, self.bucket)
        refuse(
            (folders.count(None) != 1, "claim", "set either claim or bucket, for the run folders", ""),
            (not cloud, "on", f"{self.on} is not available on GKE", ""),
            (self.budget and not self.rate, "budget", f"no price of {self.on} is known", "set launch.hours instead"),
        )

    @property
    def shape(self) -> Slice:
        """The slices or GPUs that `on` names."""
        return shape_of(self.on, self.slices)

    @property
    def hosts(self) -> int:
        """Number of hosts of one slice, with one pod each."""
        return -(-self.shape.chips // self.slices // self._resource[1])

    @property
    def rate(self) -> float | None:
        """List price in dollars an hour; GPUs are priced by whole machines."""
        price = self.shape.chip and self.shape.chip.price
        return price * self.shape.rented if price else None

    def manifest(self, job: LaunchJob) -> str:
        """The JobSet, and the recipe as a ConfigMap. RecipeError if the names of its pods would be too long."""
        room = 63 - len(f"-slice-{self.slices - 1}-{self.hosts - 1}-abcde")  # a DNS label; JobSet adds 5 random letters
        if len(job.name) > room or not job.name[0].isalpha():
            message = (
                f"name: {job.name!r} has {len(job.name)} characters; on GKE at most {room}, beginning with a letter"
            )
            raise RecipeError(message, "choose another name, as name=...")
        name, most = self._resource
        queue = {"kueue.x-k8s.io/queue-name": self.queue} if self.queue else {}
        mounts = {f"gke-gcsfuse/{key}": value for key, value in SIDECAR.items()} if self.bucket else {}
        taints = [name, "cloud.google.com/gke-spot"] if self.spot else [name]
        variables: list[JsonObject] = [{"name": key, "value": value} for key, value in job.environment().items()]
        for key in self.environment:
            variables.append({"name": key, "valueFrom": {"secretKeyRef": {"name": SECRET, "key": key}}})
        command = ["python3", "-m", "dtrain", "run", "/recipe/recipe.yaml", "--runs-dir", "/runs", *self.run_options()]
        own, first = {LABEL: job.launch}, f"{job.name}-slice-0-0.{job.name}:8476"
        words = {"NAME": job.name, "OWN": _flow(own), "LABELS": _flow(own | queue), "ANNOTATIONS": _flow(mounts)}
        words |= {"RESTARTS": self.restarts, "SLICES": self.slices, "HOSTS": self.hosts, "GRACE": self.grace}
        words |= {"ACCOUNT": self.account, "IMAGE": json.dumps(self.image), "RECIPE": json.dumps(job.recipe)}
        words |= {"PROCESS": exports("$rank", str(self.hosts * self.slices), first), "COMMAND": shlex.join(command)}
        words |= {"SELECTOR": _flow(self._nodes()), "VOLUME": json.dumps(self._volume())}
        words["TOLERATIONS"] = ", ".join(f"{{key: {key}, operator: Exists, effect: NoSchedule}}" for key in taints)
        words["ENVIRONMENT"] = "".join(f"\n              - {json.dumps(item)}" for item in variables)
        words["RESOURCE"] = f'{name}: "{min(most, self.shape.chips // self.slices)}"'
        return fill_template("jobset.yaml", words)

    def kueue(self) -> str:
        """Manifest of a Kueue queue with room for one such run."""
        assert self.shape.chip
        words = {"QUEUE": self.queue or "", "FLAVOR": f"{self.shape.chip.name}{'-spot' if self.spot else ''}"}
        words |= {"LABELS": _flow(self._nodes()), "NAMESPACE": self.namespace, "RESOURCE": self._resource[0]}
        return fill_template("kueue.yaml", words | {"CHIPS": self.shape.chips})

    @property
    def _resource(self) -> tuple[str, int]:
        """Resource that a pod requests, and the largest number of it in one pod."""
        return ("google.com/tpu", CHIPS_A_HOST) if self.shape.platform == "tpu" else ("nvidia.com/gpu", PER_HOST)

    def _nodes(self) -> dict[str, str]:
        """Labels of suitable nodes."""
        chip = self.shape.chip
        assert chip and chip.cloud
        labels = {"gke-accelerator": chip.cloud.label}
        if self.shape.platform == "tpu":
            topology = "x".join(map(str, self.shape.shape))
            labels = {"gke-tpu-accelerator": chip.cloud.label, "gke-tpu-topology": topology}
        labels |= {"gke-spot": "true"} if self.spot else {}
        return {f"cloud.google.com/{key}": value for key, value in labels.items()}

    def _volume(self) -> dict[str, object]:
        """The volume for run folders. Hosts wait for files of each other, so bucket metadata is not cached. For pods on
        the host network, the driver uses the pod's identity only with hostNetworkPodKSA."""
        if self.claim:
            return {"name": "runs", "persistentVolumeClaim": {"claimName": self.claim}}
        attributes = {"bucketName": self.bucket, "hostNetworkPodKSA": "true", "metadataCacheTTLSeconds": "0"}
        return {"name": "runs", "csi": {"driver": "gcsfuse.csi.storage.gke.io", "volumeAttributes": attributes}}


def _flow(values: dict[str, str]) -> str:
    """The content of a YAML flow mapping, without braces."""
    return ", ".join(f"{key}: {json.dumps(value)}" for key, value in values.items())


def launch_of(jobset: Any) -> str:
    """Id of the launch that created it; empty if dtrain did not create it."""
    return jobset["metadata"].get("labels", {}).get(LABEL) or ""


def _times(jobset: Any) -> dict[tuple[str, str], str]:
    """Time at which each (condition, status) began."""
    return {
        (one["type"], one["status"]): one["lastTransitionTime"]
        for one in jobset.get("status", {}).get("conditions", [])
    }


def ended(jobset: object) -> str:
    """completed or failed; empty while it has not ended."""
    return next((word for word in ("Completed", "Failed") if (word, "True") in _times(jobset)), "").lower()


def seconds(jobset: Any) -> float | None:
    """Seconds for which it has had its nodes, since Kueue admitted it or since its creation. None while it waits."""
    times, end = _times(jobset), time.time()
    if jobset["spec"].get("suspend"):
        return None
    began = times.get(("Suspended", "False")) or jobset["metadata"]["creationTimestamp"]
    if word := ended(jobset):
        end = datetime.fromisoformat(times[word.capitalize(), "True"]).timestamp()
    return end - datetime.fromisoformat(began).timestamp()


def rows(jobset: Any) -> list[Row]:
    """A row for the JobSet, with its exit code if it has ended, and one with that code for each group of its Jobs."""
    status = jobset.get("status", {})
    state = ended(jobset) or ("waiting" if jobset["spec"].get("suspend") else "running")
    code = {"completed": 0, "failed": DtrainError.exit_code}.get(state)
    jobs = [
        Row(one["name"], "jobs", ", ".join(f"{one.get(word, 0)} {word}" for word in COUNTS), code)
        for one in status.get("replicatedJobsStatus", [])
    ]
    what = f"restarted {status.get('restarts', 0)} times"
    return [Row(f"jobset {jobset['metadata']['name']}", state, what, code, seconds(jobset)), *jobs]
