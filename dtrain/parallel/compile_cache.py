"""JAX's persistent compilation cache: a program that was compiled before is read from disk, not compiled again.

JAX's cache keys contain the program, the version of jaxlib, the compiler's options and the kind of device, but not the
CPU on which a program for CPUs was compiled. Therefore each jaxlib and each CPU has its own folder. JAX's environment
variables take precedence: JAX_ENABLE_COMPILATION_CACHE=false turns the cache off, JAX_COMPILATION_CACHE_DIR sets it.
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
from types import SimpleNamespace
from typing import Any

CPU_INFO = Path("/proc/cpuinfo")
FEATURES = ("model name", "flags", "Features", "CPU ")
SIZE, ENTRIES = 2 * 2**30, 1000
"""Most bytes and programs in the cache; JAX reads the folder's list whenever it writes an entry."""
SHORTEST = 0.05
"""Fewest seconds of compile time for a program to be cached."""
ENTRY, USED = "-cache", "-atime"
"""File name suffixes. JAX writes an entry, then the time of its last use: an entry without that time is incomplete."""


def use() -> str:
    """Turn the cache on; return why it stays off, else an empty string. Call it before anything is compiled."""
    import jax

    settings: Any = jax.config  # its attributes are created at run time
    if not settings.jax_enable_compilation_cache or settings.jax_compilation_cache_dir:
        return ""
    place = Path()
    try:
        place = folder()
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = place.stat()
        if about.st_uid != os.getuid() or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(0, "other users can write to it")
        tidy(place)
    except (OSError, RuntimeError, ImportError) as error:
        return f"compiled programs are not cached in {place}: {getattr(error, 'strerror', None) or error}"
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
    """Turn the cache off within this context, for compilations whose dumps are needed: a cached program writes none."""
    import jax
    from jax.experimental.compilation_cache.compilation_cache import reset_cache

    settings: Any = jax.config
    before = settings.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    reset_cache()  # JAX reads the setting once and keeps it
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        reset_cache()


def written_by_each() -> None:
    """Make each process write the programs that it compiles for CPUs.

    JAX writes those of process 0 alone, since on other devices all processes have the same; on CPUs their keys differ,
    and the others would compile at every start.
    """
    import jax
    from jax._src import compiler, distributed  # JAX has no setting for it

    if jax.process_count() > 1 and jax.devices()[0].platform == "cpu":
        state: Any = SimpleNamespace(**vars(distributed.global_state) | {"process_id": 0})
        module: Any = compiler
        module.distributed = SimpleNamespace(global_state=state)


def folder() -> Path:
    """The folder for programs of this jaxlib and this CPU."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "dtrain" / "xla" / f"jaxlib-{importlib.metadata.version('jaxlib')}-{_cpu()}"


def _cpu() -> str:
    """A hash of what compiled CPU programs depend on: CPU model, instruction set, cores, threads."""
    parts = [platform.machine(), platform.processor(), str(os.cpu_count()), os.environ.get("PJRT_NPROC", "")]
    if hasattr(os, "sched_getaffinity"):
        parts.append(str(len(os.sched_getaffinity(0))))
    with suppress(OSError):
        first = CPU_INFO.read_text().partition("\n\n")[0]
        parts += sorted(
            line for line in first.splitlines() if line.startswith(("model name", "flags", "Features", "CPU"))
        )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]


def tidy(place: Path) -> None:
    """Remove incomplete entries and, beyond ENTRIES, those that were used least recently."""
    import filelock

    lock = filelock.FileLock(place / ".lockfile")  # the lock that JAX takes, too
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        return  # another process is writing: a later start will tidy
    try:
        names = {path.name for path in place.iterdir()}
        entries = [name.removesuffix(ENTRY) for name in names if name.endswith(ENTRY)]
        complete = [name for name in entries if name + USED in names and (place / (name + ENTRY)).stat().st_size]
        used = {name: (place / (name + USED)).stat().st_mtime for name in complete} if len(complete) > ENTRIES else {}
        old = sorted(used, key=lambda name: used[name])[: len(complete) - ENTRIES] if used else []
        for name in {*entries} - {*complete} | {*old}:
            (place / (name + ENTRY)).unlink(missing_ok=True)
            (place / (name + USED)).unlink(missing_ok=True)
    finally:
        lock.release()


@dataclass
class Counter:
    """Counts, within its context, the programs that were needed and those that were read from the cache."""

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
