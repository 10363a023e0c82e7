"""Gathers and their gradients over several axes of a mesh, as over the dims of a TPU torus."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from dtrain.parallel.gather import gathered

SHAPES = {  # and the dim that is split
    "vector": ((16,), 0),
    "first": ((16, 6), 0),
    "heads": ((16, 2, 3), 0),
    "last": ((2, 3, 16), 2),
    "middle": ((3, 16, 5), 1),
}


@pytest.mark.parametrize("axes", [("x", "y", "z"), ("x", "y"), ("z", "x")])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_gradient_of_a_gather_is_the_sum_of_all_devices(shape: str, axes: tuple[str, ...]) -> None:
    size, dim = SHAPES[shape]
    mesh = jax.make_mesh((2, 2, 2), ("x", "y", "z"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    draw = np.random.default_rng(0)
    value = draw.standard_normal(size).astype(np.float32)
    weight = draw.standard_normal((8, *size)).astype(np.float32)  # what each device multiplies the whole parameter by
    spec = PartitionSpec(*[None] * dim, axes)

    def local(part: jax.Array, own: jax.Array) -> tuple[jax.Array, jax.Array]:
        def loss(part: jax.Array) -> jax.Array:
            whole = gathered(part, ((dim, axes),), "float32", "float32")
            return jnp.sum(jnp.sin(whole) * own[0])

        value, gradient = jax.value_and_grad(loss)(part)
        others = tuple(axis for axis in mesh.axis_names if axis not in axes)
        return jax.lax.psum(value, mesh.axis_names), jax.lax.psum(gradient, others) if others else gradient

    ours = jax.shard_map(
        local, mesh=mesh, in_specs=(spec, PartitionSpec(mesh.axis_names)), out_specs=(PartitionSpec(), spec),
        check_vma=False,
    )  # fmt: skip
    total, gradient = jax.jit(ours)(value, weight)
    np.testing.assert_allclose(total, (np.sin(value) * weight).sum(), rtol=1e-5)
    np.testing.assert_allclose(gradient, np.cos(value) * weight.sum(0), rtol=1e-5, atol=1e-6)
