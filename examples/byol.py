"""BYOL (Grill et al. 2020): representations without labels, by predicting what an averaged copy of the network gives.

`averages` declares that copy. A measure reads the digit off its nearest neighbours among the representations.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dtrain import Loss, Metric, layers


@dataclass(frozen=True)
class BYOL:
    width: int = 128
    averages = {"target.*": ("online.*", 0.99)}

    def params(self) -> Any:
        def network(*sizes: int) -> Any:
            return [layers.dense(a, b, "embed hidden") for a, b in pairwise(sizes)]

        sizes = (64, 2 * self.width, self.width)
        copies = {name: network(*sizes) for name in ("online", "target")}
        return copies | {"predictor": network(self.width, self.width, self.width)}

    def apply(self, network: Any, x: Any, ctx: Any) -> Any:
        first, second = network
        return layers.linear(ctx.gather(second), jax.nn.relu(layers.linear(ctx.gather(first), x)))

    def view(self, image: Any, keys: Any) -> Any:
        """Each picture moved by up to one pixel, at another brightness, with noise."""

        def one(x: Any, key: Any) -> Any:
            places, light, noise = jax.random.split(key, 3)
            x = jax.lax.dynamic_slice(jnp.pad(x, 1), jax.random.randint(places, (2,), 0, 3), (8, 8))
            return x * jax.random.uniform(light, (), x.dtype, 0.6, 1.4) + 0.1 * jax.random.normal(noise, x.shape)

        return jax.vmap(one)(image[..., 0], keys).reshape(len(image), 64)

    def loss(self, params: Any, batch: Any, ctx: Any) -> Loss:
        views = [self.view(batch["image"], ctx.keys(batch, name)) for name in ("first", "second")]
        error = 0.0
        for one, other in (views, views[::-1]):
            guess = self.apply(params["predictor"], self.apply(params["online"], one, ctx), ctx)
            error += 2 - 2 * (unit(guess) * unit(self.apply(params["target"], other, ctx))).sum(1)
        weight = batch.get("weight", jnp.ones(len(error)))
        return Loss((error * weight).sum(), weight.sum(), {})

    def predict(self, params: Any, batch: Any, ctx: Any) -> dict[str, Any]:
        return {"code": unit(self.apply(params["online"], batch["image"].reshape(-1, 64), ctx))}


def unit(x: Any) -> Any:
    return x / (jnp.linalg.norm(x, axis=1, keepdims=True) + 1e-6)


class Neighbours:
    metrics = (Metric("neighbours", higher_is_better=True, unit="%"),)

    def __call__(self, step: int, rows: Any) -> dict[str, float]:
        pairs = [(data["label"], out["code"]) for data, out in rows]
        label, code = (np.concatenate(part) for part in zip(*pairs))
        alike = code @ code.T - 2 * np.eye(len(code))
        nearest = label[np.argsort(-alike, 1)[:, :5]]
        votes = [np.bincount(row, minlength=10).argmax() for row in nearest]
        return {"neighbours": np.mean(votes == label)}
