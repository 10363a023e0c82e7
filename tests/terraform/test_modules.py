"""Every module with a real terraform: its format, its validity, and its own tests, without a cloud."""

from pathlib import Path

import pytest

from tests.terraform.stand_in import ROOT, copied, needs_terraform, terraform

FOLDERS = sorted(path.parent.relative_to(ROOT) for path in ROOT.rglob("main.tf"))
MODULES = [folder for folder in FOLDERS if folder.parts[0] != "examples"]


@needs_terraform
def test_all_files_are_formatted() -> None:
    terraform(ROOT, "fmt", "-check", "-recursive", "-diff", provider=False)


@needs_terraform
@pytest.mark.slow
@pytest.mark.parametrize("folder", MODULES, ids=str)
def test_a_module_is_valid_and_passes_its_tests(tmp_path: Path, folder: Path) -> None:
    here = copied(tmp_path, folder)
    assert "Success" in terraform(here, "validate", "-no-color")
    assert ", 0 failed" in terraform(here, "test", "-no-color")


def test_every_variable_and_output_is_described() -> None:
    for path in (*ROOT.rglob("variables.tf"), *ROOT.rglob("outputs.tf")):
        blocks = [block for block in path.read_text().split("\n}\n") if not block.lstrip().startswith("locals")]
        for block in filter(str.strip, blocks):
            assert "description" in block, f"{path.relative_to(ROOT)}: {block.strip().splitlines()[0]}"


def test_every_module_has_tests() -> None:
    assert FOLDERS
    assert [folder for folder in FOLDERS if not list((ROOT / folder / "tests").glob("*.tftest.hcl"))] == []


def test_every_module_is_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    assert [folder for folder in FOLDERS if f"`{folder}`" not in readme] == []


def test_providers_are_pinned_to_one_major() -> None:
    lines = [line.split() for path in ROOT.rglob("*.tf") for line in path.read_text().splitlines()]
    pins = {
        (line[0], line[-2], line[-1])
        for line in lines
        if line and line[0] in ("version", "required_version") and "=" in line
    }
    assert pins == {("version", '"~>', '7.45"'), ("required_version", '">=', '1.9"')}


def test_no_lock_file_was_made_with_the_stand_in() -> None:
    """A hash of the fake provider would refuse the real one; real lock files have hashes of several platforms."""
    for path in ROOT.rglob(".terraform.lock.hcl"):
        assert path.read_text().count('"h1:') > 1, path
