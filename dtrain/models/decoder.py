"""A decoder language model; its fields describe GPT-2, Llama, Mistral, Mixtral, Qwen, Gemma, Phi-3 and OLMo 2.

Between layers, activations may be split by `tokens` (sequence parallelism); inside a layer each device has
all tokens of its `length` for its share of the heads and of the hidden values.
Dims: B batch, T tokens, E embed, H query heads, G key-value heads, D head dim, V vocabulary.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle, islice
from typing import Literal, Self

import jax
import jax.numpy as jnp

from dtrain.core.errors import FieldError
from dtrain.core.metrics import DROPPED, FURTHER_NLL, NLL, PERPLEXITY, SOURCES, Metric
from dtrain.core.types import Depth, Natural, NonNegative, Positive, PositiveFloat
from dtrain.data.batch import DOCUMENT, POSITION, SOURCE, TARGET, TOKEN, WEIGHT, Batch, Example
from dtrain.models import layer_inputs
from dtrain.models.altup import ALTUP, AltUp
from dtrain.models.decoder_checks import check
from dtrain.models.decoder_layer import (
    QueryGrowth,
    blocks,
    flops_of_tokens,
    kept,
    layer,
    norm,
    normal,
    saveable,
    shared_arrays,
)
from dtrain.models.delta import Delta
from dtrain.models.families.tensors import namings
from dtrain.models.feed_forward import Form
from dtrain.models.latent import Latent
from dtrain.models.layer_pattern import ATTENTION, LayerKind, expanded, windowed
from dtrain.models.lora import ADAPTERS, BASE
from dtrain.models.mamba import Mamba
from dtrain.models.moe import Experts
from dtrain.models.multi_token import MULTI_TOKEN, MultiToken
from dtrain.models.next_token import Head, row_mismatch
from dtrain.models.nn import param as declare
from dtrain.models.nn.context import Context, Layers
from dtrain.models.nn.kv_cache import KeptLayer
from dtrain.models.nn.model import Declared, Flops, Loss, Model, Structure
from dtrain.models.nn.param import Param, Tree
from dtrain.models.nn.remat import ON_DEVICE, Remat, Saved
from dtrain.models.place import Naming
from dtrain.models.rope import Learned, NoPosition, Rope
from dtrain.models.short_convolution import ShortConvolution

LossTransform = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""(sum of the cross-entropy, activations (B, T, E), weights of the tokens (B, T)) → the sum that is minimised."""


@dataclass(frozen=True, kw_only=True)
class Decoder(Declared):
    """A causal transformer that predicts each next token."""

    kind: Literal["decoder"] = "decoder"
    preset: str | None = None
    """A published shape to start from, as `dtrain recipes presets` lists them; other keys override it."""
    vocab: Natural = 0
    """Tokens that there are; 0: as many as the data's tokenizer has."""
    context: Natural = 0
    """Maximum tokens per row; 0: the length of the data's rows."""
    layers: Depth
    """Number of layers."""
    width: Positive
    """Values of each token between layers."""
    heads: Positive
    """Heads of the queries."""
    kv_heads: Positive | None = None
    """Heads of keys and values; default: `heads`."""
    head_dim: Positive | None = None
    """Values per head; default: width / heads."""
    hidden: Positive | None = None
    """Width of the feed-forward layer; default: 4 x width."""
    feed_forward: Form = "swiglu"
    """swiglu and geglu are gated, by SiLU and by GELU in its tanh form, swiglu_clamped by SiLU of clamped values
    (gpt-oss); gelu, gelu_tanh, relu and its square, relu2, are not gated."""
    experts: Experts | None = None
    """A mixture of experts in place of the feed-forward layer."""
    position: Rope | Learned | NoPosition = field(default_factory=Rope)
    """How the model gets the place of a token: rope rotates queries and keys, learned adds a vector, none does
    nothing."""
    norm: Literal["rms", "layer"] = "rms"
    """rms: root mean square (Llama); layer: with the mean subtracted (GPT-2)."""
    epsilon: PositiveFloat = 1e-5
    """Added to the variance in normalisations."""
    norm_bias: bool = False
    """Whether normalisations add a bias (GPT-2)."""
    norm_scale: bool = True
    """Whether normalisations multiply by a learned scale; without (OLMo 1)."""
    norm_offset: bool = False
    """Store normalisation scales as their difference from one (Gemma)."""
    pre_norm: bool = True
    """Normalise the input of attention and of the feed-forward layer."""
    post_norm: bool = False
    """Normalise the output of attention and of the feed-forward layer (Gemma 2; OLMo 2, without `pre_norm`)."""
    qk_norm: bool = False
    """Normalise queries and keys per head (Qwen 3)."""
    qk_norm_joint: bool = False
    """Normalise queries, and keys, over all heads together (OLMo 2)."""
    qk_norm_rotated: bool = False
    """Normalise queries and keys after their rotation (Hunyuan) in place of before."""
    qk_norm_plain: bool = False
    """Normalise queries and keys per head after their rotation, without a scale, in layers that rotate (Llama 4)."""
    value_norm: bool = False
    """Normalise values per head, without a scale (Gemma 4)."""
    qkv_clip: PositiveFloat | None = None
    """Bound of queries, keys and values: they are clipped to [-clip, clip] (OLMo 1)."""
    layer_scale: bool = False
    """Multiply the output of each layer by a number of its own, which is not trained (Gemma 4)."""
    parallel: bool = False
    """Attention and the feed-forward layer read the same normalised input, and both results are added (Cohere)."""
    parallel_norms: bool = False
    """With `parallel`: each of the two normalises the input for itself (GPT-NeoX)."""
    bias: bool = False
    """Biases in every matrix product except the router's and the experts'."""
    qkv_bias: bool = False
    """Biases for queries, keys and values (Qwen 2)."""
    out_bias: bool = False
    """Biases for the output of attention."""
    mlp_bias: bool = False
    """Biases in the feed-forward layer."""
    latent: Latent | None = None
    """Keys and values of all heads from one small vector for each token (DeepSeek); `head_dim` counts all values of a
    head of the queries."""
    attention_gate: bool = False
    """Multiply the result of each head of attention by the sigmoid of a gate, a matrix product of the layer's input
    (Qwen 3.5)."""
    delta: Delta | None = None
    """Sizes of the layers of `pattern` that have linear attention, by the gated delta rule (Qwen 3.5)."""
    convolution: ShortConvolution | None = None
    """Sizes of the layers of `pattern` that have a gated convolution over a few tokens (LFM2)."""
    mamba: Mamba | None = None
    """Sizes of the layers of `pattern` that have a state for each head, Mamba-2 (Granite 4)."""
    sinks: bool = False
    """Each head has one more key, of a learned score and of value zero (gpt-oss)."""
    layer_inputs: Natural = 0
    """Values of each token that every layer has as an input of its own, from a table and from what enters the first
    layer (Gemma 3n, Gemma 4); 0: none."""
    layer_inputs_vocab: Natural = 0
    """Words of that table; a later word has the row of the first one; 0: `vocab`."""
    altup: AltUp | None = None
    """Several streams of activations between layers, of which a layer computes with one (Gemma 3n)."""
    laurel_rank: Natural = 0
    """Rank of a product of two matrices beside attention, LAuReL (Gemma 3n); 0: none."""
    multi_token: MultiToken | None = None
    """Layers that learn to predict the tokens after the next one, for training alone (DeepSeek V3)."""
    tied: bool = False
    """Use the embedding as the output head."""
    head_bias: bool = False
    """A bias of the output head (Phi, GPT-J)."""
    embed_scale: bool = False
    """Multiply embeddings by the square root of the width (Gemma)."""
    embed_multiplier: PositiveFloat = 1.0
    """Multiply embeddings by this (Granite)."""
    residual_multiplier: PositiveFloat = 1.0
    """Multiply the results of attention and of the feed-forward layer by this before they are added (Granite)."""
    logit_multiplier: PositiveFloat = 1.0
    """Multiply the logits by this (Cohere, Granite)."""
    window: Positive | None = None
    """Sliding window: keys that a query attends to, its own included; default: all earlier ones."""
    global_every: Natural = 0
    """Every n-th layer attends to all keys, the others to the window; 0: every layer has the window."""
    window_theta: PositiveFloat | None = None
    """Theta of rotary positions, unscaled, in the layers with the window (Gemma 3); default: as in all other layers."""
    pattern: tuple[LayerKind, ...] = ()
    """Kinds of layers, in the order in which they repeat until there are `layers`: [{count: 3, window: 4096}, {}]. In
    place of `window`, `global_every` and `window_theta`. Equal neighbours compile as one loop."""
    query_pre_attn_scalar: PositiveFloat | None = None
    """Attention scores are divided by its square root (Gemma 2); default: head_dim."""
    attention_multiplier: PositiveFloat | None = None
    """Attention scores are multiplied by this (Granite), in place of `query_pre_attn_scalar`."""
    query_growth: QueryGrowth | None = None
    """Multiply queries by a factor that grows with their position (Ministral 3)."""
    attention_softcap: PositiveFloat | None = None
    """Bound of the attention scores: cap x tanh(score / cap) (Gemma 2)."""
    logit_softcap: PositiveFloat | None = None
    """Bound of the logits: cap x tanh(logit / cap) (Gemma 2)."""
    init: PositiveFloat = 0.02
    """Standard deviation of the initial values of matrices."""
    depth_init: bool = True
    """Divide the initial values of the two output matrices of each layer by sqrt(2 x layers) (Radford et al. 2019)."""
    z_loss: NonNegative = 0.0
    """Weight of the z-loss of the logits (Chowdhery et al. 2022, section 5)."""
    remat: Remat | tuple[Saved, ...] = "none"
    """What a layer saves for the backward pass; the rest is recomputed. none: everything; dots: results of matrix
    products and attention; attention: those of attention; full: its input only; offload: its input, in host memory;
    or a list of what is saved besides its input, such as [attention, query, key, value, up]."""
    unroll: Positive = 1
    """Layers per iteration of the compiled loop over layers: more is faster on CPUs and GPUs, and slower to compile."""
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
        check(self)
        if self.padded_vocab % (n := self.loss_chunks):
            padded = f", padded to {self.padded_vocab} (pad_vocab)" if self.padded_vocab > self.vocab else ""
            raise FieldError("loss_chunks", f"loss_chunks = {n} does not divide vocab = {self.vocab}{padded}")
        if not isinstance(self.remat, str) and (unread := sorted(set(self.remat) - set(self.saveable))):
            hint = f"save any of {', '.join(self.saveable)}"
            raise FieldError("remat", f"the backward pass of this model does not read {unread[0]}", hint)

    @property
    def left_out(self) -> tuple[str, ...]:
        return tuple(name for name in ("vocab", "context") if not getattr(self, name))

    def sized(self, example: Example) -> Self:
        if TOKEN not in example:
            return self
        token = example[TOKEN]
        return replace(self, vocab=self.vocab or token.values or 0, context=self.context or token.shape[0])

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding, padding included."""
        return self.padded(self.vocab)

    def padded(self, words: int) -> int:
        """Rows of a table of so many words, padding included."""
        return -(-words // self.pad_vocab) * self.pad_vocab

    @property
    def groups(self) -> int:
        """Number of heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def head_size(self) -> int:
        """Values per head."""
        return self.head_dim or self.width // self.heads

    @property
    def rotations(self) -> tuple[tuple[Rope, int], ...]:
        """The rotations that layers have, each once, and the values of a head that each is for."""
        return tuple(dict.fromkeys(one for kind in self.round if (one := self.rotation(kind))))

    def rotation(self, kind: LayerKind) -> tuple[Rope, int] | None:
        """How such a layer rotates queries and keys."""
        rope = kind.position or self.position
        size = self.latent.rotated if self.latent else self.head_size_of(kind)
        return (rope, size) if kind.mixer == ATTENTION and isinstance(rope, Rope) else None

    def head_size_of(self, kind: LayerKind) -> int:
        """Values per head in such a layer."""
        return kind.head_dim or self.head_size

    def groups_of(self, kind: LayerKind) -> int:
        """Heads of keys and values in such a layer."""
        return kind.kv_heads or self.groups

    def kept(self, rows: int, capacity: int) -> tuple[KeptLayer, ...]:
        """What generation keeps of each layer, for so many rows and tokens of each."""
        return tuple(kept(self, kind, rows, capacity) for kind in self.kinds)

    @property
    def saveable(self) -> tuple[Saved, ...]:
        """Values that the backward pass of a layer reads: `remat` can save them."""
        return saveable(self)

    @property
    def generates(self) -> bool:
        return True

    @property
    def beside_loss(self) -> str:
        return "multi_token" if self.multi_token else ""

    @property
    def namings(self) -> tuple[Naming, ...]:
        return namings(self)

    @property
    def metrics(self) -> tuple[Metric, ...]:
        capped = self.experts is not None and self.experts.capacity is not None
        own = (NLL,) if self.experts or self.z_loss or self.multi_token else ()
        return (*own, PERPLEXITY, *((DROPPED,) if capped else ()), *((FURTHER_NLL,) if self.multi_token else ()))

    @property
    def structure(self) -> Structure:
        mixture = self.experts.mixture if self.experts else None
        policies = [which for which in ON_DEVICE if isinstance(which, str) or set(which) <= set(self.saveable)]
        remat = {"remat": tuple(dict.fromkeys((self.remat, *policies)))}
        chunks = {"loss_chunks": (self.loss_chunks, 1)} if self.loss_chunks > 1 else {}
        return Structure(mixture, self.layers, len(self.round), remat | chunks, offload={"remat": "offload"})

    def params(self) -> Tree:
        initial, padded_vocab, width = declare.normal(self.init), self.padded_vocab, self.width
        tree: Tree = {"embed": Param((padded_vocab, width), "vocab embed", initial, unpadded=(self.vocab, width))}
        tree["norm"] = norm(self, self.width, "embed")
        tree |= {layer_inputs.NORM: norm(self, self.layer_inputs, "_")} if self.layer_inputs else {}
        tree |= {MULTI_TOKEN: self.multi_token.params(self)} if self.multi_token else {}
        tree |= {ALTUP: self.altup.outside(width, initial)} if self.altup else {}
        kinds = {self.group(kind): kind for kind in self.round}
        of = [self.group(kind) for kind in self.kinds]
        stacks = {name: declare.stacked(layer(self, kind), of.count(name)) for name, kind in kinds.items()}
        tree["blocks"] = stacks if self.stacks else next(iter(stacks.values()))
        if isinstance(self.position, Learned):
            # exact: gradients of many tokens are summed in one row
            tree["position"] = Param((self.context, self.width), "_ embed", initial, exact=True)
        if not self.tied:
            shape = (width, self.vocab)
            tree["head"] = Param((width, padded_vocab), "embed vocab", initial, fan_in=("embed",), unpadded=shape)
        if self.head_bias:
            tree["head_bias"] = Param((padded_vocab,), "vocab", declare.zeros, decay=False, unpadded=(self.vocab,))
        return tree

    def loss(self, params: Tree, batch: Batch, ctx: Context) -> Loss:
        return self.loss_with(params, batch, ctx)

    def loss_with(self, params: Tree, batch: Batch, ctx: Context, changed: LossTransform | None = None) -> Loss:
        """The loss, or `changed` of its cross-entropy in place of that: both are sums over the tokens that count."""
        target_BT = batch[TARGET]
        weight_BT = (target_BT >= 0).astype(jnp.float32)  # -1 marks a position without a target
        weight_BT = weight_BT * batch[WEIGHT][:, None] if WEIGHT in batch else weight_BT
        normalised_BTE, sums = self.normalised(params, batch, weight_BT, ctx)
        x_BTE, sparse = self.scaled(normalised_BTE), sum(not kind.dense for kind in self.kinds)
        source_BS = batch.get(SOURCE) if ctx.train else None
        nll, z, by_source = self.head.losses(x_BTE, self.unembedding(params), target_BT, weight_BT, ctx, source_BS)
        metrics = {NLL.name: nll} if self.experts or self.z_loss or self.multi_token or changed else {}
        metrics |= {} if by_source is None else {SOURCES: by_source}
        nll = changed(nll, x_BTE, weight_BT) if changed else nll
        if further := self.multi_token:
            embed = partial(self.embedded, params, ctx)
            own = further.losses(self, params, batch, weight_BT, normalised_BTE, embed, ctx)
            metrics[FURTHER_NLL.name], sparse = own.nll, sparse + further.depth * (not self.kinds[-1].dense)
            sums = {name: sums.get(name, 0) + own.sums.get(name, 0) for name in {**sums, **own.sums}}
            nll += further.weight * own.nll
        if DROPPED.name in sums:
            metrics[DROPPED.name] = sums.pop(DROPPED.name) / sparse
        return Loss(sum(sums.values(), nll + z), weight_BT.sum(), metrics)

    def predict(self, params: Tree, batch: Batch, ctx: Context) -> dict[str, jax.Array]:
        weight_BT = (batch[TARGET] >= 0).astype(jnp.float32)
        x_BTE, _ = self.activations(params, batch, weight_BT, ctx)
        return self.head.row_losses(x_BTE, self.unembedding(params), batch[TARGET], weight_BT, ctx)

    def document_losses(self, params: Tree, batch: Batch, ctx: Context, documents: int) -> tuple[jax.Array, ...]:
        """The sum of the cross-entropies (B,) of each of the first documents of the rows."""
        target_BT = batch[TARGET]
        counts_BT = target_BT >= 0
        weights = [(counts_BT & (batch[DOCUMENT] == one)).astype(jnp.float32) for one in range(documents)]
        x_BTE, _ = self.activations(params, batch, counts_BT.astype(jnp.float32), ctx)
        return self.head.weighted_losses(x_BTE, self.unembedding(params), target_BT, weights, ctx)

    def activations(self, params: Tree, batch: Batch, weight_BT: jax.Array, ctx: Context) -> tuple[jax.Array, Tree]:
        """What the output head takes, split by `tokens`, and the layers' sums (router losses)."""
        x_BTE, sums = self.normalised(params, batch, weight_BT, ctx)
        return self.scaled(x_BTE), sums

    def scaled(self, x_BTE: jax.Array) -> jax.Array:
        """What the output head takes, from the normalised output of the last layer."""
        return x_BTE * self.logit_multiplier if self.logit_multiplier != 1 else x_BTE

    def embedded(self, params: Tree, ctx: Context, token_BT: jax.Array) -> jax.Array:
        """The embeddings of tokens, split by `tokens`."""
        x_BTE = ctx.scatter(ctx.lookup(params["embed"], token_BT), "vocab")
        x_BTE = x_BTE * math.sqrt(self.width) if self.embed_scale else x_BTE
        return x_BTE * self.embed_multiplier if self.embed_multiplier != 1 else x_BTE

    def normalised(self, params: Tree, batch: Batch, weight_BT: jax.Array, ctx: Context) -> tuple[jax.Array, Tree]:
        """The normalised output of the last layer, split by `tokens`, and the layers' sums."""
        token_BT = batch[TOKEN]
        position_BT = batch[POSITION] if POSITION in batch else ctx.places(token_BT.shape[1])[None]
        first_BTE = x_BTE = self.embedded(params, ctx, token_BT)
        if isinstance(self.position, Learned):
            position_BTE = ctx.gather(params["position"])[ctx.share(position_BT)]
            x_BTE = (x_BTE + position_BTE).astype(x_BTE.dtype)
        shared = shared_arrays(self, params, batch, position_BT, weight_BT, first_BTE, ctx)
        outside = ctx.gather(params[ALTUP]) if self.altup else {}
        x_BTE = self.altup.expanded(outside, x_BTE) if self.altup else x_BTE
        tables = (layer_inputs.TABLE,) if self.layer_inputs else ()
        how = Layers(self.remat, self.unroll, self.stacks and tuple(map(self.group, self.round)), tables)
        x_BTE, sums = ctx.stack(blocks(self), params["blocks"], x_BTE, shared, how)
        x_BTE = self.altup.merged(outside, x_BTE) if self.altup else x_BTE
        return normal(self, ctx.gather(params["norm"]), x_BTE), sums

    @property
    def head(self) -> Head:
        return Head(
            self.vocab, self.tied, self.logit_softcap, self.z_loss, self.loss_chunks, self.padded_vocab > self.vocab
        )

    def unembedding(self, params: Tree) -> Tree:
        """The matrix of the output head, or {"weight", "bias"}, not yet gathered."""
        weight = params["embed"] if self.tied else params["head"]
        return {"weight": weight, "bias": params["head_bias"]} if self.head_bias else weight

    @property
    def round(self) -> tuple[LayerKind, ...]:
        """The kind of each layer of one round; rounds repeat until there are `layers`."""
        plain = windowed(self.position, self.window, self.global_every, self.window_theta)
        return (expanded(self.pattern) if self.pattern else plain)[: self.layers]

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The kind of each layer."""
        return tuple(islice(cycle(self.round), self.layers))

    def mixer(self, kind: LayerKind) -> Delta | ShortConvolution | Mamba | None:
        """What such a layer has in place of attention; None: it has attention."""
        return None if kind.mixer == ATTENTION else getattr(self, kind.mixer)

    def group(self, kind: LayerKind) -> str:
        """The group of layers whose parameters have the same shapes."""
        return kind.group(self.experts is not None)

    @property
    def stacks(self) -> tuple[str, ...]:
        """The groups of layers whose parameters have different shapes; () if all have the same."""
        found = tuple(dict.fromkeys(map(self.group, self.kinds)))
        return found if len(found) > 1 else ()

    @property
    def split_rows(self) -> bool:
        return all(kind.mixer == ATTENTION for kind in self.round) and not self.multi_token

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The rotations that layers have, each once."""
        return tuple(dict.fromkeys(rope for rope, _ in self.rotations))

    def flops(self, example: Example, examples: int, declared: Tree) -> Flops:
        length = example[TOKEN].shape[0]
        return flops_of_tokens(self, length, declared, {}, length * examples)

    def adapted_flops(self, example: Example, examples: int, adapted: Model, declared: Tree) -> Flops:
        length = example[TOKEN].shape[0]
        return flops_of_tokens(self, length, declared[BASE], declared[ADAPTERS], length * examples)

    def mismatch(self, example: Example) -> str:
        return row_mismatch(example, self.context, self.vocab)
