"""Every module and example by a real terraform: its format, its sense, and its own tests, without a cloud."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import SHARED

ROOT = Path(__file__).parents[2] / "terraform"
KIT = SHARED / "kits" / "terraform"
FOLDERS = sorted(path.parent.relative_to(ROOT) for path in ROOT.rglob("main.tf"))

needs_terraform = pytest.mark.skipif(not shutil.which("terraform"), reason="no terraform is installed here")


def terraform(folder: Path, *words: str, provider: bool = True) -> str:
    """What it prints; a provider that knows every argument stands in for Google's."""
    if provider and not KIT.is_dir():
        pytest.skip("the stand-in for Google's provider is not beside this checkout")
    stand_in = [sys.executable, str(KIT / "google_stub.py"), str(KIT / "google_schema.json"), "--"] if provider else []
    told = os.environ | {"TF_CLI_CONFIG_FILE": "/dev/null", "TF_IN_AUTOMATION": "1"}
    command = [*stand_in, "terraform", *words]
    done = subprocess.run(command, cwd=folder, env=told, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_terraform
def test_all_is_formatted() -> None:
    terraform(ROOT, "fmt", "-check", "-recursive", "-diff", provider=False)


@needs_terraform
@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS, ids=str)
def test_a_module_is_valid_and_passes_its_tests(tmp_path: Path, folder: Path) -> None:
    pytest.importorskip("grpc")
    pytest.importorskip("msgpack")
    shutil.copytree(ROOT, tmp_path / "terraform", ignore=shutil.ignore_patterns(".terraform*"))
    here = tmp_path / "terraform" / folder
    terraform(here, "init", "-no-color")
    assert "Success" in terraform(here, "validate", "-no-color")
    assert ", 0 failed" in terraform(here, "test", "-no-color")


def test_every_variable_and_output_is_explained() -> None:
    for path in (*ROOT.rglob("variables.tf"), *ROOT.rglob("outputs.tf")):
        blocks = path.read_text().split("\n}\n")
        for block in filter(str.strip, blocks):
            assert "description" in block, f"{path.relative_to(ROOT)}: {block.strip().splitlines()[0]}"


def test_every_module_has_tests() -> None:
    assert FOLDERS
    assert [folder for folder in FOLDERS if not list((ROOT / folder / "tests").glob("*.tftest.hcl"))] == []
