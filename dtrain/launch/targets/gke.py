"""Google Kubernetes Engine: a JobSet, submitted and monitored with kubectl."""

import json
import shlex
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge

from dtrain.core.chips import PER_HOST
from dtrain.core.errors import DtrainError, EnvironmentFault, LeftBehind, Locked, RecipeError
from dtrain.core.process_info import REPLACES_HOSTS, exports
from dtrain.core.slices import Target as Slice
from dtrain.core.types import JsonObject, Positive
from dtrain.launch.bucket import check_bucket, check_stop_request, remove_stop_request, stop_url
from dtrain.launch.commands import run
from dtrain.launch.job import (
    CHIPS_A_HOST,
    Check,
    LaunchJob,
    LaunchPlan,
    MachineState,
    Rented,
    Say,
    check_image,
    fill_template,
    shape_of,
)
from dtrain.launch.names import Bucket, Resource, Word, refuse

LABEL = "dtrain-launch"
"""Label with the launch id, on every object that a launch creates."""
SECRET = "dtrain"
"""The Kubernetes secret that holds the values of `environment`."""
RUNS = "/runs"
"""Where the volume of the run folders is mounted (launch/jobset.yaml)."""
SIDECAR = {"volumes": "true", "cpu-limit": "0", "memory-limit": "0", "ephemeral-storage-limit": "0"}
"""Annotations gke-gcsfuse/...: mount buckets, without default limits (a checkpoint being saved may exceed 5 GiB)."""
COUNTS = ("active", "ready", "succeeded", "failed")


@dataclass(frozen=True, kw_only=True)
class JobSet(Rented):
    """The pods of a launch: settings, machines and manifest."""

    on: Word
    """Slices or GPUs to request: v5e-64, v5p-128, tpu7x-32, h100-16."""
    slices: Positive = 1
    """Slices, or groups of GPU hosts, of one run."""
    spot: bool = False
    """Nodes that may be taken back, for less; the run resumes on others."""
    image: Word
    """Container image with dtrain, as built by `launch/Dockerfile`."""
    claim: Resource | None = None
    """Persistent volume claim for the run folders, writable by all pods."""
    bucket: Bucket | None = None
    """Or a bucket for the run folders, mounted by the Cloud Storage FUSE driver."""
    queue: Resource | None = None
    """Local queue of Kueue."""
    namespace: Resource = "default"
    """The Kubernetes namespace of the job."""
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
    def mounted(self) -> Mapping[str, str]:
        return {"/recipe": "the recipe", RUNS: f"the {'bucket' if self.bucket else 'claim'} of the runs"}

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
        # a host that is lost ends the others with 75, and JobSet starts all of them again: a rule of launch/jobset.yaml
        given = {**job.environment(), REPLACES_HOSTS: "1"}
        variables: list[JsonObject] = [{"name": key, "value": value} for key, value in given.items()]
        for key in self.environment:
            variables.append({"name": key, "valueFrom": {"secretKeyRef": {"name": SECRET, "key": key}}})
        command = [
            "python3",
            "-m",
            "dtrain",
            "run",
            "/recipe/recipe.yaml",
            "--runs-dir",
            RUNS,
            *self.run_options(job),
        ]
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


def rows(jobset: Any) -> list[MachineState]:
    """A row for the JobSet, with its exit code if it has ended, and one with that code for each group of its Jobs."""
    status = jobset.get("status", {})
    state = ended(jobset) or ("waiting" if jobset["spec"].get("suspend") else "running")
    code = {"completed": 0, "failed": DtrainError.exit_code}.get(state)
    jobs = [
        MachineState(one["name"], "jobs", ", ".join(f"{one.get(word, 0)} {word}" for word in COUNTS), code)
        for one in status.get("replicatedJobsStatus", [])
    ]
    what = f"restarted {status.get('restarts', 0)} times"
    return [MachineState(f"jobset {jobset['metadata']['name']}", state, what, code, seconds(jobset)), *jobs]


APPLY = ("apply", "-f", "-")
NO = "failed (1): "
"""End of the error message of `run` if a program exits with 1 and prints no reason."""
SPOT_GRACE = 15
"""Seconds, at most, that GKE gives the pods of a preempted spot node to end."""
POLL = 2.0
STOPPED = 300.0
"""Seconds, in addition to `grace`, to wait until the pods of a deleted JobSet have ended."""


@dataclass(frozen=True, kw_only=True)
class GKE(JobSet):
    """A cluster that kubectl reaches, with JobSet on it, and a node pool for each slice."""

    sends_environment: ClassVar[bool] = False
    """The values of `environment` come from a secret in the cluster, not from this machine."""
    kind: Literal["gke"] = "gke"
    context: Word | None = None
    """Context of kubectl; by default the one that is current when `up` is run."""

    def plan(self, job: LaunchJob) -> LaunchPlan:
        files, notes = {"manifest.yaml": self.manifest(job)}, list[str]()
        if self.spot and self.rate:
            notes.append("spot capacity costs less than the list price that is shown")
        if self.queue:
            files["kueue.yaml"] = self.kueue()
            notes.append(
                f"kueue.yaml creates the queue {self.queue}; a cluster administrator applies it, `up` does not"
            )
        if self.spot and self.grace > SPOT_GRACE:
            notes.append(f"a spot node gives its pods {SPOT_GRACE} s to save, not the {self.grace} s of launch.grace")
        apply, hosts, chips = self._kubectl(job, *APPLY), self.hosts * self.slices, self.shape.chips
        return LaunchPlan(
            files,
            [apply],
            hosts,
            chips=chips,
            dollars_hour=self.rate,
            hours=self.limit(),
            rented=True,
            notes=tuple(notes),
        )

    def by_hand(self, job: LaunchJob) -> list[str]:
        pods = self._kubectl(job, "get", "pods", "-l", f"jobset.sigs.k8s.io/jobset-name={job.name}", "-o", "name")
        process = [
            *self._kubectl(job, "exec", "POD"),
            "--",
            "sh",
            "-c",
            "pkill -KILL -o -P $(pgrep -o -f 'dtrain run')",
        ]
        host = self._kubectl(job, "delete", "pod", "POD", "--grace-period=0", "--force")
        notes = ("the names of its pods", "kills a process that trains", "ends a host without notice")
        return [f"{shlex.join(line)}    # {note}" for line, note in zip((pods, process, host), notes, strict=True)]

    def describe(self) -> list[str]:
        secret = f"variables: {', '.join(self.environment)}, with the values in secret {SECRET}"
        return [
            f"hosts: {self.hosts * self.slices} {'spot ' * self.spot}nodes, {self.slices} x {self.on}",
            f"cluster: {self._current()}, namespace {self.namespace}, service account {self.account}",
            f"program: image {self.image}",
            f"run folders: {f'gs://{self.bucket}' if self.bucket else f'volume claim {self.claim}'}",
            *([secret] if self.environment else []),
        ]

    def checks(self, job: LaunchJob) -> list[Check]:
        """Checks before anything is created; the cluster validates the manifest in a dry run."""
        self._ended_before(job)  # also fails if the cluster is unreachable or lacks JobSet
        needed = {"serviceaccount": self.account, "persistentvolumeclaim": self.claim, "localqueue": self.queue}
        checks: list[Check] = [partial(self._exists, kind, name) for kind, name in needed.items() if name]
        checks += [partial(self._exists, "secret", SECRET, self.environment)] if self.environment else []
        checks += [partial(self._accepted, job), partial(self._may_delete, job), partial(check_image, self.image)]
        if self.bucket:
            checks.append(partial(check_bucket, f"gs://{self.bucket}", f"service account {self.account}"))
            checks.append(partial(check_stop_request, stop_url(f"gs://{self.bucket}", job.name)))
        return checks

    def _accepted(self, job: LaunchJob) -> list[str]:
        """Validate the manifest under an unused name, as the spec of an ended JobSet cannot be changed."""
        probe = replace(job, name=f"dtrain-{job.launch}".ljust(len(job.name), "0"))
        run(self._kubectl(job, *APPLY, "--dry-run=server"), given=self.manifest(probe))
        return []

    def _may_delete(self, job: LaunchJob) -> list[str]:
        try:
            run(self._kubectl(job, "auth", "can-i", "delete", "jobsets.jobset.x-k8s.io", "--quiet"))
        except EnvironmentFault as error:
            if not error.message.endswith(NO):
                return [f"not checked: whether you may delete JobSets: {error.message}"]
            message = f"you may not delete JobSets in namespace {self.namespace}, which `stop` and `down` need"
            raise EnvironmentFault(message, "the role roles/container.developer allows it") from error
        return []

    def _exists(self, kind: str, name: str, keys: tuple[str, ...] = ()) -> list[str]:
        """Check that an object exists, and has these keys. Of a secret, only its key names are printed."""
        shown = "go-template={{range $key, $value := .data}}{{$key}} {{end}}" if keys else "name"
        try:
            names = run(self._kubectl(None, "get", kind, name, "--ignore-not-found", "-o", shown)).split()
        except EnvironmentFault as error:
            if "(Forbidden)" not in error.message:
                raise
            return [f"not checked: {kind} {name}, which this account may not read"]
        if not names:
            raise EnvironmentFault(f"namespace {self.namespace} has no {kind} {name}")
        if missing := [key for key in keys if key not in names]:
            raise EnvironmentFault(f"{kind} {name} in namespace {self.namespace} has no {', '.join(missing)}")
        return []

    def start_handle(self, job: LaunchJob) -> dict[str, str]:
        if "context" in job.handle:
            self._ended_before(job)  # an earlier launch, which may be in another cluster
        return {"jobset": job.name, "context": self._current(), "launch": job.launch}

    def find(self, job: LaunchJob) -> dict[str, str] | None:
        found = self._made_here(self._state(job), job)
        return {"jobset": job.name, "launch": launch_of(found)} if found else None

    def up(self, job: LaunchJob, say: Say) -> dict[str, str]:
        ended_before = self._ended_before(job)
        for line in remove_stop_request(stop_url(f"gs://{self.bucket}", job.name)) if self.bucket else []:
            say(line)
        if ended_before:
            run(self._kubectl(job, "delete", "jobset", job.name, "--wait=true"))
        try:
            printed = run(self._kubectl(job, *APPLY), given=self.manifest(job))
        except EnvironmentFault as error:
            message = f"{error.message}; parts of the launch may have been created"
            raise LeftBehind(message, f"dtrain launch down {job.name}") from error
        for line in printed.splitlines():
            say(line)
        return job.handle or self.start_handle(job)

    def status(self, job: LaunchJob) -> list[MachineState]:
        found = self._own(job)
        return rows(found) if found else [MachineState(f"jobset {job.name}", "absent")]

    def logs(self, job: LaunchJob, host: int | None, follow: bool) -> Iterator[tuple[str, str]]:
        chosen = f"jobset.sigs.k8s.io/jobset-name={job.name}"
        if host is not None:
            chosen += f",jobset.sigs.k8s.io/job-index={host // self.hosts}"
            chosen += f",batch.kubernetes.io/job-completion-index={host % self.hosts}"
        options = ["-c", "train", "--prefix", "--tail=-1", f"--max-log-requests={self.hosts * self.slices}"]
        command = self._kubectl(job, "logs", "-l", chosen, *options, *(["-f"] if follow else []))
        since: list[str] = []
        while True:  # pods may start later, and new ones after a restart
            now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            with subprocess.Popen([*command, *since], stdout=subprocess.PIPE, text=True, errors="replace") as process:
                assert process.stdout
                for line in process.stdout:
                    pod, _, text = line.rstrip("\n").partition("] ")
                    yield pod.lstrip("[").removeprefix("pod/").partition("/")[0], text
                    since = [f"--since-time={now}"]
            found = self._own(job) if follow else None
            if not found or ended(found):
                return
            time.sleep(POLL)

    def stop(self, job: LaunchJob, say: Say) -> None:
        """Delete the JobSet: its pods then save within `grace`. If it were only suspended, Kueue would resume it."""
        if self._to_delete(job, say):
            self._delete(job, "jobset", "--cascade=foreground")
            say(f"jobset {job.name} is deleted, and its pods have ended; saved checkpoints are kept")

    def down(self, job: LaunchJob, say: Say) -> None:
        for kind in ("jobset", "configmap") if self._to_delete(job, say) else ("configmap",):
            for line in self._delete(job, kind, "--wait=true").splitlines():
                say(line)

    def removes(self, job: LaunchJob) -> list[str]:
        pods = f"its pods, which get SIGTERM and at most {self.grace} s to save"
        return [f"jobset {job.name} and {pods}", f"configmap {job.name}"]

    def _to_delete(self, job: LaunchJob, say: Say) -> bool:
        """Whether the JobSet of this launch exists. EnvironmentFault if another launch has a JobSet of that name."""
        found = self._made_here(self._state(job), job)
        if found and launch_of(found) != _launch(job):
            hint = "to end that launch: remove this run's launch.json, and give the recipe file in place of the name"
            raise EnvironmentFault(f"JobSet {job.name} belongs to another launch; nothing was deleted", hint)
        if not found:
            say(f"jobset {job.name} is absent from namespace {self.namespace}: there was nothing to delete")
        return bool(found)

    def _delete(self, job: LaunchJob, kind: str, how: str) -> str:
        """Delete by launch id, so that an object of the same name from another launch stays."""
        command = self._kubectl(job, "delete", kind, "-l", f"{LABEL}={_launch(job)}", "--ignore-not-found", how)
        return run(command, wait=STOPPED + self.grace)

    def _own(self, job: LaunchJob) -> Any:
        """The JobSet, if it belongs to this launch; else None."""
        found = self._state(job)
        return found if found and launch_of(found) == _launch(job) != "" else None

    def _made_here(self, found: object, job: LaunchJob) -> Any:
        """The JobSet, or None. EnvironmentFault if dtrain did not create it: it is neither replaced nor deleted."""
        if found and not launch_of(found):
            message = (
                f"JobSet {job.name} in namespace {self.namespace} was not created by dtrain: it has no label {LABEL}"
            )
            raise EnvironmentFault(message, "give this run another name, as name=...")
        return found

    def _ended_before(self, job: LaunchJob) -> Any:
        """The JobSet of that name, or None. Locked if it has not ended."""
        found = self._state(job)
        if found and not ended(found):
            raise Locked(f"JobSet {job.name} exists already", f"dtrain launch status {job.name}")
        return self._made_here(found, job)

    def _state(self, job: LaunchJob) -> Any:
        printed = run(self._kubectl(job, "get", "jobset", job.name, "--ignore-not-found", "-o", "json"))
        return json.loads(printed) if printed.strip() else None

    def _current(self) -> str:
        """The context of the recipe, or kubectl's current one."""
        return self.context or run(["kubectl", "config", "current-context"]).strip()

    def _kubectl(self, job: LaunchJob | None, *words: str) -> list[str]:
        """A kubectl command in the context in which the job was launched, whichever is current now."""
        context = (job.handle.get("context") if job else None) or self.context
        return ["kubectl", *words, *(["--context", context] if context else []), "--namespace", self.namespace]


def _launch(job: LaunchJob) -> str:
    """Id of the launch: recorded, found, or that of a new job."""
    return job.handle.get("launch") or job.launch
