"""The task that SkyPilot runs on each host, and the machines it can rent, under SkyPilot's names. SkyPilot accepts
names that do not exist, so they are checked here."""

import re
import shlex
import textwrap
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from email import message_from_bytes
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import yaml
from annotated_types import MinLen

from dtrain.core.chips import PER_HOST
from dtrain.core.errors import EnvironmentFault
from dtrain.core.process_info import METADATA, REPLACES_HOSTS, exports
from dtrain.core.slices import Target as Slice
from dtrain.core.types import Sentence
from dtrain.launch.job import CHIPS_A_HOST, LaunchJob, fill_template, shape_of
from dtrain.launch.names import Word, _like, refuse

PYTHON, SYSTEM = "3.12", "x86_64-manylinux_2_31"
"""Python version and platform of the hosts; libtpu requires this glibc."""
PINNED = re.compile(r"([A-Za-z0-9._-]+)(\[[^\]]*\])?==[^\s;,*]+( *;[^#\\]*?)?(\s+--hash=sha256:[0-9a-f]{64})+")
DEVICE = {"tpu": (" --extra tpu", "libtpu"), "gpu": (" --extra cuda", r"jax-cuda\d+-plugin"), "cpu": ("", "jaxlib")}
"""Per platform: the extra for `uv pip compile`, and the package without which JAX would fall back to the CPU."""


def check_lock(lock: Path, wheel: Path, platform: str, extras: Sequence[str] = ()) -> None:
    """Check that the lock file pins everything that dtrain's wheel, with the extras that a recipe needs, requires on
    the platform: tpu, gpu or cpu.

    Raises EnvironmentFault if it does not, or if the wheel is not a wheel of dtrain.
    """
    extra, device = DEVICE[platform]
    command = f"uv pip compile pyproject.toml{extra}{''.join(f' --extra {name}' for name in extras)} --generate-hashes"
    hint = f"{command} --python-version {PYTHON} --python-platform {SYSTEM} -o {lock}"
    required = _requirements(wheel, extras)
    try:
        text = lock.read_text().replace("\\\n", " ")
    except (OSError, ValueError) as error:
        raise EnvironmentFault(f"{lock} cannot be read: {error}", hint) from error
    lines = [line for row in text.splitlines() if (line := re.sub(r"(^| )#.*", "", row).strip())]
    loose = next((line for line in lines if not PINNED.fullmatch(line)), "")
    if loose:
        raise EnvironmentFault(f"{lock}: {loose[:80]!r} does not pin one version with == and hashes", hint)
    pinned = {_normal(line) for line in lines}
    has_device = any(re.fullmatch(device, name) for name in pinned)
    missing = sorted(required - pinned) + [device.replace(r"\d+", "13")] * (not has_device)
    if missing:
        raise EnvironmentFault(f"{lock} does not pin {', '.join(missing)}", hint)


def _requirements(wheel: Path, extras: Sequence[str]) -> set[str]:
    """Names of the packages that dtrain's wheel requires with these extras."""
    hint = "pip wheel --no-deps -w dist ."
    try:
        with zipfile.ZipFile(wheel) as archive:
            name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
            metadata = message_from_bytes(archive.read(name))
    except (OSError, zipfile.BadZipFile, StopIteration) as error:
        raise EnvironmentFault(f"{wheel} is not a wheel: {str(error) or 'it has no METADATA'}", hint) from error
    if metadata["Name"] != "dtrain":
        raise EnvironmentFault(f"{wheel} is a wheel of {metadata['Name']}, not of dtrain", hint)
    lines = [requirement.partition(";") for requirement in metadata.get_all("Requires-Dist", [])]
    wanted = {f"extra == '{extra}'" for extra in extras}
    return {_normal(name) for name, _, marker in lines if not marker or marker.strip().replace('"', "'") in wanted}


def _normal(requirement: str) -> str:
    """The package name in a requirement, normalised as in PEP 503."""
    return re.sub(r"[-_.]+", "-", re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]).lower()


if TYPE_CHECKING:
    from dtrain.launch.targets.sky import Sky

MOUNTED = "/mnt/dtrain"
VENV = "~/.dtrain/venv/bin/python"
PROCESS = exports("$SKYPILOT_NODE_RANK", "$SKYPILOT_NUM_NODES", "$first:8476")
OWNED = {"k8s", "kubernetes", "slurm", "ssh"}
"""Existing machines of the user: no price, no spot capacity, any number of GPUs."""
CLOUDS = (
    "aws|azure|gcp|ibm|lambda|scp|oci|runpod|vast|vsphere|cudo|fluidstack|paperspace|primeintellect|do|nebius|"
    "hyperbolic|seeweb|shadeform|yotta|mithril|verda|k8s|kubernetes|slurm|ssh"
)
Infra = Annotated[
    str,
    _like(rf"(?:{CLOUDS})(?:/[A-Za-z0-9][A-Za-z0-9_.:@-]{{0,127}}){{0,2}}"),
    Sentence("where SkyPilot looks, as gcp, gcp/us-central1, aws, k8s/CONTEXT or slurm/CLUSTER/PARTITION"),
]
BucketUrl = Annotated[
    str, _like(r"(?:gs|s3)://[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]"), Sentence("a bucket, as gs://my-runs or s3://my-runs")
]
Label = Annotated[str, _like(r"[a-z0-9_-]{1,63}"), Sentence("a label: a to z, 0 to 9, '_' and '-', 63 at most")]


@dataclass(frozen=True, kw_only=True)
class Offer:
    """One choice of machines: their kind, their location, and whether to use spot capacity."""

    on: Word | None = None
    """Slice or GPUs to request: v5e-64, v5p-128, h100-16; CPU nodes if not set."""
    infra: Annotated[tuple[Infra, ...], MinLen(1)] = ("gcp",)
    """Locations, in order: gcp, gcp/us-central1, aws, k8s/CONTEXT, slurm/CLUSTER/PARTITION."""
    spot: bool = False
    """Rent capacity that the cloud may take back, for less; the run is then resumed elsewhere."""

    def __post_init__(self) -> None:
        shape, tpu = self.shape, self.platform == "tpu"
        chip, each = shape and shape.chip, min(shape.chips, PER_HOST) if shape else 0
        sold = chip.cloud.sold if chip and chip.cloud and "gcp" in self.clouds else (1, 2, 4, 8)
        rented = self.platform == "gpu" and self.clouds - OWNED
        refuse(
            (self.spot and self.clouds & OWNED, "spot", "only clouds have spot capacity", "spot: false"),
            (shape and not chip, "on", f"{self.on} cannot be rented", "leave out `on`, and set `nodes` and `cpus`"),
            (chip and not _name(shape), "on", f"SkyPilot has no {self.on}", "launch.kind: gke, or Terraform and ssh"),
            (tpu and ":" in (self.on or ""), "on", f"SkyPilot needs a number, not {self.on}", "as v5p-256"),
            (tpu and self.clouds != {"gcp"}, "infra", "SkyPilot rents TPU slices only on gcp", "launch.kind: gke"),
            (rented and each not in sold, "on", f"no machine type has {each} of them", f"available: {sold}"),
        )

    @property
    def clouds(self) -> set[str]:
        """The first parts of `infra`, the names of clouds."""
        return {infra.partition("/")[0] for infra in self.infra}

    @property
    def shape(self) -> Slice | None:
        """The slice or the GPUs; None for CPU nodes."""
        return shape_of(self.on) if self.on else None

    @property
    def platform(self) -> str:
        """tpu, gpu or cpu."""
        return self.shape.platform if self.shape else "cpu"

    @property
    def hosts(self) -> int:
        """Number of hosts of a slice or of GPUs; a 2-D slice of up to eight chips has one host."""
        if self.shape is None or self.platform != "tpu":
            return self.shape.hosts if self.shape else 1
        planar = len(self.shape.shape) == 2 and self.shape.chips <= 2 * CHIPS_A_HOST
        return 1 if planar else self.shape.chips // CHIPS_A_HOST

    @property
    def sky_nodes(self) -> int:
        """Number of nodes as SkyPilot counts them: a TPU slice is one node."""
        return 1 if self.platform == "tpu" else self.hosts

    @property
    def price(self) -> float | None:
        """Google Cloud's list price in dollars an hour; None if nothing is rented or it is not known."""
        chip = self.shape.chip if self.shape and self.clouds - OWNED else None
        return chip.price * self.shape.rented if self.shape and chip and chip.price else None

    def choices(self) -> list[dict[str, object]]:
        """The resources to request from SkyPilot, for each location of `infra`."""
        machine: dict[str, Any] = {"accelerators": _name(self.shape)} if self.shape else {}
        if self.platform == "tpu" and self.shape and self.shape.chip and self.shape.chip.cloud:
            # SkyPilot's default runtime version is wrong for v5e
            machine["accelerator_args"] = {"tpu_vm": True, "runtime_version": self.shape.chip.cloud.runtime}
        return [{"infra": infra, **machine, "use_spot": self.spot} for infra in self.infra]


def _name(shape: Slice | None) -> str:
    """SkyPilot's accelerator name with the number; empty if it has none."""
    chip, cloud = (shape.chip, shape.chip.cloud) if shape and shape.chip else (None, None)
    if shape is None or chip is None or cloud is None:
        return ""
    if cloud.sky:
        return f"{cloud.sky}:{min(shape.chips, PER_HOST)}"
    return f"tpu-{cloud.accelerator}-{shape.chips * chip.units_per_chip}" if cloud.accelerator else ""


def task(target: "Sky", job: LaunchJob) -> str:
    """The task as YAML; of secrets it contains only the names."""
    # MOUNT_CACHED would upload later: a preemption would lose checkpoints that the run considers saved
    mounts: dict[str, Any] = {MOUNTED: {"source": target.bucket, "mode": "MOUNT"}} if target.bucket else {}
    program, setup = "dtrain" if target.image else f"{target.python or VENV} -m dtrain", ""
    if target.wheel and target.lock:
        wheel, lock = (Path(name).expanduser().absolute() for name in (target.wheel, target.lock))
        mounts |= {f"~/.dtrain/{wheel.name}": str(wheel), "~/.dtrain/lock.txt": str(lock)}
        script = {"PYTHON": PYTHON, "VENV": VENV, "WHEEL": wheel.name}
        setup = f"setup: |\n{_indented(fill_template('sky_setup.sh', script))}\n"
    variables, options = {**job.environment(), REPLACES_HOSTS: "1"}, shlex.join(target.run_options(job))
    values = {
        "NAME": job.name,
        "NODES": target.num_nodes,
        "RESOURCES": _indented(yaml.safe_dump(resources(target, job), sort_keys=False, width=1000)),
        "SECRETS": yaml.safe_dump(dict.fromkeys(target.environment), default_flow_style=True, width=1000).strip(),
        "MOUNTS": _indented(yaml.safe_dump(mounts, width=1000)),
        "SETUP": setup,
        "RECIPE": _indented(job.recipe),
        "LAUNCH": f"export {shlex.join(f'{key}={value}' for key, value in variables.items())}",
        "METADATA": METADATA,
        "PROCESS": PROCESS,
        "COMMAND": f'{program} run "$recipe" --runs-dir {target.runs or MOUNTED} {options}',
    }
    return fill_template("sky.yaml", values)


def resources(target: "Sky", job: LaunchJob) -> dict[str, object]:
    """The section `resources` of the task: the common settings, and the choices."""
    common = {
        "cpus": target.cpus and f"{target.cpus}+",
        "memory": target.memory and f"{target.memory}+",
        "image_id": target.image and f"docker:{target.image}",
        "max_hourly_cost": target.max_hourly_cost,
        "network_tier": target.network_tier,
        "priority": target.priority,
        "labels": {**target.labels, "dtrain": job.name},
    }
    again = {"strategy": target.strategy.upper(), "recover_on_exit_codes": [75], "max_restarts_on_errors": 0}
    choices = [choice for offer in target.offers for choice in offer.choices()]
    chosen = choices[0] if len(choices) == 1 else {target.choice: choices}
    return {"job_recovery": again, **{key: value for key, value in common.items() if value is not None}, **chosen}


def _indented(text: str) -> str:
    return textwrap.indent(text.rstrip("\n"), "  ")
