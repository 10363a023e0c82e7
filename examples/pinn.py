"""A physics-informed network (Raissi et al. 2019): the heat equation u_t = u_xx / 10 on [0, 1], without any solution.

Each row is a point inside, one at the start and one at an edge. The exact solution is sin(pi x) exp(-pi^2 t / 10).
"""

from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dtrain import Loss, Metric, layers

RATE = 0.1


class Points:
    """Points of the additive recurrence R2, which covers the square evenly."""

    def __init__(self, split: str, points: int = 8192):
        self.first, self.points = (0 if split == "train" else 10**6), points

    def __len__(self) -> int:
        return self.points

    def rows(self, indices: Any) -> dict[str, Any]:
        number = self.first + np.asarray(indices)[:, None].astype(np.float64)
        return {"point": (0.5 + number * [0.7548776662466927, 0.5698402909980532]) % 1}


@dataclass(frozen=True)
class Heat:
    width: int = 64
    metrics = (Metric("error", higher_is_better=False),)

    def params(self) -> Any:
        sizes = (2, self.width, self.width, self.width, 1)
        return [layers.dense(a, b, "_ embed" if b > 1 else "embed _") for a, b in pairwise(sizes)]

    def u(self, params: Any, point: Any) -> Any:
        x = point[None]
        for i, layer in enumerate(params):
            x = layers.linear(layer, x if i == 0 else jnp.tanh(x))
        return x[0, 0]

    def loss(self, params: Any, batch: Any, ctx: Any) -> Loss:
        params, point = ctx.gather(params), batch["point"]
        u = partial(self.u, params)
        first, second = jax.vmap(jax.grad(u))(point), jax.vmap(jax.jacrev(jax.grad(u)))(point)
        inside = (first[:, 1] - RATE * second[:, 0, 0]) ** 2
        x, t = point.T
        start = (jax.vmap(u)(jnp.stack([x, 0 * t], 1)) - jnp.sin(jnp.pi * x)) ** 2
        edge = jax.vmap(u)(jnp.stack([jnp.round(x), t], 1)) ** 2
        exact = jnp.sin(jnp.pi * x) * jnp.exp(-RATE * jnp.pi**2 * t)
        weight = batch.get("weight", jnp.ones(len(x)))
        error = jnp.abs(jax.vmap(u)(point) - exact)
        return Loss(((inside + start + edge) * weight).sum(), weight.sum(), {"error": (error * weight).sum()})
