"""Generate text from a trained run: one pass over the prompt (prefill), then token by token with a KV cache."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from dtrain.core.errors import FieldError, RecipeError
from dtrain.core.run_dir import Folder
from dtrain.data.batch import TOKEN
from dtrain.data.codec import Codec
from dtrain.models.decoder import Decoder
from dtrain.models.nn.kv_cache import CachedContext, KVCache
from dtrain.models.nn.param import Tree
from dtrain.train.load import LoadedRun, load_run


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is sampled from the logits."""

    temperature: float = 0.8
    """0 takes the most likely token."""
    top_k: int | None = None
    """Sample only from the `top_k` most likely tokens."""
    top_p: float | None = None
    """Sample only from the most likely tokens that together have this probability (Holtzman et al. 2020)."""
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise FieldError("", f"temperature = {self.temperature}: expected a finite number, 0 or above")
        if self.top_k is not None and self.top_k < 1:
            raise FieldError("", f"top-k = {self.top_k}: expected at least 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise FieldError("", f"top-p = {self.top_p}: expected a number above 0 and at most 1")

    def draw(self, logits_BV: jax.Array, number: jax.Array) -> jax.Array:
        """The next token of each row (B,); `number` counts the tokens sampled before it, and seeds this one."""
        if self.temperature == 0:
            return logits_BV.argmax(-1)
        scaled_BV = logits_BV / self.temperature
        if self.top_k is not None:
            top_BK, index_BK = jax.lax.top_k(scaled_BV, min(self.top_k, scaled_BV.shape[-1]))
            scaled_BV = _scattered(top_BK, index_BK, scaled_BV)
        if self.top_p is not None:
            scaled_BV = _nucleus(scaled_BV, self.top_p)
        return jax.random.categorical(jax.random.fold_in(jax.random.key(self.seed), number), scaled_BV)


def _nucleus(logits_BV: jax.Array, top_p: float) -> jax.Array:
    """Keep the logits of the smallest set of tokens whose probabilities reach `top_p`; -inf for the rest.

    A token is kept if the tokens before it, by descending logit, have less than `top_p`; equal logits keep their order.
    """
    order_BV = jnp.argsort(logits_BV, axis=-1, descending=True)
    sorted_BV = jnp.take_along_axis(logits_BV, order_BV, -1)
    before_BV = jnp.cumsum(jax.nn.softmax(sorted_BV, -1), -1) - jax.nn.softmax(sorted_BV, -1)
    return _scattered(jnp.where(before_BV < top_p, sorted_BV, -jnp.inf), order_BV, logits_BV)


def _scattered(values_BK: jax.Array, index_BK: jax.Array, like_BV: jax.Array) -> jax.Array:
    """An array shaped as `like_BV` with the values at their indices in each row, -inf elsewhere."""
    row_B1 = jnp.arange(like_BV.shape[0])[:, None]
    return jnp.full_like(like_BV, -jnp.inf).at[row_B1, index_BK].set(values_BK)


@dataclass(frozen=True)
class Generator(LoadedRun):
    """A trained decoder that continues a prompt. Its parameters are in the dtype of computation."""

    @property
    def model(self) -> Decoder:
        """The trained model, but its experts drop no token: a capacity per row has no meaning for single tokens."""
        model = self.recipe.model
        assert isinstance(model, Decoder)
        return replace(model, experts=replace(model.experts, capacity=None)) if model.experts else model

    @property
    def codec(self) -> Codec:
        """The tokenizer of the training data. RecipeError if the data has none."""
        if not hasattr(self.recipe.data, "codec"):
            raise RecipeError(f"data of kind {self.recipe.data.kind} has no tokenizer, which generating text needs")
        return self.recipe.data.codec()  # type: ignore[reportAttributeAccessIssue]

    def tokens(self, prompt: Sequence[int], count: int, rows: int, sampling: Sampling) -> Iterator[np.ndarray]:
        """Yield one token for each row, int32 (rows,), `count` times.

        When the context is full, its later half is processed again, into an empty cache. Raises RecipeError if the
        prompt is empty, does not fit the context, or has a token outside the vocabulary.
        """
        model = self.model
        if len(prompt) >= model.context:
            message = f"the prompt has {len(prompt)} tokens; context = {model.context} allows {model.context - 1}"
            raise RecipeError(message, "shorten the prompt")
        if not len(prompt):
            raise RecipeError("the prompt is empty", "give at least one token")
        if unknown := [token for token in prompt if not 0 <= token < model.vocab]:
            message = f"the prompt has token {unknown[0]}; the model's vocab is {model.vocab}"
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
        """An empty cache, sharded over heads as the model's keys and values are."""
        layout, model = self.assembly.layout, self.model
        shape = (model.layers, rows, length, model.groups, model.size_of_head)
        heads = layout.sharding(layout.spec((None, None, None, "kv_heads")))
        replicated = layout.sharding(jax.sharding.PartitionSpec())
        place = KVCache(heads, heads, replicated)  # type: ignore[reportArgumentType]

        def make() -> KVCache:
            return KVCache.empty(shape, self.recipe.precision.compute)

        return jax.jit(make, out_shardings=place)()

    def _step(self, sampling: Sampling) -> Callable[..., tuple[jax.Array, KVCache]]:
        model, precision = self.model, self.recipe.precision

        def step(params: Tree, cache: KVCache, token_BT: jax.Array, number: jax.Array) -> tuple[jax.Array, KVCache]:
            ctx = CachedContext(cache, loss_dtype=precision.loss)
            weight_BT = jnp.ones(token_BT.shape, jnp.float32)
            with precision.tracing():
                x_BTE, _ = model.activations(params, {TOKEN: token_BT}, weight_BT, ctx)
                logits_BTV = model.head.logits(x_BTE[:, -1:], model.unembedding(params), "float32")
            return sampling.draw(logits_BTV[:, 0], number).astype(jnp.int32), ctx.grown[-1]

        return step


def generator(
    place: Folder, overrides: Sequence[str], say: Callable[[str], None], *, step: int | None = None, best: bool = False
) -> Generator:
    """Load a checkpoint of a decoder's run, chosen as in `load_run`. Raises RecipeError or CheckpointError if there is
    none, RecipeError if the model is not a decoder."""
    loaded = load_run(place, overrides, say, step=step, best=best)
    if not isinstance(loaded.recipe.model, Decoder):
        kind = loaded.recipe.model.kind
        raise RecipeError(f"{place.path} trained a model of kind {kind}; only a decoder generates text")
    cast = loaded.recipe.precision.cast(loaded.params, loaded.recipe.model.params())  # once, not at every token
    return Generator(**vars(loaded) | {"params": cast})
