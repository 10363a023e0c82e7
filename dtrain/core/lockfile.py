"""A lock: a requirements file with one version of every package, by == and hashes, and whether it serves a wheel."""

import re
import zipfile
from email import message_from_bytes
from pathlib import Path

from dtrain.core.errors import EnvironmentFault

PYTHON, SYSTEM = "3.12", "x86_64-manylinux_2_31"
"""What hosts install a lock for: libtpu needs that glibc."""
PINNED = re.compile(r"([A-Za-z0-9._-]+)(\[[^\]]*\])?==[^\s;,*]+( *;[^#\\]*?)?(\s+--hash=sha256:[0-9a-f]{64})+")
DEVICE = {"tpu": (" --extra tpu", "libtpu"), "gpu": (" --extra cuda", r"jax-cuda\d+-plugin"), "cpu": ("", "jaxlib")}
"""By platform: how its lock is made, and the package without which JAX would compute on the CPU."""


def check_lock(lock: Path, wheel: Path, platform: str) -> None:
    """EnvironmentFault where the wheel is not dtrain's, or the lock does not pin all that it needs on the
    platform: tpu, gpu or cpu."""
    extra, device = DEVICE[platform]
    way = f"uv pip compile pyproject.toml{extra} --generate-hashes --python-version {PYTHON} --python-platform {SYSTEM}"
    way, needed = f"{way} -o {lock}", _requirements(wheel)
    try:
        text = lock.read_text().replace("\\\n", " ")
    except (OSError, ValueError) as error:
        raise EnvironmentFault(f"{lock} cannot be read: {error}", way) from error
    lines = [line for one in text.splitlines() if (line := re.sub(r"(^| )#.*", "", one).strip())]
    loose = next((line for line in lines if not PINNED.fullmatch(line)), "")
    if loose:
        raise EnvironmentFault(f"{lock}: {loose[:80]!r} is not one version, by == and hashes", way)
    pinned = {_normal(line) for line in lines}
    found = any(re.fullmatch(device, one) for one in pinned)
    missing = sorted(needed - pinned) + [device.replace(r"\d+", "13")] * (not found)
    if missing:
        raise EnvironmentFault(f"{lock} does not pin {', '.join(missing)}", way)


def _requirements(wheel: Path) -> set[str]:
    """The packages that dtrain's wheel needs without an extra."""
    hint = "pip wheel --no-deps -w dist ."
    try:
        with zipfile.ZipFile(wheel) as archive:
            name = next(one for one in archive.namelist() if one.endswith(".dist-info/METADATA"))
            found = message_from_bytes(archive.read(name))
    except (OSError, zipfile.BadZipFile, StopIteration) as error:
        raise EnvironmentFault(f"{wheel} is not a wheel: {str(error) or 'it has no METADATA'}", hint) from error
    if found["Name"] != "dtrain":
        raise EnvironmentFault(f"{wheel} is a wheel of {found['Name']}, not of dtrain", hint)
    return {_normal(one) for one in found.get_all("Requires-Dist", []) if ";" not in one}


def _normal(requirement: str) -> str:
    """The name in a requirement, as package indexes compare names."""
    return re.sub(r"[-_.]+", "-", re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]).lower()
