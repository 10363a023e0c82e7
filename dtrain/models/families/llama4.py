"""Llama 4 in a config.json, read and written: attention in chunks, layers without rotation, and those with experts."""

from typing import TYPE_CHECKING

from dtrain.core.types import JsonObject
from dtrain.models.decoder_layer import QueryGrowth
from dtrain.models.families.fields import Fields
from dtrain.models.families.layers import FULL
from dtrain.models.families.part import Part
from dtrain.models.families.parts import biases, experts, known, rope, same, sizes
from dtrain.models.layer_pattern import LayerKind, compressed
from dtrain.models.rope import NoPosition

if TYPE_CHECKING:
    from dtrain.models.decoder import Decoder

CHUNKED = "chunked_attention"
WIDE = "intermediate_size_mlp"


def layers() -> Part:
    """The chunks and the rotation of each layer, and whether it has experts."""

    def read(fields: Fields) -> JsonObject:
        count, every = fields("num_hidden_layers"), fields("no_rope_layer_interval")
        step, size = fields("interleave_moe_layer_step"), fields("attention_chunk_size")
        rotates = fields.maybe("no_rope_layers") or [(number + 1) % every != 0 for number in range(count)]
        types = fields.maybe("layer_types") or [CHUNKED if flag else FULL for flag in rotates]
        sparse = fields.maybe("moe_layers")
        sparse = range(step - 1, count, step) if sparse is None else sparse
        if len(rotates) < count or len(types) != count or set(types) - {CHUNKED, FULL}:
            fields.refuse(f"layer_types: {', '.join(sorted(set(types)))}, {len(types)} of {count} layers")
            return {}
        if CHUNKED in types and size is None:
            fields.refuse(f"layer_types: {CHUNKED}, without attention_chunk_size")
        fields.sources["pattern"] = f"layer_types: {types.count(CHUNKED)} of {count} layers are {CHUNKED}"
        kinds = [
            LayerKind(
                chunk=size if types[number] == CHUNKED else None,
                position=None if rotates[number] else NoPosition(),
                dense=number not in sparse,
            )
            for number in range(count)
        ]
        wide = fields(WIDE, "hidden")
        found: JsonObject = {"pattern": compressed(kinds)}
        found |= {"hidden": wide} if any(kind.dense for kind in kinds) else {}
        if fields("attn_temperature_tuning") and any(kind.position for kind in kinds):
            rate, scale = fields("attn_scale", "query_growth.rate"), fields("floor_scale", "query_growth.original")
            found["query_growth"] = QueryGrowth(rate=rate, original=scale, first=1, unrotated=True)
        fields.known |= {"attn_scale", "floor_scale"}
        return found

    def write(model: "Decoder") -> JsonObject:
        growth, kinds = model.query_growth, model.kinds
        tuning = {"attn_scale": growth.rate, "floor_scale": growth.original} if growth else {}
        return {
            "layer_types": [CHUNKED if kind.chunk else FULL for kind in kinds],
            "no_rope_layers": [int(not isinstance(kind.position, NoPosition)) for kind in kinds],
            "moe_layers": [number for number, kind in enumerate(kinds) if not kind.dense],
            "attention_chunk_size": next((kind.chunk for kind in kinds if kind.chunk), None),
            "attn_temperature_tuning": growth is not None,
            WIDE: model.hidden or 4 * model.width,
            **tuning,
        }

    defaults: JsonObject = {
        "no_rope_layer_interval": 4, "interleave_moe_layer_step": 1, "attention_chunk_size": 8192, WIDE: 16_384,
        "attn_temperature_tuning": True, "attn_scale": 0.1, "floor_scale": 8192,
    }  # fmt: skip
    return Part(defaults, read, write)


LLAMA4: tuple[Part, ...] = (
    *sizes(epsilon=("rms_norm_eps", 1e-5), kv_heads=8, head_dim=128), rope(500_000.0, interleaved=True),
    biases(qkv_bias=("attention_bias", False), out_bias=("attention_bias", False)), layers(),
    same("qk_norm_plain", "use_qk_norm", True), known("for_llm_compressor"),
    experts({"count": "num_local_experts", "active": "num_experts_per_tok", "hidden": "intermediate_size"},
            {"num_local_experts": 16, "num_experts_per_tok": 1, "intermediate_size": 8192},
            shared=1, score="sigmoid", renormalise=False, before=True),
)  # fmt: skip
