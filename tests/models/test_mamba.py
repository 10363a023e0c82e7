"""State-space layers: the recurrence token by token, and what config.json says of them."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dtrain.core.errors import DataError, FieldError
from dtrain.models.families.config import config_of
from dtrain.models.mamba import Mamba
from dtrain.models.nn.param import initial
from dtrain.models.nn.param import normal as drawn
from dtrain.models.nn.single_device import SingleDeviceContext
from dtrain.models.rope import NoPosition, Rope
from tests.models.test_agreement import read_of


def step_by_step(mamba: Mamba, own: Any, y_TE: np.ndarray, document_T: np.ndarray, epsilon: float) -> np.ndarray:
    """One row in float64, each token after the other, as in Dao and Gu 2024 (listing 1 and equation 1)."""
    own, shared = jax.tree.map(lambda x: np.asarray(x, np.float64), own), mamba.heads // mamba.groups
    silu = lambda x: x / (1 + np.exp(-x))  # noqa: E731
    found = np.zeros_like(y_TE)
    state = np.zeros((mamba.heads, mamba.state, mamba.head_dim))
    for at in range(len(y_TE)):
        if at and document_T[at] != document_T[at - 1]:
            state[:] = 0

        def convolved(name: str, at: int = at) -> np.ndarray:
            total = own[f"{name}_bias"].copy()
            for back in range(min(mamba.taps, at + 1)):
                if document_T[at - back] == document_T[at]:
                    taps = own[f"{name}_taps"][..., mamba.taps - 1 - back]
                    total += taps * np.tensordot(y_TE[at - back], own[name], 1)
            return silu(total)

        x_HV, b_GK, c_GK = (convolved(name) for name in ("value", "key", "query"))
        b_HK, c_HK = (np.repeat(x, shared, 0) for x in (b_GK, c_GK))
        step_H = np.log1p(np.exp(y_TE[at] @ own["decay"] + own["shift"]))
        state = np.exp(-np.exp(own["rate"]) * step_H)[:, None, None] * state
        state += b_HK[:, :, None] * (step_H[:, None] * x_HV)[:, None]
        out_HV = np.einsum("HK,HKV->HV", c_HK, state) + own["skip"][:, None] * x_HV
        out_HV *= silu(np.tensordot(y_TE[at], own["gate"], 1))
        by_group = out_HV.reshape(mamba.groups, -1)
        by_group /= np.sqrt(np.square(by_group).mean(-1, keepdims=True) + epsilon)
        found[at] = np.tensordot(by_group.reshape(out_HV.shape) * own["scale"], own["out"], 2)
    return found


@pytest.mark.parametrize("groups", [1, 2])
def test_chunks_give_what_each_token_after_the_other_gives(groups: int) -> None:
    """Over several chunks, of which two documents share one."""
    mamba, width, length = Mamba(heads=4, head_dim=3, state=5, groups=groups, taps=3), 6, 150
    declared = mamba.params(width, drawn(0.5), drawn(0.5))
    own = initial(declared, jax.random.key(0), "float32")
    own |= {name: value + 0.3 * jax.random.normal(jax.random.key(1), value.shape) for name, value in own.items()}
    y_BTE = jax.random.normal(jax.random.key(2), (1, length, width))
    document_BT = (jnp.arange(length) >= 100).astype(jnp.int32)[None]
    found = mamba.apply(own, y_BTE, document_BT, 1e-5, SingleDeviceContext())[0]
    wanted = step_by_step(mamba, own, np.asarray(y_BTE[0], np.float64), np.asarray(document_BT[0]), 1e-5)
    np.testing.assert_allclose(found, wanted, atol=2e-5 * np.abs(wanted).max())


HYBRID: Any = {
    "hidden_size": 32, "num_hidden_layers": 5, "num_attention_heads": 4, "num_local_experts": 0, "mamba_n_heads": 8,
    "shared_intermediate_size": 40, "mamba_d_state": 16, "layer_types": ["mamba", "mamba", "attention"] + ["mamba"] * 2,
    "position_embedding_type": "nope", "rope_theta": 10_000,
}  # fmt: skip


def test_the_fields_of_granite_4_are_read() -> None:
    found = read_of("granitemoehybrid", **HYBRID)
    model = found.model
    assert (found.unserved, found.unchecked, model.experts, model.hidden) == ((), (), None, 40)
    assert model.mamba == Mamba(heads=8, head_dim=8, state=16)
    assert [kind.mixer for kind in model.kinds] == ["mamba", "mamba", "attention", "mamba", "mamba"]
    assert isinstance(model.position, NoPosition)
    newer = ["linear_attention", "linear_attention", "full_attention", "linear_attention", "linear_attention"]
    for limit in ([0.0, math.inf], [0.0, "Infinity"], [0.0, {"__float__": "Infinity"}]):
        assert read_of("granitemoehybrid", **HYBRID | {"layer_types": newer, "time_step_limit": limit}).model == model
    assert config_of(model)["layer_types"] == HYBRID["layer_types"]  # pyright: ignore[reportOptionalSubscript]
    plain = {"layer_types": ["attention"] * 5, "position_embedding_type": "rope"}
    dense = read_of("granitemoehybrid", **HYBRID | plain).model
    assert (dense.mamba, dense.pattern, dense.position) == (None, (), Rope())
    assert read_of("granitemoehybrid", **HYBRID | {"num_local_experts": 4}).model.experts.shared_size == 40


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"mamba_proj_bias": True}, "mamba_proj_bias: True"),
        ({"mamba_conv_bias": False}, "mamba_conv_bias: False"),
        ({"time_step_limit": [0.0, 0.1]}, "time_step_limit: [0.0, 0.1]"),
        ({"mamba_d_head": 16}, "mamba_n_heads x mamba_d_head: 128, not mamba_expand: 64"),
        ({"normalization_function": "layernorm"}, "normalization_function: layernorm"),
    ],
)
def test_what_state_space_layers_have_beside_is_refused(fields: dict[str, Any], problem: str) -> None:
    assert problem in read_of("granitemoehybrid", **HYBRID | fields).unserved


def test_biases_of_attention_and_of_the_feed_forward_layer_alone() -> None:
    """Together they are not those of every product: states have none."""
    given = {"mamba_n_heads": 8, "mamba_d_state": 4, "attention_bias": True, "mlp_bias": True, "hidden_size": 32,
             "attn_layer_indices": [1]}  # fmt: skip
    model = read_of("bamba", **given).model
    assert (model.bias, model.qkv_bias, model.out_bias, model.mlp_bias) == (False, True, True, True)


def test_impossible_sizes_are_errors() -> None:
    with pytest.raises(FieldError, match="groups = 3 does not divide heads = 4"):
        Mamba(heads=4, head_dim=4, state=4, groups=3)
    with pytest.raises(DataError, match="mamba_n_heads: 0; it must be a whole number of at least 1"):
        read_of("granitemoehybrid", **HYBRID | {"mamba_n_heads": 0})
