"""The launch section read from Terraform's outputs, with a real terraform; dtrain itself applies nothing."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from dtrain.cli.launch_lookup import requested
from tests.conftest import Dtrain
from tests.launch.test_names import RECIPE

needs_terraform = pytest.mark.skipif(not shutil.which("terraform"), reason="terraform is not installed here")
HOSTS = {"kind": "ssh", "hours": 23.5, "hosts": ["ada@10.0.0.11", "ada@10.0.0.12"], "runs": "/mnt/dtrain"}


@pytest.fixture
def configuration(tmp_path: Path) -> Path:
    folder = tmp_path / "pod"
    folder.mkdir()
    (folder / "main.tf").write_text(f'output "launch" {{\n  value = jsondecode({json.dumps(json.dumps(HOSTS))})\n}}\n')
    (tmp_path / "small.yaml").write_text(RECIPE)
    return folder


def terraform(folder: Path, *words: str) -> None:
    environment = os.environ | {"TF_CLI_CONFIG_FILE": "/dev/null", "TF_IN_AUTOMATION": "1"}
    done = subprocess.run(
        ["terraform", *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@needs_terraform
def test_the_output_of_an_applied_configuration_is_the_launch_section(in_process: Dtrain, configuration: Path) -> None:
    early = in_process("launch", "plan", "small.yaml", "--terraform", configuration, code=3)
    assert "it is not applied yet" in early.stderr
    assert "terraform -chdir=" in early.stderr
    terraform(configuration, "init", "-input=false")
    terraform(configuration, "apply", "-auto-approve", "-input=false")
    before = sorted(path.name for path in configuration.iterdir())
    shown = in_process("launch", "plan", "small.yaml", "--terraform", configuration)
    assert "2 hosts" in shown.stderr
    assert "ada@10.0.0.12" in shown.stdout
    assert sorted(path.name for path in configuration.iterdir()) == before
    limits = {"": "--hours 23.5", "launch.hours=3": "--hours 3", "launch.hours=48": "--hours 23.5"}
    for override, limit in limits.items():  # the machines are deleted then, whatever the recipe says
        target, job = requested(str(configuration.parent / "small.yaml"), [override] * bool(override), configuration)
        assert limit in " ".join(target.run_options())
        assert job.target["hours"] == float(limit.split()[1])


def test_overrides_of_a_run_that_is_named_are_refused(in_process: Dtrain, tmp_path: Path) -> None:
    for verb in ("status", "logs", "stop", "down"):
        refused = in_process("launch", verb, "small", "launch.hours=3", code=2)
        assert "small is the name of a run: its launch record says where it runs" in refused.stderr


@needs_terraform
def test_an_output_that_is_not_a_launch_section_is_refused(in_process: Dtrain, configuration: Path) -> None:
    (configuration / "main.tf").write_text('output "lunch" {\n  value = "soup"\n}\n')
    terraform(configuration, "init", "-input=false")
    terraform(configuration, "apply", "-auto-approve", "-input=false")
    assert "no output 'launch'" in in_process("launch", "up", "small.yaml", "--terraform", configuration, code=2).stderr


def test_a_folder_without_a_configuration_is_refused(in_process: Dtrain, tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(RECIPE)
    refused = in_process("launch", "up", "small.yaml", "--terraform", tmp_path / "nowhere", code=2)
    assert "contains no Terraform configuration" in refused.stderr
