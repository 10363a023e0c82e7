"""A small transformer in Flax NNX that predicts the next byte."""

import jax.numpy as jnp
from flax import nnx

from dtrain import layers
from dtrain.flax import NNX


class Block(nnx.Module):
    def __init__(self, width, rngs):
        self.norm, self.norm2 = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(4, width, dropout_rate=0.1, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x, mask):
        x = x + self.attention(self.norm(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Transformer(nnx.Module):
    def __init__(self, width, depth, rngs):
        self.token, self.place = nnx.Embed(256, width, rngs=rngs), nnx.Embed(64, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, rngs) for _ in range(depth)])
        self.out = nnx.Linear(width, 256, rngs=rngs)

    def __call__(self, token):
        x = self.token(token) + self.place(jnp.arange(token.shape[1]))[None]
        for block in self.blocks:
            x = block(x, nnx.make_causal_mask(token))
        return self.out(x)


def model(width=64, depth=2):
    return NNX(lambda rngs: Transformer(width, depth, rngs), loss_of=layers.next_token, metrics=())
