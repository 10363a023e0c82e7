"""Products in 8 bits: rounded as their formula says, on every engine, and nothing else is."""

import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dtrain.models.nn.low_rank import LowRank
from dtrain.models.nn.matmul import matmul, products
from dtrain.models.nn.narrow_products import FORMATS, Format, narrow_matmul, scaled
from dtrain.models.nn.precision import Precision
from dtrain.parallel.mesh import Mesh
from dtrain.recipe.load import load
from dtrain.runtime.agree import NARROW, agreement, tolerance
from dtrain.runtime.trajectory import reference_of
from tests.conftest import Dtrain
from tests.models.nn.test_precision import equations, gradient
from tests.parallel.test_mesh import RECIPES

DRAW = np.random.default_rng(0)
X, W, G = (DRAW.normal(size=shape) * scale for shape, scale in (((3, 5, 64), 9.0), ((64, 32), 0.1), ((3, 5, 32), 1e-3)))
INT8, FP8 = FORMATS["int8"], FORMATS["fp8"]
ROUNDED = {"int8": (0.00075, 0.015), "fp8": (0.02, 0.05)}
"""Relative errors of products of normal values that are rounded to a part of 127, or to three bits of mantissa."""


def off(found: Any, exact: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(found, np.float64) - exact) / np.linalg.norm(exact))


def whole(x: np.ndarray, axis: int | tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """x as whole numbers up to 127 and their scales, by numpy."""
    scale = np.abs(x).max(axis=axis, keepdims=True) / 127
    return np.rint(x / scale), scale


def test_int8_products_are_those_of_whole_numbers() -> None:
    x, w, g = (values.astype(np.float32) for values in (X, W, G))
    (qx, sx), (qw, sw) = whole(x, 2), whole(w, 0)
    out, pull = jax.vjp(lambda x, w: narrow_matmul(x, w, INT8, "float32", on_tpu=False), x, w)
    np.testing.assert_allclose(out, (qx @ qw) * sx * sw, rtol=1e-4)
    of_x, of_w = pull(g)
    left, left_scale = whole(g * sw, 2)
    right, right_scale = whole(g * sx, (0, 1))
    # a value that is half way between two whole numbers may round either way: one part of 127 of a row or column
    np.testing.assert_allclose(of_x, (left @ qw.T) * left_scale, atol=1e-2 * np.abs(of_x).max())
    np.testing.assert_allclose(of_w, np.tensordot(qx, right, ((0, 1), (0, 1))) * right_scale[0], rtol=2e-2, atol=1e-4)


def fp8(x: np.ndarray, axis: int | tuple[int, ...]) -> np.ndarray:
    """x rounded to e4m3 with scales that are powers of two, by numpy and ml_dtypes."""
    scale = 2.0 ** np.ceil(np.log2(np.abs(x).max(axis=axis, keepdims=True) / 448))
    return (x / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale


def test_fp8_products_are_those_of_values_rounded_to_e4m3() -> None:
    x, w, g = (values.astype(np.float32) for values in (X, W, G))
    out, pull = jax.vjp(jax.jit(lambda x, w: narrow_matmul(x, w, FP8, "float32", on_tpu=False)), x, w)
    of_x, of_w = pull(g)
    qx, qw = fp8(x, 2), fp8(w, 0)
    column, row = (2.0 ** np.ceil(np.log2(np.abs(a).max(axis=axis) / 448)) for a, axis in ((w, 0), (x, 2)))
    left, right = fp8(g * column, 2) / column, fp8(g * row[..., None], (0, 1)) / row[..., None]
    np.testing.assert_allclose(out, qx @ qw, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(of_x, left @ qw.T, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(of_w, np.tensordot(qx, right, ((0, 1), (0, 1))), rtol=1e-4, atol=1e-6)


def test_scales_of_fp8_are_powers_of_two_that_bring_values_into_its_range() -> None:
    largest = jnp.asarray([448.0, 448.1, 896.0, 3e-3, 1e38, 0.0, 1e-40, math.inf, math.nan], jnp.float32)
    scale = np.asarray(jax.jit(FP8.scale)(largest))
    np.testing.assert_array_equal(scale[:3], [1.0, 2.0, 2.0])
    assert (np.frexp(scale[:7])[0] == 0.5).all()
    assert (np.asarray(largest)[:5] / scale[:5] > 224).all() and (np.asarray(largest)[:5] / scale[:5] <= 448).all()
    np.testing.assert_array_equal(scale[5:], [1.0, 1.0, math.inf, math.nan])


def test_parts_of_a_row_are_rounded_to_fp8_as_the_row() -> None:
    """So meshes agree, except for values that underflow beside a larger one."""
    x = jnp.asarray(X, "float32")

    def rounded(x: jax.Array) -> np.ndarray:
        found = jax.jit(lambda x: scaled(x, (2,), FP8, on_tpu=False))(x)
        return np.asarray(FP8.values(found.bits), np.float32) * np.asarray(found.scale)

    parts = np.concatenate([rounded(x[..., :32]), rounded(x[..., 32:])], 2)
    large = np.abs(X) > 0.1
    np.testing.assert_array_equal(rounded(x)[large], parts[large])
    assert large.mean() > 0.98


@pytest.mark.parametrize("name", FORMATS)
def test_values_that_are_saved_for_the_backward_pass_are_not_rounded_again(name: str) -> None:
    """JAX rounds floating-point values that `jax.checkpoint` saves, those of e4m3 above 240 to infinity."""

    def slope(policy: Any) -> Any:
        product = jax.checkpoint(lambda w: matmul(jnp.asarray(X, "float32"), w), policy=policy)
        return jax.jit(jax.grad(lambda w: jnp.sum(product(w) ** 2)))(jnp.asarray(W, "float32"))

    with products(float32_sums=True, flat=False, narrow=name):
        saved, computed = map(slope, (jax.checkpoint_policies.everything_saveable, None))
    assert np.isfinite(computed).all()
    np.testing.assert_allclose(saved, computed, rtol=1e-5)


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.newest
def test_products_and_gradients_are_near_the_exact_ones(name: str, flat: bool) -> None:
    with products(float32_sums=True, flat=flat, narrow=name):
        out, pull = jax.vjp(matmul, jnp.asarray(X, "float32"), jnp.asarray(W, "float32"))
        of_x, of_w = pull(jnp.asarray(G, "float32"))
    for found, exact in ((out, X @ W), (of_x, G @ W.T), (of_w, np.tensordot(X, G, ((0, 1), (0, 1))))):
        assert ROUNDED[name][0] < off(found, exact) < ROUNDED[name][1]


def test_gradients_in_fp8_ask_gpus_for_exact_sums() -> None:
    """By default the products of Hopper add up fewer bits than float32 has."""

    def asked(on_tpu: bool) -> list[bool]:
        def both(x: jax.Array, w: jax.Array) -> Any:
            out, pull = jax.vjp(lambda x, w: narrow_matmul(x, w, FP8, "float32", on_tpu), x, w)
            return pull(out)

        program = jax.make_jaxpr(both)(jnp.asarray(X, "float32"), jnp.asarray(W, "float32")).jaxpr
        found = [one for one in equations(program) if one.primitive.name == "dot_general"]
        return [one.params["precision"] is not None for one in found]

    assert (asked(on_tpu=False), asked(on_tpu=True)) == ([False, True, True], [False] * 3)


@pytest.mark.parametrize("name", FORMATS)
def test_rows_of_zeros_are_zeros_and_what_is_not_finite_stays_so(name: str) -> None:
    x, w = jnp.zeros((2, 8)).at[1].set(1.0), jnp.ones((8, 4)).at[:, 0].set(0.0)
    with products(float32_sums=True, flat=False, narrow=name):
        np.testing.assert_allclose(matmul(x, w), [[0, 0, 0, 0], [0, 8, 8, 8]], rtol=1e-6)
        for wrong in (math.nan, math.inf):
            found = np.asarray(jax.jit(matmul)(x.at[0, 3].set(wrong), w))
            assert not np.isfinite(found[0]).any() and np.isfinite(found[1]).all()
            slope = jax.grad(lambda w, x: (matmul(x, w) * x[0, 0]).sum())(w, x.at[0, 0].set(wrong))
            assert not np.isfinite(slope).all()


def test_sums_that_could_overflow_are_not_made_in_int8() -> None:
    """Of more than 133,144 rows the gradient of the matrix is a product of the compute dtype."""
    assert INT8.most * 127**2 < 2**31 <= (INT8.most + 1) * 127**2
    less = Format("int8", 127, "int32", most=64)
    rows = jnp.asarray(np.concatenate([X] * 5), "float32")

    def gradient(w: jax.Array) -> jax.Array:
        return jax.grad(lambda w: narrow_matmul(rows, w, less, "float32", on_tpu=False).sum())(w)

    program = jax.make_jaxpr(gradient)(jnp.asarray(W, "float32")).jaxpr
    kinds = [str(e.invars[0].aval.dtype) for e in equations(program) if e.primitive.name == "dot_general"]
    assert "float32" in kinds and "int8" in kinds
    exact = np.repeat(np.asarray(rows, np.float64).sum((0, 1))[:, None], 32, 1)
    assert off(gradient(jnp.asarray(W, "float32")), exact) < ROUNDED["int8"][1]


@pytest.mark.parametrize("shape", [(133_145, 2), (2, 133_145)])
def test_matrices_whose_sums_could_overflow_are_not_rounded(shape: tuple[int, int]) -> None:
    """Either way: the product sums over one dim of the matrix, the gradient of x over the other."""
    x, w = jnp.full((1, shape[0]), 1.0), jnp.full(shape, 1.0)
    with products(float32_sums=True, flat=False, narrow="int8"):
        out, pull = jax.vjp(matmul, x, w)
        of_x, _ = pull(jnp.ones_like(out))
    np.testing.assert_array_equal(out, np.full((1, shape[1]), float(shape[0])))
    np.testing.assert_array_equal(of_x, np.full((1, shape[0]), float(shape[1])))


def test_low_rank_factors_are_not_rounded() -> None:
    a, b = (DRAW.normal(size=shape).astype(np.float32) for shape in ((64, 4), (4, 32)))
    adapted = LowRank(jnp.zeros((64, 32)), jnp.asarray(a), jnp.asarray(b), 1.0)
    with products(float32_sums=True, flat=False, narrow="int8"):
        found = matmul(jnp.asarray(X, "float32"), adapted)
    assert off(found, X @ a @ b) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "name"), [("jit", "int8"), ("shard_map", "int8"), ("shard_map", "fp8")])
def test_all_of_a_decoders_layers_but_not_its_head(engine: str, name: str) -> None:
    """Of llama's seven matrices, in the forward pass and both gradients."""

    def of(kind: Any, dtype: str) -> int:
        """Products of operands of this dtype."""
        program = gradient("llama", engine, Mesh(data=2, fsdp=2), Precision(matmul=kind))
        products = [e for e in program if e.primitive.name == "dot_general"]
        return sum({str(x.aval.dtype) for x in e.invars} == {dtype} for e in products)

    narrow = FORMATS[name].dtype
    assert of(name, narrow) % (3 * 7) == of("default", narrow) == 0
    assert of("default", "float32") - of(name, "float32") == of(name, narrow) >= 3 * 7
    assert of(name, "float32")  # attention and the head


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "most"), [("int8", 0.03), ("fp8", 0.05)])
def test_meshes_agree_within_what_8_bits_round(name: str, most: float) -> None:
    recipe = load(RECIPES / "decoder-tiny.yaml", [f"precision.matmul={name}"], 8)
    assert tolerance(recipe) == NARROW > tolerance(load(RECIPES / "decoder-tiny.yaml", [], 8))
    engines = {name: load(RECIPES / "decoder-tiny.yaml", [f"engine={name}"], 8).engine for name in ("jit", "shard_map")}
    reference = reference_of(recipe, 2, lambda _: None)
    meshes = [Mesh(data=2, fsdp=2, tensor=2)]
    found = agreement(reference, recipe, engines, meshes, tolerance=NARROW, changes=[], say=lambda _: None)
    assert found.agrees, list(found.lines())
    assert all(0 < one.gradients.difference < most for one in found.comparisons if one.gradients)


@pytest.mark.nightly
def test_five_hundred_steps_end_within_a_percent_of_bfloat16(dtrain: Dtrain) -> None:
    words = ["steps=500", "precision.compute=bfloat16", "evaluate.every=0", "track.every=500"]
    losses = []
    for kind in ("default", "int8", "fp8"):
        dtrain("run", "decoder-tiny", f"name={kind}", f"precision.matmul={kind}", *words)
        losses.append(json.loads(dtrain("report", kind, "--json").stdout)["last"]["eval/loss"])
    assert losses[1:] == pytest.approx(losses[:1] * 2, rel=0.01)
    assert len(set(losses)) == 3
