"""Every attention kernel gives the results of the plain form: packed, windowed and soft-capped, too."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from dtrain.models.nn import attention as plain
from dtrain.models.nn.attention import AttentionSpec, Positions
from dtrain.models.nn.vma import vary
from dtrain.parallel import kernels
from dtrain.parallel.kernels import SplashPairs, cudnn, rows_by_rows, splash
from dtrain.parallel.ring import PlainPairs, ring_attention
from dtrain.parallel.rules import zigzag_positions

SPECS = {
    "causal": AttentionSpec(0.1),
    "whole": AttentionSpec(0.1, causal=False),
    "window": AttentionSpec(0.1, window=100),
    "softcap": AttentionSpec(0.1, softcap=2.0),
}


def arrays(length: int, dim: int, dtype: Any = "float32") -> tuple[list[jax.Array], jax.Array]:
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v = (
        jax.random.normal(key, (2, length, h, dim)).astype(dtype) for key, h in zip(keys, (4, 2, 2), strict=False)
    )
    document = jnp.cumsum(jax.random.uniform(keys[3], (2, length)) < 0.02, axis=1, dtype=jnp.int32)
    return [q, k, v], document


def by_loops(q: Any, k: Any, v: Any, spec: AttentionSpec, document: Any) -> np.ndarray:
    """The definition, one query at a time, in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros((*q.shape[:3], v.shape[3]))
    for b, t, h in np.ndindex(q.shape[:3]):
        s = k[b, :, h // 2] @ q[b, t, h] * spec.scale
        s = spec.softcap * np.tanh(s / spec.softcap) if spec.softcap else s
        back = t - np.arange(len(s))
        mask = (back >= 0 if spec.causal else back > -len(s)) & (np.abs(back) < (spec.window or len(s)))
        mask = mask if document is None else mask & (np.asarray(document)[b] == document[b, t])
        weights = np.where(mask, np.exp(s - s[mask].max()), 0)
        out[b, t, h] = weights @ v[b, :, h // 2] / weights.sum()
    return out


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_the_plain_form_is_the_definition(name: str, packed: bool) -> None:
    (q, k, v), document = arrays(48, 8)
    documents = document if packed else None
    found = plain.attention(q, k, v, SPECS[name], Positions(jnp.arange(48), documents))
    np.testing.assert_allclose(found, by_loops(q, k, v, SPECS[name], documents), atol=1e-5)


def with_gradients(attend: Any, *inputs: jax.Array) -> Any:
    out, back = jax.vjp(attend, *inputs)
    return out, *back(jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape).astype(out.dtype))


def compare(found: Any, reference: Any, tolerance: float) -> None:
    for a, b in zip(found, reference, strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), b, atol=tolerance * float(np.abs(b).max()))


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
def test_attention_in_chunks_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (q, k, v), document = arrays(64, 8)
    attend = lambda q, k, v: plain.attention(q, k, v, SPECS[name], Positions(jnp.arange(64), document))  # noqa: E731
    whole = with_gradients(attend, q, k, v)
    monkeypatch.setattr(plain, "CHUNK", 16)
    compare(with_gradients(attend, q, k, v), whole, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("packed", [pytest.param(False, marks=pytest.mark.nightly), True])
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize(
    "partials",
    [pytest.param(0, id="two backward kernels", marks=pytest.mark.nightly), pytest.param(2, id="one")],
)
def test_splash_is_the_same(name: str, packed: bool, partials: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pallas's interpreter runs the TPU kernel, over two blocks of keys."""
    monkeypatch.setattr(kernels, "BLOCK", 128)
    monkeypatch.setattr(kernels, "PARTIALS", partials)
    (q, k, v), document = arrays(256, 128)
    documents = document if packed else None
    reference = with_gradients(
        lambda q, k, v: plain.attention(q, k, v, SPECS[name], Positions(jnp.arange(256), documents)), q, k, v
    )
    found = with_gradients(lambda q, k, v: splash(q, k, v, SPECS[name], documents, interpret=True), q, k, v)
    compare(found, reference, 2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("parts", [2, pytest.param(4, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("packed", [pytest.param(False, marks=pytest.mark.nightly), True])
@pytest.mark.parametrize("name", [pytest.param("causal", marks=pytest.mark.nightly), "softcap"])
@pytest.mark.parametrize(
    "partials",
    [pytest.param(0, id="two backward kernels", marks=pytest.mark.nightly), pytest.param(2, id="one")],
)
def test_a_ring_of_splash_kernels_is_attention_to_the_whole_row(
    name: str, packed: bool, parts: int, partials: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pallas's interpreter runs the TPU kernels on chunks of two blocks, in the zigzag order of a mesh."""
    monkeypatch.setattr(kernels, "BLOCK", 128)
    monkeypatch.setattr(kernels, "PARTIALS", partials)
    spec, length = SPECS[name], 2 * parts * 256
    (q, k, v), document = arrays(length, 64)
    documents = document if packed else None
    reference = with_gradients(
        lambda q, k, v: plain.attention(q, k, v, spec, Positions(jnp.arange(length), documents)), q, k, v
    )
    order = zigzag_positions(length, parts)
    back, split = np.argsort(order), PartitionSpec(None, "sequence")
    # the interpreter's own arrays do not vary over the mesh, which check_vma would refuse
    ring = jax.shard_map(
        lambda q, k, v, *document: ring_attention(
            q, k, v, document[0] if document else None, None, SplashPairs(spec, interpret=True), "sequence", parts
        ),
        mesh=Mesh(np.array(jax.devices()[:parts]), ("sequence",)),
        in_specs=split,
        out_specs=split,
        check_vma=False,
    )
    of_documents = [document[:, order]] if packed else []
    attend = jax.jit(lambda q, k, v: ring(q[:, order], k[:, order], v[:, order], *of_documents)[:, back])
    compare(with_gradients(attend, q, k, v), reference, 2e-5)


def with_sinks(sinks: jax.Array, q: Any, k: Any, v: Any, spec: AttentionSpec, document: Any) -> np.ndarray:
    """The definition, in float64: one more score for each head, whose value is zero."""
    more = by_loops(q, k, v, spec, document)
    for b, t, h in np.ndindex(q.shape[:3]):
        s = np.asarray(k, np.float64)[b, : t + 1, h // 2] @ np.asarray(q, np.float64)[b, t, h] * spec.scale
        near = slice(max(0, t + 1 - (spec.window or t + 1)), t + 1)
        same = np.asarray(document)[b, near] == document[b, t]
        total = np.exp(s[near])[same].sum()
        more[b, t, h] *= total / (total + np.exp(float(sinks[h])))
    return more


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("causal", marks=pytest.mark.nightly), "window"])
def test_sinks_are_one_more_key_for_each_head(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the plain form, in the kernel and over a ring, with gradients; values have another size than keys."""
    monkeypatch.setattr(kernels, "BLOCK", 128)
    sinks, spec, length, parts = jnp.array([-1.0, 0.5, 2.0, 4.0]), SPECS[name], 512, 2
    (q, k, v), document = arrays(length, 64)
    v = v[..., :32]
    reference = lambda q, k, v, s: plain.attention(q, k, v, spec, Positions(jnp.arange(length), document), s)  # noqa: E731
    wanted = with_gradients(reference, q, k, v, sinks)
    np.testing.assert_allclose(wanted[0], with_sinks(sinks, q, k, v, spec, document), atol=1e-5)
    own = with_gradients(lambda q, k, v, s: splash(q, k, v, spec, document, s, interpret=True), q, k, v, sinks)
    compare(own, wanted, 2e-5)
    order, split = zigzag_positions(length, parts), PartitionSpec(None, "sequence")
    pairs = SplashPairs(spec, interpret=True) if spec.window is None else PlainPairs(spec)
    ring = jax.shard_map(
        lambda q, k, v, document, s: ring_attention(
            q, k, v, document, vary(s, ("sequence",)), pairs, "sequence", parts
        ),
        mesh=Mesh(np.array(jax.devices()[:parts]), ("sequence",)),
        in_specs=(split, split, split, split, PartitionSpec()),
        out_specs=split,
        check_vma=False,
    )
    places = document[:, order]
    attend = jax.jit(lambda q, k, v, s: ring(q[:, order], k[:, order], v[:, order], places, s)[:, np.argsort(order)])
    compare(with_gradients(attend, q, k, v, sinks), wanted, 2e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["causal", "whole", "window"])
def test_cudnn_is_the_same(name: str) -> None:
    (q, k, v), _ = arrays(256, 64, "bfloat16")
    attend = lambda q, k, v: plain.attention(q, k, v, SPECS[name], Positions(jnp.arange(256)))  # noqa: E731
    reference = with_gradients(attend, *(x.astype(jnp.float32) for x in (q, k, v)))
    compare(with_gradients(lambda q, k, v: cudnn(q, k, v, SPECS[name]), q, k, v), reference, 3e-2)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(128, 128, 128), (200, 0, 184), (0, 1, 383), (384, 0, 0)])
def test_the_grouped_kernel_gives_the_gradient_of_the_experts_matrices(sizes: tuple[int, ...]) -> None:
    """Compared with JAX's own gradient, including experts without any row."""
    keys = jax.random.split(jax.random.key(0), 3)
    rows, others = jax.random.normal(keys[0], (384, 128)), jax.random.normal(keys[1], (384, 256))
    counts = jnp.array(sizes, jnp.int32)
    _, back = jax.vjp(lambda m: jax.lax.ragged_dot(rows, m, counts), jax.random.normal(keys[2], (3, 128, 256)))
    found = rows_by_rows(rows, others, counts, interpret=True)
    np.testing.assert_allclose(found, back(others)[0], rtol=1e-4, atol=1e-4)
