"""JAX's varying manual axes (VMA): the mesh axes over which a value differs inside `jax.shard_map`."""

from functools import partial

import jax
import jax.numpy as jnp


def axes_of(x: jax.Array | jax.ShapeDtypeStruct) -> tuple[str, ...]:
    """The mesh axes over which x varies; none outside `shard_map`."""
    kind = x.manual_axis_type if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x).manual_axis_type
    return tuple(getattr(kind, "varying", ()))


def vary(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """x, marked as varying over these axes too: its gradient stays local to each device along them."""
    new = tuple(axis for axis in axes if axis not in axes_of(x))
    return jax.lax.pcast(x, new, to="varying") if new else x


def varied(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """x, marked as varying over these axes too; its gradient is summed over them in float32."""
    new = tuple(axis for axis in axes if axis not in axes_of(x))
    return _varied(x, new) if new else x


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _varied(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return vary(x, axes)


def _varied_backward(axes: tuple[str, ...], _: None, gradient: jax.Array) -> tuple[jax.Array]:
    return (jax.lax.psum(gradient.astype(jnp.float32), axes).astype(gradient.dtype),)


_varied.defvjp(lambda x, axes: (vary(x, axes), None), _varied_backward)
