"""The names of the tensors of families that share few with Llama's: GPT-2 and what was published soon after it."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from dtrain.models.place import Alternating, Later, Place

if TYPE_CHECKING:
    from dtrain.models.decoder import Decoder

QKV = ("query", "key", "value")
KINDS = {"weight": True, "bias": False}
"""Of a linear layer its tensors, and whether they are transposed."""
SCALE_AND_BIAS = {"scale": "weight", "bias": "bias"}
Names = dict[str, Place]


def gpt2(model: "Decoder") -> Names:
    """GPT-2."""
    layer = "h.{layer}."
    names = {"embed": Place("wte.weight"), "position": Place("wpe.weight")}
    names |= _norms({"norm": "ln_f", "blocks.norm1": f"{layer}ln_1", "blocks.norm2": f"{layer}ln_2"})
    size = model.heads * model.head_size
    for part, ours in enumerate(QKV):
        for what in KINDS:
            names[f"blocks.{ours}.{what}"] = Place(f"{layer}attn.c_attn.{what}", start=part * size, total=3 * size)
    names |= {f"blocks.out.{what}": Place(f"{layer}attn.c_proj.{what}") for what in KINDS}
    for ours, theirs in {"up": "mlp.c_fc", "down": "mlp.c_proj"}.items():
        names |= {f"blocks.mlp.{ours}": Place(f"{layer}{theirs}.weight")}
        names |= {f"blocks.mlp.{ours}_bias": Place(f"{layer}{theirs}.bias")}
    return names


def gpt_bigcode(model: "Decoder") -> Names:
    """StarCoder 1: as GPT-2, transposed, with few heads of keys and values."""
    layer, dim = "transformer.h.{layer}.", model.head_size
    names = {"embed": Place("transformer.wte.weight"), "position": Place("transformer.wpe.weight"), **_head("lm_head")}
    names |= _norms({"norm": "transformer.ln_f", "blocks.norm1": f"{layer}ln_1", "blocks.norm2": f"{layer}ln_2"})
    sizes = [model.heads * dim, model.groups * dim, model.groups * dim]
    if model.groups == model.heads:  # then they alternate by head
        names |= _by_head(f"{layer}attn.c_attn", dim)
    else:
        for part, ours in enumerate(QKV):
            for what, turned in KINDS.items():
                place = Place(f"{layer}attn.c_attn.{what}", turned, sum(sizes[:part]), sum(sizes))
                names[f"blocks.{ours}.{what}"] = place
    return names | _linear({"out": f"{layer}attn.c_proj"}) | _mlp(f"{layer}mlp.c_fc", f"{layer}mlp.c_proj")


def opt(_: "Decoder") -> Names:
    """OPT: positions begin at 2."""
    layer = "model.decoder.layers.{layer}."
    names = {"embed": Place("model.decoder.embed_tokens.weight"), **_head("lm_head")}
    names["position"] = Later("model.decoder.embed_positions.weight", skipped=2)
    names |= _norms({"norm": "model.decoder.final_layer_norm", "blocks.norm1": f"{layer}self_attn_layer_norm",
                     "blocks.norm2": f"{layer}final_layer_norm"})  # fmt: skip
    names |= _linear({ours: f"{layer}self_attn.{ours[0]}_proj" for ours in QKV} | {"out": f"{layer}self_attn.out_proj"})
    return names | _mlp(f"{layer}fc1", f"{layer}fc2")


def gpt_neox(model: "Decoder") -> Names:
    """GPT-NeoX and Pythia: queries, keys and values of each head are neighbours in one tensor."""
    layer = "gpt_neox.layers.{layer}."
    names = {"embed": Place("gpt_neox.embed_in.weight"), **_head("embed_out")}
    names |= _norms({"norm": "gpt_neox.final_layer_norm", "blocks.norm1": f"{layer}input_layernorm",
                     "blocks.norm2": f"{layer}post_attention_layernorm"})  # fmt: skip
    names |= _by_head(f"{layer}attention.query_key_value", model.head_size)
    names |= _linear({"out": f"{layer}attention.dense"})
    return names | _mlp(f"{layer}mlp.dense_h_to_4h", f"{layer}mlp.dense_4h_to_h")


def phi(_: "Decoder") -> Names:
    """Phi 1 and 2."""
    layer = "model.layers.{layer}."
    names = {"embed": Place("model.embed_tokens.weight"), **_head("lm_head")}
    names |= _norms({"norm": "model.final_layernorm", "blocks.norm1": f"{layer}input_layernorm"})
    names |= _linear({ours: f"{layer}self_attn.{ours[0]}_proj" for ours in QKV} | {"out": f"{layer}self_attn.dense"})
    return names | _mlp(f"{layer}mlp.fc1", f"{layer}mlp.fc2")


def gptj(_: "Decoder") -> Names:
    """GPT-J."""
    layer = "transformer.h.{layer}."
    parts = {ours: f"{layer}attn.{ours[0]}_proj" for ours in QKV}
    return _gptj_rest() | _linear(parts)


def codegen(model: "Decoder") -> Names:
    """CodeGen: as GPT-J, with queries, values and keys by quarters in one tensor."""
    quarter, name = model.heads * model.head_size // 4, "transformer.h.{layer}.attn.qkv_proj.weight"
    order = ("query", "value", "key")
    return _gptj_rest() | {
        f"blocks.{ours}.weight": Alternating(name, True, runs=(quarter,) * 3, part=part)
        for part, ours in enumerate(order)
    }


def _gptj_rest() -> Names:
    layer = "transformer.h.{layer}."
    names = {"embed": Place("transformer.wte.weight"), **_head("lm_head")}
    names |= _norms({"norm": "transformer.ln_f", "blocks.norm1": f"{layer}ln_1"})
    return names | _linear({"out": f"{layer}attn.out_proj"}) | _mlp(f"{layer}mlp.fc_in", f"{layer}mlp.fc_out")


def _head(name: str) -> Names:
    return {"head": Place(f"{name}.weight", transposed=True), "head_bias": Place(f"{name}.bias")}


def _norms(names: dict[str, str]) -> Names:
    return {
        f"{ours}.{own}": Place(f"{theirs}.{named}")
        for ours, theirs in names.items()
        for own, named in SCALE_AND_BIAS.items()
    }


def _linear(names: dict[str, str]) -> Names:
    return {
        f"blocks.{ours}.{what}": Place(f"{theirs}.{what}", turned)
        for ours, theirs in names.items()
        for what, turned in KINDS.items()
    }


def _mlp(up: str, down: str) -> Names:
    names = {"up": up, "down": down}
    found = {f"blocks.mlp.{ours}": Place(f"{theirs}.weight", transposed=True) for ours, theirs in names.items()}
    return found | {f"blocks.mlp.{ours}_bias": Place(f"{theirs}.bias") for ours, theirs in names.items()}


def _by_head(name: str, dim: int) -> Names:
    return {
        f"blocks.{ours}.{what}": Alternating(f"{name}.{what}", turned, runs=(dim,) * 3, part=part)
        for part, ours in enumerate(QKV)
        for what, turned in KINDS.items()
    }


LEARNED: dict[str, Callable[["Decoder"], Names]] = {"gpt2": gpt2, "gpt_bigcode": gpt_bigcode, "opt": opt}
"""Families with learned positions."""
ROTARY: dict[str, Callable[["Decoder"], Names]] = {"gpt_neox": gpt_neox, "phi": phi, "gptj": gptj, "codegen": codegen}
