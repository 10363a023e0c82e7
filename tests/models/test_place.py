"""Parameters in the tensors of published files: what is written is read back, whole and in parts."""

import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from dtrain.checkpoint.tensors import InMemory
from dtrain.core.errors import DataError, RecipeError
from dtrain.models.altup import AltUp
from dtrain.models.decoder import Decoder
from dtrain.models.delta import Delta
from dtrain.models.latent import Latent
from dtrain.models.layer_pattern import LayerKind
from dtrain.models.lora import ADAPTERS
from dtrain.models.mamba import Mamba
from dtrain.models.moe import Experts
from dtrain.models.nn import param as declare
from dtrain.models.nn.param import Param, paths
from dtrain.models.place import Place
from dtrain.models.rope import Learned
from dtrain.models.short_convolution import ShortConvolution
from dtrain.weights.peft import adapter_tensors
from dtrain.weights.read import NESTED, base_names, find_tensors, prefixed

SIZES: dict[str, Any] = {"vocab": 16, "context": 8, "layers": 3, "width": 8, "heads": 4, "hidden": 12}
WITH_BIASES: dict[str, Any] = {"norm": "layer", "norm_bias": True, "bias": True, "feed_forward": "gelu"}
LINEAR: dict[str, Any] = {
    "attention_gate": True, "delta": Delta(key_heads=2, value_heads=4, key_dim=3, value_dim=5, taps=4),
    "pattern": (LayerKind(mixer="delta"), LayerKind()),
}  # fmt: skip
GATED = Experts(count=4, active=2, hidden=6, shared=1, shared_hidden=10)
MODELS: dict[str, Decoder] = {
    "gpt2": Decoder(**SIZES, **WITH_BIASES, position=Learned(), tied=True),
    "opt": Decoder(**SIZES, **WITH_BIASES, position=Learned(), tied=True),
    "gpt_bigcode": Decoder(**SIZES, **WITH_BIASES, position=Learned(), kv_heads=1, tied=True),
    "gpt_neox": Decoder(**SIZES, **WITH_BIASES),
    "codegen": Decoder(**SIZES, norm="layer", norm_bias=True, mlp_bias=True, feed_forward="gelu_tanh", parallel=True,
                       head_bias=True),
    "phi": Decoder(**SIZES, **WITH_BIASES, parallel=True, head_bias=True),
    "phi3": Decoder(**SIZES, kv_heads=2),
    "gpt_oss": Decoder(**SIZES, sinks=True, qkv_bias=True, out_bias=True, feed_forward="swiglu_clamped",
                       experts=Experts(count=4, active=2, hidden=6, biases=True, router_bias=True)),
    "granitemoe": Decoder(**SIZES, experts=GATED),
    "granitemoe_swa": Decoder(**SIZES, experts=GATED, sinks=True),
    "ernie4_5_moe": Decoder(**SIZES, experts=Experts(count=4, active=2, hidden=6, shared=2, bias=True)),
    "deepseek": Decoder(**SIZES, head_dim=6, latent=Latent(rank=5, query_rank=7, rotated=2, value_dim=3),
                        pattern=(LayerKind(dense=True), LayerKind(count=2)),
                        experts=Experts(count=4, active=2, hidden=6, shared=1, bias=True)),
    "qwen3_5": Decoder(**SIZES, **LINEAR),
    "lfm2": Decoder(**SIZES, qk_norm=True, convolution=ShortConvolution(),
                    pattern=(LayerKind(mixer="convolution"), LayerKind())),
    "gemma4": Decoder(**SIZES, kv_heads=4, head_dim=4, qk_norm=True, value_norm=True, post_norm=True, layer_scale=True,
                      tied=True, experts=Experts(count=4, active=2, hidden=6, beside=True),
                      pattern=(LayerKind(window=4), LayerKind(head_dim=6, kv_heads=2, shared_values=True))),
    "llama4": Decoder(**SIZES, experts=Experts(count=4, active=1, hidden=6, shared=1, score="sigmoid", before=True,
                                               renormalise=False), pattern=(LayerKind(dense=True), LayerKind())),
    "gemma4 with inputs": Decoder(**SIZES, head_dim=4, qk_norm=True, value_norm=True, post_norm=True, layer_inputs=5,
                                  pattern=(LayerKind(window=4), LayerKind(), LayerKind(shared_keys=True, hidden=10))),
    "granitemoehybrid": Decoder(**SIZES, experts=replace(GATED, count=3), mamba=Mamba(heads=4, head_dim=5, state=3),
                                pattern=(LayerKind(mixer="mamba"), LayerKind(), LayerKind(mixer="mamba"))),
    "bamba": Decoder(**SIZES, mamba=Mamba(heads=4, head_dim=5, state=3, groups=2),
                     pattern=(LayerKind(mixer="mamba"), LayerKind())),
    "gemma3n": Decoder(**SIZES, head_dim=4, qk_norm=True, value_norm=True, post_norm=True, layer_inputs=5,
                       layer_inputs_vocab=7, laurel_rank=3, altup=AltUp(streams=3), tied=True,
                       pattern=(LayerKind(window=4, sparsity=0.5), LayerKind(), LayerKind(shared_keys=True))),
    "qwen3_5_moe": Decoder(**SIZES, **LINEAR, experts=Experts(count=4, active=2, hidden=6, shared=1, shared_gate=True)),
    "qwen3_next": Decoder(**SIZES, **LINEAR, experts=Experts(count=4, active=2, hidden=6, shared=1, shared_gate=True)),
    "qwen3_5_moe_joint": Decoder(**SIZES, **LINEAR, experts=replace(GATED, shared_gate=True)),
}  # fmt: skip


def written(own: dict[str, Param], table: Any, values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors of a file, as `export` makes them."""
    tensors, parts = dict[str, np.ndarray](), dict[str, dict[int, np.ndarray]]()
    for name, param in own.items():
        place: Place = table[name]
        names = place.names(param)
        for tensor, part in zip(names, values[name].reshape(len(names), -1), strict=True):
            parts.setdefault(tensor, {})[place.key] = place.write(part, param)
            if (whole := place.joined(parts[tensor])) is not None:
                tensors[tensor] = whole
                assert whole.shape == place.shape(param), tensor
    assert parts.keys() == tensors.keys()
    return tensors


@pytest.mark.parametrize("family", MODELS)
def test_what_is_written_is_read_back_whole_and_in_parts(family: str) -> None:
    model, draw = MODELS[family], np.random.default_rng(0)
    (naming,) = [one for one in model.namings if one.family == family.partition(" ")[0]]
    declared = model.params()
    own = dict(zip(jax.tree.leaves(paths(declared)), jax.tree.leaves(declared), strict=True))
    values = {name: draw.normal(size=param.shape).astype(np.float32) for name, param in own.items()}
    tensors = written(own, naming.places, values)
    assert sum(x.size for x in tensors.values()) == sum(x.size for x in values.values()) + (
        2 * model.width if family == "opt" else 0  # rows of no position
    )

    def load(name: str, index: tuple[slice, ...]) -> np.ndarray:
        assert len(index) == tensors[name].ndim, name
        assert all(part.start < part.stop <= size for part, size in zip(index, tensors[name].shape, strict=True)), name
        return tensors[name][index]

    for name, param in own.items():
        whole = [slice(0, size) for size in param.shape]
        halves = [
            [slice(size // 2, size) if number == dim else part for number, part in enumerate(whole)]
            for dim, size in enumerate(param.shape)
            if size > 1
        ]
        for index in (whole, *halves):
            found = naming.places[name].read(load, param, index)
            np.testing.assert_array_equal(found, values[name][tuple(index)], err_msg=f"{name} {index}")


ENCODERS = ("vision_tower.encoder.a", "model.audio_tower.b", "model.embed_vision.c", "multi_modal_projector.d")


def test_a_decoder_inside_a_model_with_images_is_found() -> None:
    """`model.` is `model.language_model.` there; the image encoder and the layers for further tokens are left out."""
    model = MODELS["qwen3_5_moe_joint"]
    declared = model.params()
    own = dict(zip(jax.tree.leaves(paths(declared)), jax.tree.leaves(declared), strict=True))
    (naming,) = [one for one in model.namings if one.family == "qwen3_5_moe_joint"]
    plain = written(own, naming.places, {name: np.zeros(param.shape, np.float32) for name, param in own.items()})
    names = [prefixed(NESTED, name) for name in plain]
    assert "model.language_model.embed_tokens.weight" in names
    assert "lm_head.weight" in names
    others, said = dict.fromkeys(("model.visual.blocks.0.norm1", *ENCODERS, "mtp.fc.weight"), np.zeros(2)), []
    tensors = InMemory(dict(zip(names, plain.values(), strict=True)) | others)
    found = find_tensors(tensors, model, own, Path("folder"), say=said.append)
    assert found.prefix == NESTED
    assert said == ["folder: not read: 1 tensor of layers that predict further tokens",
                    "folder: not read: 5 tensors of encoders of images or sounds"]  # fmt: skip
    assert {name: found.table[name] for name in own} == {name: naming.places[name] for name in own}


OWN = SimpleNamespace(namings=())
"""A model without published names."""


def test_of_a_users_model_nothing_is_taken_for_an_encoder() -> None:
    """Its own tensors may have such names, and others are refused, whatever their names."""
    own, said = {"visual.weight": Param((2,), "_", declare.zeros)}, list[str]()
    find_tensors(InMemory({"visual.weight": np.zeros(2)}), OWN, own, Path("folder"), say=said.append)
    assert said == []
    for name in ("vision_tower.weight", "mtp.weight", "layers.2.eh_proj.weight"):
        with pytest.raises(DataError, match=f"{re.escape(name)} is not a parameter of the model"):
            find_tensors(InMemory({"visual.weight": np.zeros(2), name: np.zeros(2)}), OWN, own, Path("folder"))


def test_keys_that_layers_with_shared_keys_do_not_use_are_left_out() -> None:
    """As published files have them; those of other layers are not."""
    model = MODELS["gemma4 with inputs"]
    declared, said = model.params(), list[str]()
    own = dict(zip(jax.tree.leaves(paths(declared)), jax.tree.leaves(declared), strict=True))
    places = model.namings[0].places
    plain = written(own, places, {name: np.zeros(param.shape, np.float32) for name, param in own.items()})
    layer = "model.layers.{}.self_attn.k_norm.weight"
    more = {layer.format(2): np.zeros(4), "model.layers.2.self_attn.v_proj.weight": np.zeros((8, 4))}
    assert not plain.keys() & more.keys()
    find_tensors(InMemory(plain | more), model, own, Path("folder"), say=said.append)
    assert said == ["folder: not read: 2 tensors of keys and values that layers with shared keys do not use"]
    with pytest.raises(DataError, match=r"layers\.3\.self_attn\.k_norm\.weight is not a parameter of the model"):
        find_tensors(InMemory(plain | {layer.format(3): np.zeros(4)}), model, own, Path("folder"))


def test_adapters_get_the_names_of_the_family_that_the_base_was_imported_as() -> None:
    model = Decoder(**SIZES, kv_heads=2)
    declared = model.params()
    own = dict(zip(jax.tree.leaves(paths(declared)), jax.tree.leaves(declared), strict=True))
    for kind, alone in (("phi3", False), ("llama", True), ("", True), ("unheard", True)):
        place = base_names(model, own, kind)["blocks.query.weight"]
        assert place.alone is alone, kind
    fused = {name: (place, own[name]) for name, place in base_names(model, own, "phi3").items() if name in own}
    pair = {"a": np.zeros((3, 8, 2)), "b": np.zeros((3, 2, 4, 2))}
    with pytest.raises(RecipeError, match=r"blocks.query.weight is not a matrix \(out, in\) of its own"):
        adapter_tensors({f"{ADAPTERS}.blocks.query.weight": pair}, fused)


def test_adapters_of_layers_without_experts_beside_some_are_refused() -> None:
    model = MODELS["deepseek"]
    declared = model.params()
    own = dict(zip(jax.tree.leaves(paths(declared)), jax.tree.leaves(declared), strict=True))
    places = {name: (place, own[name]) for name, place in base_names(model, own, "").items() if name in own}
    with pytest.raises(RecipeError, match="PEFT loses adapters of layers without experts"):
        adapter_tensors({f"{ADAPTERS}.blocks.dense.mlp.up": {}}, places)
