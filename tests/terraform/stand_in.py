"""A real terraform with fake Google providers, which have the full schema and create nothing."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import SHARED

ROOT = Path(__file__).parents[2] / "terraform"
KIT = SHARED / "kits" / "terraform"
SCHEMA = KIT / "google_schema.json"
CLOUD = Path(__file__).with_name("cloud.py")

needs_terraform = pytest.mark.skipif(not shutil.which("terraform"), reason="terraform is not installed here")


def terraform(folder: Path, *words: str, provider: bool = True) -> str:
    """The stdout of a command in a folder; the test fails if the command does, and is skipped without the kit."""
    stand_in = [sys.executable, str(KIT / "google_stub.py"), str(_schema(folder)), "--"] if provider else []
    environment = os.environ | {"TF_CLI_CONFIG_FILE": "/dev/null", "TF_IN_AUTOMATION": "1"}
    command = [*stand_in, "terraform", *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@dataclass(frozen=True)
class Answer:
    """What plan, apply or destroy said: the exit code, the errors, and the planned action for each resource."""

    code: int
    errors: list[str]
    actions: dict[str, str]

    @property
    def refused(self) -> bool:
        """Whether the configuration itself refused, with a message that it contains."""
        ours = ("Resource precondition failed", "Resource postcondition failed", "Invalid value for variable")
        return self.code == 1 and bool(self.errors) and all(one.startswith(ours) for one in self.errors)


def asked(folder: Path, cloud: Path, *words: str) -> Answer:
    """The answer of a command that knows -json, with the providers of a cloud that remembers; see cloud.py."""
    stand_in = [sys.executable, str(CLOUD), str(KIT / "google_stub.py"), str(_schema(folder)), str(cloud), "--"]
    command = [*stand_in, "terraform", *words, "-json", "-input=false"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    said = [line["diagnostic"] for line in lines if line.get("diagnostic", {}).get("severity") == "error"]
    errors = [" ".join(f"{one['summary']}: {one.get('detail', '')}".split()) for one in said]
    changes = [line["change"] for line in lines if line["type"] == "planned_change"]
    actions = {one["resource"]["addr"]: one["action"] for one in changes if one["action"] not in ("noop", "read")}
    return Answer(done.returncode, errors or [done.stderr] * bool(done.returncode), actions)


def copied(tmp_path: Path, folder: Path) -> Path:
    """One folder in a copy of all of terraform/, after `terraform init`."""
    shutil.copytree(ROOT, tmp_path / "terraform", ignore=shutil.ignore_patterns(".terraform*"))
    terraform(tmp_path / "terraform" / folder, "init", "-no-color", "-backend=false")
    return tmp_path / "terraform" / folder


def runs(here: Path) -> dict[str, Any]:
    """The plan, or the final state, of each `run` of the tests of a folder, by its name."""
    lines = map(json.loads, terraform(here, "test", "-json", "-verbose").splitlines())
    found = [
        (line["@testrun"], line.get("test_plan") or line.get("test_state")) for line in lines if "@testrun" in line
    ]
    return {name: value for name, value in found if value}


def _schema(folder: Path) -> Path:
    """The schema of the kit, plus two data sources that it lacks, with its rules corrected to those of the provider."""
    if not KIT.is_dir():
        pytest.skip("the fake Google providers are not in the shared folder next to this checkout")
    pytest.importorskip("grpc")
    pytest.importorskip("msgpack")
    path = next(parent for parent in folder.parents if parent.name == "terraform").parent / "schema.json"
    if path.exists():
        return path
    schema = json.loads(SCHEMA.read_text())
    text, given = {"type": "string", "computed": True}, {"type": "string", "optional": True, "computed": True}
    common = {"id": text, "name": given, "project": given, "zone": given, "self_link": given}
    interfaces = {"type": ["list", ["object", {"network_ip": "string"}]], "computed": True}
    more = {
        "google_compute_instance": common | {"network_interface": interfaces},
        "google_compute_instance_group": common | {"instances": {"type": ["set", "string"], "computed": True}},
    }
    google = next(value for name, value in schema["provider_schemas"].items() if name.endswith("/google"))
    for name, attributes in more.items():
        google["data_source_schemas"].setdefault(name, {"version": 0, "block": {"attributes": attributes}})
    for provider in schema["provider_schemas"].values():
        for rule in (rule for rules in provider.get("rules", {}).values() for rule in rules):
            if rule["path"] not in rule.get("exactly_one_of", [rule["path"]]):
                rule["exactly_one_of"].append(rule["path"])  # the group always includes the argument itself
    path.write_text(json.dumps(schema))
    return path
