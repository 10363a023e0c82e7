"""A masked autoencoder (He et al. 2022): digits from the quarter of their patches that it sees.

The patches are chosen from `ctx.keys`, by example: each evaluation hides the same ones.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dtrain import Loss, layers

PATCHES, SEEN = 16, 4


@dataclass(frozen=True)
class MAE:
    width: int = 64
    blocks: int = 3

    def params(self) -> Any:
        w, dims = self.width, "embed hidden"
        block = {name: layers.dense(w, w, dims) for name in ("query", "key", "value", "out", "up", "down")}
        ends = {"patch": layers.dense(4, w, dims), "pixels": layers.dense(w, 4, "hidden embed")}
        return ends | {"place": layers.weight((PATCHES, w), "_ embed", "embed"), "blocks": [block] * self.blocks}

    def encode(self, params: Any, x: Any, ctx: Any) -> Any:
        for block in map(ctx.gather, params["blocks"]):
            y = jax.nn.standardize(x)
            query, key, value = (layers.linear(block[name], y) for name in ("query", "key", "value"))
            share = jax.nn.softmax(jnp.einsum("bqw,bkw->bqk", query, key) / self.width**0.5)
            x = x + layers.linear(block["out"], share @ value)
            x = x + layers.linear(block["down"], jax.nn.gelu(layers.linear(block["up"], jax.nn.standardize(x))))
        return x

    def restored(self, params: Any, batch: Any, ctx: Any) -> tuple[Any, Any, Any]:
        image = batch["image"].reshape(-1, 4, 2, 4, 2)
        patch = image.transpose(0, 1, 3, 2, 4).reshape(-1, PATCHES, 4)
        order = jax.vmap(lambda key: jax.random.permutation(key, PATCHES))(ctx.keys(batch, "mask"))
        seen = (order < SEEN)[..., None]
        x = jnp.where(seen, layers.linear(ctx.gather(params["patch"]), patch), 0) + ctx.gather(params["place"])[None]
        return layers.linear(ctx.gather(params["pixels"]), self.encode(params, x, ctx)), patch, seen

    def loss(self, params: Any, batch: Any, ctx: Any) -> Loss:
        guess, patch, seen = self.restored(params, batch, ctx)
        error = (((guess - patch) ** 2) * ~seen).sum((1, 2)) / (4 * (PATCHES - SEEN))
        weight = batch.get("weight", jnp.ones(len(error)))
        return Loss((error * weight).sum(), weight.sum(), {})

    def sample(self, params: Any, batch: Any, ctx: Any) -> dict[str, Any]:
        guess, patch, seen = self.restored(params, batch, ctx)
        shown = jnp.stack([patch, jnp.where(seen, patch, 0.5), jnp.where(seen, patch, guess)], 2)  # three in a row
        shown = jnp.clip(255 * shown, 0, 255).astype(jnp.uint8).reshape(-1, 4, 4, 3, 2, 2)
        return {"whole seen restored": shown.transpose(0, 1, 4, 3, 2, 5).reshape(-1, 8, 24, 1)}
