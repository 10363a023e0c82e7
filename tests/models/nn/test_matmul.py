"""The product of activations with a matrix, and its gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Jaxpr

from dtrain.models.nn.matmul import matmul, products

DRAW = np.random.default_rng(0)
X, W = DRAW.normal(size=(3, 5, 4, 8)).astype(np.float32), DRAW.normal(size=(4, 8, 6, 2)).astype(np.float32)


def gradients(x: np.ndarray, w: np.ndarray, flat: bool) -> tuple[jax.Array, jax.Array]:
    with products(float32_sums=True, flat=flat):
        return jax.grad(lambda x, w: jnp.square(matmul(x, w, 2)).sum(), (0, 1))(x, w)


@pytest.mark.parametrize("flat", [False, True])
def test_product_and_gradients_are_those_of_numpy(flat: bool) -> None:
    with products(float32_sums=True, flat=flat):
        np.testing.assert_allclose(matmul(jnp.asarray(X), jnp.asarray(W), 2), np.tensordot(X, W, 2), rtol=1e-5)
    out = np.tensordot(X, W, 2)
    of_x, of_w = gradients(X, W, flat)
    np.testing.assert_allclose(of_x, 2 * np.tensordot(out, W, ((2, 3), (2, 3))), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(of_w, 2 * np.tensordot(X, out, ((0, 1), (0, 1))), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("flat", "dims"), [(False, 3), (True, 2)])
def test_flat_products_have_matrices_as_operands(flat: bool, dims: int) -> None:
    def products_of(jaxpr: Jaxpr) -> list[int]:
        found = [max(v.aval.ndim for v in eqn.invars) for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"]
        inner = [value for eqn in jaxpr.eqns for value in eqn.params.values() if hasattr(value, "jaxpr")]
        return found + [size for value in inner for size in products_of(value.jaxpr)]

    traced = jax.make_jaxpr(lambda x, w: gradients(x, w, flat))(X, W)
    assert set(products_of(traced.jaxpr)) == {dims}
