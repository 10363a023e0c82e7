"""Layers of several kinds: the order in which they follow each other, and the loops that they compile to."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain.core.errors import FieldError, RecipeError
from dtrain.models.decoder import Decoder
from dtrain.models.layer_pattern import LayerKind, compressed, expanded, shared_from
from dtrain.models.moe import Experts
from dtrain.models.nn.attention import mean_attended_keys
from dtrain.models.nn.context import Layers
from dtrain.models.nn.single_device import SingleDeviceContext, repeated
from dtrain.models.rope import Learned, NoPosition, Rope
from dtrain.parallel.mesh import Mesh
from dtrain.parallel.shard_map import ShardMap
from dtrain.recipe.load import load
from tests.engines import DECODER, gradients, place, worst
from tests.models.test_decoder import initial_state, random_batch

SIZES: dict[str, Any] = {"vocab": 48, "context": 32, "layers": 7, "width": 32, "heads": 4, "hidden": 48, "init": 0.1}
KINDS = st.sampled_from([LayerKind(), LayerKind(window=4), LayerKind(position=NoPosition())])


@given(st.lists(KINDS, min_size=1, max_size=12))
def test_a_pattern_repeated_gives_the_layers_it_was_made_of(layers: list[LayerKind]) -> None:
    pattern = compressed(layers)
    assert Decoder(**SIZES | {"layers": len(layers)}, pattern=pattern).kinds == tuple(layers)
    assert len(pattern) <= len(layers)
    assert all(a != b for a, b in zip(expanded(pattern), expanded(pattern)[1:], strict=False)) or any(
        kind.count > 1 for kind in pattern
    )


def test_equal_neighbours_and_rounds_are_counted_once() -> None:
    local, whole = LayerKind(window=4), LayerKind()
    assert compressed([local] * 5) == (local,)
    assert compressed([local, local, local, whole] * 6) == (LayerKind(window=4, count=3), whole)
    assert compressed([whole, whole, local, local]) == (LayerKind(count=2), LayerKind(window=4, count=2))
    assert compressed([local, whole, local]) == (local, whole)  # the second round stops after its first layer


@pytest.mark.parametrize("layers", [1, 2, 3, 5, 6, 7, 9])
def test_loops_apply_the_layers_in_their_order(layers: int) -> None:
    """Each layer multiplies and adds, which do not commute."""

    def block(factor: float, layer: Any, x: jax.Array, _shared: Any, _ctx: Any) -> tuple[jax.Array, Any]:
        return factor * x + layer["add"], {"seen": layer["add"].sum()}

    near, far = partial(block, 2.0), partial(block, -3.0)
    add = np.random.default_rng(0).normal(size=(layers, 4)).astype(np.float32)
    expected = np.ones(4, np.float32)
    for number in range(layers):
        expected = (-3.0 if number % 3 == 2 else 2.0) * expected + add[number]
    ctx = SingleDeviceContext()
    for how in (Layers(), Layers("full"), Layers(unroll=2)):
        found, sums = jax.jit(lambda a, how=how: ctx.stack([near, near, far], {"add": a}, jnp.ones(4), how=how))(add)
        np.testing.assert_allclose(found, expected, rtol=1e-5)
        np.testing.assert_allclose(sums["seen"], add.sum(), rtol=1e-4, atol=1e-5)


def _scans(jaxpr: Any) -> int:
    """Loops in a program, those inside others included."""
    found = 0
    for equation in jaxpr.eqns:
        inner = [one for one in jax.tree.leaves(equation.params, is_leaf=_is_jaxpr) if _is_jaxpr(one)]
        found += (equation.primitive.name == "scan") + sum(_scans(getattr(one, "jaxpr", one)) for one in inner)
    return found


def _is_jaxpr(x: Any) -> bool:
    return hasattr(x, "eqns") or hasattr(x, "jaxpr")


@pytest.mark.parametrize(("after", "rest"), [(1, 0), (3, 0), (1, 1), (1, 7)])
def test_an_order_that_repeats_inside_a_round_is_a_loop(after: int, rest: int) -> None:
    """Of two groups: four times two near and one far, then others; each layer multiplies and adds. And with the first
    layers of a second round."""
    order = "nnf" * 4 + "m" * after
    layers = order + order[:rest]
    factors = {"n": 2.0, "f": -3.0, "m": 0.5}

    def block(factor: float, layer: Any, x: jax.Array, _shared: Any, _ctx: Any) -> tuple[jax.Array, Any]:
        return factor * x + layer["add"], {"seen": layer["add"].sum()}

    made = {kind: partial(block, factor) for kind, factor in factors.items()}
    far = layers.count("f")
    add = {"near": np.random.default_rng(0).normal(size=(len(layers) - far, 4)).astype(np.float32)}
    add["far"] = np.random.default_rng(1).normal(size=(far, 4)).astype(np.float32)
    groups, expected, left = ["far" if kind == "f" else "near" for kind in order], np.ones(4, np.float32), dict(add)
    for kind, group in zip(layers, groups + groups[:rest], strict=True):
        expected, left[group] = factors[kind] * expected + left[group][0], left[group][1:]

    def run(add: Any) -> tuple[jax.Array, Any]:
        stacks = {name: {"add": value} for name, value in add.items()}
        return SingleDeviceContext().stack(
            [made[kind] for kind in order], stacks, jnp.ones(4), how=Layers(groups=groups)
        )

    found, sums = jax.jit(run)(add)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(sums["seen"], sum(value.sum() for value in add.values()), rtol=1e-4)
    # the order, two near, and what follows; then one of a second round alone, or two near twice
    assert _scans(jax.make_jaxpr(run)(add).jaxpr) == 2 + (after > 1) + (rest > 0) + 2 * (rest > 1)


def test_runs_are_repeated_where_the_longest_repetition_is() -> None:
    a, b, c = (("a", "", 4), ("b", "", 1), ("c", "", 3))
    assert repeated([a, b, a, b, c]) == [([a, b], 2), ([c], 1)]
    assert repeated([c, a, b, a, b, a, b, a]) == [([c], 1), ([a, b], 3), ([a], 1)]
    assert repeated([a, b, c]) == [([a], 1), ([b], 1), ([c], 1)]


KEYLESS = {"window": 6, "shared_keys": True}


@pytest.mark.slow
def test_shared_keys_are_those_of_the_last_layer_before_that_has_the_same_kind_of_keys() -> None:
    """Changed keys of that layer alone change what the sharing layers give: here all that follows is theirs."""
    local, whole = LayerKind(window=6), LayerKind()
    model = Decoder(**SIZES | {"layers": 6}, pattern=(local, local, whole, *(LayerKind(**KEYLESS, count=2),), whole))
    assert shared_from(model.kinds) == (None, None, None, 1, 1, None)
    assert [layer[1] is None for layer in model.kept(2, 16)] == [False] * 3 + [True] * 2 + [False]  # of a cache
    assert [kind.group(experts=False) for kind in model.kinds[1:4]] == ["attention", "attention", "attention_keyless"]
    params, batch = initial_state(model), random_batch(model)

    def activations(blocks: Any) -> jax.Array:
        weight = jnp.ones(batch["token"].shape)
        return model.activations(params | {"blocks": blocks}, batch, weight, SingleDeviceContext())[0]

    def alone(layer: int) -> float:
        """The change of the output, where no layer but those with shared keys has an output of its attention."""
        blocks = jax.tree.map(lambda x: x, params["blocks"])
        blocks["attention"]["out"]["weight"] = jnp.zeros_like(blocks["attention"]["out"]["weight"])
        before = activations(blocks)
        key = blocks["attention"]["key"]["weight"]
        blocks["attention"]["key"]["weight"] = key.at[layer].multiply(-1.0)
        return float(jnp.abs(activations(blocks) - before).max())

    changes = [alone(layer) for layer in range(4)]
    assert changes[1] > 1e-3
    assert changes[0] == changes[2] == changes[3] == 0


@pytest.mark.slow
def test_a_query_attends_to_its_chunk_of_its_document() -> None:
    """Rows of chunks of 5 positions, packed with documents, are those of the chunks alone."""
    draw, size = np.random.default_rng(0), 5
    chunked = Decoder(**SIZES, pattern=(LayerKind(chunk=size, position=NoPosition()),))
    plain = Decoder(**SIZES, position=NoPosition())
    params = initial_state(chunked)
    token = draw.integers(0, 48, (1, 23)).astype(np.int32)
    document, position = np.repeat([[0, 1]], [9, 14], axis=1), np.r_[np.arange(9), np.arange(14)][None]

    def activations(model: Decoder, **batch: Any) -> np.ndarray:
        rows = {name: jnp.asarray(value, jnp.int32) for name, value in batch.items()}
        return np.asarray(model.activations(params, rows, jnp.ones(rows["token"].shape), SingleDeviceContext())[0][0])

    found = activations(chunked, token=token, document=document, position=position)
    for start, after in ((0, 5), (5, 9), (9, 14), (14, 19), (19, 23)):
        alone = activations(plain, token=token[:, start:after])
        np.testing.assert_allclose(found[start:after], alone, rtol=0, atol=2e-6)
    whole = activations(chunked, token=token[:, :9])  # without documents, from position 0
    np.testing.assert_allclose(whole, found[:9], rtol=0, atol=2e-6)


def test_keys_of_chunks_are_counted() -> None:
    keys = [1 + position % 5 for position in range(23)]
    assert mean_attended_keys(23, None, 5) == pytest.approx(np.mean(keys))
    assert mean_attended_keys(4, None, 5) == mean_attended_keys(4, None)


def test_a_pattern_says_what_window_and_global_every_say() -> None:
    plain = Decoder(**SIZES, window=6, global_every=3, window_theta=100.0)
    local = LayerKind(window=6, count=2, position=Rope(theta=100.0))
    other = Decoder(**SIZES, pattern=(local, LayerKind()))
    assert other.kinds == plain.kinds
    assert plain.flops(*_rows(), plain.params()) == other.flops(*_rows(), other.params())


def _rows() -> tuple[Any, int]:
    return {"token": np.zeros(32)}, 4


@pytest.mark.slow
def test_kinds_in_a_pattern_differ_and_are_the_layers_they_name() -> None:
    """Where all layers have a window, or none rotates, the model is that of one kind; a mixture is neither."""
    params, batch = initial_state(Decoder(**SIZES)), random_batch(Decoder(**SIZES))

    def loss(**how: Any) -> float:
        model = Decoder(**SIZES | how)
        return float(jax.jit(lambda p: model.loss(p, batch, SingleDeviceContext()).sum)(params))

    still, local = LayerKind(position=NoPosition()), LayerKind(window=6)
    assert loss(pattern=(still,)) == pytest.approx(loss(position=NoPosition()), rel=1e-6)
    assert loss(pattern=(local, local)) == pytest.approx(loss(window=6), rel=1e-6)
    values = [loss(), loss(pattern=(still,)), loss(pattern=(LayerKind(count=2), still)), loss(pattern=(local, still))]
    assert len({round(value, 2) for value in values}) == len(values)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [Mesh(data=1, pipeline=2, fsdp=2), Mesh(data=1, fsdp=2, tensor=2)])
def test_loops_inside_a_round_give_the_losses_and_gradients_of_one_device(mesh: Mesh) -> None:
    pattern = (LayerKind(window=6, count=2), LayerKind(position=NoPosition()))
    model = Decoder(**SIZES | {"layers": 6}, pattern=pattern, remat="dots")
    one, several = (gradients(place(model, ShardMap(), mesh)) for mesh in (Mesh(data=1), mesh))
    assert several[0] == pytest.approx(one[0], rel=2e-6)
    assert worst(several[1], one[1]) < 1e-5


def test_a_stage_holds_whole_rounds(tmp_path: Any) -> None:
    path = tmp_path / "one.yaml"
    path.write_text(
        "model: {kind: decoder, vocab: 256, layers: 6, width: 32, heads: 4, pattern: [{window: 8}, {}]}\n"
        'data: {kind: text, files: ["{dtrain}/data/alice.txt"], length: 32}\n'
        "optimizer: {kind: adamw, lr: 1e-3}\nbatch: 12\nsteps: 4\n"
    )
    assert load(path, ["mesh={data: 1, pipeline: 3}"]).model.kinds == (LayerKind(window=8), LayerKind()) * 3
    with pytest.raises(RecipeError, match="3 layers per stage, not a multiple of 2, after which their kinds repeat"):
        load(path, ["mesh={data: 1, pipeline: 2}"])
    assert load(path, ["model.layers=5"]).model.structure.layers == 5
    with pytest.raises(RecipeError, match="did you mean 'window'"):
        load(path, ["model.pattern=[{windo: 8}]"])


def test_what_a_pattern_excludes_is_refused() -> None:
    pattern = (LayerKind(window=8), LayerKind())
    for wrong, message in (
        ({"window": 8}, "window and pattern exclude each other"),
        ({"window": 8, "global_every": 2}, "window and pattern exclude"),
        ({"position": Learned()}, "layers of a model with learned positions have no kinds"),
        ({"position": Rope(partial=0.1)}, "head_dim = 8 x position.partial = 0.1 is 0"),
    ):
        with pytest.raises(FieldError, match=message):
            Decoder(**SIZES, pattern=pattern, **wrong)
    for kinds, message in (
        (({"chunk": 4, "window": 4},), "chunk and window exclude each other"),
        (({"shared_keys": True},), "no earlier layer has keys of its own of the same window"),
        (({}, KEYLESS), "no earlier layer has keys of its own of the same window"),
        (({}, {"shared_keys": True, "shared_values": True}), "have their values from an earlier layer"),
        (({}, {"head_dim": 4, "shared_keys": True}), "no earlier layer has keys"),
    ):
        with pytest.raises(FieldError, match=message):
            Decoder(**SIZES, pattern=tuple(LayerKind(**kind) for kind in kinds))
    mixture = Experts(count=4, active=2, hidden=8)
    with pytest.raises(FieldError, match="these layers have experts"):
        Decoder(**SIZES, pattern=(LayerKind(hidden=8),), experts=mixture)
    for wrong, message in (
        ({"attention_multiplier": 0.1, "query_pre_attn_scalar": 4.0}, "exclude each other"),
        ({"parallel": True, "pre_norm": False, "post_norm": True}, "read what pre_norm normalises"),
        ({"norm_scale": False, "norm_bias": True}, "leaves norm_bias and norm_offset nothing"),
        ({"qk_norm_rotated": True}, "needs qk_norm"),
        ({"qk_norm_plain": True, "qk_norm": True}, "qk_norm and qk_norm_plain exclude each other"),
    ):
        with pytest.raises(FieldError, match=message):
            Decoder(**SIZES, **wrong)
    assert DECODER.round == (LayerKind(window=12), LayerKind())
