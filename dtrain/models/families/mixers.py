"""Layers without attention in a config.json, read and written: linear attention (Qwen 3.5), convolutions
(LFM2), states (Granite 4)."""

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from dtrain.core.errors import DataError
from dtrain.core.types import JsonObject
from dtrain.models.delta import Delta
from dtrain.models.families import rotary
from dtrain.models.families.fields import Fields
from dtrain.models.families.layers import FULL, Rule
from dtrain.models.families.part import Part
from dtrain.models.families.parts import biases, fixed, known, renamed, rope, sizes, stated
from dtrain.models.layer_pattern import ATTENTION, LayerKind, Mixer, compressed
from dtrain.models.mamba import Mamba
from dtrain.models.rope import NoPosition, Rope
from dtrain.models.short_convolution import ShortConvolution

if TYPE_CHECKING:
    from dtrain.models.decoder import Decoder

SIZES = {
    "key_heads": "linear_num_key_heads", "value_heads": "linear_num_value_heads", "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim", "taps": "linear_conv_kernel_dim",
}  # fmt: skip
TYPES: dict[Mixer, str] = {"delta": "linear_attention", "convolution": "conv", "mamba": "mamba"}
"""The type of a layer with that mixer, beside full attention."""
UNLIMITED = (math.inf, "Infinity", {"__float__": "Infinity"})
"""How files write that there is no limit: JSON has no such number."""
MULTIMODAL = ("mrope_section", "mrope_interleaved")
"""How the positions of images are rotated. Those of a text are one number for each token, which is rotated as usual."""


def mixed(mixer: Mixer, rule: Rule, read_own: Callable[[Fields], Any], sizes: Mapping[str, str]) -> Part:
    """The type of each layer, by `rule` where there is no field `layer_types`, and the sizes of those with the mixer:
    the field of each."""
    other = TYPES[mixer]

    def read(fields: Fields) -> JsonObject:
        layers = fields("num_hidden_layers")
        types = fields.maybe("layer_types") or list(rule(fields, layers))
        own = read_own(fields)
        if not isinstance(types, list) or not all(isinstance(one, str) for one in types):
            raise DataError(f"{fields.path}: layer_types: {types}", "it must be a list of the type of each layer")
        if len(types) != layers or set(types) - {FULL, other}:
            fields.refuse(f"layer_types: {', '.join(sorted(set(types)))}, {len(types)} of {layers} layers")
            return {}
        fields.sources["pattern"] = f"layer_types: {types.count(other)} of {layers} layers are {other}"
        if other not in types:
            return {}
        kinds = [LayerKind(mixer=mixer) if kind == other else LayerKind() for kind in types]
        return {mixer: own, "pattern": compressed(kinds)}

    def write(model: "Decoder") -> JsonObject:
        own = getattr(model, mixer)
        written = {theirs: getattr(own, ours) for ours, theirs in sizes.items()} if own else {}
        return {"layer_types": [other if kind.mixer == mixer else FULL for kind in model.kinds], **written}

    return Part({}, read, write)


def delta_layers() -> Part:
    """Each layer but every fourth has linear attention."""
    usual = {"key_heads": 16, "value_heads": 32, "key_dim": 128, "value_dim": 128, "taps": 4}

    def rule(fields: Fields, layers: int) -> list[str]:
        every = _positive(fields, "full_attention_interval")
        return [FULL if number % every == 0 else TYPES["delta"] for number in range(1, layers + 1)]

    def own(fields: Fields) -> Delta:
        fields.known.add("full_attention_interval")
        return Delta(**{ours: _positive(fields, theirs, f"delta.{ours}") for ours, theirs in SIZES.items()})

    part = mixed("delta", rule, own, SIZES)
    defaults = {theirs: usual[ours] for ours, theirs in SIZES.items()} | {"full_attention_interval": 4}
    return Part(defaults, part.read, part.write)


def _positive(fields: Fields, name: str, ours: str = "") -> int:
    """A field that is a number of at least one. Raises DataError if it is not."""
    value = fields(name, ours)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise DataError(f"{fields.path}: {name}: {value}; it must be a whole number of at least 1")
    return value


def convolutions(rule: Rule) -> Part:
    """Layers with a short convolution, without biases."""
    taps = "conv_L_cache"

    def own(fields: Fields) -> ShortConvolution:
        return ShortConvolution(taps=_positive(fields, taps, "convolution.taps"))

    part = mixed("convolution", rule, own, {"taps": taps})
    return Part({taps: 3}, part.read, part.write)


def by_numbers(fields: Fields, layers: int) -> list[str]:
    """The layers of `full_attn_idxs` have attention; all, if there is no such field."""
    full = fields.maybe("full_attn_idxs")
    return [FULL if full is None or number in full else TYPES["convolution"] for number in range(layers)]


def by_types(fields: Fields, layers: int) -> list[str]:
    """Raises DataError: the family has no rule for the types of its layers."""
    del layers
    return fields("layer_types")


def adjusted_width() -> Part:
    """The width of the feed-forward layer: two thirds of a field, times a factor, rounded up (LFM2)."""
    name, adjusts, factor, multiple = (
        "intermediate_size", "block_auto_adjust_ff_dim", "block_ffn_dim_multiplier", "block_multiple_of"
    )  # fmt: skip

    def read(fields: Fields) -> JsonObject:
        size, times, of = fields(name, "hidden"), fields(factor), fields(multiple)
        if not fields(adjusts):
            return {"hidden": size}
        size = int(2 * size / 3)
        return {"hidden": size if times is None else -(-int(times * size) // of) * of}

    return Part({name: 12_288, adjusts: True, factor: 1.0, multiple: 256}, read,
                lambda model: {name: model.hidden, adjusts: False})  # fmt: skip


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


def mamba_layers(indices: str = "") -> Part:
    """Layers with a state for each head, with biases of the convolution alone: by type, under the names of two
    versions, or all but those that the field `indices` has."""
    sizes = {
        "heads": "mamba_n_heads", "head_dim": "mamba_d_head", "state": "mamba_d_state", "groups": "mamba_n_groups",
        "taps": "mamba_d_conv",
    }  # fmt: skip
    expand, limit = "mamba_expand", "time_step_limit"
    names: dict[str, Mixer] = {
        TYPES["mamba"]: "mamba",
        TYPES["delta"]: "mamba",
        "attention": ATTENTION,
        FULL: ATTENTION,
    }
    defaults: JsonObject = dict(zip(sizes.values(), (128, "auto", 256, 1, 4), strict=True)) | {expand: 2}

    def read(fields: Fields) -> JsonObject:
        layers = fields("num_hidden_layers")
        if indices:
            full = fields.maybe(indices) or ()
            types = [FULL if number in full else TYPES["mamba"] for number in range(layers)]
        else:
            types = fields.maybe("layer_types") or fields.maybe("layers_block_type") or [TYPES["mamba"]] * layers
        fields.known |= {*sizes.values(), expand, limit, "mamba_chunk_size"}
        if not isinstance(types, list) or len(types) != layers or not all(name in names for name in types):
            fields.refuse(f"layer_types: {types}, not mamba or attention for each of {layers} layers")
            return {}
        kinds = [LayerKind(mixer=names[name]) for name in types]
        found = sum(kind.mixer != ATTENTION for kind in kinds)
        fields.sources["pattern"] = f"layer_types: {found} of {layers} layers are mamba"
        if not found:
            return {}
        times = fields.values.get(limit)
        if times is not None and (len(times) != 2 or times[0] != 0 or times[1] not in UNLIMITED):
            fields.refuse(f"{limit}: {times}")
        inner = _positive(fields, expand) * fields("hidden_size")
        heads = _positive(fields, sizes["heads"], "mamba.heads")
        if fields.values.get(sizes["head_dim"], "auto") == "auto":
            fields.values = fields.values | {sizes["head_dim"]: inner // heads}
        own = Mamba(**{ours: _positive(fields, theirs, f"mamba.{ours}") for ours, theirs in sizes.items()})
        if own.heads * own.head_dim != inner:
            fields.refuse(f"{sizes['heads']} x {sizes['head_dim']}: {own.heads * own.head_dim}, not {expand}: {inner}")
        return {"mamba": own, "pattern": compressed(kinds)}

    def write(model: "Decoder") -> JsonObject:
        full = [number for number, kind in enumerate(model.kinds) if kind.mixer == ATTENTION]
        types = ["attention" if number in full else TYPES["mamba"] for number in range(model.layers)]
        where: JsonObject = {indices: full} if indices else {"layer_types": types}
        if (own := model.mamba) is None:
            return where
        written = {theirs: getattr(own, ours) for ours, theirs in sizes.items()}
        inner = own.heads * own.head_dim
        return where | written | ({expand: inner // model.width} if inner % model.width == 0 else {})

    return Part(defaults, read, write)


def rotated_or_not() -> Part:
    """Rotary positions, where `position_embedding_type` says so."""
    plain, name = rope(), "position_embedding_type"

    def read(fields: Fields) -> JsonObject:
        if fields.maybe(name) == "rope":
            return plain.read(fields)
        fields.known |= {"rope_theta", "rope_scaling", "rope_parameters"}
        fields.sources["position"] = f"{name}: {fields.values.get(name)}"
        return {"position": NoPosition()}

    def write(model: "Decoder") -> JsonObject:
        turns = isinstance(model.position, Rope)
        return (plain.write(model) if turns else {}) | {name: "rope" if turns else None}

    return Part(plain.defaults, read, write)


def experts_or_dense(own: Part, count: str, hidden: str) -> Part:
    """Experts with a shared one of the width `hidden`; a feed-forward layer of that width if `count` is zero."""

    def read(fields: Fields) -> JsonObject:
        if fields.values.get(count, own.defaults[count]):
            return own.read(fields)
        fields.known |= own.defaults.keys() | {"intermediate_size", count}
        return {"hidden": fields(hidden, "hidden")}

    def write(model: "Decoder") -> JsonObject:
        return own.write(model) if model.experts else {count: 0, hidden: model.hidden or 4 * model.width}

    return Part(own.defaults, read, write)


QWEN3_5 = (
    text_rope(0.25), delta_layers(), fixed(qk_norm=True, norm_offset=True, attention_gate=True),
    biases(qkv_bias=("attention_bias", False), out_bias=("attention_bias", False)),
    stated(attn_output_gate=True, mlp_only_layers=[]),
    known("mamba_ssm_dtype", "output_gate_type", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"),
)  # fmt: skip
"""What all decoders of Qwen 3.5 have, and those of Qwen 3 Next."""

LFM2 = (
    renamed(tie_embedding="tie_word_embeddings", block_ff_dim="intermediate_size"),
    *sizes(epsilon=("norm_eps", 1e-5), kv_heads=8, tied=True, act=None), rope(1e6),
    fixed(qk_norm=True, feed_forward="swiglu"), stated(conv_bias=False, block_use_swiglu=True, use_pos_enc=True),
    known("full_attn_idxs", "block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale",
          "block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads", "theta"),
)  # fmt: skip
"""What all decoders of LFM2 have. Its older files repeat some fields under names of its first code."""
