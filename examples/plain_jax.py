"""A classifier in plain JAX: two functions over a pytree of arrays, with dropout from each example's own key."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Net:
    hidden: int = 128
    drop: float = 0.2

    def init(self, key, example):
        pixels = example["image"].size
        weights = jax.random.normal(key, (pixels, self.hidden)) * pixels**-0.5
        return [(weights, jnp.zeros(self.hidden)), (jnp.zeros((self.hidden, 10)), jnp.zeros(10))]

    def outputs(self, params, batch, ctx):
        x = batch["image"].reshape(len(batch["image"]), -1)
        (w1, b1), (w2, b2) = params
        x = jax.nn.relu(x @ w1 + b1[None])
        if ctx.train:
            kept = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - self.drop, b1.shape))(ctx.keys(batch))
            x = x * kept / (1 - self.drop)
        return x @ w2 + b2[None]
