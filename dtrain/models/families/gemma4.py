"""Gemma 4 in a config.json, read and written: heads of other sizes, and values that are keys, in the layers without a
window; inputs of each layer, and layers that share the keys of earlier ones."""

from typing import TYPE_CHECKING, Any

from dtrain.core.types import JsonObject
from dtrain.models.families import rotary
from dtrain.models.families.fields import Fields
from dtrain.models.families.layers import FULL, LOCAL, every
from dtrain.models.families.part import Part
from dtrain.models.families.parts import biases, dense, experts, fixed, gemma_activation, same, sizes
from dtrain.models.layer_pattern import LayerKind, compressed
from dtrain.models.rope import LinearScaling, Rope

if TYPE_CHECKING:
    from dtrain.models.decoder import Decoder

DEFAULT: dict[str, JsonObject] = {
    FULL: {"rope_type": "proportional", rotary.PARTIAL: 0.25, "rope_theta": 1e6}, LOCAL: {"rope_theta": 1e4},
}  # fmt: skip
"""`rope_parameters` of a file without them."""
OVERRIDES = {"head_dim": "head_dim", "num_key_value_heads": "kv_heads"}
"""What `per_layer_config` may have for a layer."""


def _rotation(fields: Fields, kind: str) -> Rope:
    """The rotation of the layers of a type, from `rope_parameters`."""
    given = fields.maybe("rope_parameters") or {}
    own = (given or DEFAULT).get(kind)
    if not isinstance(own, dict):
        fields.refuse(f"rope_parameters: {given}, without those of {kind}")
        return Rope()
    values = {name: value for name, value in own.items() if value is not None}
    name, share = values.pop("rope_type", "default"), values.pop(rotary.PARTIAL, 1.0)
    theta, factor = values.pop("rope_theta", 10_000.0), values.pop("factor", None)
    where = f"rope_parameters.{kind}"
    fields.sources["position"] = f"rope_parameters: {given or 'by default'}"
    if name not in ("default", "proportional") or (name == "default" and (share != 1 or factor)) or values:
        fields.refuse(f"{where}: {own}")
    scaling = LinearScaling(factor=factor) if factor not in (None, 1, 1.0) else None
    return Rope(theta=theta, scaling=scaling, partial=share, proportional=name == "proportional" and share != 1)


def layers(size: int) -> Part:
    """The window, of `size` tokens by default, the rotation and the sizes of heads of each layer."""

    def read(fields: Fields) -> JsonObject:
        count, rule = fields("num_hidden_layers"), every(6)
        types = list(fields.maybe("layer_types") or rule(fields, count))
        if len(types) != count or set(types) - {LOCAL, FULL}:
            fields.refuse(f"layer_types: {', '.join(sorted(set(types)))}, {len(types)} of {count} layers")
            return {}
        types[-1] = FULL  # as transformers does
        shared, window = fields("attention_k_eq_v"), fields("sliding_window", "window")
        first = count - fields("num_kv_shared_layers")  # of the layers that share keys
        if first < count and set(types[: max(first, 0)]) != set(types):
            fields.refuse(f"num_kv_shared_layers: {count - first}, and no earlier layer of each type")
            return {}
        wide = 2 * fields("intermediate_size") if fields("use_double_wide_mlp") else None
        own = {"head_dim": fields("global_head_dim"), "kv_heads": fields("num_global_key_value_heads")}
        if not shared:
            own["kv_heads"] = None
        sizes = [own if kind == FULL else {} for kind in types]
        if (given := fields.maybe("per_layer_config")) is not None:
            if not isinstance(given, dict) or given.keys() - set(map(str, range(count))):
                fields.refuse(f"per_layer_config: {given}, not a mapping by the numbers of {count} layers")
                return {}
            sizes = [_overrides(fields, given.get(str(number), {})) for number in range(count)]
        usual = {"head_dim": fields("head_dim"), "kv_heads": fields("num_key_value_heads")}
        ropes = {kind: _rotation(fields, kind) for kind in dict.fromkeys(types)}
        fields.sources["pattern"] = f"layer_types: {types.count(LOCAL)} of {count} layers are {LOCAL}"

        def one(number: int, kind: str, sizes: JsonObject) -> LayerKind:
            others = {name: size for name, size in sizes.items() if size not in (None, usual[name])}
            local, later = kind == LOCAL, number >= first
            return LayerKind(
                window=window if local else None,
                position=None if ropes[kind] == ropes[FULL] else ropes[kind],
                shared_values=bool(shared) and not local and not later,
                shared_keys=later,
                hidden=wide if later else None,
                **others,
            )

        return {"position": ropes[FULL], "pattern": compressed([*map(one, range(count), types, sizes)])}

    def write(model: "Decoder") -> JsonObject:
        types = [LOCAL if kind.window else FULL for kind in model.kinds]
        own = zip(model.kinds, types, strict=True)
        full = [kind for kind, name in own if name == FULL and not kind.shared_keys]
        local = [kind for kind, name in zip(model.kinds, types, strict=True) if name == LOCAL]
        ropes = {FULL: model.position, LOCAL: next((kind.position for kind in local), None) or model.position}
        last = full[-1] if full else LayerKind()
        written: JsonObject = {
            "layer_types": types,
            "sliding_window": next((kind.window for kind in local), size),
            "attention_k_eq_v": last.shared_values,
            "global_head_dim": last.head_dim or model.head_size,
            "num_global_key_value_heads": (last.kv_heads or model.groups) if last.shared_values else None,
            "num_kv_shared_layers": sum(kind.shared_keys for kind in model.kinds),
            "use_double_wide_mlp": any(kind.hidden for kind in model.kinds),
            "rope_parameters": {kind: _written(rope) for kind, rope in ropes.items()},
        }
        return written

    defaults = {
        "sliding_window": size, "attention_k_eq_v": False, "global_head_dim": 512, "num_global_key_value_heads": None,
        "num_kv_shared_layers": 0, "use_double_wide_mlp": False,
    }  # fmt: skip
    return Part(defaults, read, write)


def _overrides(fields: Fields, given: JsonObject) -> JsonObject:
    for name in given.keys() - OVERRIDES.keys():
        fields.refuse(f"per_layer_config: {name}: {given[name]}")
    return {ours: given.get(theirs) for theirs, ours in OVERRIDES.items()}


def _written(rope: Any) -> JsonObject:
    if not isinstance(rope, Rope):
        return {}
    if not rope.proportional and rope.scaling is None:
        return {"rope_type": "default", "rope_theta": rope.theta}
    factor = {"factor": rope.scaling.factor} if isinstance(rope.scaling, LinearScaling) else {}
    return {"rope_type": "proportional", "rope_theta": rope.theta, rotary.PARTIAL: rope.partial} | factor


def experts_beside() -> Part:
    """Experts beside the feed-forward layer of each layer, where `enable_moe_block` says so."""
    names = {"count": "num_experts", "active": "top_k_experts", "hidden": "moe_intermediate_size"}
    own = experts(names, dict.fromkeys(names.values()), beside=True)

    def read(fields: Fields) -> JsonObject:
        fields.known |= set(names.values())
        if not fields("enable_moe_block"):
            return {}
        if missing := [name for name in names.values() if not isinstance(fields.values.get(name), int)]:
            fields.refuse(f"enable_moe_block: True, without {', '.join(missing)}")
            return {}
        return own.read(fields)

    def write(model: "Decoder") -> JsonObject:
        return own.write(model) | {"enable_moe_block": model.experts is not None}

    return Part({"enable_moe_block": False, **own.defaults}, read, write)


def inputs(size: int) -> Part:
    """Inputs of each layer, of `size` values by default."""

    def read(fields: Fields) -> JsonObject:
        if (both := fields.maybe("use_bidirectional_attention")) == "all":
            fields.refuse(f"use_bidirectional_attention: {both}")
        found, words = fields("hidden_size_per_layer_input", "layer_inputs"), fields("vocab_size_per_layer_input")
        if found and words != fields("vocab_size"):
            fields.refuse(f"vocab_size_per_layer_input: {words}, which is not vocab_size")
        return {"layer_inputs": found or 0}

    def write(model: "Decoder") -> JsonObject:
        return {"hidden_size_per_layer_input": model.layer_inputs, "vocab_size_per_layer_input": model.vocab}

    return Part({"hidden_size_per_layer_input": size, "vocab_size_per_layer_input": 262_144}, read, write)


def gemma4(window: int, per_layer: int) -> tuple[Part, ...]:
    """What the decoders of Gemma 4 have; the arguments are defaults."""
    return (
        *sizes(kv_heads=4, head_dim=256, tied=True, act=None), gemma_activation(),
        biases(qkv_bias=("attention_bias", False), out_bias=("attention_bias", False)),
        fixed(embed_scale=True, qk_norm=True, value_norm=True, post_norm=True, layer_scale=True,
              attention_multiplier=1.0),
        layers(window), experts_beside(), inputs(per_layer), dense(),
        same("logit_softcap", "final_logit_softcapping", None),
    )  # fmt: skip
