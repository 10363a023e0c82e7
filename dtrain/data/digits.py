"""1,797 real handwritten digits, included in dtrain: a data set that needs no network.

digits.LICENSE.txt states the source and the licence.
"""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import jax
import numpy as np

from dtrain.data.arrays import Arrays, image_example
from dtrain.data.batch import IMAGE, LABEL, Batch, Example
from dtrain.data.pixels import Pixels, WithPixels
from dtrain.data.source import Load, Source, Split

FILE = Path(__file__).with_name("digits.npz")
WHITE = 16.0
"""Largest pixel value."""
TEST = 360
"""Number of test examples."""
SHUFFLE = 1797
"""Seed of the split into train and test."""


@dataclass(frozen=True, kw_only=True)
class Digits(WithPixels):
    """UCI handwritten digits, 8 x 8 pixels, 10 classes: 1,437 training and 360 test examples."""

    kind: Literal["digits"] = "digits"
    pixels: Pixels = field(default_factory=Pixels)
    load: Load = field(default_factory=Load)

    def example(self) -> Example:
        return image_example((8, 8, 1), 10)

    def open(self, split: Split) -> Source:
        with np.load(FILE, allow_pickle=False) as file:
            image, label = file["image"], file["label"].astype(np.int32)
        order = np.random.default_rng(SHUFFLE).permutation(len(label))
        part = order[:TEST] if split == "test" else order[TEST:]
        digest = hashlib.sha256(FILE.read_bytes()).hexdigest()[:16]
        return Arrays({IMAGE: image[part], LABEL: label[part]}, self.example(), f"digits:{split}:{digest}")

    def prepare(self, batch: Batch, key: jax.Array, train: bool) -> Batch:
        return self.pixels.apply(batch, WHITE, key, train)
