"""Products in int8: rounded as their formula says, on every engine, and nothing else is."""

import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dtrain.models.nn import int8
from dtrain.models.nn.int8 import int8_matmul
from dtrain.models.nn.low_rank import LowRank
from dtrain.models.nn.matmul import matmul, products
from dtrain.models.nn.precision import Precision
from dtrain.parallel.mesh import Mesh
from dtrain.recipe.load import load
from dtrain.runtime.agree import INT8, agreement, tolerance
from dtrain.runtime.trajectory import reference_of
from tests.conftest import Dtrain
from tests.models.nn.test_precision import equations, traced
from tests.parallel.test_mesh import RECIPES

DRAW = np.random.default_rng(0)
X, W, G = (DRAW.normal(size=shape) * scale for shape, scale in (((3, 5, 64), 9.0), ((64, 32), 0.1), ((3, 5, 32), 1e-3)))
ROUNDED = 0.015
"""Largest relative error of a product of normal values that are rounded to a part of 127."""


def off(found: Any, exact: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(found, np.float64) - exact) / np.linalg.norm(exact))


def whole(x: np.ndarray, axis: int | tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """x as whole numbers up to 127 and their scales, by numpy."""
    scale = np.abs(x).max(axis=axis, keepdims=True) / 127
    return np.rint(x / scale), scale


def test_int8_products_are_those_of_whole_numbers() -> None:
    x, w, g = (values.astype(np.float32) for values in (X, W, G))
    (qx, sx), (qw, sw) = whole(x, 2), whole(w, 0)
    out, pull = jax.vjp(lambda x, w: int8_matmul(x, w, "float32", on_tpu=False), x, w)
    np.testing.assert_allclose(out, (qx @ qw) * sx * sw, rtol=1e-4)
    of_x, of_w = pull(g)
    left, left_scale = whole(g * sw, 2)
    right, right_scale = whole(g * sx, (0, 1))
    # a value that is half way between two whole numbers may round either way: one part of 127 of a row or column
    np.testing.assert_allclose(of_x, (left @ qw.T) * left_scale, atol=1e-2 * np.abs(of_x).max())
    np.testing.assert_allclose(of_w, np.tensordot(qx, right, ((0, 1), (0, 1))) * right_scale[0], rtol=2e-2, atol=1e-4)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.newest
def test_products_and_gradients_are_near_the_exact_ones(flat: bool) -> None:
    with products(float32_sums=True, flat=flat, int8=True):
        out, pull = jax.vjp(matmul, jnp.asarray(X, "float32"), jnp.asarray(W, "float32"))
        of_x, of_w = pull(jnp.asarray(G, "float32"))
    for found, exact in ((out, X @ W), (of_x, G @ W.T), (of_w, np.tensordot(X, G, ((0, 1), (0, 1))))):
        assert ROUNDED / 20 < off(found, exact) < ROUNDED


def test_rows_of_zeros_are_zeros_and_what_is_not_finite_stays_so() -> None:
    x, w = jnp.zeros((2, 8)).at[1].set(1.0), jnp.ones((8, 4)).at[:, 0].set(0.0)
    with products(float32_sums=True, flat=False, int8=True):
        np.testing.assert_allclose(matmul(x, w), [[0, 0, 0, 0], [0, 8, 8, 8]], rtol=1e-6)
        for wrong in (math.nan, math.inf):
            found = np.asarray(jax.jit(matmul)(x.at[0, 3].set(wrong), w))
            assert not np.isfinite(found[0]).any() and np.isfinite(found[1]).all()
            slope = jax.grad(lambda w, x: (matmul(x, w) * x[0, 0]).sum())(w, x.at[0, 0].set(wrong))
            assert not np.isfinite(slope).all()


def test_sums_that_could_overflow_are_not_made_in_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of more than 133,144 rows the gradient of the matrix is a product of the compute dtype."""
    assert int8.MOST * 127**2 < 2**31 <= (int8.MOST + 1) * 127**2
    monkeypatch.setattr(int8, "MOST", 64)
    rows = jnp.asarray(np.concatenate([X] * 5), "float32")

    def gradient(w: jax.Array) -> jax.Array:
        return jax.grad(lambda w: int8_matmul(rows, w, "float32", on_tpu=False).sum())(w)

    program = jax.make_jaxpr(gradient)(jnp.asarray(W, "float32")).jaxpr
    kinds = [str(e.invars[0].aval.dtype) for e in equations(program) if e.primitive.name == "dot_general"]
    assert "float32" in kinds and "int8" in kinds
    exact = np.repeat(np.asarray(rows, np.float64).sum((0, 1))[:, None], 32, 1)
    assert off(gradient(jnp.asarray(W, "float32")), exact) < ROUNDED


@pytest.mark.parametrize("shape", [(int8.MOST + 1, 2), (2, int8.MOST + 1)])
def test_matrices_whose_sums_could_overflow_are_not_rounded(shape: tuple[int, int]) -> None:
    """Either way: the product sums over one dim of the matrix, the gradient of x over the other."""
    x, w = jnp.full((1, shape[0]), 1.0), jnp.full(shape, 1.0)
    with products(float32_sums=True, flat=False, int8=True):
        out, pull = jax.vjp(matmul, x, w)
        of_x, _ = pull(jnp.ones_like(out))
    np.testing.assert_array_equal(out, np.full((1, shape[1]), float(shape[0])))
    np.testing.assert_array_equal(of_x, np.full((1, shape[0]), float(shape[1])))


def test_low_rank_factors_are_not_rounded() -> None:
    a, b = (DRAW.normal(size=shape).astype(np.float32) for shape in ((64, 4), (4, 32)))
    adapted = LowRank(jnp.zeros((64, 32)), jnp.asarray(a), jnp.asarray(b), 1.0)
    with products(float32_sums=True, flat=False, int8=True):
        found = matmul(jnp.asarray(X, "float32"), adapted)
    assert off(found, X @ a @ b) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["jit", "shard_map"])
def test_all_of_a_decoders_layers_but_not_its_head(engine: str) -> None:
    """Of llama's seven matrices, in the forward pass and both gradients."""
    mesh = Mesh(data=2, fsdp=2)
    found, plain = (traced("llama", engine, mesh, Precision(matmul=kind)) for kind in ("int8", "default"))

    def of(program: list[Any], dtype: str) -> int:
        return sum(one[:2] == ("dot_general", dtype) for one in program)

    assert of(found, "int32") % (3 * 7) == of(plain, "int32") == 0
    assert of(plain, "float32") - of(found, "float32") == of(found, "int32") >= 3 * 7
    assert of(found, "float32")  # attention and the head


@pytest.mark.nightly
def test_meshes_agree_within_what_int8_rounds() -> None:
    recipe = load(RECIPES / "decoder-tiny.yaml", ["precision.matmul=int8"], 8)
    assert tolerance(recipe) == INT8 > tolerance(load(RECIPES / "decoder-tiny.yaml", [], 8))
    engines = {name: load(RECIPES / "decoder-tiny.yaml", [f"engine={name}"], 8).engine for name in ("jit", "shard_map")}
    reference = reference_of(recipe, 2, lambda _: None)
    meshes = [Mesh(data=2, fsdp=2, tensor=2)]
    found = agreement(reference, recipe, engines, meshes, tolerance=INT8, changes=[], say=lambda _: None)
    assert found.agrees, list(found.lines())
    assert all(0 < one.gradients.difference < 0.03 for one in found.comparisons if one.gradients)


@pytest.mark.nightly
def test_five_hundred_steps_end_within_a_percent_of_bfloat16(dtrain: Dtrain) -> None:
    words = [
        "steps=500",
        "batch=4",
        "data.length=32",
        "precision.compute=bfloat16",
        "evaluate.every=0",
        "track.every=500",
    ]
    losses = []
    for kind in ("default", "int8"):
        dtrain("run", "decoder-tiny", f"name={kind}", f"precision.matmul={kind}", *words)
        losses.append(json.loads(dtrain("report", kind, "--json").stdout)["last"]["eval/loss"])
    assert losses[1] == pytest.approx(losses[0], rel=0.01)
    assert losses[1] != losses[0]
