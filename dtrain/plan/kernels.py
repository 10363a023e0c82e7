"""FLOPs of hand-written kernels, which a compiled program calls but does not contain.

A kernel is recognised by its name. Attention (splash, cuDNN) counts the blocks that its mask leaves; a matrix
product grouped by expert (ragged dot, megablox) counts each row once.
"""

import math
import re
from collections.abc import Sequence

from dtrain.plan.program import Computation, Op, Program

ATTENTION = {"splash_mha_fwd": 2, "splash_mha_dq": 3, "splash_mha_dkv": 4}
"""Matrix products of each kernel; both backward kernels recompute the scores."""

FUSED = 5
"""Matrix products of the kernel that computes all gradients: a `splash_mha_dkv` whose results include the queries'
gradient for each block of keys, an array with one dim more than the queries."""

GROUPED = ("ragged-dot-none", "ragged_dot", "gmm", "tgmm")

CUDNN = {"__cudnn$fmhaSoftmax": 2, "__cudnn$fmhaSoftmaxBackward": 5}
"""Like ATTENTION, by the target of the custom call."""

TILE = 128
"""Rows and columns of a tile of scores in cuDNN's kernels; masked scores are skipped in whole tiles."""

Input = tuple[str, tuple[int, ...]]
"""Dtype and shape."""


def hidden(op: Op, home: Computation, program: Program, filled: float) -> tuple[str, float]:
    """Kind and FLOPs of the kernel that an operation calls, also in a fusion that overlaps it with a collective.

    The kind is empty if it calls none that is known.
    """
    if op.kind == "fusion":
        inside = program.computations[op.called() or ""]
        calls = [inner for inner in inside.ops.values() if inner.kind == "custom-call"]
        found = (hidden(inner, inside, program, filled) for inner in calls)
        return next((kernel for kernel in found if kernel[0]), ("", 0.0))
    target = re.search(r'custom_call_target="([^"]*)"', op.attributes)
    called = target.group(1) if target and op.kind == "custom-call" else ""
    if called in CUDNN:
        return "attention", _cudnn(op, home, CUDNN[called])
    if called != "tpu_custom_call" or not kernel(op.name):
        return "", 0.0
    read = [array for name in op.operands if name in home.ops for array in home.ops[name].results[:1]]
    inputs = [(array.dtype, array.shape) for array in read]
    return kernel(op.name), flops(op.name, inputs, [result.shape for result in op.results], filled)


def _cudnn(op: Op, home: Computation, products: int) -> float:
    """FLOPs of a cuDNN call, from the shape of the scores and the mask in its attributes."""
    entry = re.search(r'"intermediate_tensor_shape": ?\{.*?"dimensions": ?\[([^\]]*)\]', op.attributes)
    assert entry, f"a cuDNN attention call without the shape of its scores: {op.name}"
    scores = [int(size) for size in re.findall(r"\d+", entry.group(1))]
    window = re.search(r'"sliding_window_length": ?"?(\d+)', op.attributes)
    dim, causal = home.ops[op.operands[0]].results[0].shape[-1], '"CAUSAL"' in op.attributes
    return cudnn(products, scores, dim, causal, int(window.group(1)) if window else 0)


def cudnn(products: int, scores: Sequence[int], dim: int, causal: bool, window: int) -> float:
    """FLOPs of that many matrix products with scores of shape (rows, heads, queries, keys) and heads of size `dim`."""
    tiles = -(-scores[-1] // TILE)
    used = min(tiles, -(-window // TILE) + 1) if window else tiles  # those of a window, and one that it ends in
    return 2.0 * products * math.prod(scores) * dim * (_live_part(tiles, used) if causal or window else 1.0)


def kernel(name: str) -> str:
    """Kind of the kernel of that name: "attention", "grouped product", or empty if it is not known."""
    if name.startswith(tuple(ATTENTION)):
        return "attention"
    return "grouped product" if name.startswith(GROUPED) else ""


def flops(name: str, inputs: Sequence[Input], results: Sequence[tuple[int, ...]], filled: float = 1.0) -> float:
    """FLOPs of a known kernel, from the shapes of its inputs and results.

    `filled` is the fraction of an expert's rows that hold a token: empty rows cost nothing.
    """
    numbers = [shape for dtype, shape in inputs if dtype.startswith(("bf", "f")) and len(shape) >= 2]
    if kernel(name) == "attention":
        q = next(shape for shape in numbers if len(shape) >= 3)
        products = next(count for stem, count in ATTENTION.items() if name.startswith(stem))
        fused = name.startswith("splash_mha_dkv") and max(map(len, results)) > len(q)
        products = FUSED if fused else products
        return 2.0 * products * math.prod(q) * q[-2] * _live(inputs)
    out = results[0]
    left, *others = [shape for shape in numbers if len(shape) == 2]
    if len(out) == 2:
        return 2.0 * filled * math.prod(out) * left[-1]
    # Gradient of the weights, (rows, m) and (rows, n) to (m, n); each operand may be transposed, so the number of
    # rows is computed from the sizes: sqrt(rows m * rows n / (m n)).
    matrix = out[-2] * out[-1]
    return 2.0 * filled * matrix * (math.prod(left) * math.prod(others[0]) / matrix) ** 0.5


def _live(inputs: Sequence[Input]) -> float:
    """Fraction of all blocks that the mask leaves, from the shape of the kernel's grid of mask blocks.

    One side of the grid are the blocks of queries, the other those of keys that a query can use: all, or those of a
    window. The kernel of the gradients of keys has the sides the other way. Beside the arrays of the grid, a kernel
    with a causal mask reads the positions of the queries, and one for packed rows the documents of queries and keys.
    """
    whole = [shape for dtype, shape in inputs if dtype in ("s8", "int8", "s32", "int32")]
    grid = next((shape for shape in whole if len(shape) == 3), None)
    others = sum(shape != grid for shape in whole)
    if grid is None or others % 2 == 0:  # no positions: nothing is masked but other documents, anywhere
        return 1.0
    return _live_part(max(grid[-2:]), min(grid[-2:]))


def _live_part(blocks: int, used: int) -> float:
    """The part of blocks x blocks of scores that a causal mask leaves where each query uses at most `used` of keys."""
    return (blocks * used - used * (used - 1) / 2) / blocks**2
