"""The work inside hand-written kernels, which a program names and does not show.

A kernel is known by its name. Attention (splash) counts the blocks that its mask leaves; a product
grouped by expert (ragged dot, megablox) counts its rows once.
"""

from collections.abc import Sequence

ATTENTION = {"splash_mha_fwd": 2, "splash_mha_dq": 3, "splash_mha_dkv": 4}
"""Matrix products of each kernel; the two of the backward pass compute scores again."""

GROUPED = ("ragged-dot-none", "ragged_dot", "gmm", "tgmm")

Input = tuple[str, tuple[int, ...]]
"""Dtype and shape."""


def kernel(name: str) -> str:
    """What kernel goes by that name: "attention", "grouped product", or empty for none that is known."""
    if name.startswith(tuple(ATTENTION)):
        return "attention"
    return "grouped product" if name.startswith(GROUPED) else ""


def flops(name: str, inputs: Sequence[Input], out: tuple[int, ...], filled: float = 1.0) -> float:
    """Floating-point operations of a known kernel; `out` is the shape of its first result.

    `filled` is the part of an expert's rows that hold a token: room that is left over costs nothing.
    """
    numbers = [shape for dtype, shape in inputs if dtype.startswith(("bf", "f")) and len(shape) >= 2]
    if kernel(name) == "attention":
        q = next(shape for shape in numbers if len(shape) >= 3)
        products = next(count for stem, count in ATTENTION.items() if name.startswith(stem))
        return 2.0 * products * _size(q) * q[-2] * _live(inputs)
    left, *others = [shape for shape in numbers if len(shape) == 2]
    if len(out) == 2:
        return 2.0 * filled * _size(out) * left[-1]
    matrix = out[-2] * out[-1]  # of rows and rows: either may be given transposed
    return 2.0 * filled * matrix * (_size(left) * _size(others[0]) / matrix) ** 0.5


def _live(inputs: Sequence[Input]) -> float:
    """The part of all blocks that a mask leaves, from the grid that it is given as."""
    grid = next((s[-2:] for dtype, s in inputs if dtype in ("s8", "int8", "s32", "int32") and len(s) == 3), None)
    if grid is None:
        return 1.0
    queries, keys = grid
    return (queries + 1) / (2 * queries) if queries == keys else keys / queries


def _size(shape: Sequence[int]) -> int:
    size = 1
    for side in shape:
        size *= side
    return size
