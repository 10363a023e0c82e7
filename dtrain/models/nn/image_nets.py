"""What the networks of images share: sizes that may be those of the data, and stages of blocks."""

import math
from abc import ABC
from dataclasses import dataclass, replace
from typing import Self

from dtrain.core.errors import FieldError
from dtrain.core.types import Depth, Natural, Positive
from dtrain.data.batch import IMAGE, LABEL, Example
from dtrain.models.nn.layers import ImageClassifier, weight
from dtrain.models.nn.param import Param

MOST_BLOCKS = 1_000


@dataclass(frozen=True, kw_only=True)
class ShapedClassifier(ImageClassifier, ABC):
    """A classifier of images of one shape."""

    image: tuple[Positive, Positive, Positive] | None = None
    """Height, width, channels. Default: those of the data."""
    classes: Natural = 0
    """Number of classes; 0: that of the data."""

    @property
    def left_out(self) -> tuple[str, ...]:
        return (("image",) if self.image is None else ()) + (() if self.classes else ("classes",))

    def sized(self, example: Example) -> Self:
        shape = example[IMAGE].shape if IMAGE in example else ()
        own = (shape[0], shape[1], shape[2]) if len(shape) == 3 else None
        values = (example[LABEL].values or 0) if LABEL in example else 0
        return replace(self, image=self.image or own, classes=self.classes or values)

    def mismatch(self, example: Example) -> str:
        if not {IMAGE, LABEL} <= set(example):
            return f"the model takes images and labels; the data has {', '.join(sorted(example))}"
        shape, values = example[IMAGE].shape, example[LABEL].values
        found = " x ".join(map(str, shape))
        if self.image is None:
            return f"the model takes images of height x width x channels; the data has {found}"
        if not self.classes:
            return "the number of classes is not in the data: set model.classes"
        if shape != self.image:
            return f"the model takes images of {' x '.join(map(str, self.image))}; the data has {found}"
        if values is not None and values != self.classes:
            return f"the model has {self.classes} classes; the data has {values}"
        return ""


@dataclass(frozen=True, kw_only=True)
class StagedClassifier(ShapedClassifier, ABC):
    """A convolutional network of stages, each of blocks; a stage after the first halves height and width."""

    stages: tuple[Positive, ...] = ()
    """Channels of each stage."""
    blocks: Depth | tuple[Depth, ...] = 1
    """Blocks of every stage, or of each."""

    def __post_init__(self) -> None:
        if not self.stages:
            raise FieldError("stages", "needs at least one stage; found none")
        if len(self.counts) != len(self.stages):
            raise FieldError("blocks", f"{len(self.counts)} numbers for {len(self.stages)} stages")
        if sum(self.counts) > MOST_BLOCKS:
            raise FieldError("blocks", f"{sum(self.counts)} blocks; at most {MOST_BLOCKS} in all")

    @property
    def counts(self) -> tuple[int, ...]:
        """Blocks of each stage."""
        return self.blocks if isinstance(self.blocks, tuple) else (self.blocks,) * len(self.stages)

    def blocks_in_order(self) -> list[tuple[str, int, int]]:
        """Name, stage and stride of each block: the first of a stage after the first has stride 2."""
        found = [(i, j) for i, count in enumerate(self.counts) for j in range(count)]
        return [(f"stage{i}_block{j}", i, 2 if i and not j else 1) for i, j in found]


def kernel(size: int, inputs: int, out: int, rows: str, columns: str) -> Param:
    """A square kernel (size, size, inputs, out) before a ReLU; `rows` and `columns` name its channels."""
    return weight((size, size, inputs, out), f"_ _ {rows} {columns}", fan_in=f"_ {rows}", gain=math.sqrt(2))
