"""Diffusion of handwritten digits by their class, as flow matching (Lipman et al. 2023).

Noise and times are drawn from `ctx.keys`, by example: the same on any mesh, and in every evaluation. `sample` draws the
pictures that `evaluate.samples` keeps, and `dtrain sample` after the run.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp

from dtrain import Loss, layers

MEAN, SCALE = 0.3, 0.37
"""Those of the recipe's `data.pixels`."""


@dataclass(frozen=True)
class Flow:
    hidden: int = 256
    steps: int = 50

    def params(self) -> Any:
        sizes = (64 + 22 + 10, self.hidden, self.hidden, 64)
        return {f"layer{i}": layers.dense(a, b, "embed hidden") for i, (a, b) in enumerate(pairwise(sizes))}

    def velocity(self, params: Any, x: Any, time: Any, label: Any, ctx: Any) -> Any:
        waves = jnp.cos(jnp.outer(time, jnp.pi * jnp.arange(22)))
        x = jnp.concatenate([x, waves, jax.nn.one_hot(label, 10)], 1)
        for i in range(3):
            x = layers.linear(ctx.gather(params[f"layer{i}"]), x if i == 0 else jax.nn.silu(x))
        return x

    def loss(self, params: Any, batch: Any, ctx: Any) -> Loss:
        x = batch["image"].reshape(-1, 64)
        noise = jax.vmap(lambda key: jax.random.normal(key, (64,)))(ctx.keys(batch, "noise"))
        time = jax.vmap(jax.random.uniform)(ctx.keys(batch, "time"))
        mixed = (1 - time[:, None]) * noise + time[:, None] * x
        error = ((self.velocity(params, mixed, time, batch["label"], ctx) - (x - noise)) ** 2).mean(1)
        weight = batch.get("weight", jnp.ones(len(x)))
        return Loss((error * weight).sum(), weight.sum(), {})

    def sample(self, params: Any, batch: Any, ctx: Any) -> dict[str, Any]:
        def step(i: Any, x: Any) -> Any:
            time = jnp.full_like(x[:, 0], 1) * i / self.steps
            return x + self.velocity(params, x, time, batch["label"], ctx) / self.steps

        noise = jax.vmap(lambda key: jax.random.normal(key, (64,)))(ctx.keys(batch, "start"))
        x = jax.lax.fori_loop(0, self.steps, step, noise)
        pixels = jnp.clip(255 * (SCALE * x + MEAN), 0, 255).astype(jnp.uint8)
        return {"digit": pixels.reshape(-1, 8, 8, 1), "label": batch["label"]}
