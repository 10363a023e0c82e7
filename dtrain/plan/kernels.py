"""The work inside hand-written kernels, which a program names and does not show.

A kernel is known by its name. Attention (splash, cuDNN) counts the blocks that its mask leaves; a
product grouped by expert (ragged dot, megablox) counts its rows once.
"""

import math
import re
from collections.abc import Sequence

from dtrain.plan.program import Computation, Op

ATTENTION = {"splash_mha_fwd": 2, "splash_mha_dq": 3, "splash_mha_dkv": 4}
"""Matrix products of each kernel; the two of the backward pass compute scores again."""

FUSED = 5
"""Products of the kernel that computes all gradients: `splash_mha_dkv` with the queries' gradient, block by block of
keys, among its results: one dim more than the queries have."""

GROUPED = ("ragged-dot-none", "ragged_dot", "gmm", "tgmm")

CUDNN = {"__cudnn$fmhaSoftmax": 2, "__cudnn$fmhaSoftmaxBackward": 5}
"""By the name of the call; as ATTENTION."""

TILE = 128
"""Rows of queries that cuDNN's kernels work on at once: what a mask hides is passed over in such tiles."""

Input = tuple[str, tuple[int, ...]]
"""Dtype and shape."""


def hidden(op: Op, home: Computation, filled: float) -> tuple[str, float]:
    """The kind of the kernel that an operation calls, empty where it calls none that is known, and its work."""
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
    """By the shape of the scores, which the call tells, and its mask."""
    entry = re.search(r'"intermediate_tensor_shape": ?\{.*?"dimensions": ?\[([^\]]*)\]', op.attributes)
    assert entry, f"cuDNN's attention without the shape of its scores: {op.name}"
    scores = [int(size) for size in re.findall(r"\d+", entry.group(1))]
    window = re.search(r'"sliding_window_length": ?"?(\d+)', op.attributes)
    dim, causal = home.ops[op.operands[0]].results[0].shape[-1], '"CAUSAL"' in op.attributes
    return cudnn(products, scores, dim, causal, int(window.group(1)) if window else 0)


def cudnn(products: int, scores: Sequence[int], dim: int, causal: bool, window: int) -> float:
    """Work of that many products with scores of the shape (rows, heads, queries, keys) and heads of size `dim`."""
    tiles = -(-scores[-1] // TILE)
    seen = (tiles + 1) / (2 * tiles) if causal else 1.0
    within = (window + TILE) / scores[-1] if window else 1.0
    return 2.0 * products * math.prod(scores) * dim * min(seen, within)


def kernel(name: str) -> str:
    """What kernel goes by that name: "attention", "grouped product", or empty for none that is known."""
    if name.startswith(tuple(ATTENTION)):
        return "attention"
    return "grouped product" if name.startswith(GROUPED) else ""


def flops(name: str, inputs: Sequence[Input], results: Sequence[tuple[int, ...]], filled: float = 1.0) -> float:
    """Floating-point operations of a known kernel, by the shapes of its results.

    `filled` is the part of an expert's rows that hold a token: room that is left over costs nothing.
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
    matrix = out[-2] * out[-1]  # of rows and rows: either may be given transposed
    return 2.0 * filled * matrix * (math.prod(left) * math.prod(others[0]) / matrix) ** 0.5


def _live(inputs: Sequence[Input]) -> float:
    """The part of all blocks that a mask leaves, from the grid that it is given as."""
    grid = next((s[-2:] for dtype, s in inputs if dtype in ("s8", "int8", "s32", "int32") and len(s) == 3), None)
    if grid is None:
        return 1.0
    queries, keys = grid
    return (queries + 1) / (2 * queries) if queries == keys else keys / queries
