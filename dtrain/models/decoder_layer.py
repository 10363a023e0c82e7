"""One layer of a decoder: its parameters, how it is applied, and what the layers cost.

Dims: B batch, T tokens, E embed, H query heads, G key-value heads, D head dim, F hidden.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

import jax
import jax.numpy as jnp

from dtrain.core.types import Natural, Positive, PositiveFloat
from dtrain.data.batch import DOCUMENT, TOKEN, WEIGHT, Batch
from dtrain.models import layer_inputs
from dtrain.models.altup import ALTUP
from dtrain.models.feed_forward import gated, hidden, sparse
from dtrain.models.latent import LATENT
from dtrain.models.layer_pattern import ATTENTION, LayerKind, shared_from
from dtrain.models.moe import matrices
from dtrain.models.nn import param as declare
from dtrain.models.nn.attention import AttentionSpec, mean_attended_keys
from dtrain.models.nn.context import LATER, Block, Context
from dtrain.models.nn.kv_cache import Kept, KeptLayer
from dtrain.models.nn.layers import added, bias, lift, normalised, scale
from dtrain.models.nn.matmul import matmul
from dtrain.models.nn.model import Flops
from dtrain.models.nn.param import Init, Param, Tree
from dtrain.models.nn.remat import Saved
from dtrain.models.rope import Rope, rotated

if TYPE_CHECKING:
    from dtrain.models.decoder import Decoder

QKV = ("query", "key", "value")
JOINED = "joined"
"""The matrices of `joined`."""
WAVES, GROWTH, CHUNKS = "waves", "growth", "chunks"
"""What all layers share, by position: the waves of each rotation, the factor of queries, and for each size of chunks
the documents that these are in `attend`."""


@dataclass(frozen=True, kw_only=True)
class QueryGrowth:
    """A factor of queries: 1 + rate x log(1 + floor(position / original)), as in Llama 4's and Ministral 3's code."""

    rate: PositiveFloat
    """How fast it grows."""
    original: Positive
    """Context length of the pretraining; before it the factor is 1."""
    first: Natural = 0
    """Number of the first position: 1 in Llama 4."""
    unrotated: bool = False
    """Only in layers that do not rotate queries (Llama 4)."""

    def factor(self, position_BT: jax.Array) -> jax.Array:
        """(B, T), float32."""
        position_BT = position_BT + self.first
        return 1 + self.rate * jnp.log1p(jnp.floor(position_BT.astype(jnp.float32) / self.original))


def layer(model: "Decoder", kind: LayerKind) -> Tree:
    """Parameters of a layer of this kind: of attention or another mixer, and of a feed-forward layer or a mixture
    of experts."""
    width = model.width
    inner = declare.normal(model.init)
    outer = declare.normal(model.init / (math.sqrt(2 * model.layers) if model.depth_init else 1))
    norms = ("norm1",) if _one_norm(model) else ("norm1", "norm2")
    tree: Tree = {name: norm(model, width, "embed") for name in norms} if model.pre_norm else {}
    if mixer := model.mixer(kind):
        tree[kind.mixer] = mixer.params(width, inner, outer)
    else:
        tree |= _attention_params(model, kind, inner, outer)
    if model.experts and not kind.dense:
        tree["moe"] = model.experts.params(width, model.feed_forward, inner, outer)
        if model.experts.beside:
            tree |= {name: norm(model, width, "embed") for name in ("moe_norm", "mlp_post", "moe_post")}
    if "moe" not in tree or (model.experts and model.experts.beside):
        size = _hidden_of(model, kind)
        tree["mlp"] = matrices(width, size, model.feed_forward, inner, outer)
        if model.bias or model.mlp_bias:
            inner_biases = {f"{name}_bias": bias((size,), "hidden") for name in tree["mlp"] if name != "down"}
            tree["mlp"] |= inner_biases | {"down_bias": bias((width,), "embed")}
    if model.post_norm:
        tree |= {"post1": norm(model, width, "embed"), "post2": norm(model, width, "embed")}
    if model.layer_inputs:
        tree |= layer_inputs.params(model, inner, outer) | {"inputs_post": norm(model, width, "embed")}
    if model.laurel_rank:
        tree |= {"laurel": _laurel(width, model.laurel_rank, inner, outer), "laurel_post": norm(model, width, "embed")}
    if model.altup:
        tree[ALTUP] = model.altup.params(model, inner) | {"norm": norm(model, width, "embed")}
    if model.layer_scale:
        tree["scale"] = replace(scale((1,), "_"), trained=False)
    return tree


def _hidden_of(model: "Decoder", kind: LayerKind) -> int:
    """Width of the feed-forward layer in such a layer."""
    return kind.hidden or model.hidden or 4 * model.width


def _laurel(width: int, rank: int, inner: Init, outer: Init) -> Tree:
    """A product of two thin matrices beside attention."""
    return {
        "left": Param((width, rank), "embed _", inner, fan_in=("embed",)),
        "right": Param((rank, width), "_ embed", outer, fan_in=("_",)),
    }


def _attention_params(model: "Decoder", kind: LayerKind, inner: Init, outer: Init) -> Tree:
    width, dim, groups, tree = model.width, model.head_size_of(kind), model.groups_of(kind), dict[str, Any]()
    q, kv = ((width, model.heads, dim), "embed heads _"), ((width, groups, dim), "embed kv_heads _")
    projections, values = {"query": q, "key": kv, "value": kv}, dim
    for name in ("key", "value") if kind.shared_keys else ("value",) if kind.shared_values else ():
        del projections[name]
    if model.attention_gate:
        projections["gate"] = q
    if model.latent:
        tree[LATENT] = model.latent.params(width, model.heads, dim, inner)
        projections = {"query": ((model.latent.query_rank or width, *q[0][1:]), q[1])}
        values = model.latent.values(dim)
    for name, (shape, dims) in projections.items():
        tree[name] = {"weight": Param(shape, dims, inner, fan_in=("embed",))}
        if model.bias or model.qkv_bias:
            tree[name]["bias"] = bias(shape[1:], dims.partition(" ")[2])
    tree["out"] = {"weight": Param((model.heads, values, width), "heads _ embed", outer, fan_in=("heads", "_"))}
    if model.bias or model.out_bias:
        tree["out"]["bias"] = bias((width,), "embed")
    if model.sinks:
        tree["sink"] = bias((model.heads,), "heads")
    if model.qk_norm_joint:
        tree |= {
            f"{name}_norm": scale(shape[1:], dims.partition(" ")[2])
            for name, (shape, dims) in {"query": q, "key": kv}.items()
            if name in projections
        }
    elif model.qk_norm and model.norm_scale:
        normed = [name for name in ("query", "key") if name in projections]
        tree |= {f"{name}_norm": norm(model, dim, "_")["scale"] for name in normed}
    return tree


def kept(model: "Decoder", kind: LayerKind, rows: int, capacity: int) -> KeptLayer:
    """What generation keeps of such a layer for so many rows, and tokens of each."""
    if mixer := model.mixer(kind):
        return mixer.kept(model.width, rows)
    if kind.shared_keys:
        return {}, None
    groups, heads, sizes = model.groups_of(kind), "kv_heads", (model.head_size_of(kind),) * 2
    if model.latent:
        groups, heads, sizes = 1, None, (model.latent.rank + model.latent.rotated, 0)
    dims = (None, heads, None, None)
    return Kept((rows, groups, sizes[0], capacity), dims), Kept((rows, groups, capacity, sizes[1]), dims)


def _one_norm(model: "Decoder") -> bool:
    """Whether attention and the feed-forward layer read the same normalised input."""
    return model.parallel and not model.parallel_norms


def norm(model: "Decoder", size: int, dim: str) -> Tree:
    """Scale, and bias with `norm_bias`, of a normalisation over `dim`."""
    factor = bias((size,), dim) if model.norm_offset else scale((size,), dim)  # an offset from one starts at zero
    factors = {"scale": factor} if model.norm_scale else {}
    return factors | ({"bias": bias((size,), dim)} if model.norm_bias else {})


def saveable(model: "Decoder") -> tuple[Saved, ...]:
    """Values that the backward pass of a layer reads: `remat` can save them."""
    gates = gated(model.feed_forward) or model.attention_gate or model.delta is not None or model.mamba is not None
    normed = model.post_norm or (model.experts is not None and model.experts.beside)
    absent = (set() if gates else {"gate"}) | (set() if normed else {"down"})
    absent |= {"value"} if all(kind.shared_values or kind.shared_keys for kind in model.round) else set()
    return tuple(name for name in get_args(Saved) if name not in absent)


def blocks(model: "Decoder") -> list[Block]:
    """The block of each layer of a round; equal layers have the same, but those whose keys others share."""
    stored = {number for number in shared_from(model.round) if number is not None}
    made: dict[LayerKind, Block] = {kind: partial(apply, model, kind, False) for kind in model.round}
    return [
        partial(apply, model, kind, True) if number in stored else made[kind] for number, kind in enumerate(model.round)
    ]


def apply(
    model: "Decoder", kind: LayerKind, stored: bool, block: Tree, x_BTE: jax.Array, shared: Tree, ctx: Context
) -> tuple[jax.Array, Tree]:
    """One layer: attention, then the feed-forward layer, each added to the residual stream; its router losses, and, if
    they are `stored`, its keys and values for later layers."""

    def before(name: str, x: jax.Array) -> jax.Array:
        return normal(model, block.get(name, {}), x) if model.pre_norm else x

    def after(name: str, y: jax.Array) -> jax.Array:
        y = normal(model, block.get(name, {}), y) if model.post_norm else y
        return y * model.residual_multiplier if model.residual_multiplier != 1 else y

    altup, streams = model.altup, list[jax.Array]()
    if altup:
        streams = altup.predicted(model, block[ALTUP], altup.apart(x_BTE), ctx.train)
        x_BTE = streams[altup.active]
    input_BTE, first_BTE = x_BTE, before("norm1", x_BTE)
    y_BTE, keys = _attention(model, block, ctx.collect(first_BTE), shared, kind, ctx)
    y_BTE = ctx.scatter(y_BTE, "heads")
    y_BTE = added(y_BTE, block["out"]["bias"]) if "bias" in block.get("out", {}) else y_BTE
    x_BTE = x_BTE + after("post1", y_BTE)
    if model.laurel_rank:
        y_BTE = matmul(matmul(first_BTE, block["laurel"]["left"]), block["laurel"]["right"])
        x_BTE = (x_BTE + first_BTE + normal(model, block["laurel_post"], y_BTE)) * 2**-0.5
    if not _one_norm(model):
        first_BTE = before("norm2", input_BTE if model.parallel else x_BTE)
    y_BTE, sums = _feed_forward(model, kind, block, first_BTE, x_BTE, shared, ctx)
    x_BTE = x_BTE + after("post2", y_BTE)
    if altup:
        streams = altup.corrected(model, block[ALTUP], streams, x_BTE, ctx.train)
    if model.layer_inputs:
        y_BTE = altup.read(block[ALTUP], streams) if altup else x_BTE
        y_BTE = normal(model, block["inputs_post"], layer_inputs.applied(model, block, y_BTE, shared, ctx))
        x_BTE, streams = x_BTE + y_BTE, [*streams[:1], *(stream_BTE + y_BTE for stream_BTE in streams[1:])]
    x_BTE = jnp.concatenate(streams, -1) if altup else x_BTE
    sums |= {LATER: {kind.keys: keys}} if stored else {}
    return (x_BTE * block["scale"].astype(x_BTE.dtype)[None, None] if model.layer_scale else x_BTE), sums


def _attention(
    model: "Decoder", block: Tree, y_BTE: jax.Array, shared: Tree, kind: LayerKind, ctx: Context
) -> tuple[jax.Array, tuple[jax.Array, jax.Array] | None]:
    """The result of a layer's attention or other mixer, a partial sum over its heads; keys and values."""
    if mixer := model.mixer(kind):
        return mixer.apply(block[kind.mixer], y_BTE, shared.get(DOCUMENT), model.epsilon, ctx), None
    rope, rotation = kind.position or model.position, model.rotation(kind)
    waves = shared[WAVES][model.rotations.index(rotation)] if rotation else None
    if model.latent:
        return _latent(model, block, y_BTE, (rope, waves), kind=kind, document_BT=shared.get(DOCUMENT), ctx=ctx), None
    groups, size = model.groups_of(kind), model.head_size_of(kind)
    together = _split(y_BTE, block, (model.heads, groups, groups)) if JOINED in block else {}

    def project(name: str, heads: str) -> jax.Array:
        x_BTHD = together[name] if name in together else matmul(y_BTE, block[name]["weight"], name=name)
        x_BTHD = added(x_BTHD, block[name]["bias"]) if "bias" in block[name] else x_BTHD
        return ctx.shard(x_BTHD, "batch", "length", heads, None)

    def clipped(x_BTHD: jax.Array) -> jax.Array:
        return x_BTHD if model.qkv_clip is None else jnp.clip(x_BTHD, -model.qkv_clip, model.qkv_clip)

    def turned(name: str, x_BTHD: jax.Array, heads: str, count: int) -> jax.Array:
        """Queries or keys, normalised and rotated."""
        if model.qk_norm_joint:
            x_BTHD = _joint_norm(model, block[f"{name}_norm"], x_BTHD, heads, count * size, ctx)
        elif model.qk_norm and not model.qk_norm_rotated:
            x_BTHD = _head_norm(model, block, name, x_BTHD)
        x_BTHD = clipped(x_BTHD)
        if isinstance(rope, Rope) and waves is not None:
            x_BTHD = rotated(x_BTHD, waves, rope.interleaved)
            x_BTHD = normalised({}, x_BTHD, "rms", model.epsilon, offset=False) if model.qk_norm_plain else x_BTHD
        return _head_norm(model, block, name, x_BTHD) if model.qk_norm_rotated else x_BTHD

    q_BTHD = turned("query", project("query", "heads"), "heads", model.heads)
    if kind.shared_keys:
        k_BTGD, v_BTGD = shared[kind.keys]
    else:
        key_BTGD = project("key", "kv_heads")
        k_BTGD = turned("key", key_BTGD, "kv_heads", groups)
        v_BTGD = clipped(key_BTGD if kind.shared_values else project("value", "kv_heads"))
        v_BTGD = normalised({}, v_BTGD, "rms", model.epsilon, offset=False) if model.value_norm else v_BTGD
    if GROWTH in shared and not (model.query_growth and model.query_growth.unrotated and waves is not None):
        q_BTHD = (q_BTHD * shared[GROWTH][:, :, None, None]).astype(q_BTHD.dtype)
    document_BT = shared[CHUNKS][f"{kind.chunk}"] if kind.chunk else shared.get(DOCUMENT)
    y_BTHD = ctx.attend(q_BTHD, k_BTGD, v_BTGD, _spec(model, kind), document_BT, block.get("sink"))
    if model.attention_gate:
        gate_BTHD = project("gate", "heads")
        y_BTHD = (y_BTHD * jax.nn.sigmoid(gate_BTHD.astype(jnp.float32))).astype(y_BTHD.dtype)
    keys = (k_BTGD, v_BTGD) if kind.shared_keys else ctx.for_later(k_BTGD, v_BTGD)
    return matmul(y_BTHD, block["out"]["weight"], contract_dims=2, name="out"), keys


def _spec(model: "Decoder", kind: LayerKind) -> AttentionSpec:
    factor = model.attention_multiplier or (model.query_pre_attn_scalar or model.head_size_of(kind)) ** -0.5
    rope = kind.position or model.position
    factor *= rope.scaling.scores if isinstance(rope, Rope) and rope.scaling else 1.0
    return AttentionSpec(factor, window=kind.window, softcap=model.attention_softcap, chunk=kind.chunk)


def shared_arrays(
    model: "Decoder", params: Tree, batch: Batch, position_BT: jax.Array, weight_BT: jax.Array, x_BTE: jax.Array,
    ctx: Context,
) -> Tree:  # fmt: skip
    """What all layers share, from the batch, the places of its tokens and what enters the first layer."""
    shared: Tree = {WEIGHT: weight_BT}
    shared |= {WAVES: tuple(rope.waves(position_BT, size) for rope, size in model.rotations)}
    shared |= {GROWTH: model.query_growth.factor(position_BT)} if model.query_growth else {}
    shared |= {name: batch[name] for name in (DOCUMENT,) if name in batch}
    if sizes := {kind.chunk for kind in model.round if kind.chunk}:
        at_BT = jnp.broadcast_to(position_BT, batch[TOKEN].shape)
        shared |= {CHUNKS: {f"{size}": chunks(at_BT, batch.get(DOCUMENT), size, model.context) for size in sizes}}
    return shared | (layer_inputs.shared(model, params, x_BTE, batch[TOKEN], ctx) if model.layer_inputs else {})


def chunks(position_BT: jax.Array, document_BT: jax.Array | None, size: int, context: int) -> jax.Array:
    """A number for each chunk of each document, from positions in documents: (B, T), int32."""
    number_BT = position_BT // size
    return number_BT if document_BT is None else document_BT * -(-context // size) + number_BT


def _latent(
    model: "Decoder",
    block: Tree,
    y_BTE: jax.Array,
    rotation: tuple[Any, tuple[jax.Array, jax.Array] | None],
    kind: LayerKind,
    document_BT: jax.Array | None,
    ctx: Context,
) -> jax.Array:
    """Attention whose keys and values come from one vector for each token."""
    latent: Any = model.latent
    found = latent.attended(block, y_BTE, *rotation, ctx)
    spec = replace(_spec(model, kind), values_in_keys=found.shared)
    y_BTHV = ctx.attend(found.q, found.k, found.v, spec, document_BT, block.get("sink"))
    y_BTHV = latent.from_values(block, y_BTHV, model.head_size) if found.shared else y_BTHV
    return matmul(y_BTHV, block["out"]["weight"], contract_dims=2, name="out")


def joined(block: Tree) -> Tree:
    """The parameters of a layer with the matrices of one input side by side: fewer, larger products for generation.

    Only for parameters that no device holds a share of: the parts of a share would not be those of the whole.
    """
    if LATENT in block or not block.keys() >= set(QKV):
        return block
    block = dict(block)
    weights = [block[name]["weight"] for name in QKV]
    block |= {name: {key: x for key, x in block[name].items() if key != "weight"} for name in QKV}
    block[JOINED] = jnp.concatenate(weights, axis=1)
    if "mlp" in block and "gate" in block["mlp"]:
        mlp = dict(block["mlp"])
        mlp[JOINED] = jnp.concatenate([mlp.pop("gate"), mlp.pop("up")], axis=1)
        block["mlp"] = mlp
    return block


def _split(y_BTE: jax.Array, block: Tree, sizes: tuple[int, int, int]) -> dict[str, jax.Array]:
    """Queries, keys and values from one product."""
    heads, groups, _ = sizes
    parts = jnp.split(matmul(y_BTE, block[JOINED]), (heads, heads + groups), axis=2)
    return dict(zip(QKV, parts, strict=True))


def _head_norm(model: "Decoder", block: Tree, name: str, x_BTHD: jax.Array) -> jax.Array:
    """Normalisation of each head of queries or keys."""
    return normal(model, {"scale": block[f"{name}_norm"]} if model.norm_scale else {}, x_BTHD)


def _joint_norm(
    model: "Decoder", scale_HD: jax.Array, x_BTHD: jax.Array, heads: str, total: int, ctx: Context
) -> jax.Array:
    """RMS normalisation over the `total` values of all heads together, of which this device may have a share."""
    y_BTHD = x_BTHD.astype(jnp.float32)
    squares_BT11 = ctx.reduce(jnp.square(y_BTHD).sum((2, 3), keepdims=True), heads)
    y_BTHD = y_BTHD * jax.lax.rsqrt(squares_BT11 / total + model.epsilon)
    return (y_BTHD * lift(scale_HD.astype(jnp.float32), y_BTHD)).astype(x_BTHD.dtype)


def _feed_forward(
    model: "Decoder", kind: LayerKind, block: Tree, y_BTE: jax.Array, x_BTE: jax.Array, shared: Tree, ctx: Context
) -> tuple[jax.Array, Tree]:
    """The normalised activations y through the feed-forward layer or the experts, or x, which is not normalised,
    through the experts beside it."""
    if not model.experts or "moe" not in block:
        return _dense(model, kind, block, y_BTE, ctx), {}
    apply, beside = model.experts.apply, model.experts.beside
    routed_BTE = normalised({}, x_BTE, "rms", model.epsilon, offset=False) if beside else None
    z_BTE = normal(model, block["moe_norm"], x_BTE) if beside else y_BTE
    z_BTE, sums = apply(block["moe"], z_BTE, shared[WEIGHT], model.feed_forward, ctx, routed_BTE)
    z_BTE = ctx.scatter(z_BTE, "hidden")
    if beside:
        y_BTE = normal(model, block["mlp_post"], _dense(model, kind, block, y_BTE, ctx))
        z_BTE = y_BTE + normal(model, block["moe_post"], z_BTE)
    return z_BTE, sums


def _dense(model: "Decoder", kind: LayerKind, block: Tree, y_BTE: jax.Array, ctx: Context) -> jax.Array:
    mlp, y_BTE = block["mlp"], ctx.collect(y_BTE)

    halves = jnp.split(matmul(y_BTE, mlp[JOINED]), 2, axis=-1) if JOINED in mlp else []
    together: dict[str, jax.Array] = dict(zip(("gate", "up"), halves, strict=False))

    def times(name: str) -> jax.Array:
        y_BTF = together[name] if together else matmul(y_BTE, mlp[name], name=name)
        y_BTF = added(y_BTF, mlp[f"{name}_bias"]) if f"{name}_bias" in mlp else y_BTF
        y_BTF = (
            sparse(y_BTF, kind.sparsity, _hidden_of(model, kind), ctx) if kind.sparsity and name == "gate" else y_BTF
        )
        return ctx.shard(y_BTF, "batch", "length", "hidden")

    y_BTE = ctx.scatter(matmul(hidden(model.feed_forward, times), mlp["down"], name="down"), "hidden")
    return added(y_BTE, mlp["down_bias"]) if "down_bias" in mlp else y_BTE


def normal(model: "Decoder", params: Tree, x: jax.Array) -> jax.Array:
    """The model's normalisation over the last dim."""
    return normalised(params, x, model.norm, model.epsilon, model.norm_offset)


def flops_of_tokens(model: "Decoder", length: int, declared: Tree, adapters: Tree, tokens: int) -> Flops:
    """Floating-point operations for so many tokens in rows of `length`, forward and backward.

    6 x the parameters in products, and 12 x width x keys for attention (Chowdhery et al. 2022, appendix B), the keys
    being those that the causal mask and the window allow. The gradient of a frozen parameter is not computed: 4 x. Low-
    rank `adapters` are parameters in products.
    """
    head = declared.get("head", declared["embed"])
    further = model.multi_token.depth if model.multi_token else 0  # each has a layer like the last one, and the head
    outside = ("position", layer_inputs.NORM)
    own = jax.tree.leaves({name: part for name, part in declared.items() if name not in outside})
    parts = [(param, 1.0) for param in own if "vocab" not in param.names]  # a table is not multiplied
    if model.experts:
        share = model.experts.active / model.experts.count
        parts = [(param, share if "experts" in param.names else 1.0) for param, _ in parts]
    parts += [(param, 1.0) for param in jax.tree.leaves(adapters)]
    heads = (1 + further) * model.vocab * model.width
    used = heads + sum(declare.count(param) * share for param, share in parts)
    # the factor of a layer's output is not a matrix
    frozen = sum(declare.count(param) * share for param, share in parts if not (param.trained or param.shape[-1] == 1))
    frozen += 0 if any(param.trained for param in jax.tree.leaves(head)) else heads
    each = 6 * used - 2 * frozen
    kinds = (*model.kinds, *further * model.kinds[-1:])
    for kind in kinds:
        if kind.mixer == ATTENTION:  # scores of queries and keys, and sums of values
            size = model.head_size_of(kind)
            sizes = size + (model.latent.values(size) if model.latent else size)
            each += 6 * model.heads * sizes * mean_attended_keys(length, kind.window, kind.chunk)
    each += 6 * sum(mixer.products(model.width) for kind in kinds if (mixer := model.mixer(kind)))
    parameters = "6N" if not frozen else "4N of frozen and 6N of trained parameters"
    return Flops(each * tokens, f"{parameters} and causal attention")
