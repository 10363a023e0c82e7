"""Latent attention in a config.json, read and written (DeepSeek and what follows its shape)."""

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dtrain.core.types import JsonObject
from dtrain.models.families import rotary
from dtrain.models.families.fields import Fields
from dtrain.models.families.part import Part
from dtrain.models.latent import Latent
from dtrain.models.rope import Rope, Yarn

if TYPE_CHECKING:
    from dtrain.models.decoder import Decoder

MSCALE = "mscale_all_dim"


def latent(*, query_rank: int = 1536, nope: int = 128, value: int = 128) -> Part:
    """The sizes of the vectors and of the heads; the arguments are the defaults of the family."""

    def read(fields: Fields) -> JsonObject:
        turned, rest = fields("qk_rope_head_dim", "latent.rotated"), fields("qk_nope_head_dim")
        heads, groups = fields("num_attention_heads"), fields.maybe("num_key_value_heads")
        if groups not in (None, heads):
            fields.refuse(f"num_key_value_heads: {groups} of {heads} heads")
        fields.known |= {"head_dim", "qk_head_dim"}
        fields.sources["head_dim"] = f"qk_nope_head_dim: {rest}, qk_rope_head_dim: {turned}"
        own = Latent(
            rank=fields("kv_lora_rank", "latent.rank"),
            query_rank=fields("q_lora_rank", "latent.query_rank"),
            rotated=turned,
            value_dim=fields("v_head_dim", "latent.value_dim"),
        )
        return {"latent": own, "head_dim": turned + rest, "kv_heads": heads}

    def write(model: "Decoder") -> JsonObject:
        if (own := model.latent) is None:
            return {}
        return {
            "kv_lora_rank": own.rank,
            "q_lora_rank": own.query_rank,
            "qk_rope_head_dim": own.rotated,
            "qk_nope_head_dim": model.head_size - own.rotated,
            "v_head_dim": own.values(model.head_size),
            "head_dim": own.rotated,  # as transformers writes it
        }

    sizes = {"qk_rope_head_dim": 64, "qk_nope_head_dim": nope, "v_head_dim": value}
    return Part({"kv_lora_rank": 512, "q_lora_rank": query_rank, **sizes}, read, write)


def latent_rope(*, field: bool = True) -> Part:
    """Rotary positions of the rotated part of heads, whose scaling may scale the scores too. `field`: whether the
    family has `rope_interleave`."""
    name = "rope_interleave"

    def read(fields: Fields) -> JsonObject:
        given = fields.maybe("rope_parameters") or {}
        turns = bool(fields(name, "position.interleaved")) if field else True
        rope = rotary.read(fields, given, None, interleaved=turns)
        scaling = rope.scaling
        if isinstance(scaling, Yarn):
            weight = (given or fields.maybe("rope_scaling") or {}).get(MSCALE) or 0.0
            rope = replace(rope, scaling=replace(scaling, mscale_all_dim=weight))
        elif scaling:
            fields.refuse(f"rope_type: {scaling.kind} with latent attention")
        return {"position": rope}

    def write(model: "Decoder") -> JsonObject:
        rope = model.position
        if not isinstance(rope, Rope) or (not field and not rope.interleaved):
            return {}
        config = rotary.written(rope) | ({name: rope.interleaved} if field else {})
        if isinstance(rope.scaling, Yarn):
            own: Any = config["rope_scaling"]
            config["rope_scaling"] = own | {MSCALE: rope.scaling.mscale_all_dim, **_mscale(rope.scaling)}
        return config

    return Part({"rope_theta": 10_000.0, name: True}, read, write)


def _mscale(scaling: Yarn) -> JsonObject:
    """`mscale`, from which readers that know no `attention_factor` compute it, as DeepSeek's own code does:
    (0.1 mscale log(factor) + 1) / (0.1 mscale_all_dim log(factor) + 1)."""
    grown, weight = 0.1 * math.log(scaling.factor) if scaling.factor > 1 else 0.0, scaling.mscale_all_dim
    if not grown or not weight:
        return {}
    same = scaling.attention == 1
    return {"mscale": weight if same else (scaling.attention * (grown * weight + 1) - 1) / grown}
