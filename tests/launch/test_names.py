"""Names that a command line or a script could interpret differently are refused when the recipe is read."""

import json
from pathlib import Path

import pytest

from dtrain.core.errors import RecipeError
from dtrain.launch.fanout import Machine
from dtrain.recipe.load import load

RECIPE = """
model: {kind: mlp, sizes: [64, 16, 10]}
data: digits
optimizer: {kind: sgd, lr: 0.1}
batch: 64
steps: 10
"""


def refused(tmp_path: Path, launch: str) -> str:
    path = tmp_path / "small.yaml"
    path.write_text(f"{RECIPE}launch: {launch}\n")
    with pytest.raises(RecipeError) as caught:
        load(path)
    return str(caught.value)


@pytest.mark.parametrize(
    "host",
    ["-oProxyCommand=touch x", "a b", "a;reboot", "$(id)", "a\\nb", "root@", "@a", "a@b@c", "`id`", "", "a" * 70, "ä"],
)
def test_a_host_that_could_be_a_command_is_refused(tmp_path: Path, host: str) -> None:
    assert "launch.hosts" in refused(tmp_path, f'{{kind: ssh, hosts: ["{host}"]}}')


@pytest.mark.parametrize("path", ["a b", "../x;id", "$HOME", "-rf", "a\\nb", ""])
def test_a_path_that_could_be_a_command_is_refused(tmp_path: Path, path: str) -> None:
    assert "launch.runs" in refused(tmp_path, f'{{kind: ssh, hosts: [a], runs: "{path}"}}')


@pytest.mark.parametrize("name", ["lower", "A=b", "A B", "A\\nB", "-A", ""])
def test_an_invalid_variable_name_is_refused(tmp_path: Path, name: str) -> None:
    assert "launch.environment" in refused(tmp_path, f'{{kind: local, environment: ["{name}"]}}')


def test_a_python_in_the_home_folder_is_found_there() -> None:
    machine = Machine(0, "a", ("ssh", "--", "a"), "~/venv/bin/python")
    assert machine.command()[-1] == "~/venv/bin/python -P -m dtrain.launch.agent"


CLUSTER = {"kind": "gke", "on": "v5e-16", "image": "an/image:1", "claim": "runs"}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("on", "v9-16"),
        ("on", "cpu-8"),
        ("environment", ["A=b"]),
        ("image", "a b"),
        ("claim", "c;id"),
        ("account", "-a"),
        ("budget", 0),
        ("hours", -1),
    ],
)
def test_values_that_could_be_commands_in_a_cluster_are_refused(tmp_path: Path, key: str, value: object) -> None:
    assert f"launch.{key}" in refused(tmp_path, json.dumps(CLUSTER | {key: value}))


@pytest.mark.parametrize("kind", ["tpu-vm", "queued", "group"])
def test_targets_of_earlier_versions_are_unknown(tmp_path: Path, kind: str) -> None:
    assert "launch.kind" in refused(tmp_path, json.dumps({"kind": kind, "on": "v5e-16"}))


def test_a_duplicate_host_and_a_misspelt_key_are_refused(tmp_path: Path) -> None:
    assert "a is listed twice" in refused(tmp_path, "{kind: ssh, hosts: [a, b, a]}")
    assert "did you mean 'hosts'" in refused(tmp_path, "{kind: ssh, host: [a]}")
    assert "did you mean 'local'" in refused(tmp_path, "{kind: locl}")
