"""SUNDAE (Savinov et al. 2022): codes of a picture from its caption.

It learns to repair codes of which some were replaced at random, and then what it made of them itself (unrolled steps).
It draws by repairing random codes again and again.
"""

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from first_stage import VQGAN, pixels, unit
from nets import attended, block, dense, linear, norm

from dtrain import Loss, Metric

PLACES = 64
"""Codes of a picture, 8 x 8."""


@dataclass(frozen=True)
class Sundae:
    width: int = 128
    layers: int = 3
    heads: int = 4
    unrolled: int = 2
    """Repairs in a training step: of codes replaced at random, then of what came out."""
    without_text: float = 0.1
    """Share of the examples that are trained without their caption, for guidance."""
    guidance: float = 1.5
    """How much further than without the caption its codes are followed."""
    steps: int = 24
    """Repairs when a picture is drawn."""
    first: dict[str, Any] = field(default_factory=dict)
    """Sizes of the first stage, as its recipe has them."""
    metrics = (Metric("right", higher_is_better=True, unit="%"),)

    @property
    def vq(self) -> VQGAN:
        return VQGAN(**self.first)

    def init(self, key: Any, example: Any) -> Any:
        k, w, n = iter(jax.random.split(key, self.layers + 6)), self.width, self.vq.codes
        words = max(int(example["text"].shape[1]), 1)
        return {
            "vq": self.vq.init(next(k), example)["vq"],
            "code": jax.random.normal(next(k), (n, w)),
            "place": jax.random.normal(next(k), (PLACES, w)),
            "word": jax.random.normal(next(k), (64, w)),
            "order": jax.random.normal(next(k), (words, w)),
            "blocks": [block(next(k), w, 2 * self.layers) for _ in range(self.layers)],
            "out": dense(next(k), w, n, 0.1),
        }

    def repaired(self, params: Any, code: Any, text: Any) -> Any:
        """Logits (B, 64, codes) of what the codes (B, 64) should be."""
        word = params["word"][text] + params["order"][None]
        x = jnp.concatenate([word, params["code"][code] + params["place"][None]], 1)
        for layer in params["blocks"]:
            x = attended(layer, x, self.heads)
        return linear(params["out"], norm(x[:, text.shape[1] :]))

    def loss(self, params: Any, batch: Any, ctx: Any) -> Loss:
        image, text, n = batch["image"], batch["text"], self.vq.codes
        code = self.vq.encoded(params["vq"], image)[1].reshape(-1, PLACES)

        def replaced(key: Any, own: Any) -> Any:
            """Codes of which a random share is replaced by others."""
            share, which, other = jax.random.split(key, 3)
            chosen = jax.random.uniform(which, own.shape) < jax.random.uniform(share)
            return jnp.where(chosen, jax.random.randint(other, own.shape, 0, n), own)

        x = jax.vmap(replaced)(ctx.keys(batch, "replaced"), code)
        if ctx.train:
            dropped = jax.vmap(jax.random.uniform)(ctx.keys(batch, "caption")) < self.without_text
            text = jnp.where(dropped[:, None], 0, text)
        loss, right = jnp.zeros(len(x)), jnp.zeros(len(x))
        for number in range(self.unrolled):
            logits = self.repaired(params, x, text)
            chance = jax.nn.log_softmax(logits)
            loss -= jnp.take_along_axis(chance, code[..., None], 2).mean((1, 2)) / self.unrolled
            right += (logits.argmax(-1) == code).mean(1) / self.unrolled
            keys = ctx.keys(batch, f"drawn {number}")
            x = jax.vmap(jax.random.categorical)(keys, jax.lax.stop_gradient(logits))
        counts = batch.get("weight", jnp.ones(len(x)))
        return Loss((loss * counts).sum(), counts.sum(), {"right": (right * counts).sum()})

    def sample(self, params: Any, batch: Any, ctx: Any) -> dict[str, Any]:
        text, n = batch["text"], self.vq.codes
        keys = jax.vmap(lambda key: jax.random.split(key, self.steps + 1))(ctx.keys(batch, "steps"))

        def step(i: Any, x: Any) -> Any:
            both = self.repaired(params, jnp.concatenate([x, x]), jnp.concatenate([text, jnp.zeros_like(text)]))
            named, free = jnp.split(both, 2)
            logits = free + self.guidance * (named - free)
            late = (i + 1) / self.steps  # colder, and fewer places change, towards the end

            def one(key: Any, own: Any, logits: Any) -> Any:
                draw, which = jax.random.split(key)
                new = jax.random.categorical(draw, logits / (1.0 - 0.9 * late))
                return jnp.where(jax.random.uniform(which, own.shape) < 1.0 - 0.6 * late, new, own)

            return jax.vmap(one)(keys[:, i], x, logits)

        x = jax.vmap(lambda key: jax.random.randint(key, (PLACES,), 0, n))(keys[:, -1])
        x = jax.lax.fori_loop(0, self.steps, step, x)
        drawn = self.vq.decoded(params["vq"], unit(params["vq"]["book"])[x].reshape(-1, 8, 8, self.vq.code_size))
        return {"picture": pixels(drawn)}
