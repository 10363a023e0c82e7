"""What happens to images on the device: scaling, and augmentation drawn from each row's own number.

A row's number counts the examples drawn since the start of the run, so the same row is augmented
the same way under every mesh, engine and process count, and differently in every epoch.
Dims: B batch, H height, W width, C channels.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from dtrain.core.types import Float, Natural, PositiveFloat
from dtrain.data.batch import Batch


@dataclass(frozen=True, kw_only=True)
class Pixels:
    """Images scaled to 0..1, then shifted and scaled; when training, moved and mirrored at random."""

    mean: Float = 0.0
    """Taken off the scaled image."""
    std: PositiveFloat = 1.0
    """The image is divided by it."""
    crop: Natural = 0
    """Largest move in pixels, each way; what comes in from outside is zero."""
    flip: bool = False
    """Mirror left and right, half the time."""

    @property
    def keyed(self) -> bool:
        """Whether anything is drawn at random."""
        return bool(self.crop or self.flip)

    def apply(self, batch: Batch, top: float, key: jax.Array, train: bool) -> Batch:
        """The batch with its images prepared; `top` is the value of a white pixel."""
        image_BHWC = batch["image"].astype(jnp.float32) / top
        if train and self.keyed:
            image_BHWC = jax.vmap(lambda row, image: self._augment(jax.random.fold_in(key, row), image))(
                batch["row"], image_BHWC
            )
        rest = {name: value for name, value in batch.items() if name != "row"}
        return rest | {"image": (image_BHWC - self.mean) / self.std}

    def _augment(self, key: jax.Array, image_HWC: jax.Array) -> jax.Array:
        where, side = jax.random.split(key)
        if self.crop:
            pad = ((self.crop, self.crop), (self.crop, self.crop), (0, 0))
            y, x = jax.random.randint(where, (2,), 0, 2 * self.crop + 1)
            image_HWC = jax.lax.dynamic_slice(jnp.pad(image_HWC, pad), (y, x, jnp.int32(0)), image_HWC.shape)
        if self.flip:
            image_HWC = jnp.where(jax.random.bernoulli(side), image_HWC[:, ::-1], image_HWC)
        return image_HWC
