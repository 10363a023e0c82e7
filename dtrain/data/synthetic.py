"""Generated images, a pattern per class plus noise, for speed tests and dry runs."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import jax
import numpy as np

from dtrain.core.errors import Problem
from dtrain.core.types import Positive
from dtrain.data.arrays import image_example
from dtrain.data.batch import IMAGE, LABEL, Batch, Example
from dtrain.data.order import hash64
from dtrain.data.pixels import Pixels, WithPixels
from dtrain.data.source import Load, Source, SourceDefaults, Split

MOST_PATTERNS = 2**34
"""Values of all patterns; these are in memory."""


@dataclass(frozen=True, kw_only=True)
class Synthetic(WithPixels):
    """Learnable images of any size, generated on demand."""

    kind: Literal["synthetic"] = "synthetic"
    image: tuple[Positive, Positive, Positive] = (28, 28, 1)
    """Height, width, channels."""
    classes: Positive = 10
    """Number of classes."""
    examples: Positive = 60_000
    """Number of training examples; the test split has a tenth as many."""
    pixels: Pixels = field(default_factory=Pixels)
    load: Load = field(default_factory=Load)

    def example(self) -> Example:
        return image_example(self.image, self.classes)

    def open(self, split: Split) -> Source:
        count = self.examples if split == "train" else max(1, self.examples // 10)
        return Patterns(self.image, self.classes, count, first=0 if split == "train" else self.examples)

    def problems(self, recipe: Any, example: Example) -> Iterator[Problem]:
        yield from super().problems(recipe, example)
        size = math.prod(self.image)
        if self.classes * size > MOST_PATTERNS:
            message = f"{self.classes} patterns of {size:,} values each; at most {MOST_PATTERNS:.1e} values"
            yield "data.classes", message, "use fewer classes or smaller images"

    def prepare(self, batch: Batch, key: jax.Array, train: bool) -> Batch:
        return self.pixels.apply(batch, 255.0, key, train)


@dataclass(frozen=True)
class Patterns(SourceDefaults):
    """A source in which example i is a function of i alone."""

    image: tuple[int, int, int]
    classes: int
    count: int
    first: int
    """Added to the indices, so that the splits differ."""

    @property
    def example(self) -> Example:
        return image_example(self.image, self.classes)

    @property
    def fingerprint(self) -> str:
        return f"synthetic:{self.image}:{self.classes}:{self.first}:{self.count}"

    def __len__(self) -> int:
        return self.count

    def rows(self, indices: np.ndarray) -> Batch:
        number = (indices + self.first).astype(np.uint64)
        label = (hash64(number) % np.uint64(self.classes)).astype(np.int32)
        pixel = np.arange(self._patterns[0].size, dtype=np.uint64)
        noise = (hash64(number[:, None] * np.uint64(pixel.size) + pixel[None, :]) >> np.uint64(57)).astype(np.uint8)
        return {IMAGE: self._patterns[label] + noise.reshape(-1, *self.image), LABEL: label}

    @cached_property
    def _patterns(self) -> np.ndarray:
        return np.random.default_rng(self.classes).integers(0, 128, (self.classes, *self.image), np.uint8)
