"""Layers of linear attention by the gated delta rule in a config.json, read and written (Qwen 3.5)."""

from typing import TYPE_CHECKING

from dtrain.core.types import JsonObject
from dtrain.models.delta import Delta
from dtrain.models.families import rotary
from dtrain.models.families.fields import Fields
from dtrain.models.families.layers import FULL
from dtrain.models.families.part import Part
from dtrain.models.families.parts import biases, fixed
from dtrain.models.layer_pattern import LayerKind, compressed
from dtrain.models.rope import Rope

if TYPE_CHECKING:
    from dtrain.models.decoder import Decoder

LINEAR = "linear_attention"
EVERY = "full_attention_interval"
SIZES = {
    "key_heads": "linear_num_key_heads", "value_heads": "linear_num_value_heads", "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim", "taps": "linear_conv_kernel_dim",
}  # fmt: skip
MULTIMODAL = ("mrope_section", "mrope_interleaved")
"""How the positions of images are rotated. Those of a text are one number for each token, which is rotated as usual."""


def delta_layers() -> Part:
    """The type of each layer, and the sizes of those of linear attention: each but every fourth has it."""

    def read(fields: Fields) -> JsonObject:
        layers, every = fields("num_hidden_layers"), fields.maybe(EVERY) or 4
        types = fields.maybe("layer_types") or [
            FULL if number % every == 0 else LINEAR for number in range(1, layers + 1)
        ]
        if len(types) != layers or set(types) - {FULL, LINEAR}:
            fields.refuse(f"layer_types: {', '.join(sorted(set(types)))}, {len(types)} of {layers} layers")
            return {}
        fields.sources["pattern"] = f"layer_types: {types.count(LINEAR)} of {layers} layers are {LINEAR}"
        sizes = {ours: fields(theirs, f"delta.{ours}") for ours, theirs in SIZES.items()}
        if LINEAR not in types:
            return {}
        return {
            "delta": Delta(**sizes),
            "pattern": compressed([LayerKind(linear=kind == LINEAR) for kind in types]),
        }

    def write(model: "Decoder") -> JsonObject:
        sizes = {theirs: getattr(model.delta, ours) for ours, theirs in SIZES.items()} if model.delta else {}
        return {"layer_types": [LINEAR if kind.linear else FULL for kind in model.kinds], **sizes}

    defaults = {"key_heads": 16, "value_heads": 32, "key_dim": 128, "value_dim": 128, "taps": 4}
    return Part({theirs: defaults[ours] for ours, theirs in SIZES.items()}, read, write)


def text_rope(partial: float) -> Part:
    """Rotary positions of a text, in a family that also has images."""

    def read(fields: Fields) -> JsonObject:
        given = fields.maybe("rope_parameters") or {}
        plain = {name: value for name, value in given.items() if name not in MULTIMODAL}
        return {"position": rotary.read(fields, plain, partial, interleaved=False)}

    def write(model: "Decoder") -> JsonObject:
        if not isinstance(model.position, Rope):
            return {}
        return rotary.written(model.position) | {rotary.PARTIAL: model.position.partial}

    return Part({"rope_theta": 10_000.0}, read, write)


QWEN3_5 = (
    text_rope(0.25), delta_layers(), fixed(qk_norm=True, norm_offset=True, attention_gate=True),
    biases(qkv_bias=("attention_bias", False), out_bias=("attention_bias", False)),
)  # fmt: skip
"""What all decoders of Qwen 3.5 have."""
