"""Generate text from a trained run: one pass over the prompt (prefill), then token by token with a KV cache."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dtrain.core.errors import FieldError, RecipeError
from dtrain.core.run_dir import Folder
from dtrain.data.batch import POSITION, TOKEN
from dtrain.data.tokenizer import Tokenizer
from dtrain.models.decoder import Decoder
from dtrain.models.decoder_layer import joined
from dtrain.models.nn.kv_cache import CachedContext, KVCache, is_kept, unstacked
from dtrain.models.nn.param import Tree
from dtrain.weights.load import LoadedRun, load_run


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


ENDED = -1
"""In place of a token of a row that is finished."""
CHUNK = 64
"""Most tokens that are drawn in one dispatch."""
LATENCY = 0.1
"""Seconds: more tokens are drawn in one dispatch as long as it takes less, so that text appears steadily."""


@dataclass(frozen=True)
class Generator(LoadedRun):
    """A trained decoder that continues prompts. Its parameters are in the dtype of computation."""

    programs: dict[Any, tuple[Callable[..., Any], Callable[..., Any]]] = field(default_factory=dict)
    """The compiled functions, by sampling and end tokens."""

    @property
    def model(self) -> Decoder:
        """The trained model, but its experts drop no token: a capacity per row has no meaning for single tokens."""
        model: Any = self.recipe.model
        return replace(model, experts=replace(model.experts, capacity=None)) if model.experts else model

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the training data. RecipeError if the data has none."""
        return self.recipe.data.open_tokenizer()

    def tokens(self, prompt: Sequence[int], count: int, rows: int, sampling: Sampling) -> Iterator[np.ndarray]:
        """Yield one token for each of `rows` continuations of one prompt, int32 (rows,), `count` times."""
        return self.continued([prompt] * rows, count, sampling)

    def continued(
        self,
        prompts: Sequence[Sequence[int]],
        count: int,
        sampling: Sampling,
        ends: Sequence[Sequence[int]] = (),
        steadily: bool = False,
    ) -> Iterator[np.ndarray]:
        """Yield one token for each prompt, int32 (prompts,), at most `count` times.

        A row that has drawn one of the sequences `ends` is finished: it then yields ENDED. With `steadily`, tokens come
        as soon as they are drawn, else many at once. When the context is full, the later half of each row is processed
        again, into an empty cache. RecipeError if a prompt is empty, does not fit the context, or has a token outside
        the vocabulary.
        """
        for prompt in prompts:
            self._refuse(prompt)
        return self._drawn([list(prompt) for prompt in prompts], count, sampling, ends, 1 if steadily else CHUNK)

    def _refuse(self, prompt: Sequence[int]) -> None:
        model = self.model
        if len(prompt) >= model.context:
            message = f"the prompt has {len(prompt)} tokens; context = {model.context} allows {model.context - 1}"
            raise RecipeError(message, "shorten the prompt")
        if not len(prompt):
            raise RecipeError("the prompt is empty", "give at least one token")
        if unknown := [token for token in prompt if not 0 <= token < model.vocab]:
            message = f"the prompt has token {unknown[0]}; the model's vocab is {model.vocab}"
            raise RecipeError(message, "use the tokenizer that the model was trained with")

    def _drawn(
        self, texts: list[list[int]], count: int, sampling: Sampling, ends: Sequence[Sequence[int]], at_once: int
    ) -> Iterator[np.ndarray]:
        prefill, decode = self._compiled(sampling, tuple(end[0] for end in ends if len(end) == 1))
        context, done = self.model.context, np.zeros(len(texts), bool)
        number, fresh = 0, texts
        while number < count and not done.all():
            longest = max(map(len, fresh))
            length, room = bucket(longest), context - longest
            capacity = bucket(length + min(count - number, room))
            padded = np.zeros((len(fresh), length), np.int32)
            for row, tokens in enumerate(fresh):
                padded[row, length - len(tokens) :] = tokens
            pad_B = length - np.array([len(tokens) for tokens in fresh], np.int32)
            token_B, cache = prefill(self.params, self.cache(len(fresh), capacity), padded, pad_B, np.int32(number))
            drawn = np.asarray(token_B)[None]
            while True:
                for token in drawn:
                    token = np.where(done, ENDED, token)
                    for row, value in enumerate(token.tolist()):
                        texts[row] += [value] if value != ENDED else []
                        done[row] |= any(texts[row][-len(end) :] == list(end) for end in ends)
                    number += 1
                    yield token
                    if done.all():
                        return
                steps = min(at_once, count - number, room, CHUNK)
                if steps <= 0:
                    break
                start = time.perf_counter()
                drawn_NB, cache, token_B = decode(
                    self.params, cache, token_B, done, number=np.int32(number), steps=np.int32(steps)
                )
                drawn, room = np.asarray(drawn_NB)[:steps], room - steps
                at_once = min(2 * at_once, CHUNK) if time.perf_counter() - start < LATENCY / 2 else at_once
            fresh = [tokens[-(context // 2) :] for tokens in texts]

    def cache(self, rows: int, length: int) -> KVCache:
        """An empty cache, sharded over heads as the model's keys and values are."""
        layout, model = self.assembly.layout, self.model
        layers = model.kept(rows, length)
        placed = jax.tree.map(lambda one: layout.sharding(layout.spec(one.dims)), layers, is_leaf=is_kept)
        k, v = (tuple(layer[part] for layer in placed) for part in range(2))
        replicated: Any = layout.sharding(jax.sharding.PartitionSpec())

        def make() -> KVCache:
            return KVCache.empty(layers, rows, self.recipe.precision.compute)

        return jax.jit(make, out_shardings=KVCache(k, v, replicated, replicated))()

    def _compiled(self, sampling: Sampling, ends: tuple[int, ...]) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """(prefill, decode), each compiled once per number of rows and bucket of lengths."""
        model, precision = self.model, self.recipe.precision

        def forward(params: Tree, cache: KVCache, token_BT: jax.Array) -> tuple[jax.Array, KVCache]:
            """The logits (B, V) after the last of the tokens, and the extended cache."""
            ctx = CachedContext(cache, loss_dtype=precision.loss)
            batch = {TOKEN: token_BT, POSITION: ctx.positions(token_BT.shape[1])}
            with precision.tracing():
                x_BTE, _ = model.activations(params, batch, jnp.ones(token_BT.shape, jnp.float32), ctx)
                logits_BTV = model.head.logits(x_BTE[:, -1:], model.unembedding(params), "float32")
            return logits_BTV[:, 0], ctx.grown[-1]

        def prefill(
            params: Tree, cache: KVCache, token_BT: jax.Array, pad_B: jax.Array, number: jax.Array
        ) -> tuple[jax.Array, KVCache]:
            logits_BV, cache = forward(params, replace(cache, pad_B=pad_B), token_BT)
            return sampling.draw(logits_BV, number).astype(jnp.int32), cache

        def decode(
            params: Tree, cache: KVCache, token_B: jax.Array, done_B: jax.Array, number: jax.Array, steps: jax.Array
        ) -> tuple[jax.Array, KVCache, jax.Array]:
            """`steps` tokens of each row, (CHUNK, B) with zeros behind them; fewer if all rows have ended."""

            def one(carry: Tree) -> Tree:
                step, done_B, drawn_NB, cache, token_B = carry
                logits_BV, cache = forward(params, cache, token_B[:, None])
                token_B = sampling.draw(logits_BV, number + step).astype(jnp.int32)
                done_B = done_B | (token_B[:, None] == jnp.array(ends, jnp.int32)[None]).any(1)
                return step + 1, done_B, drawn_NB.at[step].set(token_B), cache, token_B

            start = (jnp.int32(0), done_B, jnp.zeros((CHUNK, len(token_B)), jnp.int32), cache, token_B)
            _, _, drawn_NB, cache, token_B = jax.lax.while_loop(
                lambda carry: (carry[0] < steps) & ~carry[1].all(), one, start
            )
            return drawn_NB, cache, token_B

        key = (sampling, ends)
        if key not in self.programs:
            whole = self.assembly.layout.sharding(jax.sharding.PartitionSpec())  # tokens: each process reads them
            self.programs[key] = (
                jax.jit(prefill, donate_argnums=1, out_shardings=(whole, None)),
                jax.jit(decode, donate_argnums=1, out_shardings=(whole, None, whole)),
            )
        return self.programs[key]


def bucket(length: int) -> int:
    """The next power of two, at least 16: prompts and caches of such lengths share a compiled program."""
    return max(16, 1 << (length - 1).bit_length())


def generator(
    run_dir: Folder,
    overrides: Sequence[str],
    say: Callable[[str], None],
    *,
    step: int | None = None,
    best: bool = False,
) -> Generator:
    """Load a checkpoint of a decoder's run, chosen as in `load_run`. Raises RecipeError or CheckpointError if there is
    none, RecipeError if the model is not a decoder."""
    loaded = load_run(run_dir, overrides, say, step=step, best=best)
    if not loaded.recipe.model.generates:
        kind = loaded.recipe.model.kind
        raise RecipeError(f"{run_dir.path} trained a model of kind {kind}; only a decoder generates text")
    return generator_of(loaded)


def generator_of(loaded: LoadedRun) -> Generator:
    """The decoder of a loaded run, its parameters made ready for generation."""
    params: Tree = loaded.recipe.precision.cast(loaded.params, loaded.recipe.model.params())  # once, not at every token
    split = loaded.assembly.layout.parts("heads") > 1 or loaded.assembly.layout.parts("hidden") > 1
    model: Any = loaded.recipe.model
    groups = model.stacks and tuple(map(model.group, model.round))
    ready: dict[str, Any] = {"params": {**params, "blocks": _apart(params["blocks"], split, groups)}}
    return Generator(**vars(loaded) | ready)


@partial(jax.jit, static_argnums=(1, 2))
def _apart(blocks: Tree, split: bool, groups: tuple[str, ...]) -> tuple[Tree, ...]:
    """The layers' own parameters: a loop over stacked ones would copy them at every token."""
    layers = unstacked(blocks, groups)
    return layers if split else tuple(map(joined, layers))
