"""A decoder language model; its fields describe GPT-2, Llama, Mistral, Qwen, Gemma and Mixtral.

Between layers, activations may be split by `tokens` (sequence parallelism); inside a layer each device has
all tokens of its `length` for its share of the heads and of the hidden values.
Dims: B batch, T tokens, E embed, H query heads, G key-value heads, D head dim, V vocabulary.
"""

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp

from dtrain.core.errors import FieldError
from dtrain.core.metrics import DROPPED, NLL, PERPLEXITY, Metric
from dtrain.core.types import Depth, Natural, NonNegative, Positive, PositiveFloat
from dtrain.data.batch import DOCUMENT, POSITION, TARGET, TOKEN, WEIGHT, Batch, Example
from dtrain.models.decoder_layer import flops_per_token, layer, norm
from dtrain.models.feed_forward import Form, hidden
from dtrain.models.moe import Experts
from dtrain.models.next_token import Head, row_mismatch
from dtrain.models.nn import param as declare
from dtrain.models.nn.attention import AttentionSpec
from dtrain.models.nn.context import Block, Context, Layers, Remat
from dtrain.models.nn.layers import added, normalised
from dtrain.models.nn.matmul import matmul
from dtrain.models.nn.model import Declared, Flops, Loss, Structure
from dtrain.models.nn.param import Param, Tree
from dtrain.models.nn.remat import ON_DEVICE
from dtrain.models.rope import Learned, Rope, rotated


@dataclass(frozen=True, kw_only=True)
class Decoder(Declared):
    """A causal transformer that predicts each next token."""

    kind: Literal["decoder"] = "decoder"
    preset: str | None = None
    """A published shape to start from, as `dtrain recipes presets` lists them; other keys override it."""
    vocab: Positive
    context: Positive
    """Maximum tokens per row."""
    layers: Depth
    width: Positive
    heads: Positive
    kv_heads: Positive | None = None
    """Heads of keys and values; default: `heads`."""
    head_dim: Positive | None = None
    """Values per head; default: width / heads."""
    hidden: Positive | None = None
    """Width of the feed-forward layer; default: 4 x width."""
    feed_forward: Form = "swiglu"
    experts: Experts | None = None
    """A mixture of experts in place of the feed-forward layer."""
    position: Rope | Learned = field(default_factory=Rope)
    norm: Literal["rms", "layer"] = "rms"
    epsilon: PositiveFloat = 1e-5
    norm_bias: bool = False
    norm_offset: bool = False
    """Store normalisation scales as their difference from one (Gemma)."""
    post_norm: bool = False
    """Also normalise the output of attention and of the feed-forward layer (Gemma 2)."""
    qk_norm: bool = False
    """Normalise queries and keys per head (Qwen 3)."""
    bias: bool = False
    """Biases in every matrix product except the router's and the experts'."""
    qkv_bias: bool = False
    """Biases for queries, keys and values only (Qwen 2)."""
    tied: bool = False
    """Use the embedding as the output head."""
    embed_scale: bool = False
    """Multiply embeddings by the square root of the width (Gemma)."""
    window: Positive | None = None
    """Sliding window: keys that a query attends to, its own included; default: all earlier ones."""
    global_every: Natural = 0
    """Every n-th layer attends to all keys, the others to the window; 0: every layer has the window."""
    query_pre_attn_scalar: PositiveFloat | None = None
    """Attention scores are divided by its square root (Gemma 2); default: head_dim."""
    attention_softcap: PositiveFloat | None = None
    logit_softcap: PositiveFloat | None = None
    init: PositiveFloat = 0.02
    """Standard deviation of the initial values of matrices."""
    depth_init: bool = True
    """Divide the initial values of the two output matrices of each layer by sqrt(2 x layers) (Radford et al. 2019)."""
    z_loss: NonNegative = 0.0
    """Weight of the z-loss of the logits (Chowdhery et al. 2022, section 5)."""
    remat: Remat = "none"
    """What a layer saves for the backward pass; the rest is recomputed. none: everything; dots: results of matrix
    products and attention; attention: those of attention; full: its input only; offload: its input, in host memory."""
    unroll: Positive = 1
    """Layers per iteration of the compiled loop over layers: more is faster on a CPU and slower to compile."""
    loss_chunks: Positive = 1
    """Chunks of the vocabulary in which logits are computed: more chunks, less memory."""
    pad_vocab: Positive = 8
    """Round the rows of embedding and head up to a multiple of this, so that `mesh.tensor` divides them; rows beyond
    `vocab` stay zero, are never predicted and never exported."""

    def __post_init__(self) -> None:
        if self.head_dim is None and self.width % self.heads:
            raise FieldError("heads", f"heads = {self.heads} does not divide width = {self.width}", "or set head_dim")
        if self.heads % self.groups:
            raise FieldError("kv_heads", f"kv_heads = {self.groups} does not divide heads = {self.heads}")
        if isinstance(self.position, Rope) and self.size_of_head % 2:
            raise FieldError("head_dim", f"head_dim = {self.size_of_head} is odd; rotary positions rotate pairs")
        if self.words % (n := self.loss_chunks):
            padded = f", padded to {self.words} (pad_vocab)" if self.words > self.vocab else ""
            raise FieldError("loss_chunks", f"loss_chunks = {n} does not divide vocab = {self.vocab}{padded}")
        if self.global_every and (self.window is None or self.layers % self.global_every):
            hint = "set window" if self.window is None else f"it does not divide layers = {self.layers}"
            raise FieldError("global_every", f"global_every = {self.global_every}: {hint}")

    @property
    def words(self) -> int:
        """Rows of the embedding, padding included."""
        return -(-self.vocab // self.pad_vocab) * self.pad_vocab

    @property
    def groups(self) -> int:
        """Number of heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def size_of_head(self) -> int:
        """Values per head."""
        return self.head_dim or self.width // self.heads

    @property
    def metrics(self) -> tuple[Metric, ...]:
        capped = self.experts is not None and self.experts.capacity is not None
        return (*((NLL,) if self.experts or self.z_loss else ()), PERPLEXITY, *((DROPPED,) if capped else ()))

    @property
    def structure(self) -> Structure:
        mixture = self.experts.mixture if self.experts else None
        remat = {"remat": tuple(dict.fromkeys((self.remat, *ON_DEVICE)))}
        chunks = {"loss_chunks": (self.loss_chunks, 1)} if self.loss_chunks > 1 else {}
        return Structure(mixture, self.layers, self.global_every or 1, remat | chunks, offload={"remat": "offload"})

    def params(self) -> Tree:
        normal, words, width = declare.normal(self.init), self.words, self.width
        tree: Tree = {"embed": Param((words, width), "vocab embed", normal, unpadded=(self.vocab, width))}
        tree["norm"] = norm(self, self.width, "embed")
        tree["blocks"] = declare.stacked(layer(self), self.layers)
        if isinstance(self.position, Learned):
            normal = declare.normal(self.init)  # exact: gradients of many tokens are summed in one row
            tree["position"] = Param((self.context, self.width), "_ embed", normal, exact=True)
        if not self.tied:
            shape = (width, self.vocab)
            tree["head"] = Param((width, words), "embed vocab", normal, fan_in=("embed",), unpadded=shape)
        return tree

    def loss(self, params: Tree, batch: Batch, ctx: Context) -> Loss:
        target_BT = batch[TARGET]
        weight_BT = (target_BT >= 0).astype(jnp.float32)  # -1 marks a position without a target
        weight_BT = weight_BT * batch[WEIGHT][:, None] if WEIGHT in batch else weight_BT
        x_BTE, sums = self.activations(params, batch, weight_BT, ctx)
        nll, z = self.head.losses(x_BTE, self.unembedding(params), target_BT, weight_BT, ctx)
        metrics = {NLL.name: nll} if self.experts or self.z_loss else {}
        if DROPPED.name in sums:
            metrics[DROPPED.name] = sums.pop(DROPPED.name) / self.layers
        return Loss(sum(sums.values(), nll + z), weight_BT.sum(), metrics)

    def predict(self, params: Tree, batch: Batch, ctx: Context) -> dict[str, jax.Array]:
        weight_BT = (batch[TARGET] >= 0).astype(jnp.float32)
        x_BTE, _ = self.activations(params, batch, weight_BT, ctx)
        return self.head.row_losses(x_BTE, self.unembedding(params), batch[TARGET], weight_BT, ctx)

    def activations(self, params: Tree, batch: Batch, weight_BT: jax.Array, ctx: Context) -> tuple[jax.Array, Tree]:
        """The normalised output of the last layer, split by `tokens`, and the layers' sums (router losses)."""
        token_BT = batch[TOKEN]
        position_BT = batch[POSITION] if POSITION in batch else ctx.places(token_BT.shape[1])[None]
        x_BTE = ctx.scatter(ctx.lookup(params["embed"], token_BT), "vocab")
        x_BTE = x_BTE * math.sqrt(self.width) if self.embed_scale else x_BTE
        shared: Tree = {WEIGHT: weight_BT}
        if isinstance(self.position, Learned):
            position_BTE = ctx.gather(params["position"])[ctx.share(position_BT)]
            x_BTE = (x_BTE + position_BTE).astype(x_BTE.dtype)
        else:
            shared["waves"] = self.position.waves(position_BT, self.size_of_head)
        shared |= {name: batch[name] for name in (DOCUMENT,) if name in batch}
        blocks: list[Block] = [partial(self._apply, window) for window in self._windows]
        x_BTE, sums = ctx.stack(blocks, params["blocks"], x_BTE, shared, Layers(self.remat, self.unroll))
        return self._normalised(ctx.gather(params["norm"]), x_BTE), sums

    @property
    def head(self) -> Head:
        return Head(self.vocab, self.tied, self.logit_softcap, self.z_loss, self.loss_chunks, self.words > self.vocab)

    def unembedding(self, params: Tree) -> Tree:
        """The matrix of the output head, not yet gathered."""
        return params["embed"] if self.tied else params["head"]

    @property
    def _windows(self) -> list[int | None]:
        return [self.window] * (self.global_every - 1) + [None] if self.global_every else [self.window]

    def _apply(
        self, window: int | None, block: Tree, x_BTE: jax.Array, shared: Tree, ctx: Context
    ) -> tuple[jax.Array, Tree]:
        """One layer: attention, then the feed-forward layer, each added to the residual stream."""
        y_BTE = ctx.collect(self._normalised(block["norm1"], x_BTE))
        y_BTE = ctx.scatter(self._attention(block, y_BTE, shared, window, ctx), "heads")
        y_BTE = added(y_BTE, block["out"]["bias"]) if self.bias else y_BTE
        x_BTE = x_BTE + (self._normalised(block["post1"], y_BTE) if self.post_norm else y_BTE)
        y_BTE, sums = self._feed_forward(block, self._normalised(block["norm2"], x_BTE), shared, ctx)
        return x_BTE + (self._normalised(block["post2"], y_BTE) if self.post_norm else y_BTE), sums

    def _attention(self, block: Tree, y_BTE: jax.Array, shared: Tree, window: int | None, ctx: Context) -> jax.Array:
        def project(name: str, heads: str) -> jax.Array:
            x_BTHD = matmul(y_BTE, block[name]["weight"])
            x_BTHD = added(x_BTHD, block[name]["bias"]) if "bias" in block[name] else x_BTHD
            x_BTHD = ctx.shard(x_BTHD, "batch", "length", heads, None)
            if name != "value" and self.qk_norm:
                x_BTHD = self._normalised({"scale": block[f"{name}_norm"]}, x_BTHD)
            return rotated(x_BTHD, shared["waves"]) if name != "value" and "waves" in shared else x_BTHD

        q_BTHD, k_BTGD, v_BTGD = project("query", "heads"), project("key", "kv_heads"), project("value", "kv_heads")
        scale = (self.query_pre_attn_scalar or self.size_of_head) ** -0.5
        spec = AttentionSpec(scale, window=window, softcap=self.attention_softcap)
        y_BTHD = ctx.attend(q_BTHD, k_BTGD, v_BTGD, spec, shared.get(DOCUMENT))
        return matmul(y_BTHD, block["out"]["weight"], contract_dims=2)

    def _feed_forward(self, block: Tree, y_BTE: jax.Array, shared: Tree, ctx: Context) -> tuple[jax.Array, Tree]:
        if self.experts:
            y_BTE, sums = self.experts.apply(block["moe"], y_BTE, shared[WEIGHT], self.feed_forward, ctx)
            return ctx.scatter(y_BTE, "hidden"), sums
        mlp, y_BTE = block["mlp"], ctx.collect(y_BTE)

        def times(name: str) -> jax.Array:
            y_BTF = matmul(y_BTE, mlp[name])
            y_BTF = added(y_BTF, mlp[f"{name}_bias"]) if self.bias else y_BTF
            return ctx.shard(y_BTF, "batch", "length", "hidden")

        y_BTE = ctx.scatter(matmul(hidden(self.feed_forward, times), mlp["down"]), "hidden")
        return (added(y_BTE, mlp["down_bias"]) if self.bias else y_BTE), {}

    def _normalised(self, params: Tree, x: jax.Array) -> jax.Array:
        return normalised(params, x, self.norm, self.epsilon, self.norm_offset)

    def flops(self, example: Example, examples: int) -> Flops:
        length = example[TOKEN].shape[0]
        return Flops(flops_per_token(self, length, self._windows) * length * examples, "6N and causal attention")

    def mismatch(self, example: Example) -> str:
        return row_mismatch(example, self.context, self.vocab)
