"""Compile the step of a run for devices that are not present. Running out of memory is a result, not an error."""

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from dtrain.assembly.assemble import Assembly
from dtrain.core.errors import EnvironmentFault
from dtrain.core.leftovers import temporary_folder
from dtrain.parallel import compile_cache

DUMP = {"xla_dump_hlo_as_text": True, "xla_dump_hlo_pass_re": ""}
NAMES = {"text": "after_optimizations.txt", "live": "after_optimizations-live-range.txt"}


@dataclass(frozen=True)
class Compiled:
    """Output of the compiler: the scheduled program, and its values that are alive at the memory peak."""

    text: str
    live: dict[str, int]
    """Bytes of each value that is alive at the peak, by name; empty if the compiler does not report it."""
    peak: int
    """Peak bytes on one device, arguments and program included."""
    program: int
    """Bytes of the program's code."""
    arena: int = 0
    """Bytes that a device reserves: arguments, program, and the block that contains all temporary values."""
    fits: bool = True
    note: str = ""
    """Why it was compiled without what `engine.overlap: auto` chose; empty if with it."""


def compiled(assembly: Assembly) -> Compiled:
    """Compile the training step. Raises EnvironmentFault if the compiler fails for another reason than memory."""
    engine, layout = assembly.engine, assembly.layout
    options, lowered = engine.options(layout.platform, layout.chip, experts=assembly.experts), assembly.train().lower()
    notes: list[str] = []
    with temporary_folder("plan") as folder:
        try:
            with compile_cache.off():  # a program from the cache writes no dump
                program = engine.build(lowered, {**options, **DUMP, "xla_dump_to": str(folder)}, notes.append)
        except jax.errors.JaxRuntimeError as error:
            if not lacks_main_memory(str(error)):
                reason = re.sub(r"\s+", " ", str(error))[:300]
                raise EnvironmentFault(
                    f"the compiler failed: {reason}", "try --quick, another mesh, or without the options of engine.xla"
                ) from error
            return _out_of_memory(folder, str(error))
        stats: Any = program.memory_analysis()
        peak, code = int(stats.peak_memory_in_bytes), int(stats.generated_code_size_in_bytes)
        arena = int(stats.argument_size_in_bytes + stats.temp_size_in_bytes + stats.output_size_in_bytes)
        arena -= int(stats.alias_size_in_bytes)
        text = program.as_text() or ""
        live = _live(_dumped(folder, "live"))
        if assembly.layout.platform == "tpu":
            live = without_aliases(live, peak)
        else:
            peak = max(peak, sum(live.values()))  # the CPU compiler's figure excludes temporaries
        return Compiled(text, live, peak + code, code, arena + code, note="; ".join(notes))


def lacks_main_memory(error: str) -> bool:
    """Whether the program exceeds main memory (HBM); a kernel can also exceed the fast memory that it works in."""
    space = re.search(r"memory space (\w+)", error)
    out = "RESOURCE_EXHAUSTED" in error or "CompileTimeHbmOom" in error
    return out and (space is None or space.group(1) == "hbm")


def _out_of_memory(folder: Path, error: str) -> Compiled:
    """Result for a program that does not fit: the dumps written before the failure, and the size in its message."""
    live = _live(_dumped(folder, "live"))
    given = re.search(r"\(([\d.]+)([KMG])\) exceeds", error)
    needed = int(float(given.group(1)) * 2 ** (10 * (" KMG".index(given.group(2))))) if given else 0
    total = sum(live.values())
    return Compiled(_dumped(folder, "text"), live, total, 0, max(needed, total), fits=False)


def _dumped(folder: Path, what: str) -> str:
    """The newest dump of that kind; empty if the compiler wrote none."""
    paths = sorted(path for path in folder.rglob(f"*{NAMES[what]}") if ".jit_step" in path.name or "step" in path.name)
    return paths[-1].read_text() if paths else ""


def _live(text: str) -> dict[str, int]:
    """Bytes of every value that is alive at the peak of main memory."""
    sections = re.split(r"\n  Live ranges at \d+ \(peak\):\n", text)[1:]
    peaks = [dict(_values(section)) for section in sections]
    return max(peaks, key=lambda part: sum(part.values()), default={})


def without_aliases(live: dict[str, int], peak: int) -> dict[str, int]:
    """The values, without arrays that a loop carries and that the dump lists twice with the same memory: as what the
    loop begins with, and as its parameter. The largest such parameters are left out until the rest is at most `peak`.
    """
    others = Counter(size for name, size in live.items() if ".param" not in name)
    total, kept = sum(live.values()), dict(live)
    for name, size in sorted(live.items(), key=lambda item: -item[1]):
        if total > peak and ".param" in name and others[size]:
            others[size] -= 1
            total -= kept.pop(name)
    return kept


def _values(section: str) -> list[tuple[str, int]]:
    rows = []
    for line in section.splitlines():
        row = re.match(r"    ([\w.\-]+)\{([\d,]*)\}: (\d+) bytes", line)
        if row is None:
            break
        rows.append((f"{row.group(1)}{{{row.group(2)}}}", int(row.group(3))))
    return rows
