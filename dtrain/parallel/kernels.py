"""Kernels of one device: attention by splash on TPU, cuDNN on GPU, plain JAX elsewhere; grouped matrix products.

Dims: B batch, T tokens, H query heads, G key-value heads, D head dim.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from dtrain.models.nn.attention import AttentionSpec, Positions, attention
from dtrain.models.nn.blockwise_product import blockwise_product
from dtrain.models.nn.param import Tree
from dtrain.models.nn.remat import ATTENTION, QKV
from dtrain.models.nn.single_device import LANES
from dtrain.models.nn.vma import axes_of, vary
from dtrain.parallel.ring import GradientRequest, Keys, PairAttention, PartialAttention, PlainPairs, Queries

BLOCK = 512
WIDE = 2048
"""Most keys in a block of the fused gradient kernel where no score is masked, so that wide blocks waste no work."""
TILE = 1024
PARTIALS = 16
"""Most blocks of keys for which one fused kernel computes all gradients of attention: five products instead of seven.

The fused kernel writes a partial gradient of the queries for each block of keys, in the queries' dtype, and these are
summed afterwards: with many blocks they cost more memory than is worth the saved work. With a window, most are zero.
"""
CUDNN_DTYPES = (jnp.bfloat16, jnp.float16)


def local_attention(
    platform: str,
    q_BTHD: jax.Array,
    k_BTGD: jax.Array,
    v_BTGD: jax.Array,
    spec: AttentionSpec,
    document_BT: jax.Array | None,
    sink_H: jax.Array | None = None,
) -> jax.Array:
    """Attention over full rows (B, T, H, D), by the fastest kernel of the platform for such shapes and dtypes."""
    length, dim = q_BTHD.shape[1], q_BTHD.shape[3]
    if platform == "tpu" and length % LANES == 0 and dim % 64 == 0:
        return splash(q_BTHD, k_BTGD, v_BTGD, spec, document_BT, sink_H)
    plain_scores = document_BT is None and spec.softcap is None and sink_H is None and v_BTGD.shape[3] == dim
    if platform == "gpu" and plain_scores and q_BTHD.dtype in CUDNN_DTYPES and dim <= LANES and dim % 8 == 0:
        return checkpoint_name(cudnn(q_BTHD, k_BTGD, v_BTGD, spec), ATTENTION)
    positions = Positions(jnp.arange(length, dtype=jnp.int32), document_BT)
    return checkpoint_name(attention(q_BTHD, k_BTGD, v_BTGD, spec, positions, sink_H), ATTENTION)


def cudnn(q_BTHD: jax.Array, k_BTGD: jax.Array, v_BTGD: jax.Array, spec: AttentionSpec) -> jax.Array:
    """cuDNN's fused attention kernel."""
    window = None if spec.window is None else (spec.window - 1, 0 if spec.causal else spec.window - 1)
    return jax.nn.dot_product_attention(
        q_BTHD,
        k_BTGD,
        v_BTGD,
        scale=spec.scale,
        is_causal=spec.causal,
        local_window_size=window,
        implementation="cudnn",
    )


def splash(
    q_BTHD: jax.Array,
    k_BTGD: jax.Array,
    v_BTGD: jax.Array,
    spec: AttentionSpec,
    document_BT: jax.Array | None,
    sink_H: jax.Array | None = None,
    interpret: bool = False,
) -> jax.Array:
    """JAX's splash attention kernel for TPU, in Pallas: fully masked blocks are not computed.

    `interpret` runs it in Pallas's interpreter, on any platform.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel

    # if ATTENTION is saved, the backward pass does not rerun the forward kernel
    attend = _splash_kernel(spec, q_BTHD.shape, residual_checkpoint_name=ATTENTION, interpret=interpret)

    def rows(q: jax.Array, k: jax.Array, v: jax.Array, sink: jax.Array | None, document: jax.Array | None) -> jax.Array:
        """Attention of rows: q (B, T, H, D), k and v (B, T, G, D), sink (H,), document (B, T); (B, T, H, D)."""
        q, k, v = (
            checkpoint_name(jnp.swapaxes(x, 1, 2), name) for name, x in zip(QKV, (q, k, v), strict=True)
        )  # (heads, tokens) order, as the backward kernels read them
        ids = None if document is None else kernel.SegmentIds(document, document)
        out: Any = jax.vmap(attend, in_axes=(0, 0, 0, None if ids is None else 0, None))(q, k, v, ids, sink)
        return jnp.swapaxes(out, 1, 2)

    scaled = (q_BTHD * spec.scale).astype(q_BTHD.dtype)
    sink_H = None if sink_H is None else vary(sink_H.astype(jnp.float32), axes_of(q_BTHD))
    return _differentiable(rows)(scaled, k_BTGD, v_BTGD, sink_H, document_BT)


def pair_attention(platform: str, spec: AttentionSpec, length: int, dim: int) -> PairAttention:
    """How `ring_attention` attends to `length` keys at a time of heads of size `dim`: by splash where that can."""
    fits = platform == "tpu" and length % LANES == 0 and dim % 64 == 0
    # the ends of a window depend on the device, and splash's mask does not
    return SplashPairs(spec) if fits and spec.window is None else PlainPairs(spec)


@dataclass(frozen=True)
class SplashPairs:
    """Pairs of chunks by the splash kernels, whose scores never reach main memory."""

    spec: AttentionSpec
    interpret: bool = False

    def attend(self, queries: Queries, keys: Keys, own: bool) -> PartialAttention:
        """Values and log-sum-exp, as `PairAttention` says. A query without any key has a log-sum-exp of about -2e38."""
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel

        attend = self._kernel(queries, own)

        def row(q: jax.Array, k: jax.Array, v: jax.Array, ids: Any) -> tuple[jax.Array, jax.Array]:
            out, (log,) = attend(q, k, v, ids)
            return out, log

        with _tracked(kernel, queries.q):
            out, log = jax.vmap(row)(*self._inputs(queries, keys))
        return PartialAttention(jnp.swapaxes(out, 1, 2).astype(jnp.float32), jnp.swapaxes(log, 1, 2))

    def pull(
        self, queries: Queries, keys: Keys, request: GradientRequest, own: bool
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """The gradients, as `PairAttention` says.

        Splash's backward pass takes the output and the log-sum-exp that its forward pass returned. Given those over
        all keys of the row, it computes this pair's part of the gradients.
        """
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel

        attend: Any = self._kernel(queries, own)
        private: Any = kernel

        def row(q: Any, k: Any, v: Any, ids: Any, out: Any, log: Any, gradient: Any) -> list[jax.Array]:
            saved = (q, k, v, ids, None, out, log, attend.dq_mask_info, attend.dkv_mask_info)
            # the gradients of three masks, q, k, v, and others
            return private._splash_attention_bwd(**attend.kwargs, res=saved, do=gradient)[3:6]

        of_queries = (jnp.swapaxes(x, 1, 2) for x in (request.out, request.log, request.gradient))
        with _tracked(kernel, queries.q):
            gradients = jax.vmap(row)(*self._inputs(queries, keys), *of_queries)
        dq, dk, dv = (jnp.swapaxes(x, 1, 2).astype(jnp.float32) for x in gradients)
        return dq * self.spec.scale, (dk, dv)

    def _kernel(self, queries: Queries, own: bool) -> Any:
        spec = replace(self.spec, causal=own)
        return _splash_kernel(spec, queries.q.shape, wide=not own, save_residuals=True, interpret=self.interpret)

    def _inputs(self, queries: Queries, keys: Keys) -> tuple[Any, ...]:
        """Scaled queries, keys and values in (heads, tokens) order, and the documents."""
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel

        scaled = (queries.q * self.spec.scale).astype(queries.q.dtype)
        q, k, v = (jnp.swapaxes(x, 1, 2) for x in (scaled, keys.k, keys.v))
        of_q, of_k = queries.side.document_BT, keys.side.document_BT
        return q, k, v, None if of_q is None or of_k is None else kernel.SegmentIds(of_q, of_k)


def _splash_kernel(spec: AttentionSpec, shape: Sequence[int], *, wide: bool = False, **options: Any) -> Any:
    """The kernel for queries of that shape (B, T, H, D) and as many keys. `wide`: see WIDE."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel

    length, heads = shape[1:3]
    block = _block(length)
    keys = max(size for size in range(block, WIDE + 1 if wide else block + 1, block) if length % size == 0)
    fused = spec.window is None and length // keys <= PARTIALS
    sizes = dict.fromkeys(_BLOCKS if fused else (*_BLOCKS, *_BLOCKS_DQ), block)
    sizes |= {"block_kv_dkv": keys} if fused else {}
    blocks = kernel.BlockSizes(**sizes, use_fused_bwd_kernel=fused)
    options |= {"attn_logits_soft_cap": spec.softcap, "block_sizes": blocks}
    return kernel.make_splash_mha(_mask(spec, length, heads), head_shards=1, q_seq_shards=1, **options)


_BLOCKS = ("block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute")
_BLOCKS_DQ = ("block_q_dq", "block_kv_dq")


def _block(length: int) -> int:
    """The largest block up to BLOCK that divides the length."""
    return max(size for size in range(LANES, min(BLOCK, length) + 1, LANES) if length % size == 0)


def _mask(spec: AttentionSpec, length: int, heads: int) -> Any:
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    shape = (length, length)
    if spec.window is not None:
        mask = masks.LocalMask(shape, (spec.window - 1, 0 if spec.causal else spec.window - 1), 0)
    else:
        mask = masks.CausalMask(shape) if spec.causal else masks.FullMask(shape)
    return masks.MultiHeadMask([mask] * heads)


def grouped_product(platform: str, rows: jax.Array, matrices: jax.Array, sizes: jax.Array) -> jax.Array:
    """Each row times its expert's matrix, for rows (N, in) sorted by expert, `sizes` rows each: (N, out).

    On TPU, XLA has a kernel for this product and for the gradient of the rows, but computes the gradient of the
    matrices as a dense product over all rows for every expert; JAX's Pallas kernel `tgmm` replaces that one. On a CPU,
    XLA would compute all three so.
    """
    if platform == "cpu":
        return blockwise_product(rows, matrices, sizes)
    if platform != "tpu" or rows.shape[0] % LANES:
        return jax.lax.ragged_dot(rows, matrices, sizes)
    axes = (*axes_of(rows), *axes_of(matrices))
    return _grouped_on_tpu(vary(rows, axes), vary(matrices, axes), sizes)


@jax.custom_vjp
def _grouped_on_tpu(rows: jax.Array, matrices: jax.Array, sizes: jax.Array) -> jax.Array:
    return jax.lax.ragged_dot(rows, matrices, sizes)


def _grouped_forward(rows: jax.Array, matrices: jax.Array, sizes: jax.Array) -> tuple[jax.Array, Tree]:
    return _grouped_on_tpu(rows, matrices, sizes), (rows, matrices, sizes)


def _grouped_backward(saved: Tree, gradient: jax.Array) -> tuple[jax.Array | None, ...]:
    rows, matrices, sizes = saved
    of_rows = jax.lax.ragged_dot(gradient, jnp.swapaxes(matrices, 1, 2), sizes)
    return of_rows, rows_by_rows(rows, gradient, sizes), None


_grouped_on_tpu.defvjp(_grouped_forward, _grouped_backward)


def rows_by_rows(rows: jax.Array, others: jax.Array, sizes: jax.Array, interpret: bool = False) -> jax.Array:
    """For each expert, rows^T x others over its own rows (N, in) and (N, out): (experts, in, out)."""
    kernel = import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")  # the package's name `gmm` is a function
    tiling = (_block(rows.shape[0]), min(TILE, rows.shape[1]), min(TILE, others.shape[1]))
    with _tracked(kernel, others):
        return kernel.tgmm(rows.T, others, sizes, rows.dtype, tiling, interpret=interpret)


def _differentiable(rows: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """The same function and its gradient, usable under `shard_map` with `check_vma`."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel

    @jax.custom_vjp
    def call(q: jax.Array, k: jax.Array, v: jax.Array, sink: jax.Array | None, document: jax.Array | None) -> jax.Array:
        return forward(q, k, v, sink, document)[0]

    def forward(
        q: jax.Array, k: jax.Array, v: jax.Array, sink: jax.Array | None, document: jax.Array | None
    ) -> tuple[jax.Array, Tree]:
        with _tracked(kernel, q):
            return jax.vjp(lambda *inputs: rows(*inputs, document), q, k, v, sink)

    def backward(back: Tree, gradient: jax.Array) -> tuple[jax.Array | None, ...]:
        with _tracked(kernel, gradient):
            return *back(gradient), None

    call.defvjp(forward, backward)
    return call


@contextmanager
def _tracked(module: Any, like: jax.Array) -> Iterator[None]:
    """Within this context, declare that results of a module's Pallas kernels vary over the same mesh axes as `like`.

    `check_vma` requires this of every Pallas kernel, and the kernels in JAX do not declare it.
    """
    plain, kind = module.pl, jax.typeof(like).manual_axis_type

    def pallas_call(*args: Any, out_shape: object, **options: Any) -> Any:
        typed = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, manual_axis_type=kind), out_shape)
        return plain.pallas_call(*args, out_shape=typed, **options)

    module.pl = SimpleNamespace(**vars(plain) | {"pallas_call": pallas_call})
    try:
        yield
    finally:
        module.pl = plain
