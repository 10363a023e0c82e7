"""The quick tier: cost of the traced step (its jaxpr), by arithmetic; nothing is compiled.

The step is traced under shard_map, where shapes are those of one device and collectives are explicit. For
`engine: jit`, where the compiler inserts the collectives, this program is used in its place.

Seconds of a loop body, multiplied by its trip count:
  products and kernels: max(FLOPs / FLOP rate, bytes / bandwidth) each, the excess of the bytes as memory traffic
  other operations: bytes / bandwidth, with fusion assumed (jaxpr_flat.traffic)
  collectives: network.time each; those that overlap cost only max(their sum - seconds of products, 0)
On GPUs collectives are queued beside the work instead (plan/queue.py).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from jax.interpreters.partial_eval import dce_jaxpr

from dtrain.core.chips import Chip
from dtrain.models.nn.count_flops import MATRIX_PRODUCTS, one_product
from dtrain.parallel.compiler_options import SCHEDULED, WITH_KERNELS
from dtrain.parallel.engine import Compiler, Traced
from dtrain.parallel.mesh import FSDP_AXES
from dtrain.plan import kernels
from dtrain.plan.cost import OF_MATRICES, Efficiency, product_kind
from dtrain.plan.jaxpr_flat import (
    COLLECTIVE_OF,
    VIEWS,
    Flat,
    Step,
    bare,
    bytes_of,
    flatten,
    gathered,
    peak,
    summed,
    traffic,
)
from dtrain.plan.network import Group, Network
from dtrain.plan.replay import CollectiveCost, StepCost

Wait = tuple[float, CollectiveCost]
"""Seconds that the work waits, and for which collective."""


@dataclass
class Queue:
    """One pass through a loop body. Times are seconds since its beginning."""

    clock: float = 0.0
    """Time of the work."""
    end: float = 0.0
    """When the last of the queued collectives ends."""
    called: set[tuple[str, tuple[str, ...]]] = field(default_factory=set)
    """Kinds and axes of the collectives so far; compilers for GPUs combine those of a pass."""
    gathers: dict[int, tuple[float, CollectiveCost]] = field(default_factory=dict)
    """Seconds of the all-gathers whose results no step has read yet, by variable."""
    views: dict[int, int] = field(default_factory=dict)
    """The variable of which each is a view or a cast."""
    made: dict[int, float] = field(default_factory=dict)
    """When each variable was computed."""
    sums: list[tuple[float, float, CollectiveCost]] = field(default_factory=list)
    """Reduce-scatters: when what they sum was computed, their seconds."""

    def reads(self, step: Step) -> Iterator[Wait]:
        """Before a step: wait for the gathered arrays that it reads, unless it is a view or a cast of them."""
        if step.name in (*VIEWS, "convert_element_type"):
            several = len(step.made) == len(step.read)
            for at, var in enumerate(step.made):
                source = step.read[at if several else 0]
                self.views[var] = self.views.get(source, source)
            return
        for var in step.read:
            if gather := self.gathers.pop(self.views.get(var, var), None):
                seconds, collective = gather
                self.end += seconds
                yield self._until(self.end), collective

    def ran(self, step: Step) -> None:
        """After a step."""
        self.made |= dict.fromkeys(step.made, self.clock)

    def add(self, step: Step, seconds: float, collective: CollectiveCost, *, gathers: bool, hidden: bool) -> float:
        """Queue a collective; `hidden`: work continues beside it. Returns the seconds that the work waits at once."""
        if hidden and gathers:
            self.gathers[step.made[0]] = seconds, collective
        elif hidden:
            made = self.made.get(self.views.get(step.read[0], step.read[0]), 0.0)
            self.sums.append((made, seconds, collective))
        else:
            self.end = max(self.end, self.clock) + seconds
            return self._until(self.end)
        return 0.0

    def last(self) -> Iterator[Wait]:
        """At the end of the pass: wait for the reduce-scatters."""
        for made, seconds, _ in sorted(self.sums, key=lambda one: one[0]):
            self.end = max(self.end, made) + seconds
        if self.sums:
            yield self._until(self.end), self.sums[-1][-1]

    def _until(self, end: float) -> float:
        waited = max(end - self.clock, 0.0)
        self.clock += waited
        return waited


CUDNN = {"dot_product_attention_fwd_wrapper": 2, "dot_product_attention_bwd_wrapper": 5}
"""Matrix products of cuDNN's attention kernels."""


ASYNC_GATHER = "xla_tpu_enable_async_collective_fusion_fuse_all_gather"
WINDOW_GATHERS = "xla_tpu_enable_windowed_einsum_for_all_gather"
WINDOW_FROM = "xla_jf_spmd_threshold_for_windowed_einsum_mib"
WHOLE_FROM = 10_000
"""Threshold in MiB of an operand from which no product is split in practice."""

MOST_DEVICES = 32
"""Devices of a mesh up to which products are split, whatever the sizes of its axes: programs for 8, 16 and 32 devices
have such products, those for 64, 128 and 256 have none."""


@dataclass(frozen=True)
class Overlap:
    """Collectives that overlap with work in a loop body."""

    gathers: bool
    """All-gathers of parameters overlap."""
    sums: bool
    """Reduce-scatters of gradients overlap."""
    kernels: bool = False
    """Kernels hide collectives as matrix products do."""
    windowed: bool = False
    """Products are split to use the parts of their operand as they arrive."""
    waits: bool = False
    """Permutations are synchronous: each waits for the one before, so that the links of one direction are idle."""
    queued: bool = False
    """Collectives run one after another beside the work, in the order of the program (GPUs)."""
    scattered: bool = True
    """A reduce-scatter over several dimensions of a torus does not become an all-reduce."""

    def hides(self, kind: str, axes: tuple[str, ...]) -> bool:
        """Whether a collective along these axes of the mesh is hidden if there is enough work."""
        if kind == "collective-permute":
            return True
        saving = set(axes) <= set(FSDP_AXES)
        return saving and (self.gathers if kind == "all-gather" else self.sums and kind == "reduce-scatter")

    def dims(self, group: Group, torus: int) -> int | None:
        """Torus dimensions that a collective uses at once: None (all) if its group is the whole torus, else 1."""
        return None if len(group.rings) == len(group.extents) == torus else 1

    def kind(self, kind: str, group: Group) -> str:
        """The kind of collective that the compiler emits for this one."""
        whole = kind == "reduce-scatter" and len(group.extents) > 1 and not self.scattered
        return "all-reduce" if whole else kind


def overlap(engine: Compiler, placed_by_compiler: bool, chip: Chip, devices: int, *, experts: bool = False) -> Overlap:
    """Rules for an engine's compiler and options on a chip.

    `placed_by_compiler`: the compiler inserts the collectives (engine jit). `devices`: those of the whole mesh.
    `experts`: whether the model has a mixture of experts.
    """
    options: Mapping[str, bool | str] = engine.chosen(chip.platform, chip, experts=experts)
    if chip.platform == "gpu":
        hidden = _on(options, SCHEDULED)
        return Overlap(hidden, hidden and not placed_by_compiler, kernels=True, queued=True)
    split = placed_by_compiler and chip.dims == 2 and devices <= MOST_DEVICES
    if split and int(options.get(WINDOW_FROM, 0)) < WHOLE_FROM:
        waits = chip.name == "v5e" and devices == MOST_DEVICES
        return Overlap(not waits, not waits, windowed=_on(options, WINDOW_GATHERS, default=True), waits=waits)
    gathers, kernels = chip.name == "v5e" or _on(options, ASYNC_GATHER), _on(options, WITH_KERNELS)
    return Overlap(gathers, False, kernels=kernels, scattered=not placed_by_compiler)


def _on(options: Mapping[str, bool | str], name: str, *, default: bool = False) -> bool:
    """Whether an option is set to true; as text it may be `false` or `0`."""
    return str(options.get(name, default)).lower() not in ("false", "0")


FAST_MEMORY = 128 * 2**20
"""Bytes of fast memory (VMEM) of a v5e or v6e core."""

KEPT, SMALL = FAST_MEMORY // 2, FAST_MEMORY // 8
"""Bytes of the largest array that stays in fast memory: between the parts of one product, and between operations. GPUs
keep none."""

GPU_PASSES = 1.6
"""Memory traffic of programs compiled for GPUs, which fuse less, over that of the traced step: 1.4 to 1.8 in 23 of 26
programs of decoders of 0.1 to 70 billion parameters without experts, at most 2.6."""

ALL = Overlap(gathers=True, sums=True)

PRODUCTS = ("dot_general", "ragged_dot_general", "conv_general_dilated", "pallas_call", *CUDNN)


@dataclass(frozen=True)
class TracedCost:
    """Cost of the traced step on one device."""

    tally: StepCost | None
    """None if the speed of the chips is not known."""
    working: int
    """Peak bytes in memory besides the arguments."""


def step_cost(
    step: Traced, network: Network | None, devices: int, filled: float = 1.0, hides: Overlap = ALL
) -> TracedCost:
    """Add up the cost of one step.

    `filled` is the fraction of the experts' rows that hold a token; `hides` states which collectives the compiler
    overlaps with work.
    """
    walk = _Walk(network, filled, hides) if network else None
    # without what the compiler removes: gradients of frozen matrices, branches whose result is not used
    program, working = bare(step.jaxpr), 0
    outer = flatten(dce_jaxpr(program, [True] * len(program.outvars), instantiate=True)[0])
    for operation in outer.steps:
        if operation.name == "shard_map":
            inner = flatten(bare(operation.params["jaxpr"]))
            working = max(working, peak(inner))
            if walk:
                walk.work(inner, 1)
        elif walk:
            walk.step(operation, 1 / devices)  # outside shard_map shapes are global; each device computes its share
    if not any(operation.name == "shard_map" for operation in outer.steps):
        working = peak(outer) // devices
    return TracedCost(walk.tally if walk else None, working)


@dataclass
class _Body:
    """One pass through a loop body: seconds of work that can hide collectives, seconds of collectives to hide."""

    work: float = 0.0
    hidden: float = 0.0
    collectives: list[tuple[CollectiveCost, float]] = field(default_factory=list)
    """Collectives that can be hidden, with their seconds."""
    queue: Queue = field(default_factory=Queue)
    """What runs beside the work where collectives are queued."""


class _Walk:
    """Adds up costs over the operations of a program; `times` is how often an operation runs."""

    def __init__(self, network: Network, filled: float, hides: Overlap) -> None:
        self.network, self.filled, self.tally, self.efficiency = network, filled, StepCost(), Efficiency(network.chip)
        self.hides, self.body = hides, _Body()
        gpu = network.chip.platform == "gpu"
        self.small, self.passes = (0, GPU_PASSES) if gpu else (SMALL, 1.0)
        self.gathered: dict[int, tuple[int, tuple[str, ...]]] = {}
        self.summed: dict[int, tuple[str, ...]] = {}

    def work(self, program: Flat, times: float) -> float:
        """Add a loop body that runs `times` times. Returns the seconds of one pass."""
        moved, around = traffic(program, self.small), self.body
        self.body = _Body()
        self.gathered, self.summed = gathered(program, FSDP_AXES), summed(program, FSDP_AXES)
        queue = self.body.queue
        for at, step in enumerate(program.steps):
            self._wait(queue.reads(step), times)
            self.step(step, times)
            moving = self.efficiency.moving(self.passes * moved[at])
            queue.clock += moving
            self._spend("memory", times * moving)
            queue.ran(step)
        self._wait(queue.last(), times)
        self._expose()
        self.body = around
        return queue.clock

    def _wait(self, waits: Iterable[Wait], times: float) -> None:
        for seconds, collective in waits:
            collective.exposed += times * seconds
            self._spend("network", times * seconds)

    def _expose(self) -> None:
        """Charge the time that the body's work is too short to hide: max(hidden - work, 0) seconds.

        It is shared among the collectives in proportion to their seconds.
        """
        body = self.body
        waited = max(1.0 - body.work / body.hidden, 0.0) if body.hidden else 0.0
        for collective, seconds in body.collectives:
            collective.exposed += waited * seconds
            self._spend("network", waited * seconds)

    def step(self, step: Step, times: float) -> None:
        if step.name in ("scan", "while"):
            body, trips = step.params.get("jaxpr") or step.params["body_jaxpr"], step.params.get("length", 1)
            self.body.queue.clock += trips * self.work(flatten(bare(body)), times * trips)
        elif step.name == "cond":
            self.body.queue.clock += self.work(flatten(bare(step.params["branches"][-1])), times)
        elif step.name in COLLECTIVE_OF:
            self._collective(step, times)
        elif step.name in PRODUCTS:
            self._product(step, times)

    def _product(self, step: Step, times: float) -> None:
        kind, flops = _flops(step, self.filled, dense=self.network.chip.platform == "gpu")
        sizes = map(bytes_of, (*step.shapes, *step.results))
        moved = sum(size for size in sizes if size > self.small) + self._again(step)
        busy, moving = self.efficiency.computing(kind, flops), self.efficiency.moving(moved)
        self.tally.moved += times * moved
        product = kind in OF_MATRICES.values()
        if product:
            self.tally.flops += times * flops
        else:
            self.tally.kernel_flops += times * flops
        self.body.queue.clock += max(busy, moving)
        self.body.work += times * max(busy, moving) if product or self.hides.kernels else 0.0
        self.tally.compute("product" if product else "kernel", times * busy, times * moving)

    def _again(self, step: Step) -> float:
        """Bytes that a windowed product moves again, since it runs in parts / 2 steps.

        Each step reads and writes a result that it adds to, or reads the operand that is not split.
        """
        if not self.hides.windowed or step.name != "dot_general":
            return 0.0
        contracted, axes = step.params["dimension_numbers"][0], self.summed.get(step.made[0], ())
        left, right = map(bytes_of, step.shapes)
        whole, passes = max(left, right), 1
        for var, dims, other in zip(step.read, contracted, (right, left), strict=True):
            if var in self.gathered:
                dim, axes = self.gathered[var]
                whole, passes = (bytes_of(step.results[0]), 2) if dim in dims else (other, 1)
                break
        return self.network.along(axes).size / 2 * passes * whole if axes and whole > KEPT else 0.0

    def _collective(self, step: Step, times: float) -> None:
        axes = step.params.get("axes") or step.params.get("axis_name") or ()
        axes = (axes,) if isinstance(axes, str) else tuple(axis for axis in axes if isinstance(axis, str))
        group = self.network.along(axes)
        kind = self.hides.kind(COLLECTIVE_OF[step.name], group)
        size = sum(map(bytes_of, step.results if kind == "all-gather" else step.shapes))
        dims = None if kind == "all-reduce" else self.hides.dims(group, len(self.network.shape))
        seconds = (2 if self.hides.waits else 1) * self.network.time(kind, group, size, dims)
        collective = self.tally.collectives[kind, group.axes]
        beside = self.hides.hides(kind, group.axes)
        if self.hides.queued and set(group.axes) <= set(FSDP_AXES):  # combined into one call, with one latency
            called = self.body.queue.called
            seconds -= self.network.time(kind, group, 0.0, dims) if (kind, group.axes) in called else 0.0
            called.add((kind, group.axes))
        collective.add_call(times, size, seconds)
        if self.hides.queued:
            waited = self.body.queue.add(step, seconds, collective, gathers=kind == "all-gather", hidden=beside)
            self._wait([(waited, collective)], times)
        elif beside:
            self.body.hidden += times * seconds
            self.body.collectives.append((collective, times * seconds))
        else:
            self._wait([(seconds, collective)], times)

    def _spend(self, part: str, seconds: float) -> None:
        self.tally.parts[part] += seconds
        self.tally.seconds += seconds


def _flops(step: Step, filled: float, *, dense: bool) -> tuple[str, float]:
    """The kind of a product, and its FLOPs.

    `dense`: the compiler computes products grouped by expert as one product of all rows for each expert.
    """
    if step.name in MATRIX_PRODUCTS:
        shapes = [tuple(operand.shape) for operand in step.shapes]
        kind = product_kind(str(operand.dtype) for operand in step.shapes)
        return kind, one_product(step.name, step.params, shapes, tuple(step.results[0].shape))
    if step.name in CUDNN:
        (rows, queries, heads, dim), keys = step.shapes[0].shape, step.shapes[1].shape[1]
        causal, window = "CAUSAL" in str(step.params["mask_type"]), step.params["sliding_window_length"] or 0
        return "attention", kernels.cudnn(CUDNN[step.name], (rows, heads, queries, keys), dim, causal, window)
    inputs = [(str(aval.dtype), tuple(aval.shape)) for aval in step.shapes if hasattr(aval, "dtype")]
    name = str(step.params.get("name") or step.within) if step.name == "pallas_call" else "ragged_dot"
    kind = kernels.kernel(name)
    results = [tuple(aval.shape) for aval in step.results]
    if dense and kind == "grouped product":
        groups = next(shape[0] for shape in (*results, *(shape for _, shape in inputs)) if len(shape) == 3)
        return "product", groups * kernels.flops(name, inputs, results)
    return (kind, kernels.flops(name, inputs, results, filled)) if kind else ("product", 0.0)
