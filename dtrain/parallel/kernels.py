"""Which program computes attention on one device: splash on TPU, cuDNN on GPU, plain JAX elsewhere.

Dims: B batch, T tokens, H query heads, G key-value heads, D head dim.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp

from dtrain.attention import Reach, Side, attention
from dtrain.params import Tree

LANES = 128
BLOCK = 512
CUDNN_DTYPES = (jnp.bfloat16, jnp.float16)


def local_attention(
    platform: str, q_BTHD: jax.Array, k_BTGD: jax.Array, v_BTGD: jax.Array, reach: Reach, document_BT: jax.Array | None
) -> jax.Array:
    """Attention over whole rows, by the fastest program that the platform has for such arrays."""
    length, dim = q_BTHD.shape[1], q_BTHD.shape[3]
    if platform == "tpu" and length % LANES == 0 and dim % 64 == 0:
        return splash(q_BTHD, k_BTGD, v_BTGD, reach, document_BT)
    plain_scores = document_BT is None and reach.softcap is None
    if platform == "gpu" and plain_scores and q_BTHD.dtype in CUDNN_DTYPES and dim <= LANES and dim % 8 == 0:
        return cudnn(q_BTHD, k_BTGD, v_BTGD, reach)
    return attention(q_BTHD, k_BTGD, v_BTGD, reach, Side(jnp.arange(length, dtype=jnp.int32), document_BT))


def cudnn(q_BTHD: jax.Array, k_BTGD: jax.Array, v_BTGD: jax.Array, reach: Reach) -> jax.Array:
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
    reach: Reach,
    document_BT: jax.Array | None,
    interpret: bool = False,
) -> jax.Array:
    """The Pallas kernel that ships with JAX: blocks that a mask hides are never computed."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel

    length, heads = q_BTHD.shape[1:3]
    blocks = kernel.BlockSizes(**dict.fromkeys(_BLOCKS, _block(length)))
    options = {"attn_logits_soft_cap": reach.softcap, "block_sizes": blocks, "interpret": interpret}
    one = kernel.make_splash_mha(_mask(reach, length, heads), head_shards=1, q_seq_shards=1, **options)

    def rows(q: jax.Array, k: jax.Array, v: jax.Array, document: jax.Array | None) -> jax.Array:
        q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
        ids = None if document is None else kernel.SegmentIds(document, document)
        out: Any = jax.vmap(one, in_axes=(0, 0, 0, None if ids is None else 0))(q, k, v, ids)
        return jnp.swapaxes(out, 1, 2)

    scaled = (q_BTHD * reach.scale).astype(q_BTHD.dtype)
    return _differentiable(rows)(scaled, k_BTGD, v_BTGD, document_BT)


_BLOCKS = ("block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute")
_BLOCKS += ("block_q_dq", "block_kv_dq")


def _block(length: int) -> int:
    """The largest block up to BLOCK that divides the length."""
    return max(size for size in range(LANES, min(BLOCK, length) + 1, LANES) if length % size == 0)


def _mask(reach: Reach, length: int, heads: int) -> Any:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    shape = (length, length)
    if reach.window is not None:
        one = masks.LocalMask(shape, (reach.window - 1, 0 if reach.causal else reach.window - 1), 0)
    else:
        one = masks.CausalMask(shape) if reach.causal else masks.FullMask(shape)
    return masks.MultiHeadMask([one] * heads)


def _differentiable(rows: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """The same function, usable where JAX tracks over which mesh axes each value varies."""

    @jax.custom_vjp
    def call(q: jax.Array, k: jax.Array, v: jax.Array, document: jax.Array | None) -> jax.Array:
        return forward(q, k, v, document)[0]

    def forward(q: jax.Array, k: jax.Array, v: jax.Array, document: jax.Array | None) -> tuple[jax.Array, Tree]:
        with _tracked(q):
            return jax.vjp(lambda q, k, v: rows(q, k, v, document), q, k, v)

    def backward(back: Tree, gradient: jax.Array) -> tuple[jax.Array | None, ...]:
        with _tracked(gradient):
            return *back(gradient), None

    call.defvjp(forward, backward)
    return call


@contextmanager
def _tracked(like: jax.Array) -> Iterator[None]:
    """While inside, the results of splash's kernels are said to vary over the mesh as `like` does.

    JAX asks every Pallas kernel for this, and splash does not tell.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel

    module: Any = kernel
    plain, kind = module.pl, jax.typeof(like).manual_axis_type

    def pallas_call(*args: Any, out_shape: Any, **options: Any) -> Any:
        told = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, manual_axis_type=kind), out_shape)
        return plain.pallas_call(*args, out_shape=told, **options)

    module.pl = SimpleNamespace(**vars(plain) | {"pallas_call": pallas_call})
    try:
        yield
    finally:
        module.pl = plain
