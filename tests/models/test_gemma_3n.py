"""Gemma 3n: several streams of activations, sparse layers, and what its config.json says."""

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dtrain.core.errors import DataError
from dtrain.models.altup import AltUp
from dtrain.models.decoder import Decoder
from dtrain.models.families.config import config_of
from dtrain.models.feed_forward import sparse
from dtrain.models.layer_pattern import LayerKind, shared_from
from dtrain.models.lora import Adapted, Lora
from dtrain.models.nn.param import initial
from dtrain.models.nn.single_device import SingleDeviceContext
from dtrain.models.rope import Rope
from tests.models.test_agreement import read_of

GEMMA_3N: Any = {
    "altup_lr_multiplier": 1.0, "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 25, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2048, "hidden_size_per_layer_input": 256,
    "intermediate_size": [16_384] * 35, "laurel_rank": 64, "num_attention_heads": 8, "num_hidden_layers": 35,
    "num_key_value_heads": 2, "num_kv_shared_layers": 15, "rope_local_base_freq": 10_000.0, "rope_scaling": None,
    "rope_theta": 1_000_000.0, "sliding_window": 512, "vocab_size": 262_400, "vocab_size_per_layer_input": 262_144,
    "altup_correct_scale": True, "max_position_embeddings": 32_768, "hidden_act": None,
}  # fmt: skip
"""Those of E4B, in the spelling of version 4.57 of transformers."""


def test_the_fields_of_gemma_3n_are_read() -> None:
    found = read_of("gemma3n_text", **GEMMA_3N)
    model, kinds = found.model, found.model.kinds
    assert (found.unserved, found.unchecked) == ((), ())
    assert (model.altup, model.laurel_rank, model.layer_inputs_vocab, model.logit_softcap) == (AltUp(), 64, 262_144, 30)
    assert [kind.sparsity for kind in kinds] == [0.95] * 10 + [0.0] * 25
    assert [kind.window for kind in kinds] == [512, 512, 512, 512, None] * 7
    assert set(shared_from(kinds)) == {None, 18, 19}
    assert set(model.ropes) == {Rope(theta=1e4), Rope(theta=1e6)}
    left_out = ("intermediate_size", "activation_sparsity_pattern", "rope_theta", "rope_local_base_freq")
    short = {name: value for name, value in GEMMA_3N.items() if name not in left_out}
    assert read_of("gemma3n_text", **short).model.kinds == kinds
    newer = {"full_attention": {"rope_type": "default", "rope_theta": 1e6},
             "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}  # fmt: skip
    assert read_of("gemma3n_text", **GEMMA_3N, rope_parameters=newer).model == model
    assert read_of("gemma3n_text", **GEMMA_3N | {"intermediate_size": 16_384}).model == model
    apart = read_of("gemma3n_text", **GEMMA_3N | {"intermediate_size": [64] * 30 + [96] * 5}).model
    assert (apart.hidden, [kind.hidden for kind in apart.kinds[29:31]]) == (64, [None, 96])
    config = config_of(model, "gemma3n")
    assert config is not None
    assert config["model_type"] == "gemma3n_text"


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"altup_correct_scale": False}, "altup_correct_scale: False"),
        ({"activation_sparsity_pattern": [0.5]},
         "activation_sparsity_pattern: [0.5], not a number for each of 35 layers"),
        ({"intermediate_size": [64] * 3}, "intermediate_size: [64, 64, 64], not a number for each of 35 layers"),
        ({"num_kv_shared_layers": 34}, "num_kv_shared_layers: 34, and no earlier layer of each type"),
        ({"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 262_400}, "hidden_size_per_layer_input: 0"),
        ({"layer_types": ["conv"] * 35}, "layer_types: conv, 35 of 35 layers"),
        ({"laurel_rank": 0}, "laurel_rank: 0"),
        ({"altup_coef_clip": None}, "altup_coef_clip: None"),
        ({"hidden_activation": "gelu"}, "hidden_activation: gelu"),
        ({"activation_sparsity_pattern": 1.0}, f"activation_sparsity_pattern: {[1.0] * 35}, not shares below 1"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope_scaling.rope_type: longrope"),
    ],
)  # fmt: skip
def test_what_gemma_3n_has_beside_is_refused(fields: dict[str, Any], problem: str) -> None:
    assert problem in read_of("gemma3n_text", **GEMMA_3N | fields).unserved


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"altup_num_inputs": 1}, "streams = 1: 2 or more"),
        ({"altup_active_idx": 4}, "active = 4 is none of the 4 streams"),
        ({"vocab_size_per_layer_input": 262_401}, "layer_inputs_vocab = 262401: needs layer_inputs"),
    ],
)
def test_what_gemma_3n_cannot_have_is_an_error(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=re.escape(message)):
        read_of("gemma3n_text", **GEMMA_3N | fields)


MODEL = Decoder(
    vocab=32, context=16, layers=2, width=8, heads=2, hidden=16, layer_inputs=4, altup=AltUp(streams=3, clip=0.5),
    laurel_rank=2, init=0.3, pattern=(LayerKind(sparsity=0.5), LayerKind()),
)  # fmt: skip
BATCH = {"token": jnp.arange(12).reshape(2, 6) % 32, "target": jnp.arange(1, 13).reshape(2, 6) % 32}


def loss(model: Any, params: Any, train: bool, batch: Any = BATCH) -> float:
    found = jax.jit(lambda params: model.loss(params, batch, SingleDeviceContext(train=train)))(params)
    return float(found.sum / found.weight)


def test_a_share_of_the_gates_is_zero() -> None:
    x = jax.random.normal(jax.random.key(0), (2, 3, 20_000)) * 5 + 2
    found = sparse(x, 0.7, x.shape[-1], SingleDeviceContext())
    np.testing.assert_allclose((found == 0).mean(-1), 0.7, atol=0.01)
    kept = found > 0
    np.testing.assert_allclose(jnp.where(kept, x - found, 0), jnp.where(kept, 2 + 0.5244 * 5, 0), atol=0.1)
    gradient = jax.grad(lambda x: sparse(x, 0.7, x.shape[-1], SingleDeviceContext()).sum())(jnp.zeros((1, 1, 8)))
    assert bool(jnp.isfinite(gradient).all())


def test_coefficients_are_bounded_in_training_alone() -> None:
    params = initial(MODEL.params(), jax.random.key(0), "float32")
    own = params["blocks"]["altup"]
    own |= {name: own[name] * 10 for name in ("predict", "correct")}
    bounded = own | {name: jnp.clip(own[name], -0.5, 0.5) for name in ("predict", "correct")}
    clipped = params | {"blocks": params["blocks"] | {"altup": bounded}}
    assert loss(MODEL, params, True) == loss(MODEL, clipped, True) == loss(MODEL, clipped, False)
    assert loss(MODEL, params, False) != loss(MODEL, params, True)


def test_every_matrix_of_streams_takes_an_adapter() -> None:
    """Those that are clipped, too; at first they change nothing."""
    adapted = Adapted(MODEL, Lora(rank=2, targets=("blocks.altup.*", "blocks.laurel.*", "altup.*")))
    names = set(adapted.params()["lora"])
    assert {"blocks.altup.predict", "blocks.altup.router", "blocks.laurel.left", "altup.merge.2"} <= names
    params = initial(MODEL.params(), jax.random.key(0), "float32")
    whole = {"base": params, "lora": initial(adapted.params()["lora"], jax.random.key(1), "float32")}
    assert loss(adapted, whole, True) == pytest.approx(loss(MODEL, params, True), rel=1e-6)


def test_tokens_beyond_the_table_of_layers_have_its_first_row() -> None:
    model = replace(MODEL, altup=None, layer_inputs_vocab=8)
    params = initial(model.params(), jax.random.key(0), "float32")
    table = params["blocks"]["table"]

    def changed(row: int) -> Any:
        return params | {"blocks": params["blocks"] | {"table": table.at[:, row].add(1.0)}}

    beyond = BATCH | {"token": BATCH["token"] + 8}  # all of them
    values = [loss(model, own, False, beyond) for own in (params, changed(0), changed(7))]
    assert values[0] != values[1]
    assert values[0] == values[2]
