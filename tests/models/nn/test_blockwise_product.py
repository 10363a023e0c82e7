"""The product of rows with the matrix of their group, in blocks: the same as `jax.lax.ragged_dot`, at another cost."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from dtrain.models.nn.blockwise_product import blockwise_product

SIZES = {
    "even": (40, 40, 40, 40),
    "of every kind": (1, 0, 33, 126),
    "in one group": (0, 0, 160, 0),
    "fewer than rows": (7, 16, 0, 90),
    "none": (0, 0, 0, 0),
}


def arrays(rows: int, groups: int, dtype: str = "float32") -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rows (N, 8), matrices (G, 8, 6) and a gradient (N, 6)."""
    keys, shapes = jax.random.split(jax.random.key(0), 3), ((rows, 8), (groups, 8, 6), (rows, 6))
    return tuple(jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes, strict=True))  # pyright: ignore[reportReturnType]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_values_and_gradients_are_those_of_ragged_dot(sizes: tuple[int, ...], dtype: str) -> None:
    rows, matrices, gradient = arrays(160, 4, dtype)
    counts = jnp.array(sizes, jnp.int32)
    expected, back = jax.vjp(lambda r, m: jax.lax.ragged_dot(r, m, counts), rows, matrices)
    found, own_back = jax.vjp(lambda r, m: blockwise_product(r, m, counts), rows, matrices)
    for one, other in zip((found, *own_back(gradient)), (expected, *back(gradient)), strict=True):
        assert one.dtype == other.dtype
        error = 1e-5 if dtype == "float32" else 2e-2  # ragged_dot rounds more often
        np.testing.assert_allclose(one.astype(float), other.astype(float), rtol=error, atol=error)


def test_a_row_that_is_not_finite_stays_in_its_group() -> None:
    rows, matrices, gradient = arrays(160, 4)
    counts = jnp.array(SIZES["of every kind"], jnp.int32)
    out, back = jax.vjp(lambda r, m: blockwise_product(r, m, counts), rows.at[1].set(jnp.nan), matrices)
    of_rows, of_matrices = back(gradient)
    assert jnp.isfinite(of_rows).all()
    assert (~jnp.isfinite(out)).any(1).tolist() == [number == 1 for number in range(160)]
    assert (~jnp.isfinite(of_matrices)).any((1, 2)).tolist() == [False, False, True, False]


def test_each_device_has_groups_of_its_own_sizes() -> None:
    """In a `shard_map` region: as many blocks as this device needs."""
    rows, matrices, _ = arrays(320, 4)
    counts = jnp.array([SIZES["of every kind"], SIZES["in one group"]], jnp.int32).reshape(-1)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    split, whole = PartitionSpec("data"), PartitionSpec()
    region = jax.shard_map(blockwise_product, mesh=mesh, in_specs=(split, whole, split), out_specs=split)
    expected = [
        jax.lax.ragged_dot(rows[i * 160 :][:160], matrices, counts[i * 4 :][:4]) for i in range(2)
    ]  # fmt: skip
    np.testing.assert_allclose(jax.jit(region)(rows, matrices, counts), jnp.concatenate(expected), rtol=1e-5, atol=1e-5)


def test_memory_does_not_grow_with_the_number_of_groups() -> None:
    """On a CPU `jax.lax.ragged_dot` makes a copy of all rows for each group."""

    def temporaries(groups: int) -> int:
        rows, matrices, gradient = arrays(4096, groups)
        counts = jnp.full((groups,), 4096 // groups, jnp.int32)
        step = jax.jit(lambda r, m, g: jax.vjp(lambda r, m: blockwise_product(r, m, counts), r, m)[1](g))
        stats = step.lower(rows, matrices, gradient).compile().memory_analysis()
        assert stats is not None
        return stats.temp_size_in_bytes

    assert temporaries(64) < 1.5 * temporaries(4)
