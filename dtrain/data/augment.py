"""Random changes of one image, float32 (H, W, C) with values from 0 to 1, or of two.

Dims: H height, W width, C channels.
"""

import math

import jax
import jax.numpy as jnp

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
