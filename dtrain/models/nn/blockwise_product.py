"""Products of rows that are sorted by group with the matrix of their group, in a loop over blocks of rows.

`jax.lax.ragged_dot` compiles on a CPU to the product of every row with every matrix; here a row meets one matrix only.
Dims: N rows, G groups, I and O the dims of a matrix, R the rows of a block, S blocks.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from dtrain.models.nn.vma import axes_of, vary

SMALLEST, LARGEST = 16, 512
"""Rows of a block."""


class _Blocks(NamedTuple):
    """Each block has rows of one group, in ascending order; the last block of a group may be partly filled."""

    group: jax.Array
    """Number of the group of each block (S,)."""
    start: jax.Array
    """First row of each block (S,)."""
    end: jax.Array
    """The row after the last one of its group (S,)."""
    used: jax.Array
    """Number of blocks that have rows; the others come last."""


def blockwise_product(rows_NI: jax.Array, matrices_GIO: jax.Array, sizes_G: jax.Array) -> jax.Array:
    """Each row times its group's matrix: (N, O). Group g has the next `sizes[g]` rows; rows after the last group's
    give zeros, as those of `jax.lax.ragged_dot` do.
    """
    axes = (*axes_of(rows_NI), *axes_of(matrices_GIO))
    return _product(vary(rows_NI, axes), vary(matrices_GIO, axes), sizes_G)


@jax.custom_vjp
def _product(rows_NI: jax.Array, matrices_GIO: jax.Array, sizes_G: jax.Array) -> jax.Array:
    return _rows(rows_NI, matrices_GIO, sizes_G, contract=0)


def _rows(rows_NI: jax.Array, matrices_GIO: jax.Array, sizes_G: jax.Array, contract: int) -> jax.Array:
    """The product of each row and its matrix, summed over the dim `contract` of each matrix."""
    count, size = len(rows_NI), _block(len(rows_NI), len(sizes_G))
    blocks = _blocks(count, size, sizes_G)
    rows = jnp.pad(rows_NI, ((0, size), (0, 0)))  # the last block may end behind the last row

    def block(number: jax.Array, out: jax.Array) -> jax.Array:
        x = jax.lax.dynamic_slice_in_dim(rows, blocks.start[number], size)
        matrix = jax.lax.dynamic_index_in_dim(matrices_GIO, blocks.group[number], keepdims=False)
        y = jax.lax.dot_general(x, matrix, (((1,), (contract,)), ((), ())))
        # rows behind the end of the group are overwritten by the blocks that follow
        return jax.lax.dynamic_update_slice_in_dim(out, y, blocks.start[number], 0)

    shape = (count + size, matrices_GIO.shape[2 - contract])
    out = _loop(blocks, block, jnp.zeros(shape, rows_NI.dtype), axes_of(rows_NI))[:count]
    return jnp.where((jnp.arange(count) < sizes_G.sum())[:, None], out, 0)


def _matrices(rows_NI: jax.Array, others_NO: jax.Array, sizes_G: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """For each group, rows^T x others over its own rows: (G, I, O), summed in float32."""
    count, size = len(rows_NI), _block(len(rows_NI), len(sizes_G))
    blocks = _blocks(count, size, sizes_G)
    rows, others = (jnp.pad(x, ((0, size), (0, 0))) for x in (rows_NI, others_NO))

    def block(number: jax.Array, out: jax.Array) -> jax.Array:
        start, group = blocks.start[number], blocks.group[number]
        own = (start + jnp.arange(size) < blocks.end[number])[:, None]
        x, y = (jax.lax.dynamic_slice_in_dim(part, start, size) for part in (rows, others))
        # both: a value that is not finite, in a row of the next group, times zero would not be zero
        x, y = (jnp.where(own, part, 0) for part in (x, y))
        product = jax.lax.dot_general(x, y, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        before = jax.lax.dynamic_index_in_dim(out, group)
        return jax.lax.dynamic_update_index_in_dim(out, before + product[None], group, 0)

    shape = (len(sizes_G), rows_NI.shape[1], others_NO.shape[1])
    return _loop(blocks, block, jnp.zeros(shape, jnp.float32), axes_of(rows_NI)).astype(dtype)


def _loop(
    blocks: _Blocks, block: Callable[[jax.Array, jax.Array], jax.Array], out: jax.Array, axes: tuple[str, ...]
) -> jax.Array:
    return jax.lax.fori_loop(0, blocks.used, block, vary(out, axes))


def _block(rows: int, groups: int) -> int:
    """Rows of a block: at an even load two to four blocks for each group, so that few are partly filled."""
    return min(max(1 << max(rows // (2 * groups), 1).bit_length() - 1, SMALLEST), LARGEST)


def _blocks(count: int, size: int, sizes_G: jax.Array) -> _Blocks:
    each_G = (sizes_G + size - 1) // size
    last_G, end_G = jnp.cumsum(each_G), jnp.cumsum(sizes_G)
    number_S = jnp.arange(count // size + len(sizes_G))
    group_S = jnp.minimum(jnp.searchsorted(last_G, number_S, side="right"), len(sizes_G) - 1)
    place_S = number_S - (last_G - each_G)[group_S]  # among the blocks of its group
    start_S = (end_G - sizes_G)[group_S] + place_S * size
    return _Blocks(group_S, start_S, end_G[group_S], last_G[-1])


def _forward(
    rows: jax.Array, matrices: jax.Array, sizes: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    return _product(rows, matrices, sizes), (rows, matrices, sizes)


def _backward(saved: tuple[jax.Array, jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    rows, matrices, sizes = saved
    return _rows(gradient, matrices, sizes, contract=1), _matrices(rows, gradient, sizes, matrices.dtype), None


_product.defvjp(_forward, _backward)
