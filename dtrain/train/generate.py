"""Text from a trained run: the prompt in one pass, then token by token."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from dtrain.core.errors import FieldError, RecipeError
from dtrain.core.run_dir import Folder
from dtrain.data.codec import Codec
from dtrain.models.decoder import Decoder
from dtrain.models.nn.kv_cache import CachedContext, KVCache
from dtrain.models.nn.param import Tree
from dtrain.train.load import LoadedRun, load_run


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn from the logits."""

    temperature: float = 0.8
    """0 takes the likeliest token."""
    top_k: int | None = None
    """Only among so many of the likeliest."""
    top_p: float | None = None
    """Only among the likeliest that together have this probability (Holtzman et al. 2020)."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise FieldError("", f"temperature {self.temperature}: a finite number, 0 or above")
        if self.top_k is not None and self.top_k < 1:
            raise FieldError("", f"top-k {self.top_k}: at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise FieldError("", f"top-p {self.top_p}: above 0 and at most 1")

    def draw(self, logits_BV: jax.Array, number: jax.Array) -> jax.Array:
        """The next token of each row; `number` counts the tokens drawn before it."""
        if self.temperature == 0:
            return logits_BV.argmax(-1)
        scaled_BV = logits_BV / self.temperature
        if self.top_k is not None:
            top_BK, at_BK = jax.lax.top_k(scaled_BV, min(self.top_k, scaled_BV.shape[-1]))
            scaled_BV = _scattered(top_BK, at_BK, scaled_BV)
        if self.top_p is not None:
            scaled_BV = _likeliest(scaled_BV, self.top_p)
        return jax.random.categorical(jax.random.fold_in(jax.random.key(self.seed), number), scaled_BV)


def _likeliest(logits_BV: jax.Array, top_p: float) -> jax.Array:
    """The logits of the fewest tokens that together reach `top_p`; of equal ones the first; -inf for the rest."""
    at_BV = jnp.argsort(logits_BV, axis=-1, descending=True)
    sorted_BV = jnp.take_along_axis(logits_BV, at_BV, -1)
    before_BV = jnp.cumsum(jax.nn.softmax(sorted_BV, -1), -1) - jax.nn.softmax(sorted_BV, -1)
    return _scattered(jnp.where(before_BV < top_p, sorted_BV, -jnp.inf), at_BV, logits_BV)


def _scattered(values_BK: jax.Array, at_BK: jax.Array, like_BV: jax.Array) -> jax.Array:
    """The values at their places in a row, -inf elsewhere."""
    row_B1 = jnp.arange(like_BV.shape[0])[:, None]
    return jnp.full_like(like_BV, -jnp.inf).at[row_B1, at_BK].set(values_BK)


@dataclass(frozen=True)
class Generator(LoadedRun):
    """A trained decoder that continues a prompt. Its parameters have the dtype that it computes with."""

    @property
    def model(self) -> Decoder:
        """As trained, but that its experts drop nothing: what comes token by token has no row to share out."""
        model = self.recipe.model
        assert isinstance(model, Decoder)
        return replace(model, experts=replace(model.experts, capacity=None)) if model.experts else model

    @property
    def codec(self) -> Codec:
        """The tokenizer that the data was read with."""
        if not hasattr(self.recipe.data, "codec"):
            raise RecipeError(f"data of kind {self.recipe.data.kind} has no tokenizer")
        return self.recipe.data.codec()  # type: ignore[reportAttributeAccessIssue]

    def tokens(self, prompt: Sequence[int], count: int, rows: int, sampling: Sampling) -> Iterator[np.ndarray]:
        """One token (rows,) after the other. Where the context is full, its later half is kept and read anew.

        RecipeError where the prompt does not fit the context, or holds what the model does not know.
        """
        model = self.model
        if len(prompt) >= model.context:
            message = f"a prompt of {len(prompt)} tokens leaves no room in context = {model.context}"
            raise RecipeError(message, f"shorten it to {model.context - 1} tokens")
        if not len(prompt):
            raise RecipeError("an empty prompt: there is nothing to continue", "give at least one token")
        if unknown := [token for token in prompt if not 0 <= token < model.vocab]:
            message = f"the prompt holds token {unknown[0]}; the model's vocab is {model.vocab}"
            raise RecipeError(message, "use the tokenizer that the model was trained with")
        return self._drawn(np.tile(np.asarray(prompt, np.int32), (rows, 1)), count, sampling)

    def _drawn(self, text_BT: np.ndarray, count: int, sampling: Sampling) -> Iterator[np.ndarray]:
        step, context = jax.jit(self._step(sampling), donate_argnums=1), self.model.context
        room = min(context, text_BT.shape[1] + count)
        cache, new_BT = self._cache(len(text_BT), room), text_BT
        for number in range(count):
            token_B, cache = step(self.params, cache, new_BT, jnp.int32(number))
            new_BT = np.asarray(token_B)[:, None]
            text_BT = np.concatenate([text_BT, new_BT], 1)[:, -context:]
            if int(cache.used) >= room:
                cache, new_BT = self._cache(len(text_BT), room), text_BT[:, -(room // 2) :]
            yield np.asarray(token_B)

    def _cache(self, rows: int, length: int) -> KVCache:
        """An empty cache, its heads where the heads are."""
        layout, model = self.assembly.layout, self.model
        shape = (model.layers, rows, length, model.groups, model.size_of_head)
        heads = layout.sharding(layout.spec((None, None, None, "kv_heads")))
        whole = layout.sharding(jax.sharding.PartitionSpec())
        place = KVCache(heads, heads, whole)  # type: ignore[reportArgumentType]
        make = lambda: KVCache.empty(shape, self.recipe.precision.compute)  # noqa: E731
        return jax.jit(make, out_shardings=place)()

    def _step(self, sampling: Sampling) -> Callable[..., tuple[jax.Array, KVCache]]:
        model, precision = self.model, self.recipe.precision

        def step(params: Tree, cache: KVCache, token_BT: jax.Array, number: jax.Array) -> tuple[jax.Array, KVCache]:
            ctx = CachedContext(precision.loss, cache)
            weight_BT = jnp.ones(token_BT.shape, jnp.float32)
            with precision.tracing():
                x_BTE, _ = model.activations(params, {"token": token_BT}, weight_BT, ctx)
                logits_BTV = model.head.logits(x_BTE[:, -1:], model.unembedding(params), "float32")
            return sampling.draw(logits_BTV[:, 0], number).astype(jnp.int32), ctx.grown[-1]

        return step


def generator(
    place: Folder, overrides: Sequence[str], say: Callable[[str], None], *, step: int | None = None, best: bool = False
) -> Generator:
    """A checkpoint of a decoder's run, as `trained` chooses it; RecipeError or CheckpointError where there is none."""
    found = load_run(place, overrides, say, step=step, best=best)
    if not isinstance(found.recipe.model, Decoder):
        kind = found.recipe.model.kind
        raise RecipeError(f"{place.path} trained a model of kind {kind}; a decoder generates text")
    cast = found.recipe.precision.cast(found.params, found.recipe.model.params())  # once, not at every token
    return Generator(**vars(found) | {"params": cast})
