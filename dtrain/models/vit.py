"""A vision transformer (Dosovitskiy et al. 2021; mean pooling as in Beyer et al. 2022), the published ones too.

Dims: B batch, T patches, E embed, H heads, D head dim, F hidden, K classes.
"""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from dtrain.core.errors import FieldError
from dtrain.core.types import Depth, Positive, PositiveFloat
from dtrain.data.batch import Example
from dtrain.models.feed_forward import ACTIVATIONS
from dtrain.models.nn import param as declare
from dtrain.models.nn.attention import AttentionSpec
from dtrain.models.nn.context import Context
from dtrain.models.nn.image_nets import ShapedClassifier
from dtrain.models.nn.layers import (
    Drop,
    added,
    bias,
    dense,
    kept,
    layer_norm,
    linear,
    norm,
    three_times,
    weight,
)
from dtrain.models.nn.matmul import matmul
from dtrain.models.nn.model import Flops, Structure
from dtrain.models.nn.param import Param, Tree
from dtrain.models.place import Naming
from dtrain.models.published_images import vit_names

HEADS = {"query": "heads", "key": "kv_heads", "value": "kv_heads"}
"""The products of attention, and the dim of their heads."""


@dataclass(frozen=True, kw_only=True)
class ViT(ShapedClassifier):
    """Square patches of the image, a stack of equal transformer blocks, pooling, a linear head.

    With `pool: token` and `bias: true` it has the names of the published ones in timm and transformers.
    """

    kind: Literal["vit"] = "vit"
    patch: Positive = 4
    """Side of a patch in pixels."""
    layers: Depth = 4
    """Number of blocks."""
    width: Positive = 64
    """Values of each patch between blocks."""
    heads: Positive = 4
    """Heads of attention."""
    hidden: Positive = 256
    """Width of the feed-forward layer."""
    pool: Literal["mean", "token"] = "mean"
    """What the head classifies: the mean of all patches, or a token of its own before them."""
    bias: bool = False
    """Whether the products of attention have biases."""
    activation: Literal["gelu_tanh", "gelu"] = "gelu_tanh"
    """Of the feed-forward layer: GELU, or its approximation by a tanh."""
    epsilon: PositiveFloat = 1e-6
    """Added to the variance in normalisations."""

    def __post_init__(self) -> None:
        for i, name in enumerate(("height", "width")):
            if self.image and self.image[i] % self.patch:
                raise FieldError("patch", f"patch = {self.patch} does not divide the image's {name} {self.image[i]}")
        if self.width % self.heads:
            raise FieldError("heads", f"heads = {self.heads} does not divide width = {self.width}")

    @property
    def structure(self) -> Structure:
        return Structure(layers=self.layers)

    @property
    def _patches(self) -> int:
        assert self.image
        return (self.image[0] // self.patch) * (self.image[1] // self.patch)

    @property
    def _tokens(self) -> int:
        return self._patches + (self.pool == "token")

    @property
    def namings(self) -> tuple[Naming, ...]:
        published = self.pool == "token" and self.bias and self.image
        return vit_names(self.patch, self.width, self._tokens) if published else ()

    def params(self) -> Tree:
        assert self.image
        values = self.patch**2 * self.image[2]
        return {
            "embed": dense(values, self.width, "_ embed"),
            "position": Param((self._tokens, self.width), "_ embed", declare.normal(0.02), decay=False),
            **({"token": Param((self.width,), "embed", declare.zeros, decay=False)} if self.pool == "token" else {}),
            "blocks": declare.stacked(self._block(), self.layers),
            "norm": norm(self.width, "embed"),
            "head": dense(self.width, self.classes, "embed classes"),
        }

    def _block(self) -> Tree:
        width, heads, size = self.width, self.heads, self.width // self.heads
        shape = (width, heads, size)
        return {
            "norm1": norm(width, "embed"),
            **{
                name: self._matrix(weight(shape, f"embed {dim} _", fan_in="embed"), bias((heads, size), f"{dim} _"))
                for name, dim in HEADS.items()
            },
            "out": self._matrix(weight((heads, size, width), "heads _ embed", "heads _"), bias((width,), "embed")),
            "norm2": norm(width, "embed"),
            "up": dense(width, self.hidden, "embed hidden"),
            "down": dense(self.hidden, width, "hidden embed"),
        }

    def _matrix(self, matrix: Param, offset: Param) -> Tree:
        return {"weight": matrix, "bias": offset} if self.bias else matrix

    def logits(self, params: Tree, image_BHWC: jax.Array, ctx: Context, drop: Drop = kept) -> jax.Array:
        """Logits (batch, classes)."""
        x_BTE = linear(ctx.gather(params["embed"]), _patches(image_BHWC, self.patch))
        if self.pool == "token":
            token_B1E = added(jnp.zeros_like(x_BTE[:, :1]), ctx.gather(params["token"]))
            x_BTE = jnp.concatenate([token_B1E, x_BTE], axis=1)
        x_BTE = ctx.shard(added(x_BTE, ctx.gather(params["position"])), "batch", None, None)
        x_BTE, _ = ctx.stack([self._apply], params["blocks"], x_BTE)
        x_BTE = layer_norm(ctx.gather(params["norm"]), x_BTE, self.epsilon)
        x_BE = x_BTE.mean(1) if self.pool == "mean" else x_BTE[:, 0]
        return linear(ctx.gather(params["head"]), drop(x_BE, "embed", "head"))

    def flops(self, example: Example, examples: int, declared: Tree) -> Flops:
        assert self.image
        tokens, width = self._tokens, self.width
        block = 2 * tokens * (4 * width**2 + 2 * width * self.hidden) + 4 * tokens**2 * width
        ends = 2 * self._patches * self.patch**2 * self.image[2] * width + 2 * width * self.classes
        return three_times(self, float(self.layers * block + ends), example, examples, declared)

    def _apply(self, block: Tree, x_BTE: jax.Array, _: Tree, ctx: Context) -> tuple[jax.Array, Tree]:
        """One block: attention, then the feed-forward layer, each added to its input."""
        y_BTE = layer_norm(block["norm1"], x_BTE, self.epsilon)
        q_BTHD, k_BTHD, v_BTHD = (
            ctx.shard(_product(y_BTE, block[name]), "batch", None, heads, None) for name, heads in HEADS.items()
        )
        y_BTHD = ctx.attend(q_BTHD, k_BTHD, v_BTHD, AttentionSpec(q_BTHD.shape[-1] ** -0.5, causal=False), None)
        out = block["out"]["weight"] if self.bias else block["out"]
        y_BTE = ctx.reduce(matmul(y_BTHD, out, contract_dims=2), "heads")
        x_BTE = x_BTE + (added(y_BTE, block["out"]["bias"]) if self.bias else y_BTE)
        y_BTE = layer_norm(block["norm2"], x_BTE, self.epsilon)
        y_BTF = ACTIVATIONS[self.activation](linear(block["up"], y_BTE))
        y_BTE = ctx.reduce(matmul(ctx.shard(y_BTF, "batch", None, "hidden"), block["down"]["weight"]), "hidden")
        y_BTE = added(y_BTE, block["down"]["bias"])
        return ctx.shard(x_BTE + y_BTE, "batch", None, None), {}


def _product(x_BTE: jax.Array, matrix: Tree) -> jax.Array:
    """x (B, T, E) times a matrix (E, H, D), plus its bias where it has one: (B, T, H, D)."""
    return linear(matrix, x_BTE) if isinstance(matrix, dict) else matmul(x_BTE, matrix)


def _patches(image_BHWC: jax.Array, side: int) -> jax.Array:
    """Cut the image into squares and flatten each: (batch, patches, side * side * channels)."""
    batch, height, width, channels = image_BHWC.shape
    grid = image_BHWC.reshape(batch, height // side, side, width // side, side, channels)
    return grid.transpose(0, 1, 3, 2, 4, 5).reshape(batch, -1, side * side * channels)
