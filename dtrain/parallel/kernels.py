"""Which program computes attention on one device: splash on TPU, cuDNN on GPU, plain JAX elsewhere.

Dims: B batch, T tokens, H query heads, G key-value heads, D head dim.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from dtrain.models.nn.attention import AttentionSpec, Positions, attention
from dtrain.models.nn.param import Tree
from dtrain.models.nn.remat import ATTENTION, PRODUCT
from dtrain.models.nn.vma import axes_of, vary

LANES = 128
BLOCK = 512
TILE = 1024
PARTIALS = 16
"""Blocks of keys up to which one kernel computes all gradients of attention: five products in place of seven.

It writes a part of the queries' gradient for each block of keys, in the queries' dtype, to be summed afterwards:
with many blocks that takes more memory than it saves work. Under a window most of these parts would be zeros.
"""
CUDNN_DTYPES = (jnp.bfloat16, jnp.float16)


def local_attention(
    platform: str,
    q_BTHD: jax.Array,
    k_BTGD: jax.Array,
    v_BTGD: jax.Array,
    reach: AttentionSpec,
    document_BT: jax.Array | None,
) -> jax.Array:
    """Attention over whole rows, by the fastest program that the platform has for such arrays."""
    length, dim = q_BTHD.shape[1], q_BTHD.shape[3]
    if platform == "tpu" and length % LANES == 0 and dim % 64 == 0:
        return splash(q_BTHD, k_BTGD, v_BTGD, reach, document_BT)
    plain_scores = document_BT is None and reach.softcap is None
    if platform == "gpu" and plain_scores and q_BTHD.dtype in CUDNN_DTYPES and dim <= LANES and dim % 8 == 0:
        return checkpoint_name(cudnn(q_BTHD, k_BTGD, v_BTGD, reach), ATTENTION)
    side = Positions(jnp.arange(length, dtype=jnp.int32), document_BT)
    return checkpoint_name(attention(q_BTHD, k_BTGD, v_BTGD, reach, side), ATTENTION)


def cudnn(q_BTHD: jax.Array, k_BTGD: jax.Array, v_BTGD: jax.Array, reach: AttentionSpec) -> jax.Array:
    """NVIDIA's fused kernel."""
    window = None if reach.window is None else (reach.window - 1, 0 if reach.causal else reach.window - 1)
    return jax.nn.dot_product_attention(
        q_BTHD,
        k_BTGD,
        v_BTGD,
        scale=reach.scale,
        is_causal=reach.causal,
        local_window_size=window,
        implementation="cudnn",
    )


def splash(
    q_BTHD: jax.Array,
    k_BTGD: jax.Array,
    v_BTGD: jax.Array,
    reach: AttentionSpec,
    document_BT: jax.Array | None,
    interpret: bool = False,
) -> jax.Array:
    """The Pallas kernel that ships with JAX: blocks that a mask hides are never computed."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel

    length, heads = q_BTHD.shape[1:3]
    block = _block(length)
    fused = reach.window is None and length // block <= PARTIALS
    sizes = dict.fromkeys(_BLOCKS if fused else (*_BLOCKS, *_BLOCKS_DQ), block)
    blocks = kernel.BlockSizes(**sizes, use_fused_bwd_kernel=fused)
    options = {"attn_logits_soft_cap": reach.softcap, "block_sizes": blocks, "interpret": interpret}
    options["residual_checkpoint_name"] = ATTENTION  # what is kept spares the forward kernel in the backward pass
    one = kernel.make_splash_mha(_mask(reach, length, heads), head_shards=1, q_seq_shards=1, **options)

    def rows(q: jax.Array, k: jax.Array, v: jax.Array, document: jax.Array | None) -> jax.Array:
        q, k, v = (
            checkpoint_name(jnp.swapaxes(x, 1, 2), PRODUCT) for x in (q, k, v)
        )  # as the backward kernels take them
        ids = None if document is None else kernel.SegmentIds(document, document)
        out: Any = jax.vmap(one, in_axes=(0, 0, 0, None if ids is None else 0))(q, k, v, ids)
        return jnp.swapaxes(out, 1, 2)

    scaled = (q_BTHD * reach.scale).astype(q_BTHD.dtype)
    return _differentiable(rows)(scaled, k_BTGD, v_BTGD, document_BT)


_BLOCKS = ("block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute")
_BLOCKS_DQ = ("block_q_dq", "block_kv_dq")


def _block(length: int) -> int:
    """The largest block up to BLOCK that divides the length."""
    return max(size for size in range(LANES, min(BLOCK, length) + 1, LANES) if length % size == 0)


def _mask(reach: AttentionSpec, length: int, heads: int) -> Any:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    shape = (length, length)
    if reach.window is not None:
        one = masks.LocalMask(shape, (reach.window - 1, 0 if reach.causal else reach.window - 1), 0)
    else:
        one = masks.CausalMask(shape) if reach.causal else masks.FullMask(shape)
    return masks.MultiHeadMask([one] * heads)


def grouped_product(platform: str, rows: jax.Array, matrices: jax.Array, sizes: jax.Array) -> jax.Array:
    """Each row times its expert's matrix, rows (N, in) being sorted by expert: (N, out).

    XLA has a kernel for it on TPU, and for the gradient of rows; that of matrices it computes as one
    dense product for every expert. There the Pallas kernel that ships with JAX stands in.
    """
    if platform != "tpu" or rows.shape[0] % LANES:
        return jax.lax.ragged_dot(rows, matrices, sizes)
    axes = (*axes_of(rows), *axes_of(matrices))
    return _grouped_on_tpu(vary(rows, axes), vary(matrices, axes), sizes)


@jax.custom_vjp
def _grouped_on_tpu(rows: jax.Array, matrices: jax.Array, sizes: jax.Array) -> jax.Array:
    return jax.lax.ragged_dot(rows, matrices, sizes)


def _grouped_forward(rows: jax.Array, matrices: jax.Array, sizes: jax.Array) -> tuple[jax.Array, Tree]:
    return _grouped_on_tpu(rows, matrices, sizes), (rows, matrices, sizes)


def _grouped_backward(kept: Tree, gradient: jax.Array) -> tuple[jax.Array | None, ...]:
    rows, matrices, sizes = kept
    of_rows = jax.lax.ragged_dot(gradient, jnp.swapaxes(matrices, 1, 2), sizes)
    return of_rows, rows_by_rows(rows, gradient, sizes), None


_grouped_on_tpu.defvjp(_grouped_forward, _grouped_backward)


def rows_by_rows(rows: jax.Array, others: jax.Array, sizes: jax.Array, interpret: bool = False) -> jax.Array:
    """For each expert the product of its rows (N, in) with their counterparts (N, out): (experts, in, out)."""
    kernel = import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")  # its package hides it by a function
    tiling = (_block(rows.shape[0]), min(TILE, rows.shape[1]), min(TILE, others.shape[1]))
    with _tracked(kernel, others):
        return kernel.tgmm(rows.T, others, sizes, rows.dtype, tiling, interpret=interpret)


def _differentiable(rows: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """The same function, usable where JAX tracks over which mesh axes each value varies."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel

    @jax.custom_vjp
    def call(q: jax.Array, k: jax.Array, v: jax.Array, document: jax.Array | None) -> jax.Array:
        return forward(q, k, v, document)[0]

    def forward(q: jax.Array, k: jax.Array, v: jax.Array, document: jax.Array | None) -> tuple[jax.Array, Tree]:
        with _tracked(kernel, q):
            return jax.vjp(lambda q, k, v: rows(q, k, v, document), q, k, v)

    def backward(back: Tree, gradient: jax.Array) -> tuple[jax.Array | None, ...]:
        with _tracked(kernel, gradient):
            return *back(gradient), None

    call.defvjp(forward, backward)
    return call


@contextmanager
def _tracked(module: Any, like: jax.Array) -> Iterator[None]:
    """While inside, the results of a module's kernels are said to vary over the mesh as `like` does.

    JAX asks every Pallas kernel for this, and those that ship with it do not tell.
    """
    plain, kind = module.pl, jax.typeof(like).manual_axis_type

    def pallas_call(*args: Any, out_shape: Any, **options: Any) -> Any:
        typed = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, manual_axis_type=kind), out_shape)
        return plain.pallas_call(*args, out_shape=typed, **options)

    module.pl = SimpleNamespace(**vars(plain) | {"pallas_call": pallas_call})
    try:
        yield
    finally:
        module.pl = plain
