"""Data and a model of one's own: points on three spirals, generated here, and the network that separates them."""

import jax
import jax.numpy as jnp
import numpy as np


class Spirals:
    classes = 3

    def __init__(self, split, points=3000):
        draw = np.random.default_rng({"train": 0, "test": 1}[split])
        self.label = draw.integers(0, 3, points)
        radius = draw.uniform(0.1, 1, points)
        angle = 5 * radius + 2 * np.pi / 3 * self.label + draw.normal(0, 0.1, points)
        self.point = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)

    def __len__(self):
        return len(self.label)

    def rows(self, indices):
        return {"point": self.point[indices], "label": self.label[indices]}


class Net:
    def init(self, key, example):
        first, second, last = jax.random.split(key, 3)
        weights = [jax.random.normal(first, (2, 64)), jax.random.normal(second, (64, 64)) / 8, jnp.zeros((64, 3))]
        return {"weights": weights, "bias": jax.random.normal(last, (64,))}

    def outputs(self, params, batch, ctx):
        first, second, last = params["weights"]
        x = jax.nn.relu(batch["point"] @ first + params["bias"][None])
        return jax.nn.relu(x @ second) @ last
