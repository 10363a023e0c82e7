"""The published residual networks (He et al. 2016a, arXiv:1512.03385), for training that starts from their parameters.

A 3 x 3 convolution of a bottleneck has the stride ("v1.5"), as in torchvision, timm and transformers. Batch
normalisation uses the running means and variances that came with the parameters, in training as well, as is usual where
a batch is small: so the loss of an example depends on the parameters and that example only.
Dims: B batch, H height, W width, C channels.
"""

import math
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

from dtrain.core.types import Depth, Positive
from dtrain.data.batch import Example
from dtrain.models.nn import param as declare
from dtrain.models.nn.context import Context
from dtrain.models.nn.convolution import KERNEL, Padding, conv, largest
from dtrain.models.nn.image_nets import StagedClassifier, kernel
from dtrain.models.nn.layers import (
    Drop,
    affine,
    dense,
    kept,
    linear,
    norm,
    three_times,
)
from dtrain.models.nn.model import Flops
from dtrain.models.nn.param import Param, Tree
from dtrain.models.place import Naming
from dtrain.models.published_images import resnet_names

STEM = 7
EPSILON = 1e-5
"""Added to the variance: the default of PyTorch, which all published ones have."""
WIDER = 4
"""Channels after a bottleneck, as a multiple of those within."""


@dataclass(frozen=True, kw_only=True)
class ResNet(StagedClassifier):
    """A published ResNet, with the names of timm and transformers: ResNet-18 to 152. `init` names its parameters."""

    kind: Literal["resnet"] = "resnet"
    stages: tuple[Positive, ...] = (64, 128, 256, 512)
    """Channels within the blocks of each stage."""
    blocks: Depth | tuple[Depth, ...] = 2
    """Blocks of every stage, or of each: 2 for a ResNet-18, [3, 4, 6, 3] for a ResNet-34 and 50."""
    stem: Positive = 64
    """Channels of the first convolution, 7 x 7 with stride 2."""
    bottleneck: bool = False
    """Blocks of three convolutions, 1 x 1, 3 x 3 and 1 x 1, with four times as many channels after them: ResNet-50 and
    deeper ones."""

    @property
    def needs_init(self) -> str:
        return "batch normalisation uses the means and variances of published parameters; from random ones train a cnn"

    @property
    def fixed_size(self) -> bool:
        return False

    @property
    def namings(self) -> tuple[Naming, ...]:
        return resnet_names(self.counts, self.bottleneck)

    def _plan(self) -> list[tuple[str, int, int, int]]:
        """Name, channels in, channels within and stride of each block."""
        plan, channels = [], self.stem
        for name, stage, stride in self.blocks_in_order():
            plan.append((name, channels, self.stages[stage], stride))
            channels = self._out(self.stages[stage])
        return plan

    def _out(self, within: int) -> int:
        return within * WIDER if self.bottleneck else within

    def params(self) -> Tree:
        assert self.image
        last = self._out(self.stages[-1])
        return {
            "stem": {"conv": kernel(STEM, self.image[2], self.stem, "_", "embed"), "norm": _norm(self.stem, "embed")},
            **{name: self._block(inputs, within, stride) for name, inputs, within, stride in self._plan()},
            "head": dense(last, self.classes, "embed classes"),
        }

    def _block(self, inputs: int, within: int, stride: int) -> Tree:
        out = self._out(within)
        block = {
            "conv1": kernel(1 if self.bottleneck else KERNEL, inputs, within, "embed", "hidden"),
            "norm1": _norm(within, "hidden"),
            "conv2": kernel(KERNEL, within, within, "hidden", "embed"),
            "norm2": _norm(within, "embed"),
        }
        if self.bottleneck:
            block |= {"conv3": kernel(1, within, out, "_", "embed"), "norm3": _norm(out, "embed")}
        if (inputs, stride) != (out, 1):
            block |= {"skip": kernel(1, inputs, out, "_", "embed"), "skip_norm": _norm(out, "embed")}
        return block

    def logits(self, params: Tree, image_BHWC: jax.Array, ctx: Context, drop: Drop = kept) -> jax.Array:
        """Logits (batch, classes)."""
        stem = ctx.gather(params["stem"])
        x_BHWC = jax.nn.relu(_normed(stem["norm"], conv(image_BHWC, stem["conv"], 2, _around(STEM))))
        x_BHWC = largest(x_BHWC, _around(KERNEL))
        for name, _, _, stride in self._plan():
            x_BHWC = self._residual(ctx.gather(params[name]), x_BHWC, stride, ctx)
        return linear(ctx.gather(params["head"]), drop(x_BHWC.mean((1, 2)), "embed", "head"))

    def _residual(self, block: Tree, x_BHWC: jax.Array, stride: int, ctx: Context) -> jax.Array:
        size, first = (1, 1) if self.bottleneck else (KERNEL, stride)
        y_BHWC = ctx.shard(conv(x_BHWC, block["conv1"], first, _around(size)), "batch", None, None, "hidden")
        y_BHWC = jax.nn.relu(_normed(block["norm1"], y_BHWC))
        y_BHWC = ctx.reduce(conv(y_BHWC, block["conv2"], stride if self.bottleneck else 1, _around(KERNEL)), "hidden")
        y_BHWC = _normed(block["norm2"], ctx.shard(y_BHWC, "batch", None, None, None))
        if self.bottleneck:
            y_BHWC = _normed(block["norm3"], conv(jax.nn.relu(y_BHWC), block["conv3"], 1, _around(1)))
        if "skip" in block:
            x_BHWC = _normed(block["skip_norm"], conv(x_BHWC, block["skip"], stride, _around(1)))
        return ctx.shard(jax.nn.relu(x_BHWC + y_BHWC), "batch", None, None, None)

    def flops(self, example: Example, examples: int, declared: Tree) -> Flops:
        assert self.image
        height, width, channels = self.image
        area = math.ceil(height / 2) * math.ceil(width / 2)  # 2 x positions x kernel area x channels in x channels out
        total = 2.0 * area * STEM**2 * channels * self.stem
        area = math.ceil(height / 4) * math.ceil(width / 4)
        for _, inputs, within, stride in self._plan():
            before, area, out = area, math.ceil(area / stride**2), self._out(within)
            if self.bottleneck:
                total += 2 * before * inputs * within + 2 * area * (KERNEL**2 * within + out) * within
            else:
                total += 2 * area * KERNEL**2 * within * (inputs + within)
            total += 2 * area * inputs * out if (inputs, stride) != (out, 1) else 0
        return three_times(self, total + 2 * self._out(self.stages[-1]) * self.classes, example, examples, declared)


def _around(size: int) -> Padding:
    """The pixels around an image for which a kernel of that size and stride 1 has as many positions as the image."""
    return ((size // 2, size // 2), (size // 2, size // 2))


def _norm(size: int, dim: str) -> Tree:
    """Scale and bias of each channel, with its running mean and variance, which no step changes."""
    kept = {"mean": declare.zeros, "variance": declare.ones}
    still = {name: Param((size,), dim, init, decay=False, exact=True, trained=False) for name, init in kept.items()}
    return norm(size, dim) | still


def _normed(params: Tree, x_BHWC: jax.Array) -> jax.Array:
    """(x - mean) / deviation x scale + bias, of each channel; one product and one sum, in float32."""
    own = {name: value.astype(jnp.float32) for name, value in params.items()}
    scale = own["scale"] * jax.lax.rsqrt(own["variance"] + EPSILON)
    return affine({"scale": scale, "bias": own["bias"] - own["mean"] * scale}, x_BHWC)
