"""The cross-entropy of the next token, computed in chunks of the vocabulary.

For each chunk its part of the head is gathered and its logits are computed, and both are recomputed in the backward
pass, which also returns the gradient chunk by chunk: with several chunks, neither the full logits nor the full head
are ever in memory.
Dims: B batch, T tokens, E embed, V this device's share of the vocabulary or a chunk of it.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from dtrain.core.errors import RecipeError
from dtrain.core.metrics import NLL
from dtrain.data.batch import TOKEN, Example
from dtrain.models.nn.attention import MASKED_SCORE
from dtrain.models.nn.context import Context
from dtrain.models.nn.layers import lift
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
        self, x_BTE: jax.Array, matrix: jax.Array, dtype: str, first: jax.Array | int = 0, stride: int = 1
    ) -> jax.Array:
        """Logits (B, T, V) of every `stride`-th word from word `first` on."""
        logits_BTV = matmul(x_BTE, matrix.T if self.tied else matrix).astype(dtype)
        logits_BTV = self.softcap * jnp.tanh(logits_BTV / self.softcap) if self.softcap else logits_BTV
        if not self.padded:
            return logits_BTV
        word_V = first + stride * jnp.arange(logits_BTV.shape[-1])
        return jnp.where(lift(word_V < self.vocab, logits_BTV), logits_BTV, MASKED_SCORE)

    def losses(
        self, x_BTE: jax.Array, matrix: Tree, target_BT: jax.Array, weight_BT: jax.Array, ctx: Context
    ) -> tuple[jax.Array, jax.Array]:
        """The weighted sums of cross-entropy and z-loss. `matrix` is not yet gathered; x is split by `tokens`.

        If the mesh splits the vocabulary, x is gathered to all tokens of `length`, and each device computes its share
        of the words. If not, each device computes all words for its own tokens.
        """
        x_BTE, target_BT, weight_BT = self._shares(x_BTE, target_BT, weight_BT, ctx)
        nll_BT, log_BT = self._losses(x_BTE, matrix, target_BT, ctx)
        sums = (nll_BT * weight_BT).sum(), self.z_loss * (jnp.square(log_BT) * weight_BT).sum()
        return sums if ctx.parts("vocab") > 1 else (ctx.reduce(sums[0], "kept"), ctx.reduce(sums[1], "kept"))

    def row_losses(
        self, x_BTE: jax.Array, matrix: Tree, target_BT: jax.Array, weight_BT: jax.Array, ctx: Context
    ) -> dict[str, jax.Array]:
        """The sums of cross-entropy and weights over the tokens of each row (B,); arguments as in `losses`."""
        x_BTE, target_BT, own_BT = self._shares(x_BTE, target_BT, weight_BT, ctx)
        nll_B = (self._losses(x_BTE, matrix, target_BT, ctx)[0] * own_BT).sum(1)
        nll_B = nll_B if ctx.parts("vocab") > 1 else ctx.reduce(nll_B, "kept")
        return {NLL.name: ctx.reduce(nll_B, "length"), TOKENS: ctx.reduce(weight_BT.sum(1), "length")}

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
        size = jax.tree.leaves(matrix)[0].shape[0 if self.tied else 1]
        parts, first = self.parts, ctx.first("vocab", size)
        if size % parts:
            message = f"model.loss_chunks = {parts} does not divide the {size} words of each device's share"
            raise RecipeError(f"{message} of the vocabulary", "use a divisor of that, or 1")
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
            if self.tied:
                return jnp.moveaxis(leaf.reshape(-1, parts, leaf.shape[1]), 1, 0)
            return jnp.moveaxis(leaf.reshape(leaf.shape[0], -1, parts), 2, 0)

        return jax.tree.map(to_chunks, matrix)


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
