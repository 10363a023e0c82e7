"""Runs benchmarks and writes what each prints to results/DATE-NAME.md, with its command, machine, versions and commit.

Without names it runs every program of this folder that states its command in its first lines.

    python benchmarks/record_results.py [NAME ...]     loop_overhead save_stall ...
"""

import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

FOLDER = Path(__file__).parent
OPTIONS = {"plan_vs_maxtext": ["--engines"]}
"""Options with which programs are recorded."""
PACKAGES = (
    "jax",
    "jaxlib",
    "libtpu",
    "numpy",
    "optax",
    "orbax-checkpoint",
    "grain",
    "torch",
    "flax",
    "keras",
    "lightning",
)


def programs() -> list[str]:
    """The names of the benchmarks: programs whose docstring has their command. Modules that they import have none."""
    paths = sorted(FOLDER.glob("*.py"))
    return [
        path.stem
        for path in paths
        if f"python benchmarks/{path.name}" in path.read_text()[:2000] and path != Path(__file__)
    ]


def machine() -> str:
    """The processor, its cores, Python and the packages that decide about speed."""
    model = next(
        (line.partition(":")[2].strip() for line in _lines(Path("/proc/cpuinfo")) if line.startswith("model name")),
        platform.processor() or platform.machine(),
    )
    found = [f"{name} {version}" for name in PACKAGES if (version := _version(name))]
    return f"{model}, {os.cpu_count()} cores; Python {platform.python_version()}, {', '.join(found)}"


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _commit() -> str:
    asked = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(asked, cwd=FOLDER, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def record(name: str, start: float) -> int:
    """Run one benchmark, show and write what it prints; returns its exit code."""
    words = [f"{name}.py", *OPTIONS.get(name, ())]
    command = [sys.executable, str(FOLDER / words[0]), *words[1:]]
    print(f"== {name}", flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout, flush=True)
    minutes = (time.monotonic() - start) / 60
    about = [
        f"# {name}",
        f"`python benchmarks/{' '.join(words)}`: exit code {done.returncode}, {minutes:.1f} minutes",
        f"{datetime.now(UTC):%Y-%m-%d}, commit {_commit()}",
        machine(),
        f"```\n{done.stdout.rstrip()}\n```",
    ]
    (FOLDER / "results").mkdir(exist_ok=True)
    (FOLDER / "results" / f"{datetime.now(UTC):%Y-%m-%d}-{name}.md").write_text("\n\n".join(about) + "\n")
    return done.returncode


def main() -> None:
    known, asked = programs(), sys.argv[1:]
    unknown = [name for name in asked if name not in known]
    if unknown:
        sys.exit(f"no benchmark {', '.join(unknown)}; there are {', '.join(known)}")
    failed = [name for name in asked or known if record(name, time.monotonic())]
    if failed:
        sys.exit(f"missed its target or failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
