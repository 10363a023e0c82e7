"""Random crops, colours, mixed images and labels: each does what it says, keyed by the row alone."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dtrain.assembly.assemble import assemble
from dtrain.assembly.state import create_state
from dtrain.core.errors import FieldError, RecipeError
from dtrain.data.arrays import Arrays, image_example
from dtrain.data.batch import LABEL, OTHER_IMAGE, OTHER_LABEL, SHARE, SMOOTHING
from dtrain.data.batches import TrainBatches
from dtrain.data.order import Order
from dtrain.data.pixels import Pixels, coloured, cut_and_mixed, mixed, resized_crop
from dtrain.models.nn import layers
from dtrain.models.nn.single_device import SingleDeviceContext
from dtrain.parallel.engine import Put
from dtrain.recipe.load import load
from tests.engines import worst

KEY, KEYS = jax.random.key(0), jax.random.split(jax.random.key(1), 500)
ROOT = Path(__file__).parents[2]


def ramp(height: int, width: int) -> jax.Array:
    """An image whose first channel is the row and whose second is the column, each from 0 to 1."""
    y, x = jnp.meshgrid((jnp.arange(height) + 0.5) / height, (jnp.arange(width) + 0.5) / width, indexing="ij")
    return jnp.stack([y, x, 0 * x], -1)


@pytest.mark.slow
def test_a_resized_crop_is_a_box_of_the_asked_area() -> None:
    image = ramp(32, 48)
    crops = np.asarray(jax.jit(jax.vmap(lambda key: resized_crop(key, image, 0.25)))(KEYS))
    # of a ramp, the values at opposite ends show where the box was and how large
    tall = (crops[:, -1, 0, 0] - crops[:, 0, 0, 0]) * 32 / 31
    wide = (crops[:, 0, -1, 1] - crops[:, 0, 0, 1]) * 48 / 47
    area = tall * wide
    assert area.min() > 0.22
    assert area.max() < 1.01
    assert 0.55 < area.mean() < 0.7
    ratio = wide / tall
    assert ratio.min() > 0.74
    assert ratio.max() < 1.35
    assert crops.min() >= -1e-6
    assert crops.max() <= 1
    whole = jax.jit(lambda key: resized_crop(key, image, 1.0))(KEY)
    assert float(jnp.abs(whole - image)[2:-2, 2:-2].max()) < 0.15


def test_the_crop_is_that_of_pillow() -> None:
    """The same box resized by another library."""
    from PIL import Image

    image = jax.random.uniform(KEY, (24, 24, 1))
    found = np.asarray(jax.jit(lambda key: resized_crop(key, image, 0.3))(KEYS[3]))
    of_area, of_ratio, of_place = jax.random.split(KEYS[3], 3)
    area = float(jax.random.uniform(of_area, (), minval=0.3, maxval=1.0))
    ratio = float(jnp.exp(jax.random.uniform(of_ratio, (), minval=-np.log(4 / 3), maxval=np.log(4 / 3))))
    height, width = min((area / ratio) ** 0.5, 1) * 24, min((area * ratio) ** 0.5, 1) * 24
    y, x = np.asarray(jax.random.uniform(of_place, (2,))) * (24 - np.array([height, width]))
    pillow = Image.fromarray(np.asarray(image[..., 0])).resize(
        (24, 24), Image.Resampling.BILINEAR, box=(float(x), float(y), float(x + width), float(y + height))
    )
    inner = (slice(3, -3), slice(3, -3))
    np.testing.assert_allclose(found[..., 0][inner], np.asarray(pillow)[inner], atol=0.02)


@pytest.mark.slow
def test_colours_keep_their_range_and_gray_stays_gray() -> None:
    image = jax.random.uniform(KEY, (8, 8, 3))
    changed = np.asarray(jax.vmap(lambda key: coloured(key, image, 0.4))(KEYS[:50]))
    assert changed.min() >= 0
    assert changed.max() <= 1
    assert np.ptp(changed.mean((1, 2, 3))) > 0.1
    same = jax.vmap(lambda key: coloured(key, image, 0.0))(KEYS[:2])
    np.testing.assert_allclose(same[0], image, atol=1e-6)
    gray = jnp.repeat(image[..., :1], 3, -1)
    stays = np.asarray(coloured(KEYS[0], gray, 0.4))
    np.testing.assert_allclose(stays[..., 0], stays[..., 2], atol=1e-5)


@pytest.mark.slow
def test_mixing_gives_the_shares_it_used() -> None:
    own, other = jnp.ones((16, 16, 1)), jnp.zeros((16, 16, 1))
    for function in (mixed, cut_and_mixed):
        images, shares = jax.jit(jax.vmap(lambda key, f=function: f(key, own, other, 1.0)))(KEYS)
        np.testing.assert_allclose(images.mean((1, 2, 3)), shares, atol=1e-5)
        assert 0.4 < float(shares.mean()) < 0.75
        assert float(shares.std()) > 0.15
    boxes = np.asarray(jax.vmap(lambda key: cut_and_mixed(key, own, other, 1.0)[0])(KEYS[:20]))
    assert set(np.unique(boxes)) <= {0.0, 1.0}
    narrow = jax.vmap(lambda key: mixed(key, own, other, 0.05)[1])(KEYS)
    assert float(jnp.minimum(narrow, 1 - narrow).mean()) < 0.1  # Beta(0.05, 0.05) is near 0 or 1


def test_smoothed_and_mixed_labels_are_those_of_optax() -> None:
    logits = jax.random.normal(KEY, (4, 5))
    batch: dict[str, Any] = {
        LABEL: jnp.array([0, 1, 2, 3]), OTHER_LABEL: jnp.array([4, 1, 0, 2]),
        SHARE: jnp.array([0.7, 0.2, 1.0, 0.0]), SMOOTHING: jnp.full(4, 0.1),
    }  # fmt: skip
    loss = layers.classify(logits, batch, SingleDeviceContext())
    share = batch[SHARE][:, None]
    target = share * jax.nn.one_hot(batch[LABEL], 5) + (1 - share) * jax.nn.one_hot(batch[OTHER_LABEL], 5)
    expected = optax.softmax_cross_entropy(logits, optax.smooth_labels(target, 0.1)).sum()
    assert float(loss.sum) == pytest.approx(float(expected), rel=1e-5)


def test_rows_are_mixed_with_the_other_of_their_pair() -> None:
    images = np.arange(7, dtype=np.uint8).reshape(7, 1, 1, 1)
    source = Arrays({"image": images, "label": np.arange(7, dtype=np.int32)}, image_example((1, 1, 1), 7), "")
    order, local = Order(7, 3), np.arange(4)
    batches = TrainBatches(source, order, 4, local=local, start=0, steps=6, keyed=True, paired=True)
    every = [batches[i] for i in range(6)]
    label, other = (np.concatenate([batch[name] for batch in every]) for name in (LABEL, OTHER_LABEL))
    np.testing.assert_array_equal(other, label.reshape(-1, 2)[:, ::-1].ravel())
    np.testing.assert_array_equal(np.concatenate([batch[OTHER_IMAGE] for batch in every]).ravel(), other)
    split = TrainBatches(source, order, 4, local=np.array([1, 2]), start=0, steps=6, keyed=True, paired=True)
    for i in range(6):
        for name, values in split[i].items():
            np.testing.assert_array_equal(values, every[i][name][[1, 2]])


FULL = "data.pixels={resized_crop: 0.3, flip: true, colour: 0.3, mixup: 0.4, cutmix: 1.0, smoothing: 0.1}"
CNN = "model={kind: cnn, image: [8, 8, 1], classes: 10, stages: [16, 32]}"


def losses(*overrides: str, devices: int, recipe: str = "recipes/mlp-digits.yaml") -> tuple[list[float], Any]:
    given = load(ROOT / recipe, ["batch=16", "steps=60", "epochs=null", "optimizer={kind: sgd, lr: 0.1}", *overrides])
    source = given.data.open("train")
    assembly = assemble(given, jax.devices()[:devices], source.example, 60)
    put = Put(assembly.engine, assembly.layout, 16)
    batches = TrainBatches(
        source, Order(len(source), 0, None), 16, local=put.held, start=0, steps=2, keyed=True, paired=True
    )
    state, found = create_state(assembly.make, assembly.shapes), []
    step = assembly.engine.compile(assembly.train(), "cpu")
    for i in range(2):
        batch = {name: value for name, value in batches[i].items() if name in assembly.batch}
        state, metrics = step(state, put(batch))
        found.append(float(metrics["loss"]))
    return found, jax.device_get(state.params)


@pytest.mark.slow
@pytest.mark.parametrize(
    "place",
    [
        ["engine=shard_map", "mesh={data: 2, fsdp: 2, tensor: 2}", "accumulate=2"],
        pytest.param(["engine=jit", "mesh={data: 4, fsdp: 2}", "accumulate=2"], marks=pytest.mark.nightly),
        pytest.param(["engine=pmap", "mesh={data: 8}", "accumulate=2"], marks=pytest.mark.nightly),
    ],
)
def test_augmented_losses_are_those_of_one_device(place: list[str]) -> None:
    own, params = losses(CNN, FULL, *place, devices=8)
    reference, expected = losses(CNN, FULL, "mesh={data: 1}", devices=1)
    assert own == pytest.approx(reference, rel=2e-6)
    assert worst(params, expected) < 1e-5
    plain = losses(CNN, "data.pixels={smoothing: 0.1}", "mesh={data: 1}", devices=1)[0]
    assert plain != pytest.approx(reference, rel=1e-3)


@pytest.mark.slow
def test_a_users_loss_that_ignores_mixed_labels_is_refused() -> None:
    own = ["model.target=tests.data.test_augment:OwnLoss", "model.args={}", "mesh={data: 1}"]
    example = "examples/plain_jax.yaml"
    losses(*own, devices=1, recipe=example)
    for setting, what in (("mixup", "mixes labels"), ("cutmix", "mixes labels"), ("smoothing", "smooths labels")):
        with pytest.raises(RecipeError, match=f"OwnLoss: data.pixels {what}"):
            losses(*own, f"data.pixels.{setting}=0.5", devices=1, recipe=example)
    losses("data.pixels.mixup=0.5", "data.pixels.smoothing=0.1", "mesh={data: 1}", devices=1, recipe=example)


class OwnLoss:
    """A model whose loss knows labels alone."""

    def init(self, key: Any, example: Any) -> Any:
        return jax.random.normal(key, (64, 10)) * 0.1

    def loss(self, params: Any, batch: Any, ctx: Any) -> Any:
        from dtrain import Loss

        logp = jax.nn.log_softmax(batch["image"].reshape(-1, 64) @ params)
        nll = -jnp.take_along_axis(logp, batch["label"][:, None], axis=1)[:, 0]
        weight = batch.get("weight", jnp.ones(len(nll)))
        return Loss((nll * weight).sum(), weight.sum(), {})


def test_means_and_deviations_may_be_given_by_channel() -> None:
    batch = {"image": np.full((1, 2, 2, 3), 128, np.uint8)}
    found = Pixels(mean=(0.1, 0.2, 0.3), std=(1.0, 2.0, 4.0)).apply(batch, 255.0, KEY, train=False)["image"]
    np.testing.assert_allclose(found[0, 0, 0], (128 / 255 - np.array([0.1, 0.2, 0.3])) / [1, 2, 4], rtol=1e-5)
    with pytest.raises(RecipeError, match=r"data\.pixels\.mean: 3 values for images of 1 channels"):
        load(ROOT / "recipes/mlp-digits.yaml", ["data.pixels.mean=[0.1, 0.2, 0.3]"])


@pytest.mark.parametrize("wrong", [{"resized_crop": 0.0}, {"smoothing": 1.0}])
def test_what_leaves_nothing_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(FieldError, match="nothing"):
        Pixels(**wrong)  # pyright: ignore[reportArgumentType]
