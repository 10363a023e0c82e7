"""Check a lock file: a requirements file that pins one version of every package with == and hashes."""

import re
import zipfile
from collections.abc import Sequence
from email import message_from_bytes
from pathlib import Path

from dtrain.core.errors import EnvironmentFault

PYTHON, SYSTEM = "3.12", "x86_64-manylinux_2_31"
"""Python version and platform of the hosts; libtpu requires this glibc."""
PINNED = re.compile(r"([A-Za-z0-9._-]+)(\[[^\]]*\])?==[^\s;,*]+( *;[^#\\]*?)?(\s+--hash=sha256:[0-9a-f]{64})+")
DEVICE = {"tpu": (" --extra tpu", "libtpu"), "gpu": (" --extra cuda", r"jax-cuda\d+-plugin"), "cpu": ("", "jaxlib")}
"""Per platform: the extra for `uv pip compile`, and the package without which JAX would fall back to the CPU."""


def check_lock(lock: Path, wheel: Path, platform: str, extras: Sequence[str] = ()) -> None:
    """Check that the lock file pins everything that dtrain's wheel, with the extras that a recipe needs, requires on
    the platform: tpu, gpu or cpu.

    Raises EnvironmentFault if it does not, or if the wheel is not a wheel of dtrain.
    """
    extra, device = DEVICE[platform]
    command = f"uv pip compile pyproject.toml{extra}{''.join(f' --extra {name}' for name in extras)} --generate-hashes"
    hint = f"{command} --python-version {PYTHON} --python-platform {SYSTEM} -o {lock}"
    required = _requirements(wheel, extras)
    try:
        text = lock.read_text().replace("\\\n", " ")
    except (OSError, ValueError) as error:
        raise EnvironmentFault(f"{lock} cannot be read: {error}", hint) from error
    lines = [line for row in text.splitlines() if (line := re.sub(r"(^| )#.*", "", row).strip())]
    loose = next((line for line in lines if not PINNED.fullmatch(line)), "")
    if loose:
        raise EnvironmentFault(f"{lock}: {loose[:80]!r} does not pin one version with == and hashes", hint)
    pinned = {_normal(line) for line in lines}
    has_device = any(re.fullmatch(device, name) for name in pinned)
    missing = sorted(required - pinned) + [device.replace(r"\d+", "13")] * (not has_device)
    if missing:
        raise EnvironmentFault(f"{lock} does not pin {', '.join(missing)}", hint)


def _requirements(wheel: Path, extras: Sequence[str]) -> set[str]:
    """Names of the packages that dtrain's wheel requires with these extras."""
    hint = "pip wheel --no-deps -w dist ."
    try:
        with zipfile.ZipFile(wheel) as archive:
            name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
            metadata = message_from_bytes(archive.read(name))
    except (OSError, zipfile.BadZipFile, StopIteration) as error:
        raise EnvironmentFault(f"{wheel} is not a wheel: {str(error) or 'it has no METADATA'}", hint) from error
    if metadata["Name"] != "dtrain":
        raise EnvironmentFault(f"{wheel} is a wheel of {metadata['Name']}, not of dtrain", hint)
    lines = [requirement.partition(";") for requirement in metadata.get_all("Requires-Dist", [])]
    wanted = {f"extra == '{extra}'" for extra in extras}
    return {_normal(name) for name, _, marker in lines if not marker or marker.strip().replace('"', "'") in wanted}


def _normal(requirement: str) -> str:
    """The package name in a requirement, normalised as in PEP 503."""
    return re.sub(r"[-_.]+", "-", re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]).lower()
