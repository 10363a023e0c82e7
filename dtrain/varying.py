"""Over which mesh axes a value varies, inside a region placed by hand."""

import jax


def axes_of(x: jax.Array | jax.ShapeDtypeStruct) -> tuple[str, ...]:
    """The mesh axes over which x varies; none outside such a region."""
    kind = x.manual_axis_type if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x).manual_axis_type
    return tuple(getattr(kind, "varying", ()))


def vary(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """x, marked as varying over these axes too: its gradient stays local to each device along them."""
    new = tuple(axis for axis in axes if axis not in axes_of(x))
    return jax.lax.pcast(x, new, to="varying") if new else x
