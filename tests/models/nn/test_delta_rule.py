"""The gated delta rule in chunks against its definition, token by token in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dtrain.models.nn import delta_rule
from dtrain.models.nn.delta_rule import CHUNK, short_convolution

gated_delta_rule, unit_lower_inverse = jax.jit(delta_rule.gated_delta_rule), jax.jit(delta_rule.unit_lower_inverse)
B, G, R, K, V = 2, 2, 3, 8, 6


def by_definition(q, k, v, decay, strength, state, document):
    found = []
    k, q = (np.broadcast_to(x[:, :, :, None], (*x.shape[:3], R, K)) for x in (k, q))
    for t in range(q.shape[1]):
        if t and document is not None:
            state = state * (document[:, t] == document[:, t - 1])[:, None, None, None, None]
        state = state * np.exp(decay[:, t])[..., None, None]
        error = v[:, t] - np.einsum("bgrkv,bgrk->bgrv", state, k[:, t])
        state = state + np.einsum("bgrk,bgrv->bgrkv", k[:, t], strength[:, t][..., None] * error)
        found.append(np.einsum("bgrkv,bgrk->bgrv", state, q[:, t]))
    return np.stack(found, 1), state


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("length", [1, 5, CHUNK, 3 * CHUNK + 8])
def test_chunks_give_what_single_tokens_do(length: int, packed: bool) -> None:
    draw = np.random.default_rng(0)
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in draw.normal(size=(2, B, length, G, K)))
    v, decay = draw.normal(size=(B, length, G, R, V)), -np.exp(draw.normal(size=(B, length, G, R)))
    strength, state = 1 / (1 + np.exp(-draw.normal(size=(B, length, G, R)))), draw.normal(size=(B, G, R, K, V))
    document = np.cumsum(draw.random((B, length)) < 0.05, 1) if packed else None
    given = [jnp.asarray(x, jnp.float32) for x in (q, k, v, decay, strength, state)]
    found = gated_delta_rule(*given, None if document is None else jnp.asarray(document))
    for one, expected in zip(found, by_definition(q, k, v, decay, strength, state, document), strict=True):
        np.testing.assert_allclose(one, expected, atol=2e-5)


def test_a_long_document_before_a_short_one_does_not_overflow() -> None:
    """The decay of the first document's tokens to the end of the chunk has no meaning, and would be exp(+180)."""
    ones, length = jnp.ones((1, CHUNK, 1, 1, 1)), CHUNK
    document = jnp.asarray(np.arange(length) >= length - 4, jnp.int32)[None]

    def total(decay: jax.Array) -> jax.Array:
        y, state = gated_delta_rule(
            ones[..., 0], ones[..., 0], ones, decay, 0.5 * ones[..., 0], jnp.zeros((1, 1, 1, 1, 1)), document
        )
        return y.sum() + state.sum()

    value, slope = jax.jit(jax.value_and_grad(total))(-3 * ones[..., 0])
    assert np.isfinite(value)
    assert np.isfinite(slope).all()


def test_a_state_goes_on_where_a_row_is_cut() -> None:
    draw = np.random.default_rng(1)
    arrays = [draw.normal(size=(B, 40, G, *more)) for more in ((K,), (K,), (R, V), (R,), (R,))]
    q, k, v, decay, strength = (jnp.asarray(x / 4, jnp.float32) for x in arrays)
    row, state = (q, k, v, -jnp.abs(decay), strength), jnp.zeros((B, G, R, K, V))
    whole, last = gated_delta_rule(*row, state)
    first, between = gated_delta_rule(*(x[:, :17] for x in row), state)
    second, end = gated_delta_rule(*(x[:, 17:] for x in row), between)
    np.testing.assert_allclose(jnp.concatenate([first, second], 1), whole, atol=1e-6)
    np.testing.assert_allclose(end, last, atol=1e-6)


def test_the_inverse_and_its_gradient() -> None:
    """Equal keys of strength one are the worst case of a sum of powers, whose terms reach 1e17."""
    worst = jnp.tril(jnp.ones((CHUNK, CHUNK)), -1)
    np.testing.assert_array_equal(unit_lower_inverse(worst), np.linalg.inv(np.eye(CHUNK) + np.asarray(worst)))
    some = 0.1 * jnp.tril(jax.random.normal(jax.random.key(0), (3, CHUNK, CHUNK)), -1)
    expected = np.linalg.inv(np.eye(CHUNK) + np.asarray(some, np.float64))
    np.testing.assert_allclose(unit_lower_inverse(some), expected, atol=1e-6)
    ours = jax.jit(jax.grad(lambda x: jnp.sin(unit_lower_inverse(x)).sum()))(some)
    theirs = jax.jit(jax.grad(lambda x: jnp.sin(jnp.linalg.inv(jnp.eye(CHUNK)[None] + x)).sum()))(some)
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_the_convolution_reads_earlier_tokens_of_its_document_alone() -> None:
    x = np.random.default_rng(0).normal(size=(1, 6, 2)).astype(np.float32)  # two tokens before the row of four
    taps, document = np.array([[0.1, 0.2, 0.4], [0.3, 0.5, 0.7]]), np.array([[0, 0, 1, 1]])
    found = short_convolution(jnp.asarray(x), jnp.asarray(taps), jnp.asarray(document))

    for token, back in enumerate((2, 2, 0, 1)):  # earlier tokens that it reads
        expected = sum(taps[:, 2 - i] * x[0, 2 + token - i] for i in range(back + 1))
        np.testing.assert_allclose(found[0, token], expected, rtol=1e-5, err_msg=str(token))
