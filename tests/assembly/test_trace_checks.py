import jax
import jax.numpy as jnp
import numpy as np

from dtrain.assembly.trace_checks import baked_constants, fingerprint, trace_differences

BIG = np.ones((600, 500), np.float32)


def test_large_constants_are_found_however_deep() -> None:
    def step(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda carry, _: (carry + (jnp.asarray(BIG) @ carry[:500])[:500].sum(), None), x, length=2)[
            0
        ]

    found = baked_constants(jax.jit(step).trace(jnp.ones(500)), 1.0)
    assert found == ["the step has float32[600, 500], 1.2 MB, as a constant; pass it in as an argument"]
    assert baked_constants(jax.jit(step).trace(jnp.ones(500)), 2.0) == []


def test_a_trace_that_changes_is_found() -> None:
    draws = iter(range(10))
    trace = lambda: jax.jit(lambda x: x * next(draws)).trace(jnp.ones(3))  # noqa: E731
    found = trace_differences(trace, trace())
    assert "something other than its arguments" in found[0]
    assert len(found) > 1
    drawn = np.random.default_rng(0)
    arrays = lambda: jax.jit(lambda x: x * jnp.asarray(drawn.normal(size=3))).trace(jnp.ones(3))  # noqa: E731
    assert trace_differences(arrays, arrays())[1] == "  the values of a constant, float32[3]"
    pure = lambda: jax.jit(lambda x: x * 2).trace(jnp.ones(3))  # noqa: E731
    assert trace_differences(pure, pure()) == []


def test_a_program_is_known_again_by_its_fingerprint() -> None:
    draws = iter(range(10))
    trace = lambda factor: jax.jit(lambda x: x * factor).trace(jnp.ones(3))  # noqa: E731
    assert fingerprint(trace(2)) == fingerprint(trace(2))
    assert fingerprint(trace(next(draws))) != fingerprint(trace(next(draws)))
