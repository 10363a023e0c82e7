"""A vision transformer (Dosovitskiy et al. 2021; mean pooling as in Beyer et al. 2022).

Dims: B batch, T patches, E embed, H heads, D head dim, F hidden, K classes.
"""

from dataclasses import dataclass, replace
from typing import Literal, Self

import jax

from dtrain.core.errors import FieldError
from dtrain.core.types import Depth, Natural, Positive
from dtrain.data.batch import Example
from dtrain.models.nn import param as declare
from dtrain.models.nn.attention import AttentionSpec
from dtrain.models.nn.context import Context
from dtrain.models.nn.layers import (
    Drop,
    ImageClassifier,
    added,
    classes_of,
    dense,
    image_mismatch,
    image_shape,
    image_sizes_left_out,
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


@dataclass(frozen=True, kw_only=True)
class ViT(ImageClassifier):
    """Square patches of the image, a stack of equal transformer blocks, mean pooling, a linear head."""

    kind: Literal["vit"] = "vit"
    image: tuple[Positive, Positive, Positive] | None = None
    """Height, width, channels. Default: those of the data."""
    classes: Natural = 0
    """Number of classes; 0: that of the data."""
    patch: Positive = 4
    """Side of a patch in pixels."""
    layers: Depth = 4
    width: Positive = 64
    heads: Positive = 4
    hidden: Positive = 256
    """Width of the feed-forward layer."""

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
    def left_out(self) -> tuple[str, ...]:
        return image_sizes_left_out(self.image, self.classes)

    def sized(self, example: Example) -> Self:
        return replace(self, image=self.image or image_shape(example), classes=self.classes or classes_of(example))

    @property
    def _patches(self) -> int:
        assert self.image
        return (self.image[0] // self.patch) * (self.image[1] // self.patch)

    def params(self) -> Tree:
        assert self.image
        values = self.patch**2 * self.image[2]
        return {
            "embed": dense(values, self.width, "_ embed"),
            "position": Param((self._patches, self.width), "_ embed", declare.normal(0.02), decay=False),
            "blocks": declare.stacked(self._block(), self.layers),
            "norm": norm(self.width, "embed"),
            "head": dense(self.width, self.classes, "embed classes"),
        }

    def _block(self) -> Tree:
        width, heads, size = self.width, self.heads, self.width // self.heads
        shape = (width, heads, size)
        return {
            "norm1": norm(width, "embed"),
            "query": weight(shape, "embed heads _", fan_in="embed"),
            "key": weight(shape, "embed kv_heads _", fan_in="embed"),
            "value": weight(shape, "embed kv_heads _", fan_in="embed"),
            "out": weight((heads, size, width), "heads _ embed", fan_in="heads _"),
            "norm2": norm(width, "embed"),
            "up": dense(width, self.hidden, "embed hidden"),
            "down": dense(self.hidden, width, "hidden embed"),
        }

    def logits(self, params: Tree, image_BHWC: jax.Array, ctx: Context, drop: Drop = kept) -> jax.Array:
        """Logits (batch, classes)."""
        x_BTE = linear(ctx.gather(params["embed"]), _patches(image_BHWC, self.patch))
        x_BTE = ctx.shard(added(x_BTE, ctx.gather(params["position"])), "batch", None, None)
        x_BTE, _ = ctx.stack([_apply], params["blocks"], x_BTE)
        x_BE = layer_norm(ctx.gather(params["norm"]), x_BTE).mean(1)
        return linear(ctx.gather(params["head"]), drop(x_BE, "embed", "head"))

    def flops(self, example: Example, examples: int, declared: Tree) -> Flops:
        assert self.image
        tokens, width = self._patches, self.width
        block = 2 * tokens * (4 * width**2 + 2 * width * self.hidden) + 4 * tokens**2 * width
        ends = 2 * tokens * self.patch**2 * self.image[2] * width + 2 * width * self.classes
        return three_times(self, float(self.layers * block + ends), example, examples, declared)

    def mismatch(self, example: Example) -> str:
        return image_mismatch(example, self.image, self.classes)


def _apply(block: Tree, x_BTE: jax.Array, _: Tree, ctx: Context) -> tuple[jax.Array, Tree]:
    """One block: attention, then the feed-forward layer, each added to its input."""
    y_BTE = layer_norm(block["norm1"], x_BTE)
    q_BTHD, k_BTHD, v_BTHD = (
        ctx.shard(matmul(y_BTE, block[name]), "batch", None, heads, None)
        for name, heads in (("query", "heads"), ("key", "kv_heads"), ("value", "kv_heads"))
    )
    y_BTHD = ctx.attend(q_BTHD, k_BTHD, v_BTHD, AttentionSpec(q_BTHD.shape[-1] ** -0.5, causal=False), None)
    x_BTE = x_BTE + ctx.reduce(matmul(y_BTHD, block["out"], contract_dims=2), "heads")
    y_BTE = layer_norm(block["norm2"], x_BTE)
    y_BTF = ctx.shard(jax.nn.gelu(linear(block["up"], y_BTE)), "batch", None, "hidden")
    y_BTE = ctx.reduce(matmul(y_BTF, block["down"]["weight"]), "hidden")
    y_BTE = added(y_BTE, block["down"]["bias"])
    return ctx.shard(x_BTE + y_BTE, "batch", None, None), {}


def _patches(image_BHWC: jax.Array, side: int) -> jax.Array:
    """Cut the image into squares and flatten each: (batch, patches, side * side * channels)."""
    batch, height, width, channels = image_BHWC.shape
    grid = image_BHWC.reshape(batch, height // side, side, width // side, side, channels)
    return grid.transpose(0, 1, 3, 2, 4, 5).reshape(batch, -1, side * side * channels)
