"""The parts that families are made of: sizes, norms, biases, activations, scalars, rotation and experts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dtrain.core.errors import DataError
from dtrain.core.types import JsonObject
from dtrain.models.decoder_layer import QueryGrowth
from dtrain.models.families import rotary
from dtrain.models.families.fields import Fields
from dtrain.models.families.layers import kinds_of
from dtrain.models.families.part import REQUIRED, Part
from dtrain.models.layer_pattern import compressed
from dtrain.models.moe import Experts
from dtrain.models.multi_token import FURTHER_LAYERS
from dtrain.models.rope import Llama3, Rope, Yarn

if TYPE_CHECKING:
    from dtrain.models.decoder import Decoder

GATED = {"silu": "swiglu", "swish": "swiglu", "gelu_pytorch_tanh": "geglu", "gelu_new": "geglu"}
GELUS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu"}
UNGATED = GELUS | {"relu2": "relu2"}
GEMMA_GELU = {None, "gelu", "gelu_new", "gelu_pytorch_tanh"}
"""Gemma's first files have `gelu` but mean its tanh form."""


def same(ours: str, theirs: str, default: object = REQUIRED) -> Part:
    """A setting whose value is that of a field."""
    defaults = {} if default is REQUIRED else {theirs: default}
    return Part(defaults, lambda fields: {ours: fields(theirs, ours)}, lambda model: {theirs: getattr(model, ours)})


def fixed(**settings: object) -> Part:
    """Settings that each model of the family has."""
    return Part({}, lambda _: dict(settings))


LAYER_NORM = fixed(norm="layer", norm_bias=True)


def known(*names: str) -> Part:
    """Fields of the family that decide nothing more."""

    def read(fields: Fields) -> JsonObject:
        fields.known |= set(names)
        return {}

    return Part({}, read)


def stated(**values: object) -> Part:
    """Fields that must have these values where they are given: the family has no others."""

    def read(fields: Fields) -> JsonObject:
        for name, value in values.items():
            if (given := fields.maybe(name)) is not None and given != value:
                fields.refuse(f"{name}: {given}")
        return {}

    return Part({}, read)


def renamed(**names: str) -> Part:
    """Fields that transformers takes under a second name; refused where both are given and differ."""

    def read(fields: Fields) -> JsonObject:
        for second, first in names.items():
            value = fields.maybe(second)
            if value is not None and fields.values.get(first, value) != value:
                fields.refuse(f"{second}: {value} but {first}: {fields.values[first]}")
            if value is not None:
                fields.values = {first: value, **fields.values}
        return {}

    return Part({}, read)


def divided(ours: str, theirs: str, default: object) -> Part:
    """A setting that is one over a field."""
    return Part(
        {theirs: default},
        lambda fields: {ours: 1 / fields(theirs, ours)},
        lambda model: {theirs: 1 / getattr(model, ours)},
    )


def sizes(
    *,
    epsilon: tuple[str, object] | None = ("rms_norm_eps", 1e-6),
    kv_heads: int | None = None,
    head_dim: int | None = None,
    tied: bool = False,
    act: str | None = "silu",
    acts: Mapping[str, str] = GATED,
) -> tuple[Part, ...]:
    """What all but GPT-2 have under the same names; the arguments are the defaults of a family. Without `epsilon`, or
    without `act`, the family has other parts for them."""

    def read(fields: Fields) -> JsonObject:
        width, heads = fields("hidden_size", "width"), fields("num_attention_heads", "heads")
        if not isinstance(layers := fields("num_hidden_layers", "layers"), int) or layers < 1:
            raise DataError(f"{fields.path}: num_hidden_layers: {layers}; it must be a number of layers")
        fields.known.add("max_position_embeddings")
        return {
            "vocab": fields("vocab_size", "vocab"),
            "layers": layers,
            "width": width,
            "heads": heads,
            "kv_heads": fields("num_key_value_heads", "kv_heads") or heads,
            "head_dim": fields("head_dim", "head_dim") or width // heads,
        }

    def write(model: "Decoder") -> JsonObject:
        return {
            "vocab_size": model.vocab,
            "max_position_embeddings": model.context,
            "hidden_size": model.width,
            "intermediate_size": model.hidden or (model.experts.hidden if model.experts else 4 * model.width),
            "num_hidden_layers": model.layers,
            "num_attention_heads": model.heads,
            "num_key_value_heads": model.groups,
            "head_dim": model.head_size,
            "pad_token_id": None,  # the default of some classes is beyond a small vocabulary
        }

    parts = [Part({"num_key_value_heads": kv_heads, "head_dim": head_dim}, read, write)]
    parts += [same("epsilon", *epsilon)] if epsilon else []
    parts += [same("tied", "tie_word_embeddings", tied)]
    parts += [activation("hidden_act", acts, act)] if act else []
    return tuple(parts)


def dense() -> Part:
    """The width of the feed-forward layer; it is written with the sizes."""
    return Part({}, lambda fields: {"hidden": fields("intermediate_size", "hidden")})


def activation(name: str, known: Mapping[str, str], default: str) -> Part:
    """The form of the feed-forward layer by the name of its activation."""

    def read(fields: Fields) -> JsonObject:
        value = fields(name, "feed_forward")
        if value not in known:
            fields.refuse(f"{name}: {value}")
        return {"feed_forward": known.get(value, next(iter(known.values())))}

    back = {form: value for value, form in reversed(list(known.items()))}
    return Part({name: default}, read, lambda model: {name: back.get(model.feed_forward)})


def gemma_activation() -> Part:
    """Gated GELU under one of two names."""

    def read(fields: Fields) -> JsonObject:
        act = "hidden_activation" if fields("hidden_activation") else "hidden_act"
        fields.known.add("hidden_act")
        if fields.values.get(act) in GEMMA_GELU:
            return {"feed_forward": "geglu"}
        return activation(act, GATED, "silu").read(fields)

    def write(model: "Decoder") -> JsonObject:
        return {
            **activation("hidden_activation", GATED, "").write(model),
            **activation("hidden_act", GATED, "").write(model),
        }

    return Part({"hidden_activation": None}, read, write)


BIASES = ("qkv_bias", "out_bias", "mlp_bias")


def biases(*, together: bool = True, **names: tuple[str, bool] | bool) -> Part:
    """For each of BIASES its field and default, or its value; those that are left out are false. `together`: all three
    are read as `bias`, which layers without attention do not have."""
    given = {name: names.get(name, False) for name in BIASES}

    def read(fields: Fields) -> JsonObject:
        found = {ours: bool(fields(how[0], ours)) if isinstance(how, tuple) else how for ours, how in given.items()}
        if together and len({*found.values()}) == 1:
            fields.sources["bias"] = fields.sources.get(BIASES[0], "")
            return {"bias": found[BIASES[0]]}
        return found

    named = {ours: how for ours, how in given.items() if isinstance(how, tuple)}

    def write(model: "Decoder") -> JsonObject:
        return {field: model.bias or getattr(model, ours) for ours, (field, _) in named.items()}

    return Part(dict(named.values()), read, write)


def rope(theta: float = 10_000.0, *, partial: float | None = None, interleaved: bool = False) -> Part:
    """Rotary positions; `theta` and `partial` are the defaults of the family, None where it rotates whole heads."""

    def read(fields: Fields) -> JsonObject:
        return {"position": rotary.read(fields, fields.maybe("rope_parameters") or {}, partial, interleaved)}

    def write(model: "Decoder") -> JsonObject:
        if not isinstance(model.position, Rope):
            return {}
        named = {rotary.PARTIAL: model.position.partial} if partial is not None else {}
        return rotary.written(model.position) | named

    return Part({"rope_theta": theta}, read, write)


def minimax_rope() -> Part:
    """As `rope`, with the number of rotated values as a field (MiniMax M2)."""
    plain = rope(5e6, partial=1.0)

    def read(fields: Fields) -> JsonObject:
        found, rotated = plain.read(fields), fields.maybe("rotary_dim")
        if rotated is None or fields.maybe(rotary.PARTIAL) is not None:
            return found
        fields.sources["position.partial"] = f"rotary_dim: {rotated}"
        return {"position": replace(found["position"], partial=rotated / fields("head_dim"))}

    return Part(plain.defaults, read, plain.write)


def hunyuan_rope() -> Part:
    """As `rope`; scaling of kind dynamic with an `alpha` is a larger theta (Hunyuan)."""
    plain = rope()

    def read(fields: Fields) -> JsonObject:
        given = fields.maybe("rope_parameters") or fields.maybe("rope_scaling") or {}
        kind, alpha = given.get("rope_type", given.get("type")), given.get("alpha")
        if kind != "dynamic" or not alpha:
            return plain.read(fields)
        dim = fields("head_dim") or fields("hidden_size") // fields("num_attention_heads")
        theta = given.get("rope_theta", fields("rope_theta")) * alpha ** (dim / (dim - 2))
        fields.sources["position.theta"] = f"rope_scaling: {given}"
        return {"position": Rope(theta=theta)}

    return Part(plain.defaults, read, plain.write)


def scaled_by_default(scaling: Llama3 | Yarn, theta: float) -> Part:
    """As `rope`, with that scaling where no field gives another (CWM, gpt-oss)."""
    plain = rope(theta)

    def read(fields: Fields) -> JsonObject:
        given = fields.maybe("rope_parameters") or fields.maybe("rope_scaling")
        return plain.read(fields) if given else {"position": Rope(theta=fields("rope_theta"), scaling=scaling)}

    def write(model: "Decoder") -> JsonObject:
        config = plain.write(model)
        return config if config.get("rope_scaling") else config | {"rope_scaling": {"rope_type": "default"}}

    return Part(plain.defaults, read, write)


def linear_rope_alone() -> Part:
    """As `rope`; version 4.57 of transformers takes two keys of a linear scaling alone (OLMo 2)."""
    plain = rope()

    def write(model: "Decoder") -> JsonObject:
        config = plain.write(model)
        if scaling := config.get("rope_scaling"):
            config["rope_scaling"] = {"type": "linear", "factor": float(scaling["factor"])}
        return config

    return Part(plain.defaults, plain.read, write)


def growing_rope() -> Part:
    """As `rope`, scaled by Yarn, and queries that grow with their position (Ministral 3)."""
    plain = rope(1e6)

    def read(fields: Fields) -> JsonObject:
        given = fields.maybe("rope_parameters") or {}
        if rotary.GROWTH not in given:
            fields.refuse(f"rope_parameters: no {rotary.GROWTH}")
            return {}
        growth = QueryGrowth(rate=given[rotary.GROWTH], original=given["original_max_position_embeddings"])
        fields.sources["query_growth"] = f"rope_parameters.{rotary.GROWTH}: {given[rotary.GROWTH]}"
        return plain.read(fields) | {"query_growth": growth}

    def write(model: "Decoder") -> JsonObject:
        growth, position = model.query_growth, model.position
        if growth is None or not isinstance(position, Rope) or not isinstance(position.scaling, Yarn):
            return {}
        values: Any = {"rope_theta": position.theta, **(rotary.scaling_fields(position) or {})}
        return {"rope_parameters": values | {rotary.GROWTH: growth.rate}}

    return Part(plain.defaults, read, write)


def experts(names: Mapping[str, str], defaults: Mapping[str, object], **fixed: Any) -> Part:
    """A mixture of experts: for each of its settings the field, and settings that all models of the family have.

    The field of `shared` may be the width of the shared experts together.
    """
    together = "intermediate_size" in names.get("shared", "")

    def read(fields: Fields) -> JsonObject:
        renamed = {"num_experts": "num_local_experts"} if "num_local_experts" in fields.values else {}
        if isinstance(several := fields.values.get(names["active"]), list) and len(set(several)) == 1:
            fields.values = fields.values | {names["active"]: several[0]}  # the same for each layer
        there = {ours: renamed.get(theirs, theirs) for ours, theirs in names.items()}
        found: JsonObject = {
            ours: value for ours, name in there.items() if (value := fields(name, f"experts.{ours}")) is not None
        }
        if together:
            size = found["shared"]
            found["shared"], rest = divmod(size, found["hidden"])
            found |= {"shared": 1, "shared_hidden": size} if rest else {}
        return {"experts": Experts(**(found | fixed))}

    def write(model: "Decoder") -> JsonObject:
        if (own := model.experts) is None:
            return {}
        written = {theirs: getattr(own, ours) for ours, theirs in names.items()}
        return written | ({names["shared"]: own.shared_size} if together else {})

    return Part(defaults, read, write)


def dense_layers(read: Callable[[Fields, int], Sequence[bool]], write: Callable[[Sequence[bool]], JsonObject]) -> Part:
    """The layers without experts, and the width of their feed-forward layer."""

    def flags(fields: Fields) -> JsonObject:
        fields.known.add("intermediate_size")
        found = list(read(fields, fields("num_hidden_layers")))
        return {FLAGS: found, "hidden": fields("intermediate_size", "hidden")} if any(found) else {}

    def written(model: "Decoder") -> JsonObject:
        own = write([kind.dense for kind in model.kinds])
        return own | ({"intermediate_size": model.hidden} if any(kind.dense for kind in model.kinds) else {})

    return Part({}, flags, written)


def first_dense(default: int, *, by_type: bool = False, name: str = "first_k_dense_replace") -> Part:
    """The first layers have no experts. `by_type`: a field has the type of each layer, and no other their number."""

    def read(fields: Fields, layers: int) -> list[bool]:
        first, types = fields.maybe(name), fields.maybe("mlp_layer_types")
        if types:
            return [kind == "dense" for kind in types]
        if by_type and first not in (None, default):  # the class takes the types alone
            fields.refuse(f"{name}: {first}")
        return [number < (default if first is None else first) for number in range(layers)]

    def write(flags: Sequence[bool]) -> JsonObject:
        if by_type:
            return {"mlp_layer_types": ["dense" if flag else "sparse" for flag in flags]}
        return {name: flags.index(False) if False in flags else len(flags)}

    return dense_layers(read, write)


def ernie_dense() -> Part:
    """Layers without experts before a first, after a last, and between each n-th (ERNIE 4.5)."""
    start, end, interval = (f"moe_layer_{what}" for what in ("start_index", "end_index", "interval"))

    def read(fields: Fields, layers: int) -> list[bool]:
        first, last, each = fields(start), fields(end), fields(interval)
        last = layers - 1 if last == -1 else last
        return [not (first <= number <= last and (number + 1) % each == 0) for number in range(layers)]

    def write(flags: Sequence[bool]) -> JsonObject:
        sparse = [number for number, flag in enumerate(flags) if not flag]
        each = sparse[1] - sparse[0] if len(sparse) > 1 else 1
        return {start: sparse[0], end: sparse[-1], interval: each}

    part = dense_layers(read, write)
    return Part({start: 1, end: -1, interval: 1}, part.read, part.write)


def qwen_dense() -> Part:
    """Layers without experts by their numbers, and all but each n-th."""

    def read(fields: Fields, layers: int) -> list[bool]:
        step, only = fields.maybe("decoder_sparse_step") or 1, fields.maybe("mlp_only_layers") or []
        return [number in only or (number + 1) % step != 0 for number in range(layers)]

    def write(flags: Sequence[bool]) -> JsonObject:
        return {"decoder_sparse_step": 1, "mlp_only_layers": [number for number, flag in enumerate(flags) if flag]}

    return dense_layers(read, write)


def further_tokens(*, written: bool = False) -> Part:
    """Layers that predict further tokens, beside the model's: those of `multi_token`, if a recipe has that. `written`:
    whether the family's own have the names and the form of these."""
    name = FURTHER_LAYERS

    def read(fields: Fields) -> JsonObject:
        fields.known |= {name, "num_mtp_layers"}
        return {}

    return Part({}, read, lambda model: {name: model.multi_token.depth if written and model.multi_token else 0})


def no_window(switch: str) -> Part:
    """Windows, which are refused where the field has some."""

    def read(fields: Fields) -> JsonObject:
        fields.known |= {switch, "sliding_window", "max_window_layers", "layer_types"}
        if fields.values.get(switch):
            fields.refuse(f"{switch}: {fields.values[switch]}")
        return {}

    return Part({}, read)


FLAGS = "dense layers"
"""Whether each layer is dense, until `merged` puts it into the pattern."""


def merged(parts: Sequence[Part], fields: Fields) -> JsonObject:
    """The settings of all parts."""
    found: JsonObject = {}
    for part in parts:
        found |= part.read(fields)
    if flags := found.pop(FLAGS, None):
        layers = [replace(kind, dense=flag) for kind, flag in zip(kinds_of(found), flags, strict=True)]
        found = {name: value for name, value in found.items() if name not in ("window", "global_every")}
        found["pattern"] = compressed(layers)
        fields.sources["pattern"] = f"layers without experts: {sum(flags)}"
    return found
