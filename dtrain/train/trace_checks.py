"""What is looked at in a step before it runs: arrays baked into it, and a trace that is not pure."""

import difflib
import hashlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax

LINE = 160
ADDRESS = re.compile(r"\b0x[0-9a-f]+")


def baked_constants(traced: jax.stages.Traced, megabytes: float) -> list[str]:
    """A line for each array larger than that which the program carries inside itself."""
    found = []
    for constant in _constants(traced.jaxpr):
        size = getattr(constant, "nbytes", 0)
        if size > megabytes * 1e6:
            what = f"{constant.dtype}{list(constant.shape)}"
            found.append(f"the step carries {what}, {size / 1e6:.1f} MB, as a constant; pass it in as an argument")
    return found


def fingerprint(traced: jax.stages.Traced) -> str:
    """Of the program, the same in every process: without the addresses of objects."""
    return hashlib.sha256(ADDRESS.sub("", str(traced.jaxpr)).encode()).hexdigest()[:16]


def trace_differences(trace: Callable[[], jax.stages.Traced], first: jax.stages.Traced) -> list[str]:
    """Where a second trace of the same step differs from the first: what reads clocks, NumPy's
    random numbers or globals while it is traced is fixed at that moment for the whole run."""
    one, two = str(first.jaxpr).splitlines(), str(trace().jaxpr).splitlines()
    if one == two:
        return []
    changed = [line[2:].strip()[:LINE] for line in difflib.ndiff(one, two) if line[:2] in ("- ", "+ ")]
    head = "tracing the step twice gave two programs: something in it is not a function of its arguments"
    return [head, *(f"  {line}" for line in changed[:4])]


def _constants(jaxpr: Any) -> Iterator[Any]:
    """The constants of a jaxpr, closed or not, and of all that it calls."""
    yield from getattr(jaxpr, "consts", ())
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                    yield from _constants(inner)
