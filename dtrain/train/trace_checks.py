"""Check a traced step before it is compiled: large constants in the program, and tracing that is not pure."""

import difflib
import hashlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax

LINE = 160
ADDRESS = re.compile(r"\b0x[0-9a-f]+")


def baked_constants(traced: jax.stages.Traced, megabytes: float) -> list[str]:
    """A warning for each constant of the program that is larger than this."""
    warnings = []
    for constant in _constants(traced.jaxpr):
        size = getattr(constant, "nbytes", 0)
        if size > megabytes * 1e6:
            what = f"{constant.dtype}{list(constant.shape)}"
            warnings.append(f"the step has {what}, {size / 1e6:.1f} MB, as a constant; pass it in as an argument")
    return warnings


def fingerprint(traced: jax.stages.Traced) -> str:
    """A digest of the program without the addresses of objects, so that it is the same in every process."""
    return hashlib.sha256(ADDRESS.sub("", str(traced.jaxpr)).encode()).hexdigest()[:16]


def trace_differences(trace: Callable[[], jax.stages.Traced], first: jax.stages.Traced) -> list[str]:
    """Warnings if a second trace of the step differs from the first.

    A value that the code reads from a clock, NumPy's random numbers or a global variable while it is traced becomes a
    constant for the whole run.
    """
    before, after = str(first.jaxpr).splitlines(), str(trace().jaxpr).splitlines()
    if before == after:
        return []
    changed = [line[2:].strip()[:LINE] for line in difflib.ndiff(before, after) if line[:2] in ("- ", "+ ")]
    head = "tracing the step twice gave two different programs: it depends on something other than its arguments"
    return [head, *(f"  {line}" for line in changed[:4])]


def _constants(jaxpr: Any) -> Iterator[Any]:
    """The constants of a jaxpr, closed or open, and of every jaxpr inside it."""
    yield from getattr(jaxpr, "consts", ())
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                    yield from _constants(inner)
