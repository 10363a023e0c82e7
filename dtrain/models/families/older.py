"""Families that share few fields with Llama's, by `model_type`; as in `dense`."""

import math
from typing import TYPE_CHECKING

from dtrain.core.types import JsonObject
from dtrain.models.families import rotary
from dtrain.models.families.family import Family, whole_heads
from dtrain.models.families.fields import Fields
from dtrain.models.families.part import Part
from dtrain.models.families.parts import (
    GELUS,
    LAYER_NORM,
    UNGATED,
    activation,
    biases,
    dense,
    fixed,
    known,
    rope,
    same,
    sizes,
    stated,
)
from dtrain.models.rope import Learned, Rope

if TYPE_CHECKING:
    from dtrain.models.decoder import Decoder

LEARNED = fixed(position=Learned())


def gpt_sizes(*, tied: bool) -> Part:
    """The sizes of GPT-2, under the names of its fields."""
    names = {
        "vocab": "vocab_size", "context": "n_positions", "layers": "n_layer", "heads": "n_head",
        "epsilon": "layer_norm_epsilon", "tied": "tie_word_embeddings",
    }  # fmt: skip

    def read(fields: Fields) -> JsonObject:
        width = fields("n_embd", "width")
        fields.known.add("n_inner")
        fields.sources["hidden"] = f"n_inner: {fields.values.get('n_inner')}, n_embd: {width}"
        own = {"width": width, "hidden": fields.values.get("n_inner") or 4 * width}
        return own | {ours: fields(theirs, ours) for ours, theirs in names.items()}

    def write(model: "Decoder") -> JsonObject:
        return {theirs: getattr(model, ours) for ours, theirs in names.items()} | {
            "n_embd": model.width,
            "n_inner": model.hidden,
        }

    return Part({"layer_norm_epsilon": 1e-5, "tie_word_embeddings": tied}, read, write)


def rows_of(context: Part) -> Part:
    """The sizes of a model whose positions are rotated: it has no number of rows."""

    def read(fields: Fields) -> JsonObject:
        return {name: value for name, value in context.read(fields).items() if name != "context"}

    return Part(context.defaults, read, context.write)


def share(rotated: int, dim: int) -> float:
    """`Rope.partial` for so many rotated values of a head."""
    found = rotated / dim
    return found if int(dim * found) == rotated else math.nextafter(found, 1)


def gptj_rope() -> Part:
    """Rotation of the first `rotary_dim` values of each head, in pairs of neighbours."""

    def read(fields: Fields) -> JsonObject:
        count, dim = fields("rotary_dim"), fields("n_embd") // fields("n_head")
        fields.sources["position.partial"] = f"rotary_dim: {count}"
        if not count:
            fields.refuse(f"rotary_dim: {count}")
            return {}
        return {"position": Rope(partial=share(count, dim), interleaved=True)}

    def write(model: "Decoder") -> JsonObject:
        return {"rotary_dim": model.position.rotates(model.head_size)} if isinstance(model.position, Rope) else {}

    return Part({"rotary_dim": 64}, read, write)


def neox_rope() -> Part:
    """Rotary positions under the names of GPT-NeoX's fields."""
    theta, partial = "rotary_emb_base", "rotary_pct"

    def read(fields: Fields) -> JsonObject:
        given = fields.maybe("rope_parameters") or {}
        if fields.maybe("rope_scaling"):
            fields.refuse(f"rope_scaling: {fields.values['rope_scaling']}")
        kind = given.get("rope_type", "default")
        if kind != "default":
            fields.refuse(f"rope_parameters.rope_type: {kind}")
        base, part = fields(theta, "position.theta"), fields(partial, "position.partial")
        return {"position": Rope(theta=given.get("rope_theta", base), partial=given.get(rotary.PARTIAL, part))}

    def write(model: "Decoder") -> JsonObject:
        rope = model.position
        return {theta: rope.theta, partial: rope.partial} if isinstance(rope, Rope) else {}

    return Part({theta: 10_000, partial: 0.25}, read, write)


def neox_parallel() -> Part:
    """Attention and the feed-forward layer beside each other, each with a normalisation of its own."""
    plain = same("parallel", "use_parallel_residual", True)

    def read(fields: Fields) -> JsonObject:
        found = plain.read(fields)
        return found | {"parallel_norms": found["parallel"]}

    return Part(plain.defaults, read, plain.write)


def opt_sizes() -> Part:
    """The sizes of OPT; embeddings of another width than the layers are refused."""
    names = {
        "vocab": "vocab_size", "context": "max_position_embeddings", "layers": "num_hidden_layers",
        "heads": "num_attention_heads", "width": "hidden_size", "hidden": "ffn_dim", "tied": "tie_word_embeddings",
    }  # fmt: skip

    def read(fields: Fields) -> JsonObject:
        found = {ours: fields(theirs, ours) for ours, theirs in names.items()}
        if (size := fields.maybe("word_embed_proj_dim")) not in (None, found["width"]):
            fields.refuse(f"word_embed_proj_dim: {size}")
        return found | {"epsilon": 1e-5}

    return Part(
        {"tie_word_embeddings": True},
        read,
        lambda model: (
            {theirs: getattr(model, ours) for ours, theirs in names.items()}
            | {"word_embed_proj_dim": model.width, "ffn_dim": model.hidden or 4 * model.width}
        ),
    )


ONE_GROUP_EACH = Part({}, lambda fields: {"kv_heads": fields("num_attention_heads")})
"""The class has keys and values for each head, whatever `num_key_value_heads` says."""
GPTJ = (
    rows_of(gpt_sizes(tied=False)), activation("activation_function", GELUS, "gelu_new"), gptj_rope(), LAYER_NORM,
    biases(mlp_bias=True), fixed(parallel=True, head_bias=True),
)  # fmt: skip
OLDER: dict[str, Family] = {
    "gpt2": Family(
        "GPT2LMHeadModel",
        (gpt_sizes(tied=True), LEARNED, activation("activation_function", UNGATED, "gelu_new"), fixed(bias=True),
         LAYER_NORM),
        "gpt2",
        opens=lambda model: model.tied,  # an output head of its own has no name that both read
    ),
    "gpt_neox": Family(
        "GPTNeoXForCausalLM",
        (*sizes(epsilon=("layer_norm_eps", 1e-5), act="gelu", acts={"gelu": "gelu"} | UNGATED),
         ONE_GROUP_EACH, neox_rope(), LAYER_NORM,
         biases(qkv_bias=("attention_bias", True), out_bias=("attention_bias", True), mlp_bias=True), neox_parallel(),
         known("classifier_dropout"), dense()),
        "gpt_neox", opens=whole_heads,
    ),
    "phi": Family(
        "PhiForCausalLM",
        (*sizes(epsilon=("layer_norm_eps", 1e-5), act="gelu_new", acts=UNGATED), rope(partial=0.5), LAYER_NORM,
         fixed(bias=True, parallel=True, head_bias=True), stated(qk_layernorm=False), dense()),
        "phi",
    ),
    "gptj": Family("GPTJForCausalLM", GPTJ, "gptj"),
    "codegen": Family("CodeGenForCausalLM", GPTJ, "codegen"),
    "opt": Family(
        "OPTForCausalLM",
        (opt_sizes(), LEARNED, activation("activation_function", {"relu": "relu"} | UNGATED, "relu"), fixed(bias=True),
         LAYER_NORM, known("dropout", "layerdrop", "init_std"),
         stated(do_layer_norm_before=True, enable_bias=True, layer_norm_elementwise_affine=True,
                _remove_final_layer_norm=False)),
        "opt",
    ),
    "gpt_bigcode": Family(
        "GPTBigCodeForCausalLM",
        (gpt_sizes(tied=True), LEARNED, LAYER_NORM,
         activation("activation_function", {"gelu_pytorch_tanh": "gelu_tanh"} | UNGATED, "gelu_pytorch_tanh"),
         Part({"multi_query": True},
              lambda fields: {"kv_heads": 1 if fields("multi_query", "kv_heads") else fields("n_head")},
              lambda model: {"multi_query": model.groups == 1}),
         stated(scale_attn_weights=True), fixed(bias=True),
         known("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32")),
        "gpt_bigcode",
        opens=lambda model: model.groups in (1, model.heads),
    ),
}  # fmt: skip
