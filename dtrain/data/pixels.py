"""Preparation of images on the device: scaling, and random augmentation keyed by the row number.

The row number counts the examples since the start of the run. So a row is augmented in the same way for every mesh,
engine and process count, and an example is augmented differently in every epoch.
Dims: B batch, H height, W width, C channels.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from dtrain.core.types import Float, Natural, PositiveFloat
from dtrain.data.batch import IMAGE, ROW, Batch


@dataclass(frozen=True, kw_only=True)
class Pixels:
    """Scale images to 0..1 and normalise them with `mean` and `std`; in training, also shift and mirror at random."""

    mean: Float = 0.0
    """Subtracted from the image after it is scaled to 0..1."""
    std: PositiveFloat = 1.0
    """Divisor of the image after `mean` is subtracted."""
    crop: Natural = 0
    """Maximum random shift in pixels in each direction; pixels from outside the image are zero."""
    flip: bool = False
    """Mirror left and right with probability 1/2."""

    @property
    def keyed(self) -> bool:
        """Whether the augmentation is random."""
        return bool(self.crop or self.flip)

    def apply(self, batch: Batch, top: float, key: jax.Array, train: bool) -> Batch:
        """Prepare the images of a batch, uint8 (B, H, W, C) to float32; `top` is the largest pixel value.

        With `train` and random augmentation, the feature `row` (B,) selects the random numbers; it is removed.
        """
        image_BHWC = batch[IMAGE].astype(jnp.float32) / top
        if train and self.keyed:
            image_BHWC = jax.vmap(lambda row, image: self._augment(jax.random.fold_in(key, row), image))(
                batch[ROW], image_BHWC
            )
        rest = {name: value for name, value in batch.items() if name != ROW}
        return rest | {IMAGE: (image_BHWC - self.mean) / self.std}

    def _augment(self, key: jax.Array, image_HWC: jax.Array) -> jax.Array:
        crop_key, flip_key = jax.random.split(key)
        if self.crop:
            pad = ((self.crop, self.crop), (self.crop, self.crop), (0, 0))
            y, x = jax.random.randint(crop_key, (2,), 0, 2 * self.crop + 1)
            image_HWC = jax.lax.dynamic_slice(jnp.pad(image_HWC, pad), (y, x, jnp.int32(0)), image_HWC.shape)
        if self.flip:
            image_HWC = jnp.where(jax.random.bernoulli(flip_key), image_HWC[:, ::-1], image_HWC)
        return image_HWC
