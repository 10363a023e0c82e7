"""Rotary positions: both ways of computing them against complex numbers in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dtrain.core.slices import target
from dtrain.models.nn.matmul import products
from dtrain.models.rope import Rope, Yarn, rotated
from dtrain.plan.plan import program
from dtrain.recipe.load import load
from tests.parallel.test_mesh import RECIPES

SHAPE = (2, 5, 3, 8)  # B, T, H, D
WAYS = pytest.mark.parametrize("on_tpu", [False, True], ids=["halves", "product"])


def turned(x: np.ndarray, waves: tuple[jax.Array, jax.Array], direction: int = 1) -> np.ndarray:
    """Values i and i + D/2 as complex numbers, times exp(+-i angle), in float64."""
    cos, sin = (np.asarray(wave, np.float64)[:, :, None] for wave in waves)
    pairs = (x[..., :4] + 1j * x[..., 4:]) * (cos + direction * 1j * sin)
    return np.concatenate([pairs.real, pairs.imag], -1)


@pytest.mark.slow
@WAYS
@pytest.mark.parametrize("rope", [Rope(), Rope(scaling=Yarn(factor=4.0, original=2))], ids=["plain", "yarn"])
@pytest.mark.parametrize(("dtype", "error"), [("float32", 1e-6), ("bfloat16", 2**-8)])
def test_pairs_are_rotated_and_gradients_are_rotated_back(rope: Rope, dtype: str, error: float, on_tpu: bool) -> None:
    waves = rope.waves(jnp.arange(5)[None] * 7, SHAPE[-1])
    x, g = (jax.random.normal(jax.random.key(seed), SHAPE).astype(dtype) for seed in (1, 2))
    with products(float32_sums=True, flat=False, on_tpu=on_tpu):
        out, back = jax.vjp(lambda x: rotated(x, waves), x)
        (gradient,) = back(g)
    assert out.dtype == gradient.dtype == dtype
    for found, given, direction in ((out, x, 1), (gradient, g, -1)):
        expected = turned(np.asarray(given, np.float64), waves, direction)
        np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=error, atol=2 * error)


def test_both_ways_give_the_same_values() -> None:
    waves, x = Rope().waves(jnp.arange(5)[None], SHAPE[-1]), jax.random.normal(jax.random.key(1), SHAPE)
    with products(float32_sums=True, flat=False, on_tpu=True):
        product = rotated(x, waves)
    np.testing.assert_allclose(product, rotated(x, waves), rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["jit", "shard_map"])
def test_programs_for_tpus_rotate_by_a_product_and_others_do_not(engine: str) -> None:
    """decoder-tiny has heads of 24 values; nothing else in the step is a 24 x 24 matrix."""
    recipe = load(RECIPES / "decoder-tiny.yaml", [f"engine={engine}"])
    square = "f32[24,24]"
    assert square in program(recipe, target("v5e-4"), compiled=False)
    assert square not in program(recipe, target("h100-4"), compiled=False)
