"""A lock file must pin everything that dtrain's wheel requires; files written by uv are accepted."""

import re
import zipfile
from pathlib import Path

import pytest

from dtrain.core.errors import EnvironmentFault
from dtrain.launch.targets.sky_task import check_lock

HASH = f"--hash=sha256:{'0' * 64}"
METADATA = (
    "Metadata-Version: 2.4\nName: dtrain\nVersion: 1\nRequires-Dist: jax>=0.10.2\n"
    "Requires-Dist: Orbax_Checkpoint>=0.12\n"
    "Provides-Extra: tpu\nRequires-Dist: jax[tpu]; extra == 'tpu'\nProvides-Extra: dev\n"
    "Requires-Dist: pytest>=8; extra == 'dev'\nRequires-Dist: wandb>=0.25; extra == 'wandb'\n\nRequires-Dist: prose\n"
)
LOCK = f"""# as uv writes it
jax==0.10.2 \\
    {HASH} \\
    {HASH}
    # via dtrain
jaxlib==0.10.2 ; python_full_version >= '3.11' and sys_platform == 'linux' \\
    {HASH}
libtpu==0.0.42 {HASH}  # via jax
orbax-checkpoint[all]==0.12.8 \\
    {HASH}
"""


def wheel(folder: Path, metadata: str = METADATA) -> Path:
    path = folder / "dtrain-1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("dtrain-1.dist-info/METADATA", metadata)
    return path


def lock(folder: Path, text: str = LOCK) -> Path:
    path = folder / "lock.txt"
    path.write_text(text)
    return path


def refused(lock: Path, wheel: Path, platform: str = "tpu") -> EnvironmentFault:
    with pytest.raises(EnvironmentFault) as caught:
        check_lock(lock, wheel, platform)
    return caught.value


def test_a_full_lock_is_accepted(tmp_path: Path) -> None:
    check_lock(lock(tmp_path), wheel(tmp_path), "tpu")
    check_lock(lock(tmp_path), wheel(tmp_path), "cpu")
    check_lock(lock(tmp_path, LOCK.replace("libtpu", "jax-cuda13-plugin")), wheel(tmp_path), "gpu")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("jax==0.10.2", "jax>=0.10.2"),
        ("jax==0.10.2", "jax==0.10.2,<1"),
        ("jax==0.10.2", "-e ."),
        ("jax==0.10.2", "jax @ https://example.com/jax.whl"),
        (f"libtpu==0.0.42 {HASH}", "libtpu==0.0.42"),
        (HASH, "--hash=md5:00"),
        ("# as uv writes it", "--index-url https://example.com/simple"),
    ],
)
def test_a_line_that_could_become_another_version_is_refused(tmp_path: Path, old: str, new: str) -> None:
    assert "does not pin one version" in refused(lock(tmp_path, LOCK.replace(old, new)), wheel(tmp_path)).message


@pytest.mark.parametrize(
    ("package", "platform"),
    [("jax", "tpu"), ("orbax-checkpoint", "tpu"), ("libtpu", "tpu"), ("jax-cuda13-plugin", "gpu"), ("jaxlib", "cpu")],
)
def test_a_package_that_is_not_pinned_is_named_with_the_command(tmp_path: Path, package: str, platform: str) -> None:
    without = re.sub(rf"^{package}[\[=].*\n(?:    .*\n)*", "", LOCK, flags=re.MULTILINE)
    error = refused(lock(tmp_path, without), wheel(tmp_path), platform)
    assert f"does not pin {package}" in error.message
    assert "uv pip compile pyproject.toml" in error.hint
    assert {"tpu": "--extra tpu", "gpu": "--extra cuda", "cpu": "--generate-hashes"}[platform] in error.hint


def test_what_a_recipe_needs_besides_the_core_must_be_pinned_too(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match="does not pin wandb") as refused:
        check_lock(lock(tmp_path), wheel(tmp_path), "tpu", ("wandb",))
    assert "uv pip compile pyproject.toml --extra tpu --extra wandb --generate" in refused.value.hint
    check_lock(lock(tmp_path, f"{LOCK}wandb==0.31.0 {HASH}\n"), wheel(tmp_path), "tpu", ("wandb",))


def test_what_is_no_wheel_of_dtrain_is_refused_before_the_lock(tmp_path: Path) -> None:
    empty = tmp_path / "empty.whl"
    empty.touch()
    assert "is not a wheel" in refused(lock(tmp_path), empty).message
    assert "is not a wheel" in refused(lock(tmp_path), tmp_path / "missing.whl").message
    other = wheel(tmp_path, METADATA.replace("Name: dtrain", "Name: other"))
    assert "of other, not of dtrain" in refused(lock(tmp_path), other).message
    with zipfile.ZipFile(tmp_path / "bare.whl", "w") as archive:
        archive.writestr("dtrain/__init__.py", "")
    assert "it has no METADATA" in refused(lock(tmp_path), tmp_path / "bare.whl").message
    assert "cannot be read" in refused(tmp_path / "missing.txt", wheel(tmp_path)).message
