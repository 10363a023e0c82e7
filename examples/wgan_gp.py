"""A Wasserstein GAN with gradient penalty (Gulrajani et al. 2017) that draws digits of a class.

Both players are one loss: `stop` keeps each from learning for the other. The recipe's groups give each its settings.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp

from dtrain import Loss, Metric, layers

MEAN, SCALE = 0.3, 0.37
"""Those of the recipe's `data.pixels`."""
stop = jax.lax.stop_gradient


@dataclass(frozen=True)
class GAN:
    hidden: int = 128
    noise: int = 32
    metrics = (Metric("distance", higher_is_better=False),)

    def params(self) -> Any:
        def player(*sizes: int) -> Any:
            dims = ["_ embed", "embed hidden", "embed _"]
            return [layers.dense(a, b, names) for (a, b), names in zip(pairwise(sizes), dims, strict=True)]

        widths = (self.hidden, self.hidden)
        return {"critic": player(64 + 10, *widths, 1), "generator": player(self.noise + 10, *widths, 64)}

    def apply(self, params: Any, x: Any, label: Any) -> Any:
        x = jnp.concatenate([x, jax.nn.one_hot(label, 10)], 1)
        first, *rest = params
        x = layers.linear(first, x)
        for layer in rest:
            x = layers.linear(layer, jax.nn.leaky_relu(x, 0.2))
        return x

    def draw(self, generator: Any, batch: Any, ctx: Any) -> Any:
        noise = jax.vmap(lambda key: jax.random.normal(key, (self.noise,)))(ctx.keys(batch, "noise"))
        return self.apply(generator, noise, batch["label"])

    def loss(self, params: Any, batch: Any, ctx: Any) -> Loss:
        critic, generator = ctx.gather(params["critic"]), ctx.gather(params["generator"])
        real, label = batch["image"].reshape(-1, 64), batch["label"]
        fake, share = self.draw(generator, batch, ctx), jax.vmap(jax.random.uniform)(ctx.keys(batch, "share"))
        between = share[:, None] * real + (1 - share[:, None]) * stop(fake)
        slope = jax.vmap(jax.grad(lambda x, y: self.apply(critic, x[None], y[None])[0, 0]))(between, label)
        penalty = (jnp.sqrt((slope**2).sum(1) + 1e-12) - 1) ** 2
        distance = (self.apply(critic, real, label) - self.apply(critic, stop(fake), label))[:, 0]
        drawn = self.apply(jax.tree.map(stop, critic), fake, label)[:, 0]
        weight = batch.get("weight", jnp.ones(len(real)))
        total = ((10 * penalty - distance - drawn) * weight).sum()
        return Loss(total, weight.sum(), {"distance": (distance * weight).sum()})

    def sample(self, params: Any, batch: Any, ctx: Any) -> dict[str, Any]:
        pixels = 255 * (SCALE * self.draw(ctx.gather(params["generator"]), batch, ctx) + MEAN)
        return {"digit": jnp.clip(pixels, 0, 255).astype(jnp.uint8).reshape(-1, 8, 8, 1), "label": batch["label"]}
