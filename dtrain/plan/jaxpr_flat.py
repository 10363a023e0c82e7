"""A traced program as one list of operations, and what of it is in memory at once."""

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
"""What leaves an array in memory. All else is taken to be fused into what uses it, unless one of these does."""

CUT = ("slice", "dynamic_slice", "split")
"""What reads a part of an array."""


@dataclass
class Step:
    """One operation of a traced program, its variables by number."""

    name: str
    read: list[int]
    made: list[int]
    params: dict[str, Any]
    shapes: list[Any]
    results: list[Any]
    within: str = ""
    """The function that it stands in, where that was called by name."""


@dataclass
class Flat:
    """A program without its nested calls."""

    steps: list[Step] = field(default_factory=list)
    sizes: dict[int, int] = field(default_factory=dict)
    """Bytes of every variable."""
    given: list[int] = field(default_factory=list)
    returned: list[int] = field(default_factory=list)


def flatten(jaxpr: Any) -> Flat:
    """The program with calls of functions replaced by what they do."""
    found = Flat()

    def number(aval: Any) -> int:
        found.sizes[len(found.sizes)] = bytes_of(aval)
        return len(found.sizes) - 1

    def walk(inner: Any, names: dict[Any, int], within: str = "") -> list[int]:
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
                made = walk(body, own | dict(zip(body.invars, read, strict=True)), called)
            else:
                made = [number(var.aval) for var in equation.outvars]
                shapes, results = ([var.aval for var in side] for side in (equation.invars, equation.outvars))
                found.steps.append(Step(name, read, made, equation.params, shapes, results, within))
            names.update(zip(equation.outvars, made, strict=True))
        return [of(var) for var in inner.outvars]

    names = {var: number(var.aval) for var in [*jaxpr.constvars, *jaxpr.invars]}
    found.given = list(names.values())
    found.returned = walk(jaxpr, names)
    return found


def _body(equation: Any) -> Any:
    """The program that a call applies."""
    inner = equation.params.get("jaxpr") or equation.params.get("call_jaxpr")
    inner = bare(inner)
    fits = inner is not None and len(inner.invars) == len(equation.invars)
    return inner if fits else None


def bytes_of(aval: Any) -> int:
    if not hasattr(aval, "shape") or not hasattr(aval, "dtype") or not hasattr(aval.dtype, "itemsize"):
        return 0
    return math.prod(aval.shape) * aval.dtype.itemsize


def peak(program: Flat) -> int:
    """Bytes of arrays in memory besides those given, when most are: each lives from its making to its last use."""
    stays, ends = materialised(program), _last_uses(program)
    live, most = 0, 0
    dying: dict[int, list[int]] = {}
    for var, end in ends.items():
        dying.setdefault(end, []).append(var)
    for at, step in enumerate(program.steps):
        made = sum(program.sizes[var] for var in step.made if var in stays)
        carried = 0
        if step.name == "scan":  # a loop's state is changed in place
            carried = sum(program.sizes[v] for v in _carried(step) if v in stays and ends.get(v) == at)
        most = max(most, live + made - carried + _inside(step))
        live += made - sum(program.sizes[var] for var in dying.get(at, ()) if var in stays)
    return most


def _carried(step: Step) -> list[int]:
    """What a scan hands from turn to turn: neither its constants, nor what it goes along, which has a dim more."""
    body = bare(step.params["jaxpr"])
    along = lambda outside, inside: sum(  # noqa: E731
        len(a.shape) != len(b.aval.shape) for a, b in zip(outside, inside, strict=True)
    )
    count = len(step.made) - along(step.results, body.outvars)
    last = len(step.read) - along(step.shapes, body.invars)
    return step.read[last - count : last]


def bare(program: Any) -> Any:
    """A program without its constants, which JAX keeps beside it or, from 0.12 on, within."""
    return getattr(program, "jaxpr", program)


def _inside(step: Step) -> int:
    """What a nested program has in memory of its own."""
    bodies: Sequence[Any] = ()
    if step.name in ("scan", "while"):
        bodies = (step.params.get("jaxpr") or step.params["body_jaxpr"],)
    elif step.name == "cond":
        bodies = step.params["branches"]
    return max((peak(flatten(bare(body))) for body in bodies), default=0)


def materialised(program: Flat) -> set[int]:
    """Variables that stand in memory: made by what cannot be fused, or used by it."""
    found = {var for step in program.steps if step.name in MADE for var in step.made}
    source = {var: step for step in program.steps for var in step.made}
    wanted = [var for step in program.steps if step.name in MADE and "dot" not in step.name for var in step.read]
    seen: set[int] = set()
    todo = [*wanted, *program.returned]
    while todo:
        var = todo.pop()
        step = source.get(var)
        if var in seen or step is None or var in found:
            continue
        seen.add(var)
        if step.name in VIEWS:
            todo += step.read[:1]
        else:
            found.add(var)
    return found - set(program.given)


def traffic(program: Flat) -> list[float]:
    """Bytes that each step moves which is neither a product nor a collective.

    A result that stands in memory is written, and everything in memory that is fused into it is read. A reduction
    reads its operand whether or not its result stays; those over the same arrays do so in one pass.
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
            moved[at] = float(sum(program.sizes[var] for var in (*step.made, *(() if again else read))))
        if reduces:
            reduced.add(read)
        for var in step.made:
            sources[var] = frozenset((var,)) if own else read
    return moved


def gathered(program: Flat, along: Collection[str]) -> dict[int, tuple[int, tuple[str, ...]]]:
    """Of every variable that is gathered along some of these axes, the dim that was split, and the axes."""
    found: dict[int, tuple[int, tuple[str, ...]]] = {}
    for step in program.steps:
        if COLLECTIVE_OF.get(step.name) == "all-gather":
            axes = step.params["axis_name"]
            axes = (axes,) if isinstance(axes, str) else tuple(axes)
            if set(axes) <= set(along):
                found[step.made[0]] = step.params["all_gather_dimension"], axes
        elif step.name in VIEWS and step.read and step.read[0] in found:
            dim, axes = found[step.read[0]]
            before, after = step.shapes[0].shape, step.results[0].shape
            from_end = len(after) - (len(before) - dim)
            for at in (dim, from_end):  # a reshape joins or parts dims on one side
                if step.name != "transpose" and 0 <= at < len(after) and before[dim] == after[at]:
                    found[step.made[0]] = at, axes
                    break
    return found


def _last_uses(program: Flat) -> dict[int, int]:
    """The last step that looks at each variable, itself or through what is fused into it."""
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
