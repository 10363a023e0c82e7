"""Number formats: the step computes in the dtypes that the recipe's `precision` requests."""

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dtrain.assembly import step
from dtrain.assembly.assemble import assemble
from dtrain.core.errors import FieldError
from dtrain.models.nn.param import initial
from dtrain.models.nn.precision import Precision
from dtrain.models.nn.single_device import SingleDeviceContext
from dtrain.parallel.mesh import Mesh
from dtrain.recipe.load import load
from tests.engines import ENGINES, LANGUAGE_MODELS, MODELS, place, random_batch
from tests.parallel.test_mesh import RECIPES

EVERY = MODELS | LANGUAGE_MODELS
REDUCTIONS = ("reduce_scatter", "psum", "psum_invariant", "psum2")


def equations(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                    yield from equations(getattr(inner, "jaxpr", inner))


def traced(name: str, engine: str, mesh: Mesh, precision: Precision) -> list[tuple[str, str, tuple[int, ...]]]:
    """Primitive, and dtype and shape of the first result, of each equation of the gradient."""
    results = [(e.primitive.name, e.outvars[0].aval) for e in gradient(name, engine, mesh, precision) if e.outvars]
    return [(name, str(out.dtype), out.shape) for name, out in results if hasattr(out, "shape")]


def gradient(name: str, engine: str, mesh: Mesh, precision: Precision) -> Iterator[Any]:
    """The equations of the gradient."""
    on = place(EVERY[name], ENGINES[engine], mesh)
    grads = on.engine.grads(on.layout, step.loss_of(EVERY[name], lambda rows: rows, precision), 1)
    with precision.tracing():
        found = on.engine.trace(on.layout, grads, on.now.params, on.rows, out=None, donate=False)
    return equations(found.jaxpr)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [*(pytest.param(name, marks=pytest.mark.newest) for name in ("mlp", "gpt2")), "cnn", "vit", "deepseek"]
)
@pytest.mark.parametrize("engine", ["jit", "shard_map"])
def test_gradients_are_summed_over_devices_in_float32(name: str, engine: str) -> None:
    found = traced(name, engine, Mesh(data=2, fsdp=2), Precision(compute="bfloat16"))
    floats = {dtype for primitive, dtype, _ in found if primitive in REDUCTIONS and "float" in dtype}
    assert floats <= {"float32"}
    assert (engine == "jit") != ("reduce_scatter" in {primitive for primitive, _, _ in found})
    exact = {shape for primitive, dtype, shape in found if primitive in PRODUCTS and dtype == "float32"}
    for param in jax.tree.leaves(EVERY[name].params()):
        own = [s for s, dim in zip(param.shape, param.names, strict=True) if dim != "layer"]
        rows = math.prod(s for s, dim in zip(param.shape, param.names, strict=True) if dim in param.fan_in)
        flat = (rows, math.prod(own) // max(rows, 1))
        if param.fan_in and engine == "jit" and "experts" not in param.names:
            assert {tuple(own), flat, flat[::-1]} & exact, param


PRODUCTS = ("dot_general", "conv_general_dilated")


def test_gradients_may_be_summed_in_the_compute_dtype() -> None:
    precision = Precision(compute="bfloat16", reduce="compute")
    found = traced("mlp", "shard_map", Mesh(data=1, fsdp=4), precision)
    assert {dtype for primitive, dtype, _ in found if primitive == "reduce_scatter"} == {"bfloat16"}
    found = traced("mlp", "jit", Mesh(data=1, fsdp=4), precision)
    assert {dtype for primitive, dtype, _ in found if primitive == "dot_general"} == {"bfloat16"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "mesh"),
    [
        ("jit", Mesh(data=2, pipeline=2)),
        ("shard_map", Mesh(data=1, tensor=2, rules={"kv_heads": "replicated"})),
        ("shard_map", Mesh(data=1, tensor=2, rules={"hidden": "replicated"})),
    ],
)
def test_gradients_of_matrices_are_summed_in_float32_wherever_they_are_marked_as_varying(
    engine: str, mesh: Mesh
) -> None:
    found = traced("llama", engine, mesh, Precision(compute="bfloat16"))
    flat = {(32, 16), (32, 32), (32, 48), (48, 32), (16, 32), (32, 24), (24, 32), (32,), (4, 8, 32), (2, 8)}
    sums = {(dtype, shape) for primitive, dtype, shape in found if primitive in REDUCTIONS and shape in flat}
    assert sums
    assert {dtype for dtype, _ in sums} == {"float32"}


@pytest.mark.slow
@pytest.mark.parametrize("reduce", ["float32", "compute"])
@pytest.mark.parametrize(("engine", "name"), [("jit", "gpt2"), ("shard_map", "gpt2"), ("pmap", "llama")])
def test_gradients_of_embedding_rows_are_summed_in_float32(engine: str, name: str, reduce: Any) -> None:
    mesh = Mesh(data=2) if engine == "pmap" else Mesh(data=1, fsdp=2)
    found = traced(name, engine, mesh, Precision(compute="bfloat16", reduce=reduce))
    assert {dtype for primitive, dtype, _ in found if primitive == "scatter-add"} == {"float32"}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtypes"), [("llama", {"bfloat16"}), ("gpt2", {"bfloat16", "float32"})])
def test_the_gradient_of_a_head_that_is_not_the_embedding_is_summed_like_that_of_other_matrices(
    name: str, dtypes: set[str]
) -> None:
    precision = Precision(compute="bfloat16", reduce="compute")
    found = traced(name, "shard_map", Mesh(data=1, fsdp=2), precision)
    assert {dtype for primitive, dtype, _ in found if primitive == "reduce_scatter"} == dtypes


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["jit", "shard_map"])
def test_every_product_of_the_router_is_exact_in_training(engine: str) -> None:
    model = LANGUAGE_MODELS["deepseek"]
    on = place(model, ENGINES[engine], Mesh(data=2))
    grads = on.engine.grads(on.layout, step.loss_of(model, lambda rows: rows, Precision(compute="bfloat16")), 1)
    found = on.engine.trace(on.layout, grads, on.now.params, on.rows, out=None, donate=False)
    router = [
        equation
        for equation in equations(found.jaxpr)
        if equation.primitive.name == "dot_general"
        and any(var.aval.shape in ((32, 8), (8, 32)) for var in (*equation.invars, *equation.outvars))
    ]
    assert len(router) >= 3  # forward, and the gradients of both factors
    assert all("HIGHEST" in str(equation.params["precision"]) for equation in router)


@pytest.mark.slow
def test_the_router_and_its_bias_are_exact() -> None:
    """In bfloat16 a bias of 0.501 would be 0.5, and its small steps would be rounded away."""
    model, precision = LANGUAGE_MODELS["deepseek"], Precision(compute="bfloat16")
    declared = model.params()
    params = jax.jit(lambda: initial(declared, jax.random.key(0), "float32"))()
    params["blocks"]["moe"]["bias"] += 0.501
    cast = precision.cast(params, declared)
    assert cast["blocks"]["moe"]["bias"].dtype == cast["blocks"]["moe"]["router"].dtype == jnp.float32
    assert cast["blocks"]["moe"]["experts"]["up"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(cast["blocks"]["moe"]["bias"], params["blocks"]["moe"]["bias"])
    loss = step.loss_of(model, lambda rows: rows, precision)
    batch = random_batch(model)
    assert np.isfinite(float(jax.jit(lambda p: loss(p, batch, SingleDeviceContext()).sum)(params)))


@pytest.mark.slow
@pytest.mark.parametrize("matmul", ["default", "high", "highest"])
def test_products_have_the_requested_precision(matmul: Any) -> None:
    recipe = load(RECIPES / "mlp-digits.yaml", [f"precision.matmul={matmul}"], 1)
    assembly = assemble(recipe, jax.devices()[:1], recipe.data.open("train").example, 100)
    found = {str(e.params["precision"]) for e in equations(assembly.train().jaxpr) if e.primitive.name == "dot_general"}
    assert all(("None" in name) if matmul == "default" else (matmul.upper() in name) for name in found), found


def test_parameters_in_bfloat16_are_refused() -> None:
    """They would not change: from 1.0, a thousand steps of AdamW at 1e-3 end at 1.0 instead of 0."""
    with pytest.raises(FieldError, match="updates smaller than 1/256 of a value are rounded away"):
        Precision(params="bfloat16")


@pytest.mark.slow
def test_the_loss_dtype_is_that_of_the_logits() -> None:
    """Logits of a decoder that computes in bfloat16, against the same activations and head in float64."""
    model = LANGUAGE_MODELS["llama"]
    params = jax.jit(lambda: initial(model.params(), jax.random.key(0), "float32"))()
    x_BTE = jax.random.normal(jax.random.key(1), (2, 5, 32)).astype("bfloat16")
    head = params["head"].astype("bfloat16")
    exact = np.asarray(x_BTE, np.float64) @ np.asarray(head, np.float64)
    wide, narrow = (np.asarray(model.head.logits(x_BTE, head, dtype), np.float64) for dtype in ("float32", "bfloat16"))
    assert np.abs(wide - exact).max() < 1e-6
    assert np.abs(narrow - exact).max() > 1e-4
    batch = {name: jnp.asarray(value) for name, value in random_batch(model).items()}

    def loss(dtype: Any) -> tuple[float, Any]:
        precision = Precision(compute="bfloat16", loss=dtype)
        of = step.loss_of(model, lambda rows: rows, precision)
        return jax.jit(jax.value_and_grad(lambda p: of(p, batch, SingleDeviceContext()).sum))(params)

    (first, gradient), (second, _) = loss("float32"), loss("bfloat16")
    assert float(first) != float(second)
    assert {leaf.dtype for leaf in jax.tree.leaves(gradient)} == {jnp.dtype("float32")}
