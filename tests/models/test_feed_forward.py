"""Activations of feed-forward layers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import erf

from dtrain.models.feed_forward import gelu


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-6), ("bfloat16", 0.03)])
def test_gelu_is_that_of_its_definition(dtype: str, bound: float) -> None:
    x = np.asarray(jnp.linspace(-8, 8, 4001, dtype=dtype), np.float64)
    expected = 0.5 * x * (1 + erf(x / np.sqrt(2)))
    assert np.abs(np.asarray(gelu(jnp.asarray(x, dtype)), np.float64) - expected).max() < bound
    if dtype == "bfloat16":  # small results keep their relative precision
        near = np.abs(np.asarray(gelu(jnp.bfloat16(-3.0)), np.float64) / (-1.5 * (1 + erf(-3 / np.sqrt(2)))) - 1)
        assert near < 0.05


def test_the_gradient_of_gelu_is_that_of_jax() -> None:
    x = jnp.linspace(-6, 6, 1001)
    mine, theirs = (jax.vmap(jax.grad(one))(x) for one in (gelu, lambda x: jax.nn.gelu(x, approximate=False)))
    np.testing.assert_allclose(mine, theirs, atol=2e-6)
