"""Machines that are rented for one run on Google Cloud: what each kind of them has in common.

Hosts keep themselves (host.py): they read the job from the bucket, say there how they stand, and give the machines
back when it is over. What is done from here is put files, create, look, and delete.
"""

import json
import re
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from annotated_types import MinLen

from dtrain.errors import FieldError, RecipeError
from dtrain.fields import Positive, PositiveFloat
from dtrain.launch.bucket import Place
from dtrain.launch.job import Common, Job, Plan
from dtrain.launch.names import Bucket, Email, Project, Resource, Wheel, Word, Zone
from dtrain.launch.templates import filled
from dtrain.slices import Target, target

GRACE = 120
PORT = 8476
LETTER = re.compile(r"[a-z]")
LONGEST = 50
PINNED = ("jax", "jaxlib", "numpy", "optax", "orbax-checkpoint", "grain")


@dataclass(frozen=True, kw_only=True)
class Cloud(Common, ABC):
    """What all kinds of rented machines are told."""

    on: Word
    """What is asked for: v5e-64, v5p-128."""
    slices: Positive = 1
    project: Project
    zones: Annotated[tuple[Zone, ...], MinLen(1)]
    """Tried in this order."""
    bucket: Bucket
    """For the run folders; every host mounts it. It needs a hierarchical namespace."""
    wheel: Wheel | None = None
    """dtrain to install: a wheel on this machine."""
    image: Word | None = None
    """Or an image that has it."""
    spot: bool = False
    network: Resource | None = None
    subnetwork: Resource | None = None
    account: Email | None = None
    """The service account of the machines."""
    hours: PositiveFloat | None = None
    """How long the machines may be up for this run, all starts together; it is asked to save and leave then."""
    budget: PositiveFloat | None = None
    """Dollars that they may cost, by list prices; what comes first counts."""

    def __post_init__(self) -> None:
        if self.wheel is None and self.image is None:
            raise FieldError("wheel", "say what the machines run: wheel or image")
        try:
            shape = self.shape
        except RecipeError as error:
            raise FieldError("on", error.message, error.hint) from error
        if not shape.chip or not shape.chip.cloud:
            raise FieldError("on", f"{self.on} is not rented on Google Cloud")

    @property
    def shape(self) -> Target:
        """The slice, or the GPUs."""
        return target(self.on, self.slices)

    @property
    @abstractmethod
    def hosts(self) -> int:
        """Of one slice."""

    @property
    def rate(self) -> float | None:
        """Dollars an hour by list prices, all slices together."""
        price = self.shape.chip.price if self.shape.chip else None
        return price * self.shape.chips if price else None

    @property
    def limit(self) -> float | None:
        """Hours that the machines may be up."""
        bought = self.budget / self.rate if self.budget and self.rate else None
        return min((hours for hours in (self.hours, bought) if hours), default=None)

    @abstractmethod
    def creating(self, job: Job, zone: str) -> list[list[str]]:
        """The argvs that make the machines; startup.sh lies where they run."""

    @abstractmethod
    def looking(self, job: Job, zone: str) -> list[str]:
        """The argv that describes them in JSON."""

    @abstractmethod
    def state(self, described: Any) -> str:
        """The cloud's word in what that says."""

    @abstractmethod
    def deleting(self, job: Job, zone: str) -> list[list[str]]:
        """The argvs that take away all that was made."""

    @abstractmethod
    def giving_back(self, job: Job) -> list[tuple[str, str, str]]:
        """The same as a host asks for it itself: method, interface, path with ZONE for its zone."""

    def plan(self, job: Job) -> Plan:
        if not LETTER.match(job.name) or len(job.name) > LONGEST:
            message = f"{job.name}: machines' names begin with a letter and have at most {LONGEST}"
            raise RecipeError(message, "give the run another name: name=...")
        files = self.files(job)
        commands = [self.copying(job, files), *self.creating(job, self.zones[0]), *self.accompanying(job)]
        return Plan(files, commands, self.hosts * self.slices, self.shape.chips, self.rate, self.notes())

    def notes(self) -> tuple[str, ...]:
        """What a reader of the plan should know."""
        notes = [f"where {self.zones[0]} has none: {', '.join(self.zones[1:])}"] if self.zones[1:] else []
        if self.spot and self.rate:
            notes.append("spot capacity: the price below is that of the list, of which it costs a part")
        if not self.network:
            notes.append("machines have no address of the world: the default network must lead out by Cloud NAT")
        if self.limit and self.rate:
            paid = f"{self.limit * self.rate:,.2f} dollars buy {self.limit:.1f} hours"
            notes.append(f"{paid}; the run is asked to save and leave then")
        return tuple(notes)

    def copying(self, job: Job, files: Iterable[str]) -> list[str]:
        """The argv that puts files, and the wheel, into the bucket."""
        wheel = [str(Path(self.wheel).expanduser().absolute())] if self.wheel else []
        return self.place(job).copying([*files, *wheel])

    def place(self, job: Job) -> Place:
        """Where hosts and laptop meet."""
        return Place(self.bucket, job.name, self.project)

    def files(self, job: Job) -> dict[str, str]:
        """What goes into the bucket, and the script that machines start with."""
        from importlib.metadata import version

        told = {
            "name": job.name,
            "launch": job.handle.get("launch", ""),
            "project": self.project,
            "hosts": self.hosts * self.slices,
            "slices": self.slices,
            "port": PORT,
            "processes": self.processes,
            "arguments": self.run_options(),
            "environment": list(self.environment),
            "restarts": self.restarts,
            "hours": self.limit,
            "group": self.group(job),
            "give_back": self.giving_back(job),
        }
        return {
            "recipe.yaml": job.recipe,
            "job.json": json.dumps(told, indent=2) + "\n",
            "constraints.txt": "".join(f"{name}=={version(name)}\n" for name in PINNED),
            "startup.sh": self.script(job, f"-m dtrain.launch.host /mnt/dtrain/{job.name}/launch/job.json"),
        }

    def accompanying(self, job: Job) -> list[list[str]]:
        """The argvs of what is made beside them, once."""
        return []

    def dismissing(self, job: Job) -> list[list[str]]:
        """The argvs that take that away."""
        return []

    def group(self, job: Job) -> str:
        """The instance group, where that is how hosts find each other."""
        return ""

    @contextmanager
    def written(self, job: Job) -> Iterator[Path]:
        """The files, in a folder of their own."""
        with tempfile.TemporaryDirectory() as folder:
            for name, text in self.files(job).items():
                Path(folder, name).write_text(text)
            yield Path(folder)

    def script(self, job: Job, command: str, chips: bool = True) -> str:
        """What a machine starts with; one without chips beside them is kept by the wheel."""
        chip = self.shape.chip
        return filled(
            "startup.sh",
            {
                "NAME": job.name,
                "BUCKET": self.bucket,
                "IMAGE": (self.image or "") if chips else "",
                "WHEEL": Path(self.wheel or "").name,
                "EXTRA": ("tpu" if chip and chip.platform == "tpu" else "cuda") if chips else "",
                "COMMAND": command,
                "GRACE": str(GRACE),
            },
        )
