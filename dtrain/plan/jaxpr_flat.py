"""A traced program (jaxpr) as a flat list of operations, its memory peak and its memory traffic."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

INLINED = ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "remat2", "checkpoint")
COLLECTIVE_OF = {
    "psum": "all-reduce", "psum_invariant": "all-reduce", "psum2": "all-reduce", "pmax": "all-reduce",
    "pmin": "all-reduce", "all_gather": "all-gather", "all_gather_invariant": "all-gather",
    "reduce_scatter": "reduce-scatter", "all_to_all": "all-to-all", "ppermute": "collective-permute",
}  # fmt: skip
VIEWS = (
    "reshape", "squeeze", "expand_dims", "broadcast_in_dim", "pvary", "copy", "stop_gradient", "name", "transpose",
    "optimization_barrier", "reshard", "split", "slice", "reduce_precision",
)  # fmt: skip
MADE = (
    "dot_general", "ragged_dot_general", "conv_general_dilated", "pallas_call", "scan", "while",
    "dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper", "cond", "gather",
    "scatter", "scatter-add", "sort", "dynamic_update_slice", "concatenate", "cumsum", *COLLECTIVE_OF,
)  # fmt: skip
"""Operations whose results are stored in memory. All others are assumed to be fused into their users, unless one of
these uses them."""

CUT = ("slice", "dynamic_slice", "split")
"""Operations that read a part of an array."""


@dataclass
class Step:
    """One operation of a traced program; variables are numbers."""

    name: str
    read: list[int]
    made: list[int]
    params: dict[str, Any]
    shapes: list[Any]
    results: list[Any]
    within: str = ""
    """Name of the called function that contains it; empty if it has none."""


@dataclass
class Flat:
    """A program with its nested calls inlined."""

    steps: list[Step] = field(default_factory=list)
    sizes: dict[int, int] = field(default_factory=dict)
    """Bytes of every variable."""
    given: list[int] = field(default_factory=list)
    returned: list[int] = field(default_factory=list)


def flatten(jaxpr: Any) -> Flat:
    """Inline the function calls of a jaxpr. A loop or a branch stays one operation."""
    flat = Flat()

    def number(aval: object) -> int:
        flat.sizes[len(flat.sizes)] = bytes_of(aval)
        return len(flat.sizes) - 1

    def walk(inner: Any, names: dict[object, int], within: str = "") -> list[int]:
        def of(var: Any) -> int:
            if hasattr(var, "val"):  # a literal
                return number(var.aval)
            return names[var]

        for equation in inner.eqns:
            read, name = [of(var) for var in equation.invars], equation.primitive.name
            body = _body(equation) if name in INLINED else None
            if body is not None:
                called = str(equation.params.get("name") or within)
                own = {var: number(var.aval) for var in body.constvars}
                outputs = walk(body, own | dict(zip(body.invars, read, strict=True)), called)
            else:
                outputs = [number(var.aval) for var in equation.outvars]
                shapes, results = ([var.aval for var in side] for side in (equation.invars, equation.outvars))
                flat.steps.append(
                    Step(name, read, outputs, params=equation.params, shapes=shapes, results=results, within=within)
                )
            names.update(zip(equation.outvars, outputs, strict=True))
        return [of(var) for var in inner.outvars]

    names = {var: number(var.aval) for var in [*jaxpr.constvars, *jaxpr.invars]}
    flat.given = list(names.values())
    flat.returned = walk(jaxpr, names)
    return flat


def _body(equation: Any) -> Any:
    """The jaxpr that a call applies; None if its inputs are not those of the call."""
    inner = equation.params.get("jaxpr") or equation.params.get("call_jaxpr")
    inner = bare(inner)
    fits = inner is not None and len(inner.invars) == len(equation.invars)
    return inner if fits else None


def bytes_of(aval: Any) -> int:
    """Bytes of an abstract value; 0 for values without a shape, such as tokens."""
    if not hasattr(aval, "shape") or not hasattr(aval, "dtype") or not hasattr(aval.dtype, "itemsize"):
        return 0
    return math.prod(aval.shape) * aval.dtype.itemsize


def peak(program: Flat) -> int:
    """Peak bytes of arrays in memory besides the inputs. An array is alive from its operation to its last use."""
    stays, ends = materialised(program), _last_uses(program)
    live, most = 0, 0
    dying: dict[int, list[int]] = {}
    for var, end in ends.items():
        dying.setdefault(end, []).append(var)
    for at, step in enumerate(program.steps):
        created = sum(program.sizes[var] for var in step.made if var in stays)
        carried = 0
        if step.name == "scan":  # the carry is updated in place: its input and output share memory
            carried = sum(program.sizes[v] for v in _carried(step) if v in stays and ends.get(v) == at)
        most = max(most, live + created - carried + _inside(step))
        live += created - sum(program.sizes[var] for var in dying.get(at, ()) if var in stays)
    return most


def _carried(step: Step) -> list[int]:
    """Variables that a scan carries between iterations.

    Inputs are constants, carry and scanned arrays, in this order; results are carry and stacked arrays. Scanned
    and stacked arrays have one dim more outside of the body than inside.
    """
    body = bare(step.params["jaxpr"])

    def along(outside: Any, inside: Any) -> int:
        return sum(len(a.shape) != len(b.aval.shape) for a, b in zip(outside, inside, strict=True))

    count = len(step.made) - along(step.results, body.outvars)
    last = len(step.read) - along(step.shapes, body.invars)
    return step.read[last - count : last]


def bare(program: object) -> Any:
    """The jaxpr without its constants; JAX keeps these in a wrapper (ClosedJaxpr) or, from 0.12 on, in the jaxpr."""
    return getattr(program, "jaxpr", program)


def _inside(step: Step) -> int:
    """Peak bytes of the bodies nested in an operation."""
    bodies: Sequence[Any] = ()
    if step.name in ("scan", "while"):
        bodies = (step.params.get("jaxpr") or step.params["body_jaxpr"],)
    elif step.name == "cond":
        bodies = step.params["branches"]
    return max((peak(flatten(bare(body))) for body in bodies), default=0)


def materialised(program: Flat) -> set[int]:
    """Variables that are stored in memory: results of operations that cannot be fused, and values that these read."""
    stored = {var for step in program.steps if step.name in MADE for var in step.made}
    source = {var: step for step in program.steps for var in step.made}
    operands = [var for step in program.steps if step.name in MADE and "dot" not in step.name for var in step.read]
    visited: set[int] = set()
    todo = [*operands, *program.returned]
    while todo:
        var = todo.pop()
        step = source.get(var)
        if var in visited or step is None or var in stored:
            continue
        visited.add(var)
        if step.name in VIEWS:
            todo += step.read[:1]
        else:
            stored.add(var)
    return stored - set(program.given)


def traffic(program: Flat, small: int = 0) -> list[float]:
    """Bytes moved by each step that is neither a product nor a collective.

    A result that is stored is written, and every stored array that is fused into it is read. A reduction reads its
    operand even if its result is fused; reductions over the same arrays share one pass.
    """
    stays, moved = materialised(program), [0.0] * len(program.steps)
    reduced: set[frozenset[int]] = set()
    sources: dict[int, frozenset[int]] = {var: frozenset((var,)) for var in program.given}
    for at, step in enumerate(program.steps):
        read: frozenset[int] = frozenset().union(*(sources.get(var, frozenset()) for var in step.read))
        written = [var for var in step.made if var in stays]
        reduces = step.name.startswith("reduce_") and step.name != "reduce_precision"
        own = step.name in MADE or step.name in CUT or bool(written) or reduces
        if step.name not in MADE and (written or reduces):
            again = reduces and not written and read in reduced
            moved[at] = float(
                sum(size for var in (*step.made, *(() if again else read)) if (size := program.sizes[var]) > small)
            )
        if reduces:
            reduced.add(read)
        for var in step.made:
            sources[var] = frozenset((var,)) if own else read
    return moved


def gathered(program: Flat, along: Collection[str]) -> dict[int, tuple[int, tuple[str, ...]]]:
    """For each variable that is all-gathered along some of these axes: the gathered dim, and the axes."""
    result: dict[int, tuple[int, tuple[str, ...]]] = {}
    for step in program.steps:
        if COLLECTIVE_OF.get(step.name) == "all-gather":
            axes = step.params["axis_name"]
            axes = (axes,) if isinstance(axes, str) else tuple(axes)
            if set(axes) <= set(along):
                result[step.made[0]] = step.params["all_gather_dimension"], axes
        elif step.name in VIEWS and step.read and step.read[0] in result:
            dim, axes = result[step.read[0]]
            before, after = step.shapes[0].shape, step.results[0].shape
            from_end = len(after) - (len(before) - dim)
            for at in (dim, from_end):  # a reshape merges or splits dims before or after this one
                if step.name != "transpose" and 0 <= at < len(after) and before[dim] == after[at]:
                    result[step.made[0]] = at, axes
                    break
    return result


def summed(program: Flat, along: Collection[str]) -> dict[int, tuple[str, ...]]:
    """The axes of each variable that is reduce-scattered along some of these axes, directly or through views."""
    result: dict[int, tuple[str, ...]] = {}
    for step in reversed(program.steps):
        if COLLECTIVE_OF.get(step.name) == "reduce-scatter":
            axes = step.params["axis_name"]
            axes = (axes,) if isinstance(axes, str) else tuple(axes)
            if set(axes) <= set(along):
                result[step.read[0]] = axes
        elif step.made and step.made[0] in result and step.name in (*VIEWS, "convert_element_type"):
            result[step.read[0]] = result[step.made[0]]
    return result


def _last_uses(program: Flat) -> dict[int, int]:
    """Index of the last step that reads each variable, directly or through operations that are fused into it."""
    stays = materialised(program)
    ends = dict.fromkeys(program.returned, len(program.steps))
    for at in range(len(program.steps) - 1, -1, -1):
        step = program.steps[at]
        reach = max((ends[var] for var in step.made if var in ends and var not in stays), default=at)
        for var in step.read:
            ends[var] = max(ends.get(var, 0), reach, at)
        for var in step.made:
            ends.setdefault(var, at)
    return ends
