"""The cross-entropy of the next token, computed in chunks of the vocabulary.

For each chunk its part of the head is gathered and its logits are computed, and both are recomputed in the backward
pass, which also returns the gradient chunk by chunk: with several chunks, neither the full logits nor the full head
are ever in memory.
Dims: B batch, T tokens, E embed, V this device's share of the vocabulary or a chunk of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dtrain.core.errors import RecipeError
from dtrain.core.metrics import NLL
from dtrain.data.batch import TOKEN, Example
from dtrain.models.nn.attention import MASKED_SCORE
from dtrain.models.nn.context import Context
from dtrain.models.nn.layers import added, lift
from dtrain.models.nn.matmul import matmul
from dtrain.models.nn.model import TOKENS
from dtrain.models.nn.param import Tree


@dataclass(frozen=True)
class Head:
    """The output head: turns activations into logits and losses."""

    vocab: int
    """Number of words; columns of the matrix beyond it are padding and are never predicted."""
    tied: bool
    """Whether the matrix is the embedding (vocab, embed); else it is (embed, vocab)."""
    softcap: float | None = None
    """Bound of the logits: softcap x tanh(logits / softcap) (Gemma 2)."""
    z_loss: float = 0.0
    """Weight of the squared log-sum-exp of the logits (Chowdhery et al. 2022, section 5)."""
    parts: int = 1
    """Number of chunks of the vocabulary."""
    padded: bool = False
    """Whether the matrix has more columns than there are words."""

    def logits(
        self, x_BTE: jax.Array, matrix: Tree, dtype: str, first: jax.Array | int = 0, stride: int = 1
    ) -> jax.Array:
        """Logits (B, T, V) of every `stride`-th word from word `first` on."""
        wide, weight, bias_V = str(jnp.promote_types(x_BTE.dtype, dtype)), weight_of(matrix), bias_of(matrix)
        logits_BTV = matmul(x_BTE, weight.T if self.tied else weight, dtype=wide, narrow=False).astype(dtype)
        logits_BTV = logits_BTV if bias_V is None else added(logits_BTV, bias_V)
        logits_BTV = self.softcap * jnp.tanh(logits_BTV / self.softcap) if self.softcap else logits_BTV
        if not self.padded:
            return logits_BTV
        word_V = first + stride * jnp.arange(logits_BTV.shape[-1])
        return jnp.where(lift(word_V < self.vocab, logits_BTV), logits_BTV, MASKED_SCORE)

    def losses(
        self,
        x_BTE: jax.Array,
        matrix: Tree,
        target_BT: jax.Array,
        weight_BT: jax.Array,
        ctx: Context,
        source_BS: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array, jax.Array | None]:
        """The weighted sums of cross-entropy and z-loss; for each source of rows (S) those of cross-entropy and weight.

        `matrix` is not yet gathered; x is split by `tokens`. If the mesh splits the vocabulary, x is gathered to all
        tokens of `length`, and each device computes its share of the words. If not, each device computes all words for
        its own tokens.
        """
        x_BTE, target_BT, weight_BT = self._shares(x_BTE, target_BT, weight_BT, ctx)
        nll_BT, log_BT = self._losses(x_BTE, matrix, target_BT, ctx)
        sums = [(nll_BT * weight_BT).sum(), self.z_loss * (jnp.square(log_BT) * weight_BT).sum()]
        if source_BS is not None:
            rows_2B = jnp.stack([(nll_BT * weight_BT).sum(1), weight_BT.sum(1)])
            sums.append(jnp.matmul(rows_2B, source_BS.astype(jnp.float32), precision="highest"))
        nll, z, *by_source = sums if ctx.parts("vocab") > 1 else [ctx.reduce(one, "kept") for one in sums]
        return nll, z, by_source[0] if by_source else None

    def row_losses(
        self, x_BTE: jax.Array, matrix: Tree, target_BT: jax.Array, weight_BT: jax.Array, ctx: Context
    ) -> dict[str, jax.Array]:
        """The sums of cross-entropy and weights over the tokens of each row (B,); arguments as in `losses`."""
        (nll_B,) = self.weighted_losses(x_BTE, matrix, target_BT, (weight_BT,), ctx)
        return {NLL.name: nll_B, TOKENS: ctx.reduce(weight_BT.sum(1), "length")}

    def weighted_losses(
        self, x_BTE: jax.Array, matrix: Tree, target_BT: jax.Array, weights: Sequence[jax.Array], ctx: Context
    ) -> tuple[jax.Array, ...]:
        """The sum of the cross-entropies of each row (B,), for each of several weights of the tokens (B, T)."""
        owns = [self._shares(x_BTE, target_BT, weight_BT, ctx)[2] for weight_BT in weights]
        x_BTE, target_BT, _ = self._shares(x_BTE, target_BT, weights[0], ctx)
        nll_BT = self._losses(x_BTE, matrix, target_BT, ctx)[0]
        sums = [(nll_BT * own_BT).sum(1) for own_BT in owns]
        sums = sums if ctx.parts("vocab") > 1 else [ctx.reduce(nll_B, "kept") for nll_B in sums]
        return tuple(ctx.reduce(nll_B, "length") for nll_B in sums)

    def divergence(
        self, x_BTE: jax.Array, matrix: Tree, known: "Known", weight_BT: jax.Array, ctx: Context, temperature: float
    ) -> jax.Array:
        """The weighted sum of KL(known || this), the distributions of logits / temperature (Hinton et al. 2015)."""
        other_BTE = known.x_BTE
        if ctx.parts("vocab") > 1:
            x_BTE, other_BTE = ctx.collect(x_BTE), ctx.collect(other_BTE)
        else:
            weight_BT = ctx.share(weight_BT)
        size, parts = self._size(matrix), self.parts
        first, dtype, x32_BTE = ctx.first("vocab", size), x_BTE.dtype, x_BTE.astype(jnp.float32)

        # Online, like the log-sum-exp of `_losses`: of both logits a and b (known) the running maximum and the sum of
        # exponentials relative to it, and the sum of exp(b) (b - a) relative to the maximum of b.
        def part(carry: Tree, chunk: Tree) -> tuple[Tree, None]:
            (top_a, total_a), (top_b, total_b), mean = carry
            number, own, other = chunk
            word, how = first + number, ctx.loss_dtype
            a_BTV = self.logits(x32_BTE.astype(dtype), ctx.gather(own), how, word, parts).astype(jnp.float32)
            b_BTV = known.head.logits(other_BTE, ctx.gather(other), how, word, parts).astype(jnp.float32)
            a_BTV, b_BTV = a_BTV / temperature, jax.lax.stop_gradient(b_BTV) / temperature
            high_a, exp_a = _relative(top_a, a_BTV)
            high_b, exp_b = _relative(top_b, b_BTV)
            total_a = total_a * jnp.exp(top_a - high_a) + exp_a.sum(-1)
            total_b, mean = (old * jnp.exp(top_b - high_b) for old in (total_b, mean))
            return (
                (high_a, total_a),
                (high_b, total_b + exp_b.sum(-1)),
                mean + (exp_b * (b_BTV - a_BTV)).sum(-1),
            ), None

        zero_BT = jax.lax.stop_gradient(x32_BTE[..., 0]) * 0
        carry = ((zero_BT - 1e30, zero_BT), (zero_BT - 1e30, zero_BT), zero_BT)
        chunks = (jnp.arange(parts), self._in_parts(matrix, parts), known.head._in_parts(known.matrix, parts))
        carry, _ = jax.lax.scan(jax.checkpoint(part), carry, chunks)
        (top_a, total_a), (top_b, total_b), mean = carry
        all_a, all_b = ctx.largest(top_a, "vocab"), ctx.largest(top_b, "vocab")
        total_a = ctx.reduce(total_a * jnp.exp(top_a - all_a), "vocab")
        total_b, mean = (ctx.reduce(own * jnp.exp(top_b - all_b), "vocab") for own in (total_b, mean))
        kl_BT = mean / total_b + (jnp.log(total_a) + all_a) - (jnp.log(total_b) + all_b)
        total = (kl_BT * weight_BT).sum()
        return total if ctx.parts("vocab") > 1 else ctx.reduce(total, "kept")

    def _size(self, matrix: Tree) -> int:
        """This device's share of the words. RecipeError if the chunks do not divide it."""
        size = jax.tree.leaves(weight_of(matrix))[0].shape[0 if self.tied else 1]
        if size % self.parts:
            message = f"model.loss_chunks = {self.parts} does not divide the {size} words of each device's share"
            raise RecipeError(f"{message} of the vocabulary", "use a divisor of that, or 1")
        return size

    def _shares(
        self, x_BTE: jax.Array, target_BT: jax.Array, weight_BT: jax.Array, ctx: Context
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The tokens whose losses this device computes."""
        target_BT = jnp.maximum(target_BT, 0)
        if ctx.parts("vocab") > 1:
            return ctx.collect(x_BTE), target_BT, weight_BT
        return x_BTE, ctx.share(target_BT), ctx.share(weight_BT)

    def _losses(
        self, x_BTE: jax.Array, matrix: Tree, target_BT: jax.Array, ctx: Context
    ) -> tuple[jax.Array, jax.Array]:
        """The cross-entropy of each token, and the logarithm of the sum of the exponentials of its logits."""
        size, parts = self._size(matrix), self.parts
        first = ctx.first("vocab", size)
        place_BT = target_BT - first
        dtype, x32_BTE = x_BTE.dtype, x_BTE.astype(jnp.float32)  # in float32 the gradients of the chunks are summed

        # Online log-sum-exp (Milakov & Gimelshein 2018): carry the running maximum, the sum of exponentials relative to
        # it, which is rescaled whenever the maximum grows, and the logit of the target once its chunk is reached.
        def part(carry: Tree, chunk: Tree) -> tuple[Tree, None]:
            top_BT, total_BT, picked_BT = carry
            number, piece = chunk
            x_BTE, words = x32_BTE.astype(dtype), ctx.gather(piece)
            logits_BTV = self.logits(x_BTE, words, ctx.loss_dtype, first + number, parts).astype(jnp.float32)
            higher_BT = jnp.maximum(top_BT, jax.lax.stop_gradient(logits_BTV.max(-1)))
            total_BT = total_BT * jnp.exp(top_BT - higher_BT) + jnp.exp(logits_BTV - higher_BT[..., None]).sum(-1)
            # word i of this device is in chunk i % parts, at row i // parts of it: see `_in_parts`
            here_BT = (place_BT >= 0) & (place_BT < size) & (place_BT % parts == number)
            row_BT1 = jnp.clip(place_BT // parts, 0, size // parts - 1)[..., None]
            target_logit_BT = jnp.take_along_axis(logits_BTV, row_BT1, axis=-1)[..., 0]
            return (higher_BT, total_BT, picked_BT + jnp.where(here_BT, target_logit_BT, 0)), None

        # computed from x, so that under shard_map it varies over the same mesh axes as the carry does later
        zero_BT = jax.lax.stop_gradient(x32_BTE[..., 0]) * 0
        carry, chunks = (zero_BT - 1e30, zero_BT, zero_BT), (jnp.arange(parts), self._in_parts(matrix, parts))
        if parts == 1:
            carry, _ = part(carry, jax.tree.map(lambda leaf: leaf[0], chunks))
        else:
            carry, _ = jax.lax.scan(jax.checkpoint(part), carry, chunks)
        top_BT, total_BT, picked_BT = carry
        all_BT = ctx.largest(top_BT, "vocab")  # the same merge, over the devices that split the vocabulary
        log_BT = jnp.log(ctx.reduce(total_BT * jnp.exp(top_BT - all_BT), "vocab")) + all_BT
        return log_BT - ctx.reduce(picked_BT, "vocab"), log_BT

    def _in_parts(self, matrix: Tree, parts: int) -> Tree:
        """The matrix as `parts` chunks along a new first dim; chunk i has every `parts`-th word, from word i.

        Strided chunks, unlike contiguous ones, leave the words that a device holds on that device.
        """

        def to_chunks(leaf: jax.Array) -> jax.Array:
            if leaf.ndim == 1:  # the bias
                return leaf.reshape(-1, parts).T
            if self.tied:
                return jnp.moveaxis(leaf.reshape(-1, parts, leaf.shape[1]), 1, 0)
            return jnp.moveaxis(leaf.reshape(leaf.shape[0], -1, parts), 2, 0)

        return jax.tree.map(to_chunks, matrix)


def weight_of(matrix: Tree) -> Any:
    """The matrix of a head that may have a bias: {"weight", "bias"}."""
    return matrix["weight"] if isinstance(matrix, dict) else matrix


def bias_of(matrix: Tree) -> Any:
    """The bias of a head (V,), or None."""
    return matrix["bias"] if isinstance(matrix, dict) else None


class Known(NamedTuple):
    """A head, its input and its matrix, whose distribution another head learns: none of them is trained."""

    head: Head
    x_BTE: jax.Array
    matrix: Tree


def _relative(top_BT: jax.Array, logits_BTV: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The maximum of `top_BT` and the logits, and the exponentials of the logits relative to it."""
    high_BT = jnp.maximum(top_BT, jax.lax.stop_gradient(logits_BTV.max(-1)))
    return high_BT, jnp.exp(logits_BTV - high_BT[..., None])


def row_mismatch(example: Example, context: int, vocab: int) -> str:
    """Why a model of this context and vocabulary cannot take such rows; empty where it can."""
    if TOKEN not in example:
        return f"the model takes tokens; the data has {', '.join(sorted(example))}"
    token, length = example[TOKEN], example[TOKEN].shape[0]
    if length > context:
        return f"rows of {length} tokens are longer than context = {context}"
    if token.values is not None and token.values > vocab:
        where = f" ({token.origin})" if token.origin else ""
        return f"the data's largest token is {token.values - 1}{where}; the model's vocab is {vocab}"
    return ""
