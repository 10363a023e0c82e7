"""SkyPilot: a managed job on machines that SkyPilot rents, replaces and deletes. `sky` is run, never imported."""

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Le

from dtrain.core.errors import EnvironmentFault, LeftBehind, Locked, RecipeError
from dtrain.core.files import overwrite
from dtrain.core.types import Positive, PositiveFloat
from dtrain.launch.bucket import check_bucket, remove_object, stop_url, write_object
from dtrain.launch.commands import INSTALL
from dtrain.launch.job import Check, LaunchJob, LaunchPlan, MachineState, Rented, Say, check_image
from dtrain.launch.names import RemotePath, Wheel, Word, refuse
from dtrain.launch.targets.sky_client import PROVED, UNDER_CANCEL, WAITING, Client, ManagedJob
from dtrain.launch.targets.sky_task import OWNED, BucketUrl, Label, Offer, check_lock, task

LAUNCHING, STOPPING, CANCELLING, POLL = 1800.0, 900.0, 300.0, 5.0
"""Seconds to wait for a submission (the first creates SkyPilot's controller), a save, a cancellation; between polls."""


@dataclass(frozen=True, kw_only=True)
class Sky(Offer, Rented):
    """A managed job of SkyPilot, on one slice of TPUs, on GPUs, or on CPU nodes."""

    kind: Literal["sky"] = "sky"
    fallbacks: tuple[Offer, ...] = ()
    """Alternative machines: on, infra, spot."""
    choice: Literal["ordered", "any_of"] = "ordered"
    """Choice among infra and fallbacks: the first that is available, or the cheapest."""
    strategy: Literal["failover", "eager_next_region"] = "failover"
    """After a preemption: try the same region first, or another one at once."""
    nodes: Positive = 1
    """Number of CPU nodes."""
    cpus: Positive | None = None
    """Smallest number of CPUs of each node."""
    memory: Positive | None = None
    """Smallest memory of each node, in GB."""
    max_hourly_cost: PositiveFloat | None = None
    """Highest price of each node, in dollars an hour; a TPU slice is one node."""
    bucket: BucketUrl | None = None
    """Bucket for run folders, mounted on every host: gs://my-runs, s3://my-runs."""
    runs: RemotePath | None = None
    """Or a folder that all nodes of your own cluster share."""
    image: Word | None = None
    """Container image with dtrain, as built by `launch/Dockerfile`."""
    wheel: Wheel | None = None
    """Or dtrain's wheel on this machine, with `lock`."""
    lock: RemotePath | None = None
    """The versions of all packages, with hashes, as `uv pip compile --generate-hashes` writes them."""
    python: RemotePath | None = None
    """Or a Python on the nodes that dtrain is installed for."""
    labels: dict[Label, Label] = field(default_factory=dict)
    """Labels of the machines, by which costs are accounted for."""
    network_tier: Literal["standard", "best"] | None = None
    """SkyPilot's tier of the network between hosts; default: the cloud's own."""
    priority: Annotated[int, Ge(-1000), Le(1000)] | None = None
    """Of the job in SkyPilot's queue: higher ones start first."""
    server: Word | None = None
    """Address of SkyPilot's API server; by default the one chosen by `sky api login`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        clouds = {cloud for offer in self.offers for cloud in offer.clouds}
        programs, tpu = sum(map(bool, (self.image, self.wheel, self.python))), self.platform == "tpu"
        refuse(
            (self.on and self.nodes > 1, "nodes", "`on` determines the number of nodes", "leave out `nodes`"),
            (tpu and (self.cpus or self.memory), "cpus", "the host size of a TPU slice is fixed", ""),
            (
                len({one.sky_nodes for one in self.offers}) > 1,
                "fallbacks",
                "all must have the same number of nodes",
                "",
            ),
            (len({one.platform for one in self.offers}) > 1, "fallbacks", "TPUs, GPUs and CPUs cannot be mixed", ""),
            (bool(self.bucket) == bool(self.runs), "bucket", "set either bucket or runs, for run folders", ""),
            (self.runs and clouds - OWNED, "runs", "rented machines do not share a folder", "set `bucket`"),
            (programs != 1, "image", "set exactly one of image, wheel and python", ""),
            (bool(self.wheel) != bool(self.lock), "lock", "set both wheel and lock, or neither", ""),
            (self.wheel and "slurm" in clouds, "wheel", "nodes of SLURM share a home folder", "use image or python"),
            (self.budget and not self.rate, "budget", "not all prices are known", "set max_hourly_cost, or hours"),
        )

    @property
    def offers(self) -> tuple[Offer, ...]:
        """The machines that are accepted, first choice first."""
        return (self, *self.fallbacks)

    @property
    def num_nodes(self) -> int:
        """Number of nodes as SkyPilot counts them: a TPU slice is one node."""
        return self.sky_nodes if self.on else self.nodes

    @property
    def rate(self) -> float | None:
        """Highest price in dollars an hour: by max_hourly_cost, else by Google Cloud's list; None if not known."""
        if self.max_hourly_cost:
            return self.max_hourly_cost * self.num_nodes
        rented = [one for one in self.offers if one.clouds - OWNED]
        prices = [one.price for one in rented if one.price and one.clouds <= {"gcp", *OWNED}]
        return max(prices) if rented and len(prices) == len(rented) else None

    def plan(self, job: LaunchJob) -> LaunchPlan:
        if not job.name[0].isalpha():
            raise RecipeError(f"name {job.name!r}: names of SkyPilot jobs begin with a letter", "give name=...")
        others = dict.fromkeys(one.on for one in self.fallbacks if one.on != self.on)
        notes = [f"fallback {on} is not predicted: use `dtrain plan RECIPE --on {on}`" for on in others]
        paid = any(one.clouds - OWNED for one in self.offers)
        if self.max_hourly_cost and self.platform == "gpu":
            notes.append("on gcp SkyPilot compares max_hourly_cost with the GPU price only; the hosts cost extra")
        elif self.rate and not self.max_hourly_cost:
            notes.append(
                "the price is on demand in Google Cloud's cheapest region; other regions, clouds and spot differ"
            )
        elif paid and not self.rate:
            notes.append("not all prices are known: set max_hourly_cost to limit the price per hour")
        notes.append("waiting for machines has no time limit and costs nothing; `dtrain launch down` ends it")
        notes.append("SkyPilot's jobs controller is a paid machine too, unless the API server does its work")
        files, hosts = {"task.yaml": task(self, job)}, self.hosts if self.on else self.nodes
        chips, hours = self.shape.chips if self.shape else 0, self.limit()
        return LaunchPlan(files, [self._launch(job)], hosts, chips, self.rate, hours, rented=paid, notes=tuple(notes))

    def by_hand(self, job: LaunchJob) -> list[str]:
        return [
            "sky jobs queue    # the name of the cluster that runs the job",
            "ssh CLUSTER \"pkill -KILL -o -P \\$(pgrep -o -f 'dtrain run')\"    # kills a process that trains",
            "and delete one of the cluster's machines in the cloud's console: ends a host without notice",
        ]

    def describe(self) -> list[str]:
        what = [f"{one.on or f'{self.nodes} CPU nodes'} on {', '.join(one.infra)}" for one in self.offers]
        lines = [f"hosts: {', or '.join(what)}", f"program: {self.image or self.wheel or self.python}"]
        lines += [f"lock file, sent to the hosts: {self.lock}"] if self.lock else []
        # the server gets the task, and the values of the environment variables in it
        return lines + ([f"API server, in place of the one you logged in to: {self.server}"] if self.server else [])

    def checks(self, job: LaunchJob) -> list[Check]:
        checks = [*super().checks(job), partial(self._check_program, job.extras)]
        checks += [partial(check_bucket, self.bucket, "the account of the hosts")] if self.bucket else []
        return [*checks, partial(check_image, self.image)] if self.image else checks

    def _check_program(self, extras: Sequence[str]) -> list[str]:
        if self.wheel and self.lock:
            check_lock(Path(self.lock).expanduser(), Path(self.wheel).expanduser(), self.platform, extras)
        if not PROVED.search(version := self._client.sky("--version").strip()):
            raise EnvironmentFault(f"{version}: dtrain was tested with 0.14.1", INSTALL["sky"])
        return []

    def start_handle(self, job: LaunchJob) -> dict[str, str]:
        """The newest earlier job of that name: the new one has a higher number, even if `up` does not receive it."""
        listed = [one.id for one in self._client.jobs(job.name)]  # none while the controller is stopped
        return {"after": max([job.handle.get("id", "0"), *listed], key=int)}

    def up(self, job: LaunchJob, say: Say) -> dict[str, str]:
        if alive := next((one for one in self._client.jobs(job.name) if not one.over), None):
            raise Locked(f"{alive} is {alive.state.lower()}", f"dtrain launch status {job.name}, or name=...")
        self._remove_stop_request(job)
        path = Path(self._launch(job)[-1])
        path.parent.mkdir(parents=True, exist_ok=True)
        overwrite(path, task(self, job))
        hint = f"`sky api status` and `sky jobs queue` show its state; `dtrain launch down {job.name}` cancels it"
        try:
            printed = self._client.sky(*self._launch(job)[1:], wait=LAUNCHING)
        except EnvironmentFault as error:
            if isinstance(error.__cause__, OSError):  # the program did not start
                raise
            raise LeftBehind(error.message, "; ".join(filter(None, (error.hint, hint)))) from error
        found = re.search(r"Managed Job ID: (\d+)", printed)
        if not found:
            raise LeftBehind("sky jobs launch printed no job id", hint)
        say(f"managed job {found[1]}")
        return {"id": found[1]}

    def find(self, job: LaunchJob) -> dict[str, str] | None:
        if found := self._client.find(job.name, {}, own=True):
            return {"id": found.id}
        return {"id": found.id, "user": found.user} if (found := self._job(job)) else None

    def status(self, job: LaunchJob) -> list[MachineState]:
        found = self._job(job)
        if not found:
            what = "SkyPilot does not list it; if its controller is stopped, `sky jobs queue -r` starts it"
            return [MachineState(f"job {job.handle.get('id', job.name)}", "absent", what)]
        word = "ended" if found.over else "waiting" if found.state in WAITING else "running"
        return [MachineState(str(found), word, found.details(), found.code, found.row.get("job_duration"))]

    def logs(self, job: LaunchJob, host: int | None, follow: bool) -> Iterator[tuple[str, str]]:
        if not (found := self._job(job)):
            raise EnvironmentFault(f"SkyPilot does not list a job of {job.name}", f"dtrain launch status {job.name}")
        state = [("sky", None, f"{found}: {found.details()}")] if found.state in WAITING else []
        # while no run is alive, `sky jobs logs` waits without output, even with --no-follow
        lines = chain(state, self._client.lines(found.id, follow) if follow or not state else ())
        return ((machine, text) for machine, rank, text in lines if host in (None, rank))

    def stop(self, job: LaunchJob, say: Say) -> None:
        self._end(job, say, save=True)

    def down(self, job: LaunchJob, say: Say) -> None:
        self._end(job, say, save=False)
        say(f"{self.bucket or self.runs} stays, and so does SkyPilot's jobs controller, if there is one: `sky status`")

    def removes(self, job: LaunchJob) -> list[str]:
        return [f"{self._client.own(job.name, job.handle)} with its machines"]

    def _end(self, job: LaunchJob, say: Say, save: bool) -> None:
        """Wait until it is over. With `save`, a live run is asked to save and end; other jobs are cancelled."""
        seconds, asked, found = STOPPING if save else CANCELLING, set[bool](), self._client.own(job.name, job.handle)
        end = time.monotonic() + seconds
        while not found.over:
            request = save and found.state not in WAITING
            if request in asked or found.state == UNDER_CANCEL:
                pass
            elif request:
                self._request_stop(job)
            else:
                self._client.sky("jobs", "cancel", "-y", found.id)
            asked.add(request)
            if time.monotonic() > end:
                hint = f"dtrain launch status {job.name}; `dtrain launch down {job.name}` ends it without saving"
                raise LeftBehind(f"{found} is still {found.state.lower()} after {seconds:.0f} s", hint)
            time.sleep(POLL)
            found = self._client.own(job.name, {"id": found.id})
        say(f"{found}: {found.details()}")

    def _request_stop(self, job: LaunchJob) -> None:
        """Write the stop request to the run's folder."""
        stop = Path(self.runs or "").expanduser() / job.name / "stop"
        if self.bucket:
            write_object(stop_url(self.bucket, job.name), "stop\n")
        elif stop.parent.is_dir():
            stop.touch()
        else:
            raise EnvironmentFault(
                f"{stop.parent} does not exist on this machine", f"create {stop} on a machine that has the folder"
            )

    def _remove_stop_request(self, job: LaunchJob) -> None:
        if self.bucket:
            remove_object(stop_url(self.bucket, job.name))
        else:
            Path(self.runs or "", job.name, "stop").expanduser().unlink(missing_ok=True)

    def _launch(self, job: LaunchJob) -> list[str]:
        secrets = [word for name in self.environment for word in ("--secret", name)]  # `sky` reads the values itself
        path = (job.folder or Path("runs", job.name)) / "launch" / "task.yaml"
        return ["sky", "jobs", "launch", "-y", "-d", "-n", job.name, *secrets, str(path)]

    @property
    def _client(self) -> Client:
        return Client(self.server)

    def _job(self, job: LaunchJob) -> ManagedJob | None:
        return self._client.find(job.name, job.handle)
