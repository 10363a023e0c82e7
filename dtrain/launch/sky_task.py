"""The task that SkyPilot runs on each host."""

import shlex
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from dtrain.launch.job import Job
from dtrain.launch.templates import filled
from dtrain.lockfile import PYTHON
from dtrain.process_info import METADATA, REPLACES_HOSTS, exports

if TYPE_CHECKING:
    from dtrain.launch.sky import Sky

MOUNTED = "/mnt/dtrain"
VENV = "~/.dtrain/venv/bin/python"
PROCESS = exports("$SKYPILOT_NODE_RANK", "$SKYPILOT_NUM_NODES", "$first:8476")


def task(target: "Sky", job: Job) -> str:
    """The task as YAML; secrets are in it by name alone."""
    # MOUNT_CACHED would upload late: a preemption loses what the run took as saved
    mounts: dict[str, Any] = {MOUNTED: {"source": target.bucket, "mode": "MOUNT"}} if target.bucket else {}
    program, setup = "dtrain" if target.image else f"{target.python or VENV} -m dtrain", ""
    if target.wheel and target.lock:
        wheel, lock = (Path(one).expanduser().absolute() for one in (target.wheel, target.lock))
        mounts |= {f"~/.dtrain/{wheel.name}": str(wheel), "~/.dtrain/lock.txt": str(lock)}
        script = {"PYTHON": PYTHON, "VENV": VENV, "WHEEL": wheel.name}
        setup = f"setup: |\n{_indented(filled('sky_setup.sh', script))}\n"
    variables = {**job.environment(), REPLACES_HOSTS: "1"}
    values = {
        "NAME": job.name,
        "NODES": str(target.num_nodes),
        "RESOURCES": _indented(yaml.safe_dump(resources(target, job), sort_keys=False, width=1000)),
        "SECRETS": yaml.safe_dump(dict.fromkeys(target.environment), default_flow_style=True, width=1000).strip(),
        "MOUNTS": _indented(yaml.safe_dump(mounts, width=1000)),
        "SETUP": setup,
        "RECIPE": _indented(job.recipe),
        "LAUNCH": f"export {shlex.join(f'{key}={value}' for key, value in variables.items())}",
        "METADATA": METADATA,
        "PROCESS": PROCESS,
        "COMMAND": f'{program} run "$recipe" --runs-dir {target.runs or MOUNTED} {shlex.join(target.run_options())}',
    }
    return filled("sky.yaml", values)


def resources(target: "Sky", job: Job) -> dict[str, Any]:
    """The task's section of that name: what all choices have in common, and the choices."""
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
    choices = [found for offer in target.offers for found in offer.choices()]
    chosen = choices[0] if len(choices) == 1 else {target.choice: choices}
    return {"job_recovery": again, **{key: value for key, value in common.items() if value is not None}, **chosen}


def _indented(text: str) -> str:
    return textwrap.indent(text.rstrip("\n"), "  ")
