"""`up --terraform` and `down`: a real terraform, with a stand-in for Google's provider, and a real gcloud."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dtrain.errors import RecipeError
from dtrain.launch.terraform import Ground
from tests.conftest import SHARED, bare_environment
from tests.launch.cloud import Cloud
from tests.launch.test_cloud import RECIPE, cloud, needs_gcloud  # noqa: F401

ROOT = Path(__file__).parents[2]
KIT = SHARED / "kits" / "terraform"
Dtrain = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def dtrain(tmp_path: Path, cloud: Cloud) -> Dtrain:  # noqa: F811
    """The command line, beside a provider that makes everything at once and for nothing."""
    if not KIT.is_dir():
        pytest.skip("the stand-in for Google's provider is not beside this checkout")
    if not shutil.which("terraform"):
        pytest.skip("no terraform is installed here")
    shutil.copytree(ROOT / "terraform", tmp_path / "terraform", ignore=shutil.ignore_patterns(".terraform*"))
    provider = [sys.executable, str(KIT / "google_stub.py"), str(KIT / "google_schema.json"), "--"]
    told = bare_environment() | cloud.environment(tmp_path / "config") | {"TF_CLI_CONFIG_FILE": "/dev/null"}

    def call(*words: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
        command = [*provider, sys.executable, "-m", "dtrain", *map(str, words)]
        done = subprocess.run(command, cwd=tmp_path, env=told, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done

    return call


def recipe(tmp_path: Path) -> Path:
    (tmp_path / "far.yaml").write_text(RECIPE.format(tiny=ROOT / "recipes" / "decoder-tiny.yaml"))
    return tmp_path / "far.yaml"


def state(tmp_path: Path) -> list[str]:
    found = json.loads((tmp_path / "terraform/examples/tpu/terraform.tfstate").read_text())
    return sorted({one["type"] for one in found["resources"] if one["mode"] == "managed"})


@needs_gcloud
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_ground_is_made_and_taken_away_but_for_the_bucket(dtrain: Dtrain, tmp_path: Path, cloud: Cloud) -> None:  # noqa: F811
    given = ["--terraform", "terraform/examples/tpu", "--var", "project=my-project", "--var", "bucket=my-bucket"]
    # the provider of the stand-in makes up addresses that are none
    more = ["launch.wheel=dtrain-0.1.0-py3-none-any.whl", "launch.account=a@my-project.iam.gserviceaccount.com"]
    up = dtrain("launch", "up", recipe(tmp_path), *given, *more, "--yes", "--detach")
    assert "Plan: " in up.stderr
    assert cloud.named("far")
    assert "google_compute_network" in state(tmp_path)
    assert not (tmp_path / "terraform/examples/tpu/.dtrain.tfplan").exists()
    down = dtrain("launch", "down", "far", "--yes")
    assert "module.ground.module.network.google_compute_network.this" in down.stderr
    assert cloud.resources == {}
    assert state(tmp_path) == ["google_storage_bucket"]


@pytest.mark.slow
def test_what_terraform_refuses_is_told_and_nothing_is_left(dtrain: Dtrain, tmp_path: Path) -> None:
    given = ["--terraform", "terraform/examples/tpu", "--var", "project=my-project", "--var", "bucket=my-bucket"]
    wrong = dtrain("launch", "up", recipe(tmp_path), *given, "--var", "kind=tpu", "--yes", code=3)
    assert "The kind is queued or group" in wrong.stderr
    nobody = dtrain("launch", "up", recipe(tmp_path), *given, code=2)
    assert "nobody can be asked here" in nobody.stderr
    assert not (tmp_path / "terraform/examples/tpu/.dtrain.tfplan").exists()
    assert not (tmp_path / "terraform/examples/tpu/terraform.tfstate").exists()


def test_a_folder_without_terraform_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="holds no Terraform"):
        Ground(str(tmp_path))
    (tmp_path / "main.tf").touch()
    with pytest.raises(RecipeError, match="NAME=VALUE"):
        Ground(str(tmp_path), ("project",))
