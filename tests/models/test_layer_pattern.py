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
from dtrain.models.layer_pattern import LayerKind, compressed, expanded
from dtrain.models.nn.context import Layers
from dtrain.models.nn.single_device import SingleDeviceContext
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
    for wrong, message in (
        ({"attention_multiplier": 0.1, "query_pre_attn_scalar": 4.0}, "exclude each other"),
        ({"parallel": True, "pre_norm": False, "post_norm": True}, "read what pre_norm normalises"),
        ({"norm_scale": False, "norm_bias": True}, "leaves norm_bias and norm_offset nothing"),
        ({"qk_norm_rotated": True}, "needs qk_norm"),
    ):
        with pytest.raises(FieldError, match=message):
            Decoder(**SIZES, **wrong)
    assert DECODER.round == (LayerKind(window=12), LayerKind())
