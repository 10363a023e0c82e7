"""Names that could be something else on a command line or in a script are refused where the recipe is read."""

import json
from pathlib import Path

import pytest

from dtrain.errors import RecipeError
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
def test_a_variable_is_named_and_never_set(tmp_path: Path, name: str) -> None:
    assert "launch.environment" in refused(tmp_path, f'{{kind: local, environment: ["{name}"]}}')


def test_a_python_in_the_home_folder_is_found_there() -> None:
    machine = Machine(0, "a", ("ssh", "--", "a"), "~/venv/bin/python")
    assert machine.command("look")[-1] == "~/venv/bin/python -m dtrain.launch.agent look"


CLOUD = {"on": "v5e-16", "project": "my-project", "zones": ["us-central1-a"], "bucket": "my-bucket", "wheel": "a.whl"}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("project", "my project"),
        ("project", "--quiet"),
        ("zones", ["us-central1"]),
        ("zones", ["a;id"]),
        ("zones", []),
        ("bucket", "gs://b"),
        ("bucket", "b$(id)"),
        ("wheel", "dtrain.tar.gz"),
        ("wheel", "a b.whl"),
        ("wheel", "a\n.whl"),
        ("account", "me"),
        ("account", "a@b c"),
        ("network", "n;id"),
        ("subnetwork", "-s"),
        ("on", "v9-16"),
        ("on", "cpu-8"),
        ("environment", ["A=b"]),
        ("image", "a b"),
        ("budget", 0),
        ("hours", -1),
        ("wait", 0),
    ],
)
def test_what_could_be_a_command_in_the_cloud_is_refused(tmp_path: Path, key: str, value: object) -> None:
    assert f"launch.{key}" in refused(tmp_path, json.dumps({"kind": "queued"} | CLOUD | {key: value}))


@pytest.mark.parametrize(
    ("kind", "more", "said"),
    [
        ("queued", {"on": "tpu7x-16"}, "the TPU API does not serve tpu7x-16"),
        ("queued", {"on": "v5p:4x4x16"}, "say it by its number"),
        ("queued", {"on": "h100-8"}, "the TPU API does not serve h100-8"),
        ("queued", {"spot": True, "reserved": True}, "one of them"),
        ("queued", {"guaranteed": True, "spot": True}, "one of them"),
        ("queued", {"wheel": None, "image": "i"}, "the watcher needs a wheel"),
        ("queued", {"wheel": None}, "wheel or image"),
        ("tpu-vm", {"slices": 2}, "one slice at a time"),
        ("group", {"on": "tpu7x-16"}, "say which image family"),
        ("group", {"on": "v6e-16", "slices": 2}, "a group is one slice"),
        ("group", {"on": "v6e-16", "spot": True, "reservation": "mine"}, "one of them"),
        ("queud", {}, "did you mean 'queued'"),
        ("queued", {"zone": "us-central1-a"}, "did you mean 'zones'"),
        ("group", {"familly": "x"}, "did you mean 'family'"),
        ("tpu-vm", {"wathcer": False}, "did you mean 'watcher'"),
    ],
)
def test_what_cannot_be_rented_is_told_before_anything_is_asked(
    tmp_path: Path, kind: str, more: dict[str, object], said: str
) -> None:
    given = {key: value for key, value in ({"kind": kind} | CLOUD | more).items() if value is not None}
    assert said in refused(tmp_path, json.dumps(given))


def test_a_host_stands_once_and_a_typo_is_told(tmp_path: Path) -> None:
    assert "a is named twice" in refused(tmp_path, "{kind: ssh, hosts: [a, b, a]}")
    assert "did you mean 'hosts'" in refused(tmp_path, "{kind: ssh, host: [a]}")
    assert "did you mean 'local'" in refused(tmp_path, "{kind: locl}")
