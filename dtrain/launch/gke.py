"""Google Kubernetes Engine: a JobSet with a Job for each slice, and a pod for each host."""

import json
import shlex
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import yaml
from annotated_types import Ge

from dtrain.errors import DtrainError, FieldError, Locked, RecipeError
from dtrain.fields import Positive
from dtrain.hardware import PER_HOST
from dtrain.launch.job import Common, Job, Plan, Row, Say
from dtrain.launch.names import Bucket, Resource, Word
from dtrain.launch.templates import filled
from dtrain.launch.tool import run
from dtrain.slices import Target, target

RUNS = "/runs"
CHIPS_A_HOST = 4
POLL = 2.0
STOPPED = 300.0


@dataclass(frozen=True, kw_only=True)
class GKE(Common):
    """A cluster that kubectl reaches, with JobSet on it, and a node pool for each slice."""

    kind: Literal["gke"] = "gke"
    on: Word
    """What is asked for: v5e-64, v5p-128, tpu7x-32, h100-16."""
    slices: Positive = 1
    image: Word
    """That has dtrain: `launch/Dockerfile` builds it."""
    claim: Resource | None = None
    """A volume claim that all pods may write to, for the run folders."""
    bucket: Bucket | None = None
    """Or a bucket, by the Cloud Storage FUSE driver; one with a hierarchical namespace."""
    queue: Resource | None = None
    """Kueue's local queue."""
    spot: bool = False
    namespace: Resource = "default"
    account: Resource = "default"
    """The Kubernetes service account of the pods."""
    context: Word | None = None
    """Of kubectl; the current one where not said."""
    grace: Annotated[int, Ge(10)] = 60
    """Seconds that a pod has to save when it must go."""

    def __post_init__(self) -> None:
        if (self.claim is None) == (self.bucket is None):
            raise FieldError("claim", "say where run folders go: claim or bucket, one of them")
        try:
            shape = self.shape
        except RecipeError as error:
            raise FieldError("on", error.message, error.hint) from error
        if shape.chip is None or shape.chip.cloud is None:
            raise FieldError("on", f"{self.on} is not rented on GKE")

    @property
    def shape(self) -> Target:
        """The slice, or the GPUs."""
        return target(self.on, self.slices)

    @property
    def hosts(self) -> int:
        """Of one slice."""
        chips = self.shape.chips // self.slices
        return max(1, chips // (CHIPS_A_HOST if self.shape.platform == "tpu" else PER_HOST))

    def plan(self, job: Job) -> Plan:
        price = self.shape.chip.price if self.shape.chip else None
        queue = {"kueue.yaml": self._kueue()} if self.queue else {}
        return Plan(
            {"manifest.yaml": self._manifest(job)} | queue,
            [self._kubectl("apply", "-f", "-")],
            self.hosts * self.slices,
            self.shape.chips,
            price * self.shape.chips if price else None,
            self._notes(),
        )

    def _notes(self) -> tuple[str, ...]:
        notes = ["spot capacity: the price below is that of the list, of which it costs a part"] if self.spot else []
        if self.queue:
            notes.append(f"kueue.yaml makes the queue {self.queue}; who runs the cluster applies it, `up` does not")
        return tuple(notes)

    def _kueue(self) -> str:
        """A queue with room for one such run."""
        chip, (name, _) = self.shape.chip, self._resource()
        assert chip
        return filled(
            "kueue.yaml",
            {
                "QUEUE": self.queue or "",
                "FLAVOR": f"{chip.name}{'-spot' if self.spot else ''}",
                "LABELS": self._labels(),
                "NAMESPACE": self.namespace,
                "RESOURCE": name,
                "CHIPS": str(self.shape.chips),
            },
        )

    def _labels(self) -> str:
        """Of the nodes that will do, as YAML."""
        return ", ".join(f"cloud.google.com/{key}: {json.dumps(one)}" for key, one in self._nodes().items())

    def up(self, job: Job, say: Say) -> dict[str, str]:
        found = self._state(job)
        if found and not _ended(found):
            raise Locked(f"JobSet {job.name} is there already", f"dtrain launch status {job.name}")
        if found:
            run(self._kubectl("delete", "jobset", job.name, "--wait=true"))
        for line in run(self._kubectl("apply", "-f", "-"), given=self._manifest(job)).splitlines():
            say(line)
        return {"jobset": job.name}

    def status(self, job: Job) -> list[Row]:
        found = self._state(job)
        if not found:
            return [Row(f"jobset {job.name}", "absent")]
        told = found.get("status", {})
        words = ("active", "ready", "succeeded", "failed")
        rows = [
            Row(one["name"], "jobs", ", ".join(f"{one.get(word, 0)} {word}" for word in words))
            for one in told.get("replicatedJobsStatus", [])
        ]
        state = _ended(found) or ("waiting" if found["spec"].get("suspend") else "running")
        code = {"completed": 0, "failed": DtrainError.exit_code}.get(state)
        return [Row(f"jobset {job.name}", state, f"restarted {told.get('restarts', 0)} times", code), *rows]

    def logs(self, job: Job, host: int | None, follow: bool) -> Iterator[tuple[str, str]]:
        chosen = f"jobset.sigs.k8s.io/jobset-name={job.name}"
        if host is not None:
            chosen += f",jobset.sigs.k8s.io/job-index={host // self.hosts}"
            chosen += f",batch.kubernetes.io/job-completion-index={host % self.hosts}"
        options = ["--prefix", "--tail=-1", f"--max-log-requests={self.hosts * self.slices}"]
        command = self._kubectl("logs", "-l", chosen, *options, *(["-f"] if follow else []))
        since: list[str] = []
        while True:  # pods come late, and others after a restart
            now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            with subprocess.Popen([*command, *since], stdout=subprocess.PIPE, text=True, errors="replace") as process:
                assert process.stdout
                for line in process.stdout:
                    pod, _, text = line.rstrip("\n").partition("] ")
                    yield pod.lstrip("[").removeprefix("pod/").partition("/")[0], text
                    since = [f"--since-time={now}"]
            if not follow or self._over(job):
                return
            time.sleep(POLL)

    def stop(self, job: Job, say: Say) -> None:
        """A JobSet that is deleted ends its pods, which save within `grace`; one suspended, Kueue would wake."""
        run(self._kubectl("delete", "jobset", job.name, "--ignore-not-found", "--cascade=foreground"), wait=STOPPED)
        say(f"jobset {job.name} is deleted, and its pods have ended; what they saved is where it was")

    def down(self, job: Job, say: Say) -> None:
        for kind in ("jobset", "configmap"):
            for line in run(self._kubectl("delete", kind, job.name, "--ignore-not-found", "--wait=true")).splitlines():
                say(line)

    def removes(self, job: Job) -> list[str]:
        return [f"jobset {job.name} and its pods", f"configmap {job.name}"]

    def _over(self, job: Job) -> bool:
        found = self._state(job)
        return not found or bool(_ended(found))

    def _state(self, job: Job) -> Any:
        said = run(self._kubectl("get", "jobset", job.name, "--ignore-not-found", "-o", "json"))
        return json.loads(said) if said.strip() else None

    def _kubectl(self, *words: str) -> list[str]:
        context = ["--context", self.context] if self.context else []
        return ["kubectl", *context, "--namespace", self.namespace, *words]

    def _manifest(self, job: Job) -> str:
        """The JobSet, and the recipe as a ConfigMap beside it."""
        name, each = self._resource()
        tolerations = [{"key": name, "operator": "Exists", "effect": "NoSchedule"}]
        if self.spot:
            spot = {"key": "cloud.google.com/gke-spot", "operator": "Equal", "value": "true", "effect": "NoSchedule"}
            tolerations.append(spot)
        secrets = [
            {"name": name, "valueFrom": {"secretKeyRef": {"name": "dtrain", "key": name}}} for name in self.environment
        ]
        command = ["python3", "-m", "dtrain", "run", "/recipe/recipe.yaml", "--runs-dir", RUNS, *self.run_options()]
        jobset = filled(
            "jobset.yaml",
            {
                "NAME": job.name,
                "LABELS": f"kueue.x-k8s.io/queue-name: {self.queue}" if self.queue else "",
                "ANNOTATIONS": 'gke-gcsfuse/volumes: "true"' if self.bucket else "",
                "RESTARTS": str(self.restarts),
                "SLICES": str(self.slices),
                "HOSTS": str(self.hosts),
                "TOTAL": str(self.hosts * self.slices),
                "GRACE": str(self.grace),
                "ACCOUNT": self.account,
                "SELECTOR": self._labels(),
                "TOLERATIONS": ", ".join(map(json.dumps, tolerations)),
                "IMAGE": json.dumps(self.image),
                "SECRETS": "".join(f"\n              - {json.dumps(one)}" for one in secrets),
                "COMMAND": shlex.join(command),
                "RESOURCE": f'{name}: "{each}"',
                "RUNS": RUNS,
                "VOLUME": json.dumps(self._volume()),
            },
        )
        recipe: dict[str, Any] = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": job.name}}
        return f"{yaml.safe_dump(recipe | {'data': {'recipe.yaml': job.recipe}}, sort_keys=False)}---\n{jobset}"

    def _resource(self) -> tuple[str, int]:
        """What a pod asks for, and how many."""
        if self.shape.platform == "tpu":
            return "google.com/tpu", min(CHIPS_A_HOST, self.shape.chips // self.slices)
        return "nvidia.com/gpu", min(PER_HOST, self.shape.chips)

    def _nodes(self) -> dict[str, str]:
        """Labels of the nodes that will do."""
        chip = self.shape.chip
        assert chip
        assert chip.cloud
        spot = {"gke-spot": "true"} if self.spot else {}
        if self.shape.platform == "gpu":
            return {"gke-accelerator": chip.cloud.label} | spot
        topology = "x".join(map(str, self.shape.shape))
        return {"gke-tpu-accelerator": chip.cloud.label, "gke-tpu-topology": topology} | spot

    def _volume(self) -> dict[str, Any]:
        """Where run folders go."""
        if self.claim:
            return {"name": "runs", "persistentVolumeClaim": {"claimName": self.claim}}
        fuse = {"driver": "gcsfuse.csi.storage.gke.io", "volumeAttributes": {"bucketName": self.bucket}}
        return {"name": "runs", "csi": fuse}


def _ended(found: Any) -> str:
    """completed or failed, where it has ended."""
    for one in found.get("status", {}).get("conditions", []):
        if one["type"] in ("Completed", "Failed") and one["status"] == "True":
            return one["type"].lower()
    return ""
