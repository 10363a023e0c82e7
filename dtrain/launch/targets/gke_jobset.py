"""What a launch on GKE submits: a JobSet, with a Job for each slice and a pod for each host; and how it stands."""

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
from dtrain.core.types import Positive
from dtrain.launch.job import CHIPS_A_HOST, LaunchJob, Rented, Row, shape_of
from dtrain.launch.names import Bucket, Resource, Word, refuse
from dtrain.launch.templates import filled

LABEL = "dtrain-launch"
"""Of all that a launch makes: the id of the launch."""
SECRET = "dtrain"
"""The Kubernetes secret with the values of `environment`."""
SIDECAR = {"volumes": "true", "cpu-limit": "0", "memory-limit": "0", "ephemeral-storage-limit": "0"}
"""gke-gcsfuse/ annotations: mount buckets, without the default limits (a checkpoint under way may exceed 5 GiB)."""
COUNTS = ("active", "ready", "succeeded", "failed")


@dataclass(frozen=True, kw_only=True)
class JobSet(Rented):
    """The pods of a launch, and where they run."""

    on: Word
    """What is asked for: v5e-64, v5p-128, tpu7x-32, h100-16."""
    slices: Positive = 1
    spot: bool = False
    image: Word
    """That has dtrain: `launch/Dockerfile` builds it."""
    claim: Resource | None = None
    """A volume claim that all pods may write to, for the run folders."""
    bucket: Bucket | None = None
    """Or a bucket, by the Cloud Storage FUSE driver."""
    queue: Resource | None = None
    """Kueue's local queue."""
    namespace: Resource = "default"
    account: Resource = "default"
    """The Kubernetes service account of the pods."""
    grace: Annotated[int, Ge(10)] = 60
    """Seconds that a pod has to save when it must go."""

    def __post_init__(self) -> None:
        cloud, folders = self.shape.chip and self.shape.chip.cloud, (self.claim, self.bucket)
        refuse(
            (folders.count(None) != 1, "claim", "say where run folders go: claim or bucket, one of them", ""),
            (not cloud, "on", f"{self.on} is not rented on GKE", ""),
            (self.budget and not self.rate, "budget", f"no price of {self.on} is known", "set launch.hours instead"),
        )

    @property
    def shape(self) -> Slice:
        """The slices, or the GPUs."""
        return shape_of(self.on, self.slices)

    @property
    def hosts(self) -> int:
        """Of one slice, with a pod each."""
        return -(-self.shape.chips // self.slices // self._resource[1])

    @property
    def rate(self) -> float | None:
        """By list prices; GPUs by whole machines."""
        price = self.shape.chip and self.shape.chip.price
        return price * self.shape.rented if price else None

    def manifest(self, job: LaunchJob) -> str:
        """The JobSet, and the recipe as a ConfigMap. RecipeError where the names of its pods would be too long."""
        room = 63 - len(f"-slice-{self.slices - 1}-{self.hosts - 1}-abcde")  # a DNS label; JobSet adds the letters
        if len(job.name) > room or not job.name[0].isalpha():
            message = f"name: {job.name!r} has {len(job.name)} characters; on GKE it has {room} at most, a letter first"
            raise RecipeError(message, "give another, as name=...")
        name, most = self._resource
        queue = {"kueue.x-k8s.io/queue-name": self.queue} if self.queue else {}
        mounts = {f"gke-gcsfuse/{key}": value for key, value in SIDECAR.items()} if self.bucket else {}
        taints = [name, "cloud.google.com/gke-spot"] if self.spot else [name]
        variables: list[dict[str, Any]] = [{"name": key, "value": value} for key, value in job.environment().items()]
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
        words["ENVIRONMENT"] = "".join(f"\n              - {json.dumps(one)}" for one in variables)
        words["RESOURCE"] = f'{name}: "{min(most, self.shape.chips // self.slices)}"'
        return filled("jobset.yaml", words)

    def kueue(self) -> str:
        """A queue with room for one such run."""
        assert self.shape.chip
        words = {"QUEUE": self.queue or "", "FLAVOR": f"{self.shape.chip.name}{'-spot' if self.spot else ''}"}
        words |= {"LABELS": _flow(self._nodes()), "NAMESPACE": self.namespace, "RESOURCE": self._resource[0]}
        return filled("kueue.yaml", words | {"CHIPS": self.shape.chips})

    @property
    def _resource(self) -> tuple[str, int]:
        """What a pod asks for, and how many at most."""
        return ("google.com/tpu", CHIPS_A_HOST) if self.shape.platform == "tpu" else ("nvidia.com/gpu", PER_HOST)

    def _nodes(self) -> dict[str, str]:
        """Labels of the nodes that will do."""
        chip = self.shape.chip
        assert chip and chip.cloud
        found = {"gke-accelerator": chip.cloud.label}
        if self.shape.platform == "tpu":
            topology = "x".join(map(str, self.shape.shape))
            found = {"gke-tpu-accelerator": chip.cloud.label, "gke-tpu-topology": topology}
        found |= {"gke-spot": "true"} if self.spot else {}
        return {f"cloud.google.com/{key}": value for key, value in found.items()}

    def _volume(self) -> dict[str, Any]:
        """Where run folders go. Hosts wait for files of each other, so metadata of a bucket is not cached; in pods on
        the network of their host, the driver has the pod's identity only where it is asked to."""
        if self.claim:
            return {"name": "runs", "persistentVolumeClaim": {"claimName": self.claim}}
        attributes = {"bucketName": self.bucket, "hostNetworkPodKSA": "true", "metadataCacheTTLSeconds": "0"}
        return {"name": "runs", "csi": {"driver": "gcsfuse.csi.storage.gke.io", "volumeAttributes": attributes}}


def _flow(values: dict[str, str]) -> str:
    """The inside of a YAML flow mapping."""
    return ", ".join(f"{key}: {json.dumps(value)}" for key, value in values.items())


def launch_of(found: Any) -> str:
    """The id of the launch that made it; empty where dtrain did not make it."""
    return found["metadata"].get("labels", {}).get(LABEL) or ""


def _times(found: Any) -> dict[tuple[str, str], str]:
    """When each condition came to be True or False."""
    return {
        (one["type"], one["status"]): one["lastTransitionTime"] for one in found.get("status", {}).get("conditions", [])
    }


def ended(found: Any) -> str:
    """completed or failed, where it has ended."""
    return next((word for word in ("Completed", "Failed") if (word, "True") in _times(found)), "").lower()


def seconds(found: Any) -> float | None:
    """How long it has had its nodes: since Kueue let it start, or since it was made. None while it waits."""
    times, end = _times(found), time.time()
    if found["spec"].get("suspend"):
        return None
    began = times.get(("Suspended", "False")) or found["metadata"]["creationTimestamp"]
    if word := ended(found):
        end = datetime.fromisoformat(times[word.capitalize(), "True"]).timestamp()
    return end - datetime.fromisoformat(began).timestamp()


def rows(found: Any) -> list[Row]:
    """One of the JobSet, with its exit code where it has ended, and one with that code for each group of its Jobs."""
    status = found.get("status", {})
    state = ended(found) or ("waiting" if found["spec"].get("suspend") else "running")
    code = {"completed": 0, "failed": DtrainError.exit_code}.get(state)
    jobs = [
        Row(one["name"], "jobs", ", ".join(f"{one.get(word, 0)} {word}" for word in COUNTS), code)
        for one in status.get("replicatedJobsStatus", [])
    ]
    what = f"restarted {status.get('restarts', 0)} times"
    return [Row(f"jobset {found['metadata']['name']}", state, what, code, seconds(found)), *jobs]
