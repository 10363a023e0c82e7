"""Preparation of images on the device: scaling, and random augmentation keyed by the row number.

The row number counts the examples since the start of the run. So a row is augmented in the same way for every mesh,
engine and process count, and an example is augmented differently in every epoch. Rows 2i and 2i + 1 of the run are a
pair: mixup and cutmix mix each of them with the other.
Dims: B batch, H height, W width, C channels.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dtrain.core.errors import FieldError, Problem
from dtrain.core.types import Float, Fraction, Natural, NonNegative, PositiveFloat
from dtrain.data.batch import IMAGE, LABEL, OTHER_IMAGE, ROW, SHARE, SMOOTHING, Batch, Example, Preparation
from dtrain.data.image_files import Decoding
from dtrain.data.source import DataDefaults

RATIO = 4 / 3
"""Largest ratio of the sides of a crop, relative to those of the image."""
GRAY = (0.299, 0.587, 0.114)
"""Weights of red, green and blue in the brightness of a pixel (ITU-R BT.601)."""


def resized_crop(key: jax.Array, image_HWC: jax.Array, least: float) -> jax.Array:
    """A random box of the image, resized to the whole: `least` to all of its area, sides in a ratio of 3/4 to 4/3.

    The logarithm of the ratio is uniform, as the area is; a side that would exceed the image is cut to it.
    """
    height, width, _ = image_HWC.shape
    of_area, of_ratio, of_place = jax.random.split(key, 3)
    area = jax.random.uniform(of_area, (), minval=least, maxval=1.0)
    ratio = jnp.exp(jax.random.uniform(of_ratio, (), minval=-math.log(RATIO), maxval=math.log(RATIO)))
    part = jnp.minimum(jnp.stack([jnp.sqrt(area / ratio), jnp.sqrt(area * ratio)]), 1.0)  # of height and width
    corner = jax.random.uniform(of_place, (2,)) * (1 - part)
    size = jnp.array([height, width], jnp.float32)
    # scale_and_translate maps a place p of the input to p * scale + translation
    return jax.image.scale_and_translate(
        image_HWC, image_HWC.shape, (0, 1), 1 / part, -corner * size / part, "linear", antialias=True
    )


def coloured(key: jax.Array, image_HWC: jax.Array, most: float) -> jax.Array:
    """The image with brightness, contrast and, of three channels, saturation multiplied by factors of 1 +- `most`."""
    brightness, contrast, saturation = jax.random.uniform(key, (3,), minval=1 - most, maxval=1 + most)
    x = jnp.clip(image_HWC * brightness, 0, 1)
    gray_HW1 = _gray(x) if x.shape[-1] == len(GRAY) else x
    mean = gray_HW1.mean()
    x = jnp.clip(mean + (x - mean) * contrast, 0, 1)
    if x.shape[-1] != len(GRAY):
        return x
    gray_HW1 = _gray(x)
    return jnp.clip(gray_HW1 + (x - gray_HW1) * saturation, 0, 1)


def _gray(x_HWC: jax.Array) -> jax.Array:
    """The brightness of each pixel (H, W, 1) of an image of three channels."""
    return (x_HWC * jnp.array(GRAY).reshape(1, 1, -1)).sum(-1, keepdims=True)


def mixed(key: jax.Array, own_HWC: jax.Array, other_HWC: jax.Array, alpha: float) -> tuple[jax.Array, jax.Array]:
    """share x own + (1 - share) x other, and the share, from Beta(alpha, alpha)."""
    share = jax.random.beta(key, alpha, alpha)
    return share * own_HWC + (1 - share) * other_HWC, share


def cut_and_mixed(
    key: jax.Array, own_HWC: jax.Array, other_HWC: jax.Array, alpha: float
) -> tuple[jax.Array, jax.Array]:
    """The own image with a box of the other, and the share of the area that is its own.

    The box has the sides of the image times sqrt(1 - s), s from Beta(alpha, alpha), around a random centre; what lies
    outside the image is cut off.
    """
    height, width, _ = own_HWC.shape
    of_share, of_centre = jax.random.split(key)
    side = jnp.sqrt(1 - jax.random.beta(of_share, alpha, alpha))
    y, x = jax.random.uniform(of_centre, (2,))
    rows_H, columns_W = (jnp.arange(size) + 0.5 for size in (height, width))
    inside_H = jnp.abs(rows_H - y * height) < side * height / 2
    inside_W = jnp.abs(columns_W - x * width) < side * width / 2
    box_HW = inside_H[:, None] & inside_W[None]
    return jnp.where(box_HW[..., None], other_HWC, own_HWC), 1 - box_HW.mean(dtype=jnp.float32)


EXTRA = (ROW, OTHER_IMAGE)
"""Features of a batch that the augmentation uses up."""


@dataclass(frozen=True, kw_only=True)
class Pixels:
    """Scale images to 0..1 and normalise them with `mean` and `std`; in training, also augment them at random."""

    mean: Float | tuple[Float, ...] = 0.0
    """Subtracted from the image after it is scaled to 0..1: one number, or one for each channel."""
    std: PositiveFloat | tuple[PositiveFloat, ...] = 1.0
    """Divisor of the image after `mean` is subtracted: one number, or one for each channel."""
    crop: Natural = 0
    """Maximum random shift in pixels in each direction; pixels from outside the image are zero."""
    resized_crop: Fraction | None = None
    """Smallest part of the image's area that a random crop keeps, which is resized to the whole: 0.08 for ImageNet
    (Szegedy et al. 2015)."""
    flip: bool = False
    """Mirror left and right with probability 1/2."""
    colour: Fraction = 0.0
    """Change brightness, contrast and saturation by random factors of up to 1 +- colour."""
    mixup: NonNegative = 0.0
    """Mix two images and their labels with a share from Beta(mixup, mixup) (Zhang et al. 2018)."""
    cutmix: NonNegative = 0.0
    """Paste a box of another image, and mix the labels by its area, from Beta(cutmix, cutmix) (Yun et al. 2019). With
    `mixup`, each is used for half of the examples."""
    smoothing: Fraction = 0.0
    """Label smoothing: this share of each label is spread over all classes (Szegedy et al. 2016)."""

    def __post_init__(self) -> None:
        if self.resized_crop == 0:
            raise FieldError("resized_crop", "0 keeps nothing of an image", "leave it out for no crop")
        if self.smoothing == 1:
            raise FieldError("smoothing", "1 leaves nothing of the labels")

    @property
    def needs_row_numbers(self) -> bool:
        """Whether the augmentation is random."""
        return bool(self.crop or self.flip or self.resized_crop or self.colour or self.needs_pairs)

    @property
    def needs_pairs(self) -> bool:
        """Whether an image is mixed with another one."""
        return bool(self.mixup or self.cutmix)

    @property
    def changes_labels(self) -> bool:
        """Whether a loss must use more than the label: `layers.classify` does."""
        return self.needs_pairs or bool(self.smoothing)

    def apply(self, batch: Batch, top: float, key: jax.Array, train: bool, names: Sequence[str] = (IMAGE,)) -> Batch:
        """Prepare the images of a batch, uint8 (B, H, W, C) to float32; `top` is the largest pixel value.

        `names`: the features that are images; those of a row are augmented with the same random numbers.

        With `train` and random augmentation, the feature `row` (B,) selects the random numbers; it is removed. With
        `mixup` or `cutmix`, OTHER_LABEL has the label of the other image and SHARE the share of the own one.
        """
        rest = {name: value for name, value in batch.items() if name not in EXTRA}
        for name in names:
            image_BHWC = batch[name].astype(jnp.float32) / top
            if train and self.needs_row_numbers:
                image_BHWC = self._all_augmented(key, batch[ROW], image_BHWC)
                if self.needs_pairs:
                    other_BHWC = batch[OTHER_IMAGE].astype(jnp.float32) / top
                    other_BHWC = self._all_augmented(key, batch[ROW] ^ 1, other_BHWC)
                    image_BHWC, rest[SHARE] = jax.vmap(self._mixed)(_keys(key, batch[ROW]), image_BHWC, other_BHWC)
            rest[name] = (image_BHWC - _last(self.mean)) / _last(self.std)
        if train and self.smoothing:
            rest[SMOOTHING] = jnp.full_like(batch[LABEL], self.smoothing, jnp.float32)
        return rest

    def _all_augmented(self, key: jax.Array, row_B: jax.Array, image_BHWC: jax.Array) -> jax.Array:
        return jax.vmap(self._augmented)(_keys(key, row_B), image_BHWC)

    def _augmented(self, key: jax.Array, image_HWC: jax.Array) -> jax.Array:
        crop_key, flip_key = jax.random.split(key)
        if self.resized_crop:
            image_HWC = resized_crop(jax.random.fold_in(key, 1), image_HWC, self.resized_crop)
        if self.crop:
            pad = ((self.crop, self.crop), (self.crop, self.crop), (0, 0))
            y, x = jax.random.randint(crop_key, (2,), 0, 2 * self.crop + 1)
            image_HWC = jax.lax.dynamic_slice(jnp.pad(image_HWC, pad), (y, x, jnp.int32(0)), image_HWC.shape)
        if self.flip:
            image_HWC = jnp.where(jax.random.bernoulli(flip_key), image_HWC[:, ::-1], image_HWC)
        return coloured(jax.random.fold_in(key, 2), image_HWC, self.colour) if self.colour else image_HWC

    def _mixed(self, key: jax.Array, own_HWC: jax.Array, other_HWC: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The mixed image, and the share of the own one."""
        of_mixup, of_cutmix, of_choice = (jax.random.fold_in(key, number) for number in (3, 4, 5))
        if not self.cutmix:
            return mixed(of_mixup, own_HWC, other_HWC, self.mixup)
        pasted = cut_and_mixed(of_cutmix, own_HWC, other_HWC, self.cutmix)
        if not self.mixup:
            return pasted
        choice, blended = jax.random.bernoulli(of_choice), mixed(of_mixup, own_HWC, other_HWC, self.mixup)
        return jnp.where(choice, blended[0], pasted[0]), jnp.where(choice, blended[1], pasted[1])


class WithPixels(DataDefaults):
    """What data of images has in common."""

    pixels: Pixels

    @property
    def picture_names(self) -> tuple[str, ...]:
        """The features that are images."""
        return (IMAGE,)

    @property
    def pictures(self) -> Preparation | None:
        mean, std = (value if isinstance(value, tuple) else (value,) for value in (self.pixels.mean, self.pixels.std))
        return Preparation(mean, std, self.decoding.fit)

    @property
    def decoding(self) -> Decoding:
        """How the file of a picture becomes pixels."""
        return Decoding()

    @property
    def reads_inputs(self) -> bool:
        return True

    def problems(self, recipe: Any, example: Example) -> Iterator[Problem]:
        """Values for other channels than the images have, and random shifts that are larger than the images."""
        del recipe
        for height, width, channels in (example[name].shape for name in self.picture_names if name in example):
            for name in ("mean", "std"):
                values = getattr(self.pixels, name)
                if isinstance(values, tuple) and len(values) not in (1, channels):
                    message = f"{len(values)} values for images of {channels} channels"
                    yield f"data.pixels.{name}", message, "one number, or one for each channel"
            if self.pixels.crop >= min(height, width):
                shifts = f"shifts of {self.pixels.crop} pixels in images of {height} x {width}"
                yield "data.pixels.crop", f"{shifts}; at most {min(height, width) - 1}", ""

    @property
    def needs_row_numbers(self) -> bool:
        return self.pixels.needs_row_numbers

    @property
    def needs_pairs(self) -> bool:
        return self.pixels.needs_pairs


def _keys(key: jax.Array, row_B: jax.Array) -> jax.Array:
    """A key for each row."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, row_B)


def _last(value: float | tuple[float, ...]) -> jax.Array:
    """The value as an array (1, 1, 1, 1 or C)."""
    return jnp.asarray(value, jnp.float32).reshape(1, 1, 1, -1)
