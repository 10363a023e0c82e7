"""Gemma 3n in a config.json, read and written: several streams of activations, low-rank residuals, sparse layers, and
layers that share the keys of earlier ones."""

from collections import Counter
from typing import TYPE_CHECKING, Any

from dtrain.core.types import JsonObject
from dtrain.models.altup import AltUp
from dtrain.models.families import rotary
from dtrain.models.families.fields import Fields
from dtrain.models.families.layers import FULL, LOCAL, every, window_of
from dtrain.models.families.part import Part
from dtrain.models.families.parts import GATED, activation, biases, fixed, known, same, sizes, stated
from dtrain.models.layer_pattern import LayerKind, compressed
from dtrain.models.rope import Rope

if TYPE_CHECKING:
    from dtrain.models.decoder import Decoder

WINDOW, SHARED, HIDDEN = 512, 15, 16_384
SPARSE_LAYERS, SPARSITY = 10, 0.95
"""Without `activation_sparsity_pattern`, the first of more layers than these are so sparse."""


def _of_layers(fields: Fields, name: str, value: Any, count: int) -> list[Any] | None:
    """A number for each layer, from one for all or a list; None, and refused, for anything else."""
    found: Any = [value] * count if isinstance(value, int | float) else value
    if not isinstance(found, list) or len(found) != count or not all(isinstance(one, int | float) for one in found):
        fields.refuse(f"{name}: {value}, not a number for each of {count} layers")
        return None
    return found


def layers() -> Part:
    """The window, the rotation, the width and the sparsity of each layer, and which share keys."""

    def read(fields: Fields) -> JsonObject:
        count = fields("num_hidden_layers")
        types = list(fields.maybe("layer_types") or every(5)(fields, count))
        if len(types) != count or set(types) - {LOCAL, FULL}:
            fields.refuse(f"layer_types: {', '.join(sorted(set(types)))}, {len(types)} of {count} layers")
            return {}
        first = count - fields("num_kv_shared_layers")  # of the layers that share keys
        if first < count and set(types[: max(first, 0)]) != set(types):
            fields.refuse(f"num_kv_shared_layers: {count - first}, and no earlier layer of each type")
            return {}
        usual = [SPARSITY] * SPARSE_LAYERS + [0.0] * (count - SPARSE_LAYERS) if count > SPARSE_LAYERS else 0.0
        given = fields.maybe("activation_sparsity_pattern")
        shares = _of_layers(fields, "activation_sparsity_pattern", usual if given is None else given, count)
        widths = _of_layers(fields, "intermediate_size", fields("intermediate_size", "hidden"), count)
        rope, theta = rotary.of_two(fields)
        if shares is None or widths is None:
            return {}
        if not all(0 <= share < 1 for share in shares):
            fields.refuse(f"activation_sparsity_pattern: {shares}, not shares below 1")
            return {}
        hidden, window = Counter(widths).most_common(1)[0][0], fields("sliding_window", "window")
        fields.sources["pattern"] = f"layer_types: {types.count(LOCAL)} of {count} layers are {LOCAL}"
        local = {"window": window, "position": None if theta == rope.theta and not rope.scaling else Rope(theta=theta)}
        kinds = [
            LayerKind(shared_keys=number >= first, hidden=None if width == hidden else width, sparsity=share,
                      **(local if kind == LOCAL else {}))
            for number, (kind, width, share) in enumerate(zip(types, widths, shares, strict=True))
        ]  # fmt: skip
        return {"position": rope, "hidden": hidden, "pattern": compressed(kinds)}

    def write(model: "Decoder") -> JsonObject:
        usual, ropes = model.hidden or 4 * model.width, rotary.of_layers(model)
        scaling = rotary.scaling_fields(model.position) if isinstance(model.position, Rope) else None
        return {
            "layer_types": [LOCAL if kind.window else FULL for kind in model.kinds],
            "sliding_window": window_of(model) or WINDOW,
            "num_kv_shared_layers": sum(kind.shared_keys for kind in model.kinds),
            "intermediate_size": [kind.hidden or usual for kind in model.kinds],
            "activation_sparsity_pattern": [kind.sparsity for kind in model.kinds],
            "rope_theta": ropes[FULL]["rope_theta"],
            "rope_local_base_freq": ropes[LOCAL]["rope_theta"],
            "rope_scaling": scaling,
            "rope_parameters": ropes,
        }

    defaults = {
        "sliding_window": WINDOW, "num_kv_shared_layers": SHARED, "intermediate_size": HIDDEN, "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
    }  # fmt: skip
    return Part(defaults, read, write)


def streams() -> Part:
    """Streams of activations, and the rank of the residuals beside attention."""
    names = {
        "streams": "altup_num_inputs", "active": "altup_active_idx", "clip": "altup_coef_clip",
    }  # fmt: skip
    defaults = {**dict(zip(names.values(), (4, 0, 120.0), strict=True)), "laurel_rank": 64}

    def read(fields: Fields) -> JsonObject:
        own = {ours: fields(theirs, "altup") for ours, theirs in names.items()}
        for name in (names["clip"], "laurel_rank"):
            if not isinstance(value := fields(name), int | float) or value <= 0:
                fields.refuse(f"{name}: {value}")
                return {}
        return {"altup": AltUp(**own), "laurel_rank": fields("laurel_rank", "laurel_rank")}

    def write(model: "Decoder") -> JsonObject:
        own = {theirs: getattr(model.altup, ours) for ours, theirs in names.items()} if model.altup else {}
        return own | {"laurel_rank": model.laurel_rank}

    return Part(defaults, read, write)


def inputs() -> Part:
    """Inputs of each layer, from a table of fewer words than there are."""
    size, words = "hidden_size_per_layer_input", "vocab_size_per_layer_input"

    def read(fields: Fields) -> JsonObject:
        found, own, whole = fields(size, "layer_inputs"), fields(words, "layer_inputs_vocab"), fields("vocab_size")
        if not found:
            fields.refuse(f"{size}: {found}")
        return {"layer_inputs": found, "layer_inputs_vocab": 0 if own == whole else own}

    def write(model: "Decoder") -> JsonObject:
        return {size: model.layer_inputs, words: model.layer_inputs_vocab or model.vocab}

    return Part({size: 256, words: 262_144}, read, write)


GEMMA3N: tuple[Part, ...] = (
    *sizes(kv_heads=2, head_dim=256, tied=True, act=None), activation("hidden_activation", GATED, "gelu_pytorch_tanh"),
    known("hidden_act"),
    biases(qkv_bias=("attention_bias", False), out_bias=("attention_bias", False)),
    fixed(embed_scale=True, qk_norm=True, value_norm=True, post_norm=True, attention_multiplier=1.0),
    layers(), streams(), stated(altup_correct_scale=True), known("altup_lr_multiplier"), inputs(),
    same("logit_softcap", "final_logit_softcapping", 30.0),
)  # fmt: skip
