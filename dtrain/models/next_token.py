"""The cross-entropy of the next token, in parts of the vocabulary.

Each part of the head is gathered, used, and computed again in the backward pass, where its gradient
is given back part by part: with several parts neither the logits nor the head ever stand whole.
Dims: B batch, T tokens, E embed, V this device's share of the vocabulary or a part of that.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from dtrain.core.errors import RecipeError
from dtrain.data.batch import Example
from dtrain.models.nn.attention import HIDDEN
from dtrain.models.nn.context import Context
from dtrain.models.nn.layers import lift
from dtrain.models.nn.matmul import matmul
from dtrain.models.nn.param import Tree


@dataclass(frozen=True)
class Head:
    """How activations become logits."""

    vocab: int
    """Words; columns of the matrix beyond them are padding, and are never predicted."""
    tied: bool
    """The matrix is the embedding's (vocab, embed); else it is (embed, vocab)."""
    softcap: float | None = None
    """Logits are bent to lie within this."""
    z_loss: float = 0.0
    """Weight of the squared log of the summed exponentials (Chowdhery et al. 2022, section 5)."""
    parts: int = 1
    """Parts in which the vocabulary is taken."""
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
        return jnp.where(lift(word_V < self.vocab, logits_BTV), logits_BTV, HIDDEN)

    def losses(
        self, x_BTE: jax.Array, matrix: Tree, target_BT: jax.Array, weight_BT: jax.Array, ctx: Context
    ) -> tuple[jax.Array, jax.Array]:
        """The summed cross-entropy and the summed z-loss, weighed. `matrix` is not yet gathered.

        x is split by `tokens`. Devices that split the vocabulary take all tokens of a row, each for its share
        of the words; where no device splits it, each takes its own tokens for all words.
        """
        if ctx.parts("vocab") > 1:
            return self._losses(ctx.collect(x_BTE), matrix, target_BT, weight_BT, ctx)
        own = self._losses(x_BTE, matrix, ctx.share(target_BT), ctx.share(weight_BT), ctx)
        return ctx.reduce(own[0], "kept"), ctx.reduce(own[1], "kept")

    def _losses(
        self, x_BTE: jax.Array, matrix: Tree, target_BT: jax.Array, weight_BT: jax.Array, ctx: Context
    ) -> tuple[jax.Array, jax.Array]:
        size = jax.tree.leaves(matrix)[0].shape[0 if self.tied else 1]
        parts, first = self.parts, ctx.first("vocab", size)
        if size % parts:
            message = f"model.loss_chunks = {parts} does not divide the {size} words of a device's share"
            raise RecipeError(f"{message} of the vocabulary", "use a divisor of that, or 1")
        place_BT = target_BT - first
        dtype, x32_BTE = x_BTE.dtype, x_BTE.astype(jnp.float32)  # gradients of the parts add up in float32

        def part(carry: Tree, chunk: Tree) -> tuple[Tree, None]:
            top_BT, total_BT, picked_BT = carry
            number, piece = chunk
            x_BTE, words = x32_BTE.astype(dtype), ctx.gather(piece)
            logits_BTV = self.logits(x_BTE, words, ctx.loss_dtype, first + number, parts).astype(jnp.float32)
            higher_BT = jnp.maximum(top_BT, jax.lax.stop_gradient(logits_BTV.max(-1)))
            total_BT = total_BT * jnp.exp(top_BT - higher_BT) + jnp.exp(logits_BTV - higher_BT[..., None]).sum(-1)
            here_BT = (place_BT >= 0) & (place_BT < size) & (place_BT % parts == number)
            row_BT1 = jnp.clip(place_BT // parts, 0, size // parts - 1)[..., None]
            found_BT = jnp.take_along_axis(logits_BTV, row_BT1, axis=-1)[..., 0]
            return (higher_BT, total_BT, picked_BT + jnp.where(here_BT, found_BT, 0)), None

        zero_BT = jax.lax.stop_gradient(x32_BTE[..., 0]) * 0
        carry, chunks = (zero_BT - 1e30, zero_BT, zero_BT), (jnp.arange(parts), self._in_parts(matrix, parts))
        if parts == 1:
            carry, _ = part(carry, jax.tree.map(lambda leaf: leaf[0], chunks))
        else:
            carry, _ = jax.lax.scan(jax.checkpoint(part), carry, chunks)
        top_BT, total_BT, picked_BT = carry
        all_BT = ctx.largest(top_BT, "vocab")
        log_BT = jnp.log(ctx.reduce(total_BT * jnp.exp(top_BT - all_BT), "vocab")) + all_BT
        nll_BT = log_BT - ctx.reduce(picked_BT, "vocab")
        return (nll_BT * weight_BT).sum(), self.z_loss * (jnp.square(log_BT) * weight_BT).sum()

    def _in_parts(self, matrix: Tree, parts: int) -> Tree:
        """Part i takes every `parts`-th word from word i on, so that a split over words stays as it is."""

        def cut(leaf: jax.Array) -> jax.Array:
            if self.tied:
                return jnp.moveaxis(leaf.reshape(-1, parts, leaf.shape[1]), 1, 0)
            return jnp.moveaxis(leaf.reshape(leaf.shape[0], -1, parts), 2, 0)

        return jax.tree.map(cut, matrix)


def row_mismatch(example: Example, context: int, vocab: int) -> str:
    """Why a model of this context and vocabulary cannot take such rows; empty where it can."""
    if "token" not in example:
        return f"the model takes tokens; the data has {', '.join(sorted(example))}"
    token, length = example["token"], example["token"].shape[0]
    if length > context:
        return f"rows of {length} tokens are longer than context = {context}"
    if token.values is not None and token.values > vocab:
        where = f" ({token.origin})" if token.origin else ""
        return f"the data's largest token is {token.values - 1}{where}; the model's vocab is {vocab}"
    return ""
