"""The contract of an engine: it places batches, sums gradients over devices and traces steps."""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dtrain.core.chips import Chip
from dtrain.core.errors import Problem, RecipeError
from dtrain.core.types import Positive
from dtrain.data.batch import CALL, Batch
from dtrain.models.nn.context import Context
from dtrain.models.nn.model import Loss
from dtrain.models.nn.param import Tree, merged, trained
from dtrain.models.nn.vma import axes_of, vary
from dtrain.parallel.compiler_options import (
    ALL_REDUCE,
    SCHEDULED,
    SPARSECORE,
    TPU,
    VMEM,
    WITH_KERNELS,
    Overlap,
    resolved,
)
from dtrain.parallel.mesh import PIPELINE
from dtrain.parallel.rules import Layout

LossFn = Callable[[Tree, Batch, Context], Loss]
Grads = Callable[[Tree, Batch], tuple[Loss, Tree]]
Sums = Callable[[Tree, Batch], Loss]
OutputsFn = Callable[[Tree, Batch, Context], dict[str, jax.Array]]
Outputs = Callable[[Tree, Batch], dict[str, jax.Array]]
Warn = Callable[[str], None]
Place = tuple[tuple[int, ...], NamedSharding]
"""The global shape and the sharding of an array."""


@dataclass(frozen=True)
class Replicas:
    """A step that was traced and lowered as the program of each of several devices, for global arrays."""

    jaxpr: ClosedJaxpr
    """The program of one device."""
    lowered: jax.stages.Lowered

    @property
    def out_tree(self) -> Any:
        return self.lowered.out_tree

    def lower(self) -> jax.stages.Lowered:
        return self.lowered


Traced = jax.stages.Traced | Replicas


def _silent(_: str) -> None:
    """No warning."""


FILES = re.compile(r"_(dir|path|file|directory|from|to)(_|$)")
"""Names of options whose values are paths, some of them of programs that the compiler runs."""


@dataclass(frozen=True, kw_only=True)
class EngineSection:
    """What every engine's section of a recipe has: compiler options, and which engine it is."""

    overlap: Overlap = "auto"
    """What the compiler runs collectives beside. On TPUs: matrix "products"; "kernels", too, such as attention and the
    products of experts; "sparsecore": collectives also run on the SparseCores, "kernels" where a chip has none; "none";
    "auto": what plans find fastest for the chip, or "none" where the compiler fails with it. Under jit, what ends
    the compiler's process is left out: kernels on v4 and v5p; of models with experts kernels and all-reduces on the
    SparseCores, on TPU7x all of it. On GPUs all but "none" are the same."""
    xla: dict[str, bool | int | str] = field(default_factory=dict)
    """XLA options: {xla_tpu_scoped_vmem_limit_kib: 65536}, also against one that `overlap` sets. Those of other
    hardware are ignored."""
    steps_per_call: Positive = 1
    """Most training steps that one call of the compiled program runs: more than 1 saves the time of the calls where a
    step takes a few milliseconds or less. A call ends where the run evaluates or saves. Stop requests wait for it."""

    def on(self, layout: Layout, chip: Chip | None, devices: int, *, tokens: float) -> Any:
        """The engine itself, or, of `auto`, the one on so many devices of this chip. `layout`: without parameters.
        `tokens`: of a microbatch on one device; 0 for models and slices with which engines were not compared."""
        del layout, chip, devices, tokens
        return self

    @property
    def choices(self) -> dict[str, Any]:
        """The engines that it may be, by kind; on CPUs it is the first."""
        own: Any = self
        return {own.kind: own}

    def problems(self, recipe: Any) -> Iterator[Problem]:
        """Options of the compiler that a recipe, which may come from others, must not set."""
        del recipe
        for name, value in self.xla.items():
            if "dump" in name or (isinstance(value, str) and (FILES.search(name) or "/" in value)):
                hint = "a recipe may come from an untrusted source; set the option in XLA_FLAGS instead"
                yield f"engine.xla.{name}", "an option that names a file or writes one is not allowed in a recipe", hint


@dataclass(frozen=True, kw_only=True)
class Compiler(EngineSection):
    """How an engine compiles its programs."""

    @property
    def explicit(self) -> bool:
        """Whether dtrain places the collectives, not the compiler."""
        return True

    def automatic(self, chip: Chip) -> Overlap:
        """What `overlap: auto` is on a TPU, by plans of programs that were compiled for it (docs/plan.md)."""
        del chip
        return "none"

    def left_out(self, chip: Chip | None, *, experts: bool) -> frozenset[str]:
        """Options of `overlap` with which the chip's compiler ends the process, or fails."""
        del chip, experts
        return frozenset()

    def overlapped(self, platform: str, chip: Chip | None) -> Overlap:
        """What `overlap` is on this hardware."""
        automatic = self.automatic(chip) if chip else "none"
        return resolved(automatic if self.overlap == "auto" else self.overlap, platform, chip)

    def chosen(self, platform: str, chip: Chip | None = None, *, experts: bool = False) -> dict[str, bool | str]:
        """The options that the section asks of this hardware's compiler. `chip`: None if it is not in the table.
        `experts`: whether the model has a mixture of experts."""
        others = {"tpu": ("xla_gpu_", "xla_cpu_"), "gpu": ("xla_tpu_", "xla_jf_", "xla_cpu_")}
        foreign = others.get(platform, ("xla_tpu_", "xla_jf_", "xla_gpu_", "xla_enable_async_"))
        own = {SCHEDULED: self.overlap != "none"} if platform == "gpu" else TPU[self.overlapped(platform, chip)]
        left_out = self.left_out(chip, experts=experts)
        kept = {name: value for name, value in own.items() if name not in left_out}
        ends = (own and not kept) or (self.overlap == "kernels" and WITH_KERNELS in left_out)
        if ends and self.overlap != "auto" and platform == "tpu":
            of = " of models with experts" if experts else ""
            where = f"{chip.name if chip else 'TPUs'} ends the process with it under this engine"
            raise RecipeError(f"engine.overlap: the compiler{of} for {where}", "use auto, or engine: shard_map")
        given = {**kept, **self.xla}
        line = {name: value if isinstance(value, bool) else str(value) for name, value in given.items()}
        return {name: value for name, value in line.items() if not name.startswith(foreign)}

    def options(self, platform: str, chip: Chip | None = None, *, experts: bool = False) -> dict[str, bool | str]:
        """The options for this hardware's compiler, as it takes them."""
        simulated = platform == "cpu" and jax.device_count() > 1 and jax.process_count() == 1
        return ({SCHEDULER: MEMORY} if simulated else {}) | self.chosen(platform, chip, experts=experts)

    def arranged(self, mesh: Mesh) -> Mesh:
        """Any order is supported."""
        return mesh

    def compile(
        self, step: Traced, platform: str, chip: Chip | None = None, *, experts: bool = False, warn: Warn = _silent
    ) -> jax.stages.Compiled:
        """Compile the traced step. Raises RecipeError with the name of an option that the compiler does not have."""
        lowered = step.lower()
        if platform == "cpu" and jax.device_count() > 1:
            number_collectives(lowered.compiler_ir())
        return self.build(lowered, self.options(platform, chip, experts=experts), warn)

    def build(self, lowered: jax.stages.Lowered, options: Mapping[str, bool | str], warn: Warn) -> jax.stages.Compiled:
        """Compile with these options. One of `overlap: auto` that the compiler does not have is left out, since
        versions of XLA differ, and all of them where the compiler fails; `warn` gets the reason. RecipeError names
        others, and says what to do about an operation that is too large."""
        while True:
            try:
                return lowered.compile(compiler_options=dict(options) or None)
            except jax.errors.JaxRuntimeError as error:
                too_large = "ScopedVmemOom" in str(error)
                overlapped = options.keys() & SPARSECORE.keys() - self.xla.keys()
                if self.overlap == "auto" and overlapped and (too_large or str(error).startswith("INTERNAL")):
                    # XLA fails to compile some all-reduces for the SparseCores
                    some = not too_large and ALL_REDUCE in overlapped
                    changed = "without all-reduces on SparseCores" if some else "with engine.overlap=none"
                    warn(f"the compiler failed, compiled again {changed}: {_short(error)}")
                    left_out = {ALL_REDUCE} if some else overlapped
                    options = {name: value for name, value in options.items() if name not in left_out}
                    continue
                if too_large:
                    raise self._too_large(options) from error
                if str(error).startswith("INTERNAL") and overlapped:
                    raise RecipeError(f"the compiler failed: {_short(error)}", "try engine.overlap=none") from error
                unknown = re.search(r"No such compile option: '(\w+)'", str(error))
                if not unknown or (name := unknown.group(1)) not in options:
                    raise
                if name in self.xla:
                    raise RecipeError(f"engine.xla.{name}: this compiler has no such option") from error
                if name not in SPARSECORE:
                    raise
                if self.overlap != "auto":
                    reason = f"engine.overlap: this compiler has no option {name}, which {self.overlap!r} needs"
                    raise RecipeError(reason, "use auto, which leaves it out") from error
                options = {other: value for other, value in options.items() if other != name}

    def _too_large(self, options: Mapping[str, bool | str]) -> RecipeError:
        """An operation exceeds the memory that it works in."""
        more = f"engine.xla={{{VMEM}: {2 * max(int(options.get(VMEM, 0)), 32 * 1024)}}}"
        off = "engine.overlap=none, or " if options.keys() & SPARSECORE.keys() - {VMEM} else ""
        message = "the compiler: one operation of the step exceeds the memory that it may take (VMEM)"
        return RecipeError(message, f"try {off}{more}")


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def number_collectives(module: Any) -> None:
    """Give each collective of a StableHLO module a channel of its own.

    JAX gives channel 1 to all collectives of `shard_map`. CPU devices that come to two of them in different orders then
    take the values of one for those of the other: numbers are wrong, or the process waits for ever, or crashes.
    """
    from jax.extend.mlir import ir
    from jax.extend.mlir.dialects import stablehlo

    count = itertools.count(1)

    def number(operation: Any) -> Any:
        if CHANNEL in operation.attributes:
            kind = stablehlo.ChannelHandle(operation.attributes[CHANNEL]).channel_type
            operation.attributes[CHANNEL] = stablehlo.ChannelHandle.get(next(count), kind, module.context)
        return ir.WalkResult.ADVANCE

    with module.context:
        module.operation.walk(number)


CHANNEL = "channel_handle"
SCHEDULER, MEMORY = "xla_cpu_scheduler_type", "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"
"""How XLA's CPU compiler orders a program for several devices: scheduled for concurrency, its default, devices enter
independent collectives in different orders and wait for each other. Not for several processes, whose collectives (gloo)
are paired by their order alone: there only the schedule for concurrency keeps it, and the other ends them at random."""


class Engine(Protocol):
    """`jit`, `shard_map` or `pmap`: the recipe's `engine` section itself. All results are global."""

    @property
    def steps_per_call(self) -> int:
        """Most training steps that one call runs."""
        ...

    @property
    def explicit(self) -> bool:
        """Whether dtrain places the collectives, not the compiler."""
        ...

    def compile(
        self, step: Traced, platform: str, chip: Chip | None = None, *, experts: bool = False, warn: Warn = _silent
    ) -> jax.stages.Compiled:
        """Compile the traced step with the options of the section, or with others, which `warn` gets."""
        ...

    def arranged(self, mesh: Mesh) -> Mesh:
        """The mesh with its devices in an order that this engine supports."""
        ...

    def refusal(self, layout: Layout) -> str:
        """Why this engine does not support such a layout; empty if it does."""
        ...

    def problems(self, recipe: Any) -> Iterator[Problem]:
        """What of a recipe, beside its layout, this engine does not support."""
        ...

    def place(self, layout: Layout, name: str, shape: tuple[int, ...]) -> tuple[tuple[int, ...], NamedSharding]:
        """The global shape and sharding of the batch array of this name and shape."""
        ...

    def grads(self, layout: Layout, loss: LossFn, microbatches: int) -> Grads:
        """(params, batch) → the summed loss and the gradients of its sum, over all microbatches and devices.

        Parameters that are not trained have None in place of a gradient.
        """
        ...

    def sums(self, layout: Layout, loss: LossFn, microbatches: int) -> Sums:
        """(params, batch) → the summed loss over all devices."""
        ...

    def rows(self, layout: Layout, outputs: OutputsFn) -> Outputs:
        """(params, batch) → the outputs for each example."""
        ...

    def trace(self, layout: Layout, function: Callable[..., object], *args: Any, out: object, donate: bool) -> Traced:
        """Trace `function(first, batch)` for arrays or for shapes.

        `out` has the shardings of its results; `donate` lets the results reuse the memory of the first argument.
        """
        ...


@dataclass(frozen=True)
class Put:
    """Turn this process's rows of a batch of `examples` into one global batch on the devices.

    Shapes and shardings are computed once, with the first batch.
    """

    engine: Engine
    layout: Layout
    examples: int
    _places: dict[str, tuple[tuple[int, ...], NamedSharding, np.ndarray | None]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def __call__(self, batch: Batch) -> Batch:
        places = self._of(batch)
        return self._sent(self._ordered(batch), {name: (shape, to) for name, (shape, to, _) in places.items()}, axis=0)

    def several(self, batches: Sequence[Batch], steps: int) -> Batch:
        """At most `steps` batches for one call: (steps, examples, ...) each, padded, and how many there are."""
        ordered = [self._ordered(batch) for batch in batches]
        ordered += ordered[-1:] * (steps - len(ordered))
        stacked = {name: np.stack([batch[name] for batch in ordered]) for name in ordered[0]}
        places = {name: _stacked(shape, to, steps) for name, (shape, to, _) in self._of(batches[0]).items()}
        count = self._sent({CALL: np.int32(len(batches))}, {CALL: ((), replicated(self.layout))}, axis=None)
        return self._sent(stacked, places, axis=1) | count

    def _of(self, batch: Batch) -> dict[str, tuple[tuple[int, ...], NamedSharding, np.ndarray | None]]:
        if not self._places.keys() >= batch.keys():
            self._places.update({name: self._place(name, rows) for name, rows in batch.items()})
        return {name: self._places[name] for name in batch}

    def _ordered(self, batch: Batch) -> Batch:
        """This process's rows in the shape of the engine, tokens in the order of the devices."""
        places = self._of(batch)
        return {
            name: (rows if places[name][2] is None else rows[:, places[name][2]]).reshape(-1, *places[name][0][1:])
            for name, rows in batch.items()
        }

    def _sent(self, local: Batch, places: Mapping[str, Place], axis: int | None) -> Batch:
        """The arrays on the devices; `axis` is the one along which this process has some of the rows."""
        if all(sharding.is_fully_addressable for _, sharding in places.values()):
            return jax.device_put(local, {name: sharding for name, (_, sharding) in places.items()})
        with jax.transfer_guard("allow"):  # JAX counts the transfers inside as implicit ones
            return {
                name: jax.make_array_from_callback(shape, sharding, _part(local[name], shape, sharding, axis))
                for name, (shape, sharding) in places.items()
            }

    def _place(self, name: str, rows: np.ndarray) -> tuple[tuple[int, ...], NamedSharding, Any]:
        """The global shape and sharding of an array, and the zigzag order of its tokens, or None."""
        return *self.engine.place(self.layout, name, (self.examples, *rows.shape[1:])), self.layout.zigzag_order(name)

    @cached_property
    def held(self) -> np.ndarray:
        """Indices of the rows of the global batch that this process has."""
        return local_rows(self.layout, self.examples)


def call_shapes(layout: Layout, batch: Batch, steps: int) -> Batch:
    """The shapes of what one call of so many steps takes, of those of one batch."""
    if steps == 1:
        return batch
    places = {name: _stacked(of.shape, of.sharding, steps) for name, of in batch.items()}
    stacked = {
        name: jax.ShapeDtypeStruct(shape, batch[name].dtype, sharding=to) for name, (shape, to) in places.items()
    }
    return stacked | {CALL: jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated(layout))}


def _stacked(shape: tuple[int, ...], sharding: NamedSharding, steps: int) -> Place:
    """The place of that array where the batches of so many steps are stacked along a new first dim."""
    return (steps, *shape), NamedSharding(sharding.mesh, PartitionSpec(None, *sharding.spec))


def replicated(layout: Layout) -> NamedSharding:
    """Every device has the whole array."""
    return layout.sharding(PartitionSpec())


def _part(local: np.ndarray, shape: tuple[int, ...], to: NamedSharding, axis: int | None) -> Callable[..., np.ndarray]:
    """(index into the global array) → that part of it; `local` has what this process holds along `axis`."""

    def part(index: Any) -> np.ndarray:
        if axis is None:
            return local[index]
        start, stop, _ = index[axis].indices(shape[axis])
        first = int(np.searchsorted(_held(to, shape, axis), start))
        return local[(*index[:axis], slice(first, first + stop - start), *index[axis + 1 :])]

    return part


def local_rows(layout: Layout, examples: int) -> np.ndarray:
    """Indices of the rows of a global batch that the devices of this process hold, sorted."""
    return _held(layout.sharding(layout.spec(("batch",))), (examples,), 0)


@cache
def _held(sharding: NamedSharding, shape: tuple[int, ...], axis: int) -> np.ndarray:
    """The indices along `axis` of what the devices of this process hold of an array, sorted."""
    parts = [index[axis] for index in sharding.addressable_devices_indices_map(shape).values() if index]
    return np.unique(np.concatenate([np.arange(*part.indices(shape[axis])) for part in parts]))


def flow(layout: Layout, microbatches: int) -> tuple[int, int]:
    """(microbatches accumulated one after the other, microbatches in the pipeline at the same time)."""
    return (1, microbatches) if layout.sizes[PIPELINE] > 1 else (microbatches, 1)


def accumulate(
    loss: Callable[[Tree, Batch], Loss], params: Tree, batch: Batch, parts: int, declared: Tree
) -> tuple[Loss, Tree]:
    """The loss and the gradients of its sum by the trained parameters, accumulated over `parts` microbatches.

    Microbatch i has every `parts`-th row, from row i: each device then finds its part of each microbatch among its own
    rows, and none are moved.
    """

    def microbatch(rows: Batch) -> tuple[Loss, Tree]:
        def scalar(own: Tree) -> tuple[jax.Array, Loss]:
            value = loss(merged(own, params, declared), rows)
            return value.sum, value._replace(statistics=jax.lax.stop_gradient(value.statistics))

        (_, value), gradients = jax.value_and_grad(scalar, has_aux=True)(trained(params, declared))
        return value, gradients

    if parts == 1:
        return microbatch(batch)
    stacked = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(-1, parts, *x.shape[1:]), 1, 0), batch)
    first = jax.tree.map(lambda x: x[0], stacked)
    start = jax.tree.map(_zeros, jax.eval_shape(microbatch, first))

    def add(sums: Tree, rows: Batch) -> tuple[Tree, None]:
        # Without the barrier, XLA sums full gradients and reduce-scatters them once, which needs more memory. A
        # barrier per array: one barrier over all would make them vary over the same mesh axes.
        values = jax.tree.map(jax.lax.optimization_barrier, microbatch(rows))
        return jax.tree.map(jnp.add, sums, values), None

    return jax.lax.scan(add, start, stacked)[0]


def _zeros(shape: jax.ShapeDtypeStruct) -> jax.Array:
    """Zeros that vary over the same mesh axes as the values that are added to them."""
    return vary(jnp.zeros(shape.shape, shape.dtype), axes_of(shape))
