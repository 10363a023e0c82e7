"""The package as users get it: wheel and sdist, started by uvx and pipx on bare Pythons, in an empty folder."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import bare_environment

ROOT = Path(__file__).parents[1]
BESIDE = Path(sys.executable).parent
UV = shutil.which("uv", path=f"{BESIDE}{os.pathsep}{os.environ.get('PATH', '')}") or ""
EXPECTED = "mlp-digits: finished with accuracy 98.89% on 360 held-out examples"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not UV, reason="uv is not installed")]


def run(*command: str | Path, where: Path) -> str:
    environment = bare_environment()
    environment.pop("XLA_FLAGS", None)  # as for a user, and for the newest JAX, which does not know them all
    done = subprocess.run(command, cwd=where, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the wheel, which is made from the sdist, and the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    run(UV, "build", "--quiet", "--out-dir", folder, ROOT, where=folder)
    yield folder


def python(version: str) -> str:
    """The path of an interpreter of that version. Skips the test if there is none."""
    found = shutil.which(f"python{version}")
    if shutil.which("pyenv"):
        done = subprocess.run(["pyenv", "prefix", version], capture_output=True, text=True, check=False)
        found = f"{done.stdout.strip()}/bin/python3" if done.returncode == 0 else found
    if not found:
        pytest.skip(f"no Python {version} here")
    return found


@pytest.mark.parametrize(
    ("version", "kind"),
    [
        ("3.11", "whl"),
        pytest.param("3.13", "whl", marks=pytest.mark.nightly),
        pytest.param("3.12", "whl", marks=pytest.mark.nightly),
        pytest.param("3.11", "tar.gz", marks=pytest.mark.nightly),
    ],
)
def test_uvx_trains_without_installing(built: Path, tmp_path: Path, version: str, kind: str) -> None:
    package = next(built.glob(f"*.{kind}"))
    command = [UV, "tool", "run", "--quiet", "--python", python(version), "-c", str(ROOT / "constraints.txt")]
    assert EXPECTED in run(*command, "--from", package, "dtrain", "run", "mlp-digits", where=tmp_path)
    assert (tmp_path / "runs/mlp-digits/checkpoints").is_dir()
    assert "Exit code 4" in run(*command, "--from", package, "dtrain", "help", "E-DATA", where=tmp_path)


@pytest.mark.nightly
def test_pipx_trains_without_installing(built: Path, tmp_path: Path) -> None:
    package = next(built.glob("*.whl"))
    pipx = [
        UV,
        "tool",
        "run",
        "--quiet",
        "--python",
        python("3.11"),
        "--from",
        "pipx",
        "pipx",
        "run",
        "--spec",
        package,
    ]
    assert EXPECTED in run(*pipx, "dtrain", "run", "mlp-digits", where=tmp_path)


def test_the_packages_have_what_is_needed_and_nothing_else(built: Path) -> None:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        names = wheel.namelist()
    for needed in ("dtrain/py.typed", "dtrain/errors.md", "dtrain/recipes/mlp-digits.yaml", "dtrain/launch/templates/"):
        assert any(name.startswith(needed) for name in names), needed
    assert {name.partition("/")[0] for name in names} <= {"dtrain", f"dtrain-{_version()}.dist-info"}
    with tarfile.open(next(built.glob("*.tar.gz"))) as sdist:
        top = {Path(member.name).parts[1] for member in sdist if len(Path(member.name).parts) > 1}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    assert top <= {Path(line).parts[0] for line in tracked.splitlines()} | {"PKG-INFO"}


def _version() -> str:
    from dtrain import __version__

    return __version__
