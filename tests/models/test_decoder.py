"""The decoder against the recorded logits of published implementations, and against its own definition."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dtrain.checkpoint.tensors import opened
from dtrain.core.errors import FieldError
from dtrain.data.batch import Feature
from dtrain.models.decoder import Decoder
from dtrain.models.delta import Delta
from dtrain.models.layer_pattern import LayerKind
from dtrain.models.moe import Experts
from dtrain.models.nn.kv_cache import CachedContext, KVCache
from dtrain.models.nn.param import count, initial
from dtrain.models.nn.single_device import SingleDeviceContext
from dtrain.models.rope import Learned, Rope
from dtrain.models.short_convolution import ShortConvolution
from dtrain.recipe.compose import presets
from dtrain.recipe.parse import Problems, section
from tests.conftest import SHARED
from tests.engines import DECODER, LANGUAGE_MODELS, LENGTH, loss_alone, places_in, random_batch
from tests.train.test_import_run import read_tree

DELTA = Delta(key_heads=2, value_heads=4, key_dim=4, value_dim=4)
DELTA_LAYER = LayerKind(mixer="delta")
MIXED: dict[str, Any] = {"delta": DELTA, "pattern": (DELTA_LAYER, LayerKind())}
LLAMA = Decoder(vocab=256, context=128, layers=2, width=64, heads=4, kv_heads=2, head_dim=16, hidden=128, epsilon=1e-6)
PUBLISHED = {
    "llama": LLAMA,
    "mixtral": dataclasses.replace(
        LLAMA, epsilon=1e-5, hidden=None, position=Rope(theta=1e6),
        experts=Experts(count=4, active=2, hidden=96, balance=0.0)
    ),
    "gpt2": Decoder(
        vocab=256, context=128, layers=2, width=64, heads=4, feed_forward="gelu_tanh", position=Learned(),
        norm="layer", norm_bias=True, bias=True, tied=True,
    ),
}  # fmt: skip


ALWAYS, IN_CI = (
    ("llama", "qwen3_5"),
    ("llama", "qwen3_5", "lfm2_moe", "deepseek_v3", "gpt_oss", "gemma4", "gemma4_e2b", "llama4"),
)
EVERY_KIND = [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.nightly) for name in LANGUAGE_MODELS]
CACHED = [name if name in IN_CI else pytest.param(name, marks=pytest.mark.nightly) for name in LANGUAGE_MODELS]


def published(model: Decoder, folder: Path) -> Any:
    """The parameters of a checkpoint of Hugging Face's."""
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, "float32", sharding=here), model.params())
    with opened(folder) as tensors:
        return read_tree(tensors, model, shapes, folder)


def logits_of(model: Decoder, params: Any, token: np.ndarray, **more: Any) -> jax.Array:
    def compiled(params: Any, batch: Any) -> jax.Array:
        x, _ = model.activations(params, batch, jnp.ones(token.shape), SingleDeviceContext())
        return model.head.logits(x, model.unembedding(params), "float32")

    return jax.jit(compiled)(params, {"token": jnp.asarray(token), **more})


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_logits_and_loss_are_those_of_the_published_implementation(name: str) -> None:
    folder = SHARED / "data" / "hf_tiny" / name
    if not folder.is_dir():
        pytest.skip("the small published checkpoints are not beside this checkout")
    model, recorded = PUBLISHED[name], np.load(folder / "ref.npz")
    params = published(model, folder)
    token = recorded["input_ids"]
    np.testing.assert_allclose(logits_of(model, params, token), recorded["logits"], atol=2e-5)
    found = loss_alone(model, params, {"token": token[:, :-1], "target": token[:, 1:]})
    assert float(found.sum / found.weight) == pytest.approx(float(recorded["loss"]), rel=1e-5)


def gemma2_attention(q_TD: np.ndarray, k_TD: np.ndarray, v_TD: np.ndarray, scalar: float, cap: float) -> np.ndarray:
    """One causal head as Gemma 2's paper and code define it, in float64."""
    scores_TS = cap * np.tanh(q_TD @ k_TD.T * scalar**-0.5 / cap)
    weights_TS = np.exp(np.where(np.tril(np.ones_like(scores_TS)) > 0, scores_TS, -np.inf))
    return weights_TS / weights_TS.sum(-1, keepdims=True) @ v_TD


@pytest.mark.slow
@pytest.mark.parametrize("scalar", [None, 6.0])
def test_attention_scores_are_divided_by_the_root_of_the_query_scalar(scalar: float | None) -> None:
    """One layer whose feed-forward part is zero, against attention in NumPy."""
    dim, length, cap = 16, 12, 2.0
    model = Decoder(
        vocab=32, context=length, layers=1, width=dim, heads=1, position=Learned(), attention_softcap=cap,
        query_pre_attn_scalar=scalar, epsilon=1e-6,
    )  # fmt: skip
    draw = np.random.default_rng(0)
    params = jax.tree.map(lambda p: draw.normal(size=p.shape), model.params())
    params["blocks"]["mlp"] = jax.tree.map(np.zeros_like, params["blocks"]["mlp"])
    token = draw.integers(32, size=(1, length))
    x = params["embed"][token[0]] + params["position"]
    y = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * params["blocks"]["norm1"]["scale"][0]
    q, k, v = (y @ params["blocks"][name]["weight"][0, :, 0] for name in ("query", "key", "value"))
    x = x + gemma2_attention(q, k, v, scalar or dim, cap) @ params["blocks"]["out"]["weight"][0, 0]
    expected = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * params["norm"]["scale"] @ params["head"]
    found = logits_of(model, jax.tree.map(lambda p: jnp.asarray(p, jnp.float32), params), token)
    np.testing.assert_allclose(found[0], expected, atol=1e-5 * np.abs(expected).max())


def initial_state(model: Decoder) -> Any:
    return jax.jit(lambda: initial(model.params(), jax.random.key(0), "float32"))()


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY_KIND)
def test_no_token_attends_to_a_later_one_or_another_document(name: str) -> None:
    """By the gradient of the activation at each position with respect to every token's embedding."""
    model = LANGUAGE_MODELS[name]
    params, batch = initial_state(model), random_batch(model, 1)
    document = batch["document"][0]
    table = jax.random.normal(jax.random.key(1), (LENGTH, model.width)) * 0.1

    def out(table: jax.Array, place: jax.Array) -> jax.Array:
        own = {**batch, "token": jnp.arange(LENGTH, dtype=jnp.int32)[None]}  # a separate embedding row for each token
        x, _ = model.activations({**params, "embed": table}, own, jnp.ones((1, LENGTH)), SingleDeviceContext())
        return (x[0, place] * jnp.cos(jnp.arange(model.width))).sum()

    slope = jax.jit(jax.grad(out))
    slopes = np.stack([np.abs(slope(table, place)).sum(1) for place in range(LENGTH)])
    place = np.arange(LENGTH)
    attended = (place[:, None] >= place[None, :]) & (document[:, None] == document[None, :])
    assert (slopes[~attended] == 0).all()
    assert (slopes[attended & (place[:, None] - place[None, :] < (model.window or LENGTH))] > 0).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ALWAYS)
def test_a_packed_document_gives_the_logits_of_the_document_alone(name: str) -> None:
    model = LANGUAGE_MODELS[name]
    params, batch = initial_state(model), random_batch(model, 1)
    packed = logits_of(model, params, batch["token"], document=batch["document"], position=batch["position"])
    for number in np.unique(batch["document"]):
        (at,) = np.nonzero(batch["document"][0] == number)
        alone = logits_of(model, params, batch["token"][:, at])
        np.testing.assert_allclose(packed[:, at], alone, atol=2e-5)


@pytest.mark.slow
def test_a_target_of_minus_one_is_no_target() -> None:
    model = DECODER
    params, batch = initial_state(model), random_batch(model)
    found = loss_alone(model, params, batch)
    assert float(found.weight) == (batch["target"] >= 0).sum()
    changed = {**batch, "target": np.where(batch["target"] < 0, -1, batch["target"])}
    assert float(loss_alone(model, params, changed).sum) == float(found.sum)


@pytest.mark.slow
def test_the_loss_in_chunks_is_the_same() -> None:
    whole = dataclasses.replace(DECODER, z_loss=1e-2)
    params, batch = initial_state(whole), random_batch(whole)
    losses = [
        jax.jit(jax.value_and_grad(lambda p, model=model: model.loss(p, batch, SingleDeviceContext()).sum))(params)
        for model in (whole, dataclasses.replace(whole, loss_chunks=8))
    ]
    assert float(losses[1][0]) == pytest.approx(float(losses[0][0]), rel=1e-6)
    for a, b in zip(*(jax.tree.leaves(gradients) for _, gradients in losses), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())


@pytest.mark.slow
def test_a_padded_vocabulary_gives_the_loss_and_gradients_of_the_plain_one() -> None:
    plain, padded = (dataclasses.replace(DECODER, vocab=45, pad_vocab=pad, tied=True) for pad in (1, 8))
    assert padded.params()["embed"].shape == (48, 32)
    batch = random_batch(plain)
    found = [
        jax.jit(jax.value_and_grad(lambda p, m=m: m.loss(p, batch, SingleDeviceContext()).sum))(initial_state(m))
        for m in (plain, padded)
    ]
    assert float(found[1][0]) == pytest.approx(float(found[0][0]), rel=1e-6)
    np.testing.assert_allclose(found[1][1]["embed"][:45], found[0][1]["embed"], atol=1e-5)
    assert not found[1][1]["embed"][45:].any()
    assert logits_of(padded, initial_state(padded), batch["token"])[..., 45:].max() < -1e29


@pytest.mark.slow
@pytest.mark.parametrize(
    "remat", ["full", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("dots", "attention", "offload"))]
)
def test_rematerialisation_does_not_change_gradients(remat: Any) -> None:
    params, batch = initial_state(DECODER), random_batch(DECODER)

    def gradients(model: Decoder) -> Any:
        return jax.jit(jax.grad(lambda p: model.loss(p, batch, SingleDeviceContext()).sum))(params)

    plain, again = gradients(DECODER), gradients(dataclasses.replace(DECODER, remat=remat))
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6 * np.abs(b).max())


@pytest.mark.slow
@pytest.mark.parametrize("name", CACHED)
def test_generating_with_a_cache_gives_the_logits_of_the_whole_row(name: str) -> None:
    model = LANGUAGE_MODELS[name]
    params, token = initial_state(model), random_batch(model, 2)["token"]
    whole = logits_of(model, params, token)
    cache = KVCache.empty(model.kept(2, LENGTH), 2, "float32")

    @jax.jit
    def step(cache: KVCache, token: jax.Array) -> tuple[jax.Array, KVCache]:
        ctx = CachedContext(cache=cache)
        batch = {"token": token, "position": ctx.positions(token.shape[1])}
        x, _ = model.activations(params, batch, jnp.ones(token.shape), ctx)
        return model.head.logits(x, model.unembedding(params), "float32"), ctx.grown[-1]

    found = []
    for start, end in [(0, 7), *((i, i + 1) for i in range(7, LENGTH))]:
        logits, cache = step(cache, token[:, start:end])
        found.append(logits)
    np.testing.assert_allclose(np.concatenate(found, 1), whole, atol=3e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_5", "granite_hybrid", pytest.param("mamba_groups", marks=pytest.mark.nightly)])
def test_rows_of_several_lengths_are_continued_as_each_alone(name: str) -> None:
    """Shorter rows begin with empty slots, which change no state, also where biases are not zero."""
    model, draw = LANGUAGE_MODELS[name], np.random.default_rng(0)
    params = jax.tree.map(lambda x: x + 0.1 * draw.standard_normal(x.shape, np.float32), initial_state(model))
    token = np.array(random_batch(model, 1)["token"][0, :9])
    rows = np.stack([token, np.concatenate([[7, 7, 7], token[:6]])])  # the second has three empty slots

    @jax.jit
    def step(cache: KVCache, token: jax.Array) -> tuple[jax.Array, KVCache]:
        ctx = CachedContext(cache=cache)
        batch = {"token": token, "position": ctx.positions(token.shape[1])}
        x, _ = model.activations(params, batch, jnp.ones(token.shape), ctx)
        return model.head.logits(x[:, -1:], model.unembedding(params), "float32"), ctx.grown[-1]

    cache = dataclasses.replace(KVCache.empty(model.kept(2, LENGTH), 2, "float32"), pad_B=jnp.array([0, 3]))
    first, cache = step(cache, rows)
    second, _ = step(cache, np.array([[11], [12]]))
    for row, own in enumerate((token, token[:6])):
        alone = logits_of(model, params, np.append(own, 11 + row)[None])[0, -2:]
        np.testing.assert_allclose(np.stack([first[row, 0], second[row, 0]]), alone, atol=3e-5)


@pytest.mark.parametrize(("preset", "published"), [("mixtral-8x7b", 0.02), ("qwen3-30b-a3b", 0.001)])
def test_the_balance_of_a_preset_is_the_published_loss_at_an_even_load(preset: str, published: float) -> None:
    """Hugging Face adds c x count x sum over experts of (fraction of tokens x mean probability), over the tokens of all
    layers: c x active at an even load. In dtrain each layer adds `balance`."""
    model = section(Decoder, presets()[preset], "model", Problems())
    even = published * model.experts.count * model.experts.count * (model.experts.active / model.experts.count**2)
    assert model.layers * model.experts.balance == pytest.approx(even, rel=5e-3)


def test_the_balance_is_one_for_each_token_at_an_even_load() -> None:
    experts = Experts(count=4, active=1, hidden=8, renormalise=False)
    score = jnp.tile(0.25 + 0.01 * jnp.eye(4), (2, 2, 1))  # the tokens of each row choose the experts in turn
    hits = jnp.tile(jnp.eye(4), (2, 2, 1))
    assert float(experts._imbalance(score, hits, jnp.ones((2, 8)), SingleDeviceContext())) == pytest.approx(
        16, rel=1e-5
    )


def test_positions_restart_with_each_document() -> None:
    assert places_in(np.array([[0, 0, 1, 1, 1, 2]])).tolist() == [[0, 1, 0, 1, 2, 0]]


def test_a_router_whose_gates_are_always_one_is_refused() -> None:
    with pytest.raises(FieldError, match="with one active expert every gate is 1"):
        Experts(count=4, active=1, hidden=8)
    assert Experts(count=1, active=1, hidden=8).renormalise


def test_impossible_fields_are_refused() -> None:
    good: Any = {"vocab": 8, "context": 8, "layers": 4, "width": 8, "heads": 4}
    for wrong, message in (
        ({"heads": 3}, "heads = 3 does not divide width = 8"),
        ({"kv_heads": 3}, "kv_heads = 3 does not divide heads = 4"),
        ({"head_dim": 3}, "head_dim = 3 is odd"),
        ({"global_every": 2}, "set window"),
        ({"window_theta": 100.0}, "window_theta = 100.0: needs window"),
        ({"pre_norm": False}, "a layer must be normalised somewhere"),
        ({"qk_norm_joint": True}, "qk_norm_joint needs qk_norm"),
        ({"pattern": (LayerKind(mixer="delta"),)}, "layers have the mixer delta: set its sizes in model.delta"),
        ({"delta": DELTA}, "no layer of model.pattern has the mixer delta"),
        (
            {"delta": DELTA, "pattern": (LayerKind(mixer="delta", window=4),)},
            "neither a window, chunks nor rotary positions",
        ),
        (
            {"delta": DELTA, "pattern": (DELTA_LAYER, LayerKind()), "bias": True},
            "layers without attention have no biases",
        ),
        (
            {"delta": DELTA, "pattern": (DELTA_LAYER,), "qk_norm": True},
            "qk_norm is a setting of attention, which no layer",
        ),
        (
            {"delta": dataclasses.replace(DELTA, value_heads=3), "pattern": (LayerKind(mixer="delta"),)},
            "key_heads = 2 does not divide value_heads = 3",
        ),
    ):
        with pytest.raises(FieldError, match=message):
            Decoder(**(good | wrong))
    with pytest.raises(FieldError, match="active = 5 experts is more than count = 4"):
        Experts(count=4, active=5, hidden=8)
    with pytest.raises(FieldError, match="group_by ranks groups of experts, and there is one"):
        Experts(count=4, active=2, hidden=8, group_by=1)


def test_data_that_does_not_fit_is_refused_with_both_numbers() -> None:
    token = Feature((LENGTH,), "int32", 50, ("length",), "train.bin")
    assert DECODER.mismatch({"token": token}) == "the data's largest token is 49 (train.bin); the model's vocab is 48"
    long = dataclasses.replace(token, shape=(64,), values=None)
    assert DECODER.mismatch({"token": long}) == "rows of 64 tokens are longer than context = 32"


def test_flops_are_six_for_each_parameter_and_token_and_those_of_causal_attention() -> None:
    model = Decoder(vocab=100, context=64, layers=3, width=32, heads=4, hidden=48, tied=True, norm="rms")
    example = {"token": Feature((64,), "int32")}
    matrices = 3 * (4 * 32 * 32 + 3 * 32 * 48 + 2 * 32) + 32 + 100 * 32
    attention = 3 * 12 * 32 * 65 / 2
    assert model.flops(example, 5, model.params()).step == pytest.approx((6 * matrices + attention) * 64 * 5)
    moe = dataclasses.replace(model, experts=Experts(count=8, active=2, hidden=48))
    more = 3 * 6 * 64 * 5 * (3 * 32 * 48 + 32 * 8)
    assert moe.flops(example, 5, moe.params()).step == pytest.approx(
        model.flops(example, 5, model.params()).step + more
    )


def test_flops_of_other_mixers_are_those_of_their_parameters_and_states() -> None:
    """The state of a head is read twice and added to for each token; one of the two layers has attention."""
    own = {"delta": Delta(key_heads=2, value_heads=4, key_dim=8, value_dim=12), "convolution": ShortConvolution(taps=3)}
    for (name, sizes_of_it), products in zip(own.items(), (3 * 4 * 8 * 12, 3 * 32), strict=True):
        pattern = (LayerKind(mixer=name), LayerKind())  # pyright: ignore[reportArgumentType]
        sizes: dict[str, Any] = {"width": 32, "heads": 4, "hidden": 48, "tied": True, "pattern": pattern}
        model = Decoder(vocab=100, context=64, layers=2, **sizes, **{name: sizes_of_it})
        parameters = count({key: value for key, value in model.params().items() if key != "embed"}) + 100 * 32
        step = model.flops({"token": Feature((64,), "int32")}, 5, model.params()).step
        assert step == pytest.approx((6 * parameters + 12 * 32 * 65 / 2 + 6 * products) * 64 * 5)
