"""The processes of this machine, by their command lines."""

import os
from pathlib import Path


def mentioning(text: str) -> set[int]:
    """Those whose command line has that text, this one left out."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text in path.read_bytes().replace(b"\0", b" ").decode(errors="replace"):
                found.add(int(path.parent.name))
        except OSError:
            continue
    return found - {os.getpid()}


def youngest(processes: set[int]) -> int:
    """The one that was started last; numbers of processes are used again."""
    return max(processes, key=_started)


def _started(pid: int) -> int:
    """Clock ticks from boot to the start of the process: field 22 of proc(5), counted behind its name."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
