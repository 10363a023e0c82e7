"""FLOPs of attention kernels, as the shapes of the real kernels' inputs give them."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dtrain.models.nn.attention import AttentionSpec
from dtrain.parallel.kernels import splash
from dtrain.plan import kernels

ROWS, HEADS, DIM = 2, 4, 128


def pallas_calls(jaxpr: Any) -> Iterator[Any]:
    for step in jaxpr.eqns:
        if step.primitive.name == "pallas_call":
            yield step
            continue
        for value in step.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from pallas_calls(inner)


def live_share(length: int, window: int | None, block: int, causal: bool = True) -> float:
    """The share of blocks of scores in which a key is seen."""
    back = np.arange(length)[:, None] - np.arange(length)
    seen = (back >= 0) & (back < (window or length)) if causal else np.ones_like(back, bool)
    return float(seen.reshape(length // block, block, -1, block).any((1, 3)).mean())


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("length", "window", "causal"),
    [(4096, None, True), (8192, 4096, True), (8192, 1024, True), (4096, 4096, True), (4096, None, False)],
)
def test_masked_blocks_of_splash_attention_cost_nothing_in_any_of_its_kernels(
    length: int, window: int | None, causal: bool, packed: bool
) -> None:
    spec = AttentionSpec(scale=1.0, causal=causal, window=window)
    q = jax.ShapeDtypeStruct((ROWS, length, HEADS, DIM), jnp.bfloat16)
    documents = jnp.zeros((ROWS, length), jnp.int32) if packed else None
    loss = lambda q, k, v: splash(q, k, v, spec, documents, interpret=True).astype(jnp.float32).sum()  # noqa: E731
    traced = jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(q, q, q)
    found: dict[str, float] = {}
    for call in pallas_calls(traced.jaxpr):
        name = str(call.params["name"])
        inputs = [(str(one.aval.dtype), one.aval.shape) for one in call.invars]
        found[name] = kernels.flops(name, inputs, [one.aval.shape for one in call.outvars])
    one = 2.0 * ROWS * HEADS * length**2 * DIM * live_share(length, window, 512, causal)
    products = sorted(round(value / one, 6) for value in found.values())
    assert products == ([2, 5] if window is None else [2, 3, 4])
    scores = (ROWS, HEADS, length, length)
    counted = kernels.cudnn(1, scores, DIM, causal, window or 0)
    share = live_share(length, window, kernels.TILE, causal)
    assert counted == pytest.approx(2 * ROWS * HEADS * length**2 * DIM * share)
