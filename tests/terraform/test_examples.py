"""The examples: their plans, two stacks in one project, the resources that destroy keeps, and their launch section."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dtrain.recipe.load import part
from dtrain.recipe.recipe import Launch
from tests.terraform.stand_in import ROOT, copied, needs_terraform, runs, terraform

EXAMPLES = sorted(path.parent.name for path in ROOT.glob("examples/*/main.tf"))
NAMES = ("name", "name_prefix", "account_id", "role_id", "repository_id")
SHARED = {"google_project_service"}
"""Resource types that two stacks of one project both declare, and neither removes."""

pytestmark = [needs_terraform, pytest.mark.slow]


@pytest.fixture(scope="module", params=EXAMPLES)
def example(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """The name of an example, and the plans or states of its test runs."""
    here = copied(tmp_path_factory.mktemp(request.param), Path("examples") / request.param)
    assert "Success" in terraform(here, "validate", "-no-color")
    return request.param, runs(here)


def created(plan: dict[str, Any]) -> list[dict[str, Any]]:
    return [one for one in plan["resource_changes"] if one["mode"] == "managed"]


def test_its_plan(example: tuple[str, dict[str, Any]], golden: Callable[[str, str], None]) -> None:
    name, planned = example
    golden(f"terraform_{name}.txt", "\n".join(map(described, created(planned["planned"]))) + "\n")


def described(resource: dict[str, Any]) -> str:
    """An address and its arguments, one per line, without the startup script, which has its own tests."""
    arguments = bare(resource["change"]["after"])
    for key in ("metadata_startup_script", "input", "project"):
        arguments.pop(key, None)
    arguments.get("metadata", {}).pop("startup-script", None)
    lines = [f"  {key} = {json.dumps(value, sort_keys=True)}" for key, value in sorted(arguments.items()) if value]
    return "\n".join([resource["address"], *lines])


def bare(value: Any) -> Any:
    """The value without arguments that are not set."""
    if isinstance(value, dict):
        return {key: bare(one) for key, one in value.items() if one not in (None, [], {})}
    return [bare(one) for one in value] if isinstance(value, list) else value


def test_two_stacks_have_no_name_in_common(example: tuple[str, dict[str, Any]]) -> None:
    _, planned = example
    first, second = (names(planned[run]) for run in ("planned", "second_stack"))
    assert len(first) > 8
    assert first & second == set()


def names(plan: dict[str, Any]) -> set[tuple[str, str]]:
    """Resources that must be unique in a project, as type and name; pools belong to their cluster."""
    found = [(one["type"], one["change"]["after"].get(key)) for one in created(plan) for key in NAMES]
    return {(kind, name) for kind, name in found if name and kind not in SHARED | {"google_container_node_pool"}}


def test_destroy_keeps_the_bucket_and_nothing_else(example: tuple[str, dict[str, Any]]) -> None:
    _, planned = example
    left = [one["type"] for one in created(planned["planned"]) if one["change"]["after"].get("deletion_policy")]
    assert left == ["google_storage_bucket"]


def test_every_resource_with_labels_has_owner_and_run(example: tuple[str, dict[str, Any]]) -> None:
    _, planned = example
    labels = [
        one["change"]["after"].get(key)
        for one in created(planned["planned"])
        for key in ("labels", "resource_labels")
        if key in one["change"]["after"]
    ]
    assert labels
    assert [one for one in labels if not (one and {"owner", "run"} <= one.keys())] == []


def test_no_host_may_create_machines(example: tuple[str, dict[str, Any]]) -> None:
    _, planned = example
    members = [one["change"]["after"] for one in created(planned["planned"]) if one["type"].endswith("_iam_member")]
    roles = {member["role"] for member in members if member.get("role")}
    assert "roles/storage.objectUser" in roles
    assert [role for role in roles if "dmin" in role or role in ("roles/owner", "roles/editor")] == []


def test_its_output_is_a_launch_section(example: tuple[str, dict[str, Any]]) -> None:
    """The output has only keys of the recipe, which refuses unknown ones."""
    _, planned = example
    section = dict(planned["up"]["outputs"]["launch"]["value"])
    if "addresses" in section:  # a mock gives all instances of a resource the same address
        section["addresses"] = [f"10.0.0.{number}" for number in range(2, 2 + len(section["addresses"]))]
    assert part(Launch, section, "launch").kind == section["kind"]


def test_setup_reaches_every_host(example: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    """With fake commands that record their arguments, and an ssh that fails once."""
    _, planned = example
    outputs = planned["up"]["outputs"]
    for name in ("gcloud", "kubectl", "ssh", "sleep", "ssh-keygen"):
        fails = f"[ -e {tmp_path}/tried ] || {{ touch {tmp_path}/tried; exit 255; }}" if name == "ssh" else ""
        (tmp_path / name).write_text(f'#!/bin/sh\necho "{name} $*" >> {tmp_path}/log\n{fails}\n')
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    subprocess.run(["sh", "-ec", outputs["setup"]["value"]], env=environment, check=True, stdin=subprocess.DEVNULL)
    log = (tmp_path / "log").read_text().splitlines()
    reached = [line.split()[-2] for line in log if line.startswith("ssh ")]
    hosts = outputs["launch"]["value"].get("hosts", [])
    assert reached == [*hosts[:1], *hosts]
    assert any(line.startswith("gcloud ") for line in log)
