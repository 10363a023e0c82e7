"""Frozen matrices of 8 or 4 bits for each value, with a scale for each block (QLoRA, Dettmers et al. 2023).

A value is code x scale. Codes of int8 are -127 to 127. Those of nf4 are one of sixteen levels, the quantiles of a
normal distribution, and two are in a byte. Blocks run along the last of the dims that a product sums, so that a block
is in one column; on TPUs a block is whole rows of the tiles that a matrix is stored in.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from types import ModuleType
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from dtrain.models.nn.param import Param, Tree, zeros

Width = Literal["int8", "nf4"]
WIDTHS: tuple[Width, ...] = get_args(Width)
LARGEST = 127
LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The levels of nf4 (Dettmers et al. 2023, appendix E)."""
BLOCKS = (64, 32, 16)
PARTS = (8, 4, 2, 1)
"""Into how many parts a mesh should be able to divide the blocks, if possible: for it they are shorter."""


@partial(
    jax.tree_util.register_dataclass, data_fields=["codes", "scales"], meta_fields=["width", "block", "dim", "kept"]
)
@dataclass(frozen=True)
class Quantised:
    """A matrix (..., rows, ...): `codes` int8 of its shape, or uint8 with half the rows, and `scales` of rows / block.

    `dim` counts from the last: the dim of the rows. `kept`: under jit, the axes that split each dim when a layer uses
    it, from the last dim, and then the sharding; None: the arrays are as they are used.
    """

    codes: Any
    scales: Any
    width: Width
    block: int
    dim: int
    kept: tuple[Any, ...] | jax.sharding.Sharding | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the matrix."""
        shape = list(self.scales.shape)
        shape[self.dim] *= self.block
        return tuple(shape)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def wide(self, dtype: Any = None) -> jax.Array:
        """The matrix, computed in float32 and rounded to `dtype`, or that of the scales."""
        dim, codes, scales = self.dim % self.ndim, self.codes, self.scales
        if isinstance(self.kept, jax.sharding.Sharding):  # the compiler gathers the codes, not the values
            codes, scales = (jax.lax.with_sharding_constraint(x, self.kept) for x in (codes, scales))
        codes = _in_blocks(codes, dim, self.block // (2 if self.width == "nf4" else 1))
        if self.width == "nf4":  # the first half of a block is in the lower four bits
            values = _levels(jnp.concatenate([codes & 15, codes >> 4], dim + 1))
        else:
            values = codes.astype(jnp.float32)
        scales = jnp.expand_dims(scales.astype(jnp.float32), dim + 1)
        return (values * scales).reshape(self.shape).astype(dtype or self.scales.dtype)


def _levels(codes: jax.Array) -> jax.Array:
    """The level of each code, float32. Selected bit by bit: a lookup in a table is slow on TPUs."""
    found: list[Any] = [jnp.float32(level) for level in LEVELS]
    for bit in range(4):
        odd = (codes & (1 << bit)) != 0
        found = [jnp.where(odd, high, low) for low, high in zip(found[::2], found[1::2], strict=True)]
    return found[0]


def is_quantised(leaf: object) -> bool:
    """Whether this node of a tree of parameters is such a matrix."""
    return isinstance(leaf, Quantised)


def mapped(function: Callable[[Any], Any], tree: Tree) -> Tree:
    """The tree with `function(leaf)` in place of each leaf, where a quantised matrix is one leaf."""
    return jax.tree.map(function, tree, is_leaf=is_quantised)


def declared(param: Param, width: Width, rows: int) -> Any:
    """How a parameter is declared whose values are quantised along the dim `rows`; None if no block divides it."""
    size, dim = param.shape[rows], rows - len(param.shape)
    possible = [block for parts in PARTS for block in BLOCKS if not size % (block * parts)]
    if not possible or param.unpadded:
        return None
    block = possible[0]

    def part(length: int, dtype: str, exact: bool) -> Param:
        shape = (*param.shape[:rows], length, *param.shape[rows + 1 :])
        return replace(param, shape=shape, init=zeros, trained=False, saved=False, dtype=dtype, exact=exact)

    codes = part(size // 2, "uint8", True) if width == "nf4" else part(size, "int8", True)
    return Quantised(codes, part(size // block, "bfloat16", False), width, block, dim)


def in_full(tree: Tree) -> Tree:
    """Declared parameters, with one in place of the codes and scales of each quantised one. Its initial values are
    zeros."""

    def one(leaf: Any) -> Any:
        return replace(leaf.codes, shape=leaf.shape, dtype="", exact=False) if is_quantised(leaf) else leaf

    return mapped(one, tree)


def quantise(values: Any, like: Quantised, xp: ModuleType = np) -> tuple[Any, Any]:
    """(codes, scales) of values of the matrix, or of a part of it with whole blocks. `xp`: NumPy, or JAX's.

    The scale is rounded first, and the codes are for the rounded one: to bfloat16 a value loses nothing by it, but for
    the largest of a block, at most 1 / 256 of it.
    """
    dim = values.ndim + like.dim
    blocks = _in_blocks(values.astype(xp.float32), dim, like.block)
    largest = xp.abs(blocks).max(dim + 1)
    scales = (largest * np.float32(1 if like.width == "nf4" else 1 / LARGEST)).astype(jnp.bfloat16)
    wide = xp.expand_dims(scales.astype(xp.float32), dim + 1)
    if like.width == "int8":
        ratio = blocks / xp.where(wide == 0, 1, wide)
        codes = xp.clip(xp.rint(ratio), -LARGEST, LARGEST).astype(xp.int8)
        return codes.reshape(values.shape), scales
    codes = xp.zeros(blocks.shape, xp.uint8)
    for lower, upper in pairwise(LEVELS):  # the number of midpoints that a value is above
        codes = codes + (blocks > np.float32((lower + upper) / 2) * wide).astype(xp.uint8)
    low, high = xp.split(codes, 2, dim + 1)
    shape = list(values.shape)
    shape[dim] //= 2
    return (low | high << 4).reshape(shape), scales


def _in_blocks(x: Any, dim: int, block: int) -> Any:
    """x with the dim (rows) as two: (rows / block, block)."""
    return x.reshape(*x.shape[:dim], -1, block, *x.shape[dim + 1 :])
