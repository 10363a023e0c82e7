"""A residual network with pre-activation blocks (He et al. 2016b, arXiv:1603.05027) and group normalisation.

Group normalisation in place of batch normalisation makes the loss of an example depend on the parameters and
that example only: there are no running statistics, and the numbers are the same on any number of devices.
Dims: B batch, H height, W width, C channels.
"""

import math
from dataclasses import dataclass
from typing import Literal

import jax

from dtrain.core.errors import FieldError
from dtrain.core.types import Depth, Positive
from dtrain.data.batch import Example
from dtrain.models.nn.context import Context
from dtrain.models.nn.convolution import KERNEL, conv, largest
from dtrain.models.nn.image_nets import StagedClassifier, kernel
from dtrain.models.nn.layers import (
    Drop,
    dense,
    group_norm,
    grouped_norm,
    kept,
    linear,
    norm,
    three_times,
)
from dtrain.models.nn.model import Flops
from dtrain.models.nn.param import Tree


@dataclass(frozen=True, kw_only=True)
class CNN(StagedClassifier):
    """A ResNet: a stem, then stages of residual blocks; each stage after the first halves height and width."""

    kind: Literal["cnn"] = "cnn"
    stages: tuple[Positive, ...] = (16, 32, 64)
    """Channels of each stage."""
    blocks: Depth | tuple[Depth, ...] = 1
    """Residual blocks of every stage, or of each: [3, 4, 6, 3] for a ResNet-34."""
    stem: Literal["plain", "imagenet"] = "plain"
    """plain: a 3 x 3 convolution; imagenet: one of 7 x 7 with stride 2, then maxima of 3 x 3 with stride 2."""
    group: Positive = 8
    """Channels per normalisation group."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for i, channels in enumerate(self.stages):
            if channels % self.group:
                raise FieldError(f"stages.{i}", f"group = {self.group} does not divide {channels} channels")

    @property
    def _stem(self) -> tuple[int, int]:
        """Size and stride of the stem's kernel."""
        return (7, 2) if self.stem == "imagenet" else (KERNEL, 1)

    def _plan(self) -> list[tuple[str, int, int, int]]:
        """Name, channels in, channels out and stride of each block."""
        plan, channels = [], self.stages[0]
        for name, stage, stride in self.blocks_in_order():
            plan.append((name, channels, self.stages[stage], stride))
            channels = self.stages[stage]
        return plan

    def params(self) -> Tree:
        assert self.image
        blocks = {name: _block(inputs, out, stride, self.group) for name, inputs, out, stride in self._plan()}
        last = self.stages[-1]
        return {
            "stem": kernel(self._stem[0], self.image[2], self.stages[0], "_", "embed"),
            **blocks,
            "norm": norm(last, "embed"),
            "head": dense(last, self.classes, "embed classes"),
        }

    def logits(self, params: Tree, image_BHWC: jax.Array, ctx: Context, drop: Drop = kept) -> jax.Array:
        """Logits (batch, classes)."""
        x_BHWC = conv(image_BHWC, ctx.gather(params["stem"]), self._stem[1])
        x_BHWC = largest(x_BHWC) if self.stem == "imagenet" else x_BHWC
        for name, _, _, stride in self._plan():
            x_BHWC = self._residual(ctx.gather(params[name]), x_BHWC, stride, ctx)
        x_BHWC = jax.nn.relu(group_norm(ctx.gather(params["norm"]), x_BHWC, self.group))
        return linear(ctx.gather(params["head"]), drop(x_BHWC.mean((1, 2)), "embed", "head"))

    def _residual(self, block: Tree, x_BHWC: jax.Array, stride: int, ctx: Context) -> jax.Array:
        y_BHWC = jax.nn.relu(group_norm(block["norm1"], x_BHWC, self.group))
        skip = conv(y_BHWC, block["skip"], stride) if "skip" in block else x_BHWC
        y_BHWC = ctx.shard(conv(y_BHWC, block["conv1"], stride), "batch", None, None, "hidden")
        y_BHWC = jax.nn.relu(group_norm(block["norm2"], y_BHWC, self.group))
        y_BHWC = ctx.reduce(conv(y_BHWC, block["conv2"]), "hidden")
        return ctx.shard(skip + y_BHWC, "batch", None, None, None)

    def flops(self, example: Example, examples: int, declared: Tree) -> Flops:
        assert self.image
        height, width, channels = self.image
        size, stride = self._stem  # 2 x positions x kernel area x channels in x channels out, per convolution
        area = math.ceil(height * width / stride**2)
        total = 2.0 * area * size**2 * channels * self.stages[0]
        area = math.ceil(area / 4) if self.stem == "imagenet" else area
        for _, inputs, out, stride in self._plan():
            area = math.ceil(area / stride**2)
            total += 2 * area * KERNEL**2 * out * (inputs + out)
            total += 2 * area * inputs * out if (inputs, stride) != (out, 1) else 0
        return three_times(self, total + 2 * self.stages[-1] * self.classes, example, examples, declared)


def _block(inputs: int, out: int, stride: int, group: int) -> Tree:
    block = {
        "norm1": norm(inputs, "embed"),
        "conv1": kernel(KERNEL, inputs, out, "embed", "hidden"),
        "norm2": grouped_norm(out, group, "hidden"),
        "conv2": kernel(KERNEL, out, out, "hidden", "embed"),
    }
    return block if (inputs, stride) == (out, 1) else block | {"skip": kernel(1, inputs, out, "_", "embed")}
