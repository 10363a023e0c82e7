"""Cost of one operation of a compiled program: floating-point operations, and bytes to and from main memory.

FLOPs are counted exactly, for matrix products and convolutions only; all other operations are bound by memory.
Memory traffic is counted by these rules:
  - An array in fast memory (a memory space other than 0) costs nothing.
  - An array that is only sliced costs its slices; one that is updated in place costs the update.
  - What a collective delivers is network traffic, in every fusion that the collective passes through.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from dtrain.core.chips import Chip
from dtrain.models.nn.count_flops import real_taps
from dtrain.plan.program import Array, Computation, Op, Program

EFFICIENCY = {"memory": 0.9, "network": 0.9, "attention": 0.5}
"""Fraction of the peak rate. `network` is for NVLink and between slices or hosts: the TPU link rates of the chip table
include it already. That of matrix products is the chip's."""

GROUPED = 0.7 / 0.9
"""What grouped products of experts reach of what other products do."""


NARROW = {"s8": "int8", "int8": "int8", "f8e4m3fn": "fp8", "float8_e4m3fn": "fp8"}
"""Formats of 8 bits by the dtypes of HLO and of JAX."""
OF_MATRICES = {"": "product", "int8": "int8 product", "fp8": "fp8 product"}
"""The kinds of products of matrices, by the format of their operands."""


def product_kind(dtypes: Iterable[str]) -> str:
    """The kind of a product of operands of these dtypes, as HLO and JAX name them."""
    formats = {NARROW.get(dtype, "") for dtype in dtypes}
    return OF_MATRICES[formats.pop() if len(formats) == 1 else ""]


@dataclass(frozen=True)
class Efficiency:
    """Predicts seconds of work on one device of a chip."""

    chip: Chip

    def computing(self, kind: str, flops: float) -> float:
        """Seconds of FLOPs of a kind: "product", "attention", "grouped product" or one of OF_MATRICES."""
        product = self.chip.product
        products = {kind: self.chip.rates.get(name, 1.0) * product for name, kind in OF_MATRICES.items()}
        products["grouped product"] = GROUPED * product
        reached = (EFFICIENCY | products)[kind]
        return flops / (reached * self.chip.flops_per_device)

    def moving(self, size: float) -> float:
        """Seconds to move `size` bytes to or from main memory."""
        return size / (EFFICIENCY["memory"] * self.chip.bandwidth / self.chip.devices)


VIEWS = ("bitcast", "reshape", "copy", "transpose", "convert")
SLICES = ("dynamic-slice", "slice", "gather")
FREE = (
    "parameter", "constant", "get-tuple-element", "tuple", "bitcast", "partition-id", "replica-id", "after-all",
    "iota", "add-dependency", "opt-barrier", "domain",
)  # fmt: skip
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")
UNMOVED = (
    "AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound", "AsyncCollectiveStart", "AsyncCollectiveDone",
)  # fmt: skip
"""XLA custom calls that only reserve memory, rename a value or state an assumption; they move no bytes."""


@dataclass(frozen=True)
class Cost:
    """Floating-point operations and bytes of main memory."""

    products: Mapping[str, float] = field(default_factory=dict)
    """FLOPs by kind of product."""
    bytes: float = 0.0

    @property
    def flops(self) -> float:
        return sum(self.products.values())


@dataclass(frozen=True)
class Costs:
    """The costs of a program's operations."""

    program: Program
    _known: dict[str, Mapping[str, float]] = field(default_factory=dict, init=False)
    """FLOPs of fused computations, by name; each is counted once."""

    def of(self, op: Op, home: Computation) -> Cost:
        """Cost of one operation of the computation `home`; bodies of loops, and collectives, are not included."""
        if op.kind in FREE or _unmoved(op):
            return Cost()
        inside = self.program.computations.get(op.called() or "")
        if op.kind in ("fusion", "call") and inside:
            return Cost(self.flops(inside), self._traffic(op, home, inside))
        flops = {_kind(op, home): product_flops(op, home)} if op.kind in ("dot", "convolution") else {}
        if op.kind == "dynamic-update-slice":
            return Cost({}, 2.0 * _main(home.ops[op.operands[1]].results))
        if op.kind in SLICES:
            return Cost({}, 2.0 * _main(op.results))
        read = sum(_main(home.ops[name].results) for name in dict.fromkeys(op.operands) if name in home.ops)
        return Cost(flops, read + _main(op.results))

    def flops(self, computation: Computation) -> Mapping[str, float]:
        """FLOPs of the products in a fused computation by their kind, nested fusions included."""
        if computation.name not in self._known:
            total: dict[str, float] = defaultdict(float)
            for op in computation.ops.values():
                if op.kind in ("dot", "convolution"):
                    total[_kind(op, computation)] += product_flops(op, computation)
                elif op.kind == "fusion" and (inside := op.called()):
                    for kind, count in self.flops(self.program.computations[inside]).items():
                        total[kind] += count
            self._known[computation.name] = total
        return self._known[computation.name]

    def _traffic(self, op: Op, home: Computation, inside: Computation) -> float:
        read = 0.0
        for number, parameter in inside.parameters.items():
            source = home.ops.get(op.operands[number])
            if source is not None and source.results and source.results[0].space == 0:
                read += self._read(parameter, inside)
        return read + self._written(inside.root, inside)

    def _read(self, value: Op, home: Computation) -> float:
        """Bytes of a value that its users read: the slices where all of them slice it, else the whole."""
        whole = float(sum(array.bytes for array in value.results))
        total = 0.0
        for user in home.users[value.name]:
            first = bool(user.operands) and user.operands[0] == value.name
            if user.kind in SLICES and first:
                total += sum(array.bytes for array in user.results)
            elif user.kind in ("tuple", "get-tuple-element", *COLLECTIVES) or _unmoved(user):
                continue
            elif user.kind == "dynamic-update-slice" and first and user.operands.count(value.name) == 1:
                continue  # updated in place, not read
            elif self._is_view(user) and not user.root:
                total += self._read(user, home)
            elif user.kind == "fusion" and (inside := self.program.computations.get(user.called() or "")):
                places = [place for place, name in enumerate(user.operands) if name == value.name]
                total += sum(self._read(inside.parameters[place], inside) for place in places)
            else:
                return whole
        return min(total, whole)

    def _is_view(self, op: Op) -> bool:
        """Whether what reads a slice of the result reads no more of the operand: inside a fusion nothing is stored.
        A fusion of nothing but a copy onto its own operand is a view as well."""
        if op.kind in VIEWS:
            return True
        inside = self.program.computations.get(op.called() or "") if op.kind == "fusion" else None
        alone = inside is not None and inside.root.kind == "copy" and len(inside.ops) == 1 + len(inside.parameters)
        return alone and "output_to_operand_aliasing" in op.attributes

    def _written(self, value: Op, home: Computation) -> float:
        """Bytes that a result writes to main memory."""
        if value.kind == "tuple":
            return sum(self._written(home.ops[name], home) for name in value.operands)
        if value.kind in ("parameter", "get-tuple-element", *COLLECTIVES) or _unmoved(value):
            return 0.0
        if value.kind == "dynamic-update-slice":
            return float(sum(array.bytes for array in home.ops[value.operands[1]].results))
        if value.kind == "bitcast" and home.ops[value.operands[0]].kind in ("dynamic-update-slice", "parameter"):
            return self._written(home.ops[value.operands[0]], home)
        if value.kind == "fusion" and (inside := self.program.computations.get(value.called() or "")):
            return min(self._written(inside.root, inside), _main(value.results))
        return _main(value.results)


def _unmoved(op: Op) -> bool:
    return op.kind == "custom-call" and any(f'custom_call_target="{name}"' in op.attributes for name in UNMOVED)


def _main(results: tuple[Array, ...]) -> float:
    """Bytes of the results that are in main memory."""
    return float(sum(array.bytes for array in results if array.space == 0))


def _kind(op: Op, home: Computation) -> str:
    return product_kind(home.ops[name].results[0].dtype for name in op.operands[:2])


def product_flops(op: Op, home: Computation) -> float:
    """FLOPs of a dot or a convolution: two for each multiplication of real inputs; padding does not count."""
    left, right = (home.ops[name].results[0] for name in op.operands[:2])
    out = op.results[0]
    if op.kind == "dot":
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", op.attributes)
        dims = [int(dim) for dim in contracted.group(1).split(",") if dim] if contracted else []
        return 2.0 * out.size * math.prod(left.shape[dim] for dim in dims)
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", op.attributes)
    assert labels, f"a convolution without dim_labels: {op.name}"
    lhs, rhs, res = labels.groups()
    window = _window(op.attributes, sum(letter.isdigit() for letter in lhs))
    taps = 1.0
    for place, (size, stride, low, left_step, right_step, *_) in enumerate(window):
        extent, outputs = left.shape[lhs.index(str(place))], out.shape[res.index(str(place))]
        taps *= real_taps(extent, outputs, size, stride=stride, low=low, left=left_step, right=right_step)
    return 2.0 * out.shape[res.index("b")] * out.shape[res.index("f")] * right.shape[rhs.index("i")] * taps


def _window(attributes: str, dims: int) -> list[tuple[int, ...]]:
    """Size, stride, low padding, and the dilation of both operands, for each spatial dim."""
    found = re.search(r"window=\{([^}]*)\}", attributes)
    text = dict(part.split("=") for part in found.group(1).split()) if found else {}

    def per(name: str, default: str) -> list[str]:
        return (text[name] if name in text else "x".join([default] * dims)).split("x")

    columns = (per("size", "1"), per("stride", "1"), per("pad", "0_0"), per("lhs_dilate", "1"), per("rhs_dilate", "1"))
    return [tuple(int(part.split("_")[0]) for part in row) for row in zip(*columns, strict=True)] if dims else []
