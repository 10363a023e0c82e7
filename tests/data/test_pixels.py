import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dtrain.data.pixels import Pixels

KEY = jax.random.key(0)
BATCH = {"image": np.arange(2 * 4 * 4, dtype=np.uint8).reshape(2, 4, 4, 1), "label": np.zeros(2, np.int32)}


def test_images_are_scaled_then_shifted() -> None:
    found = Pixels(mean=0.5, std=2.0).apply(BATCH, 31.0, KEY, train=True)
    np.testing.assert_allclose(found["image"], (BATCH["image"] / 31 - 0.5) / 2, rtol=1e-6)


@pytest.mark.slow
def test_a_row_is_augmented_by_its_own_number_alone() -> None:
    pixels, images = Pixels(crop=2, flip=True), np.repeat(BATCH["image"][:1], 8, axis=0)
    rows = jnp.arange(8, dtype=jnp.uint32)
    whole = pixels.apply({"image": images, "row": rows}, 1.0, KEY, train=True)["image"]
    parts = [pixels.apply({"image": images[:4], "row": rows[i : i + 4]}, 1.0, KEY, train=True)["image"] for i in (0, 4)]
    assert np.array_equal(whole, np.concatenate(parts))
    assert len({np.asarray(image).tobytes() for image in whole}) > 4


def test_evaluation_draws_nothing() -> None:
    found = Pixels(crop=2, flip=True).apply(BATCH, 1.0, KEY, train=False)
    assert np.array_equal(found["image"], BATCH["image"].astype(np.float32))


def test_a_crop_moves_and_a_flip_mirrors() -> None:
    image = np.zeros((64, 5, 5, 1), np.uint8)
    image[:, 2, 1] = 1
    rows = jnp.arange(64, dtype=jnp.uint32)
    moved = np.asarray(Pixels(crop=1).apply({"image": image, "row": rows}, 1.0, KEY, train=True)["image"])
    assert set(zip(*np.nonzero(moved)[1:3], strict=True)) == {(y, x) for y in (1, 2, 3) for x in (0, 1, 2)}
    mirrored = np.asarray(Pixels(flip=True).apply({"image": image, "row": rows}, 1.0, KEY, train=True)["image"])
    assert set(zip(*np.nonzero(mirrored)[1:3], strict=True)) == {(2, 1), (2, 3)}
