"""JAX's persistent compilation cache: a program that was compiled before is read from disk, not compiled again.

JAX's own keys hold the program, jaxlib, the compiler's options and the kind of device; they do not hold the CPU that a
program for CPUs was compiled on. So each jaxlib and each CPU has a folder of its own. JAX's variables take precedence:
JAX_ENABLE_COMPILATION_CACHE=false turns it off, JAX_COMPILATION_CACHE_DIR is used as it is.
"""

import hashlib
import importlib.metadata
import os
import platform
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CPU_INFO = Path("/proc/cpuinfo")
FEATURES = ("model name", "flags", "Features", "CPU ")
SIZE, ENTRIES = 2 * 2**30, 1000
"""Bytes and programs that are kept; JAX looks at every entry when it writes one."""
SHORTEST = 0.05
"""Seconds of compiling from which on a program is worth an entry."""
ENTRY, USED = "-cache", "-atime"
"""JAX writes an entry, then the time of its last use: an entry without one was not written to its end."""


def use() -> str:
    """Turn it on; why it stays off, or nothing. To be called before anything is compiled."""
    import jax

    settings: Any = jax.config  # its attributes are made at run time
    if not settings.jax_enable_compilation_cache or settings.jax_compilation_cache_dir:
        return ""
    place = Path()
    try:
        place = folder()
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = place.stat()
        if about.st_uid != os.getuid() or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(0, "other users may write there")
        tidy(place)
    except (OSError, RuntimeError, ImportError) as error:
        return f"compiled programs are not kept in {place}: {getattr(error, 'strerror', None) or error}"
    for name, value in {
        "jax_compilation_cache_dir": str(place),
        "jax_compilation_cache_max_size": SIZE,
        "jax_persistent_cache_min_compile_time_secs": SHORTEST,
    }.items():
        if name.upper() not in os.environ:
            jax.config.update(name, value)
    return ""


@contextmanager
def off() -> Iterator[None]:
    """No cache while inside: for a compiler that has to write down what it does."""
    import jax
    from jax.experimental.compilation_cache.compilation_cache import reset_cache

    settings: Any = jax.config
    before = settings.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    reset_cache()  # JAX looks at the setting once
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        reset_cache()


def folder() -> Path:
    """Where the programs of this jaxlib and this CPU are kept."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "dtrain" / "xla" / f"jaxlib-{importlib.metadata.version('jaxlib')}-{_cpu()}"


def _cpu() -> str:
    """A name for what programs for CPUs are compiled for: model, instructions, cores, threads."""
    found = [platform.machine(), platform.processor(), str(os.cpu_count()), os.environ.get("PJRT_NPROC", "")]
    if hasattr(os, "sched_getaffinity"):
        found.append(str(len(os.sched_getaffinity(0))))
    with suppress(OSError):
        first = CPU_INFO.read_text().partition("\n\n")[0]
        found += sorted(
            line for line in first.splitlines() if line.startswith(("model name", "flags", "Features", "CPU"))
        )
    return hashlib.sha256("\n".join(found).encode()).hexdigest()[:12]


def tidy(place: Path) -> None:
    """Remove what an interrupted write left, and the entries that are unused the longest where there are too many."""
    import filelock

    lock = filelock.FileLock(place / ".lockfile")  # JAX's own
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        return  # another process writes: a later start tidies
    try:
        names = {path.name for path in place.iterdir()}
        entries = [name.removesuffix(ENTRY) for name in names if name.endswith(ENTRY)]
        whole = [name for name in entries if name + USED in names and (place / (name + ENTRY)).stat().st_size]
        used = {name: (place / (name + USED)).stat().st_mtime for name in whole} if len(whole) > ENTRIES else {}
        old = sorted(used, key=lambda name: used[name])[: len(whole) - ENTRIES] if used else []
        for name in {*entries} - {*whole} | {*old}:
            (place / (name + ENTRY)).unlink(missing_ok=True)
            (place / (name + USED)).unlink(missing_ok=True)
    finally:
        lock.release()


@dataclass
class Counter:
    """Programs that were needed, and how many of them were read from the cache. Counts while inside."""

    needed: int = 0
    read: int = 0

    @property
    def all_read(self) -> bool:
        """Whether nothing had to be compiled."""
        return 0 < self.needed == self.read

    def __enter__(self) -> "Counter":
        import jax

        jax.monitoring.register_event_listener(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        import jax

        jax.monitoring.unregister_event_listener(self._count)

    def _count(self, event: str, **_: object) -> None:
        self.needed += event == "/jax/compilation_cache/compile_requests_use_cache"
        self.read += event == "/jax/compilation_cache/cache_hits"
