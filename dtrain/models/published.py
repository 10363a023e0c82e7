"""The names of a decoder's parameters in Hugging Face's checkpoints."""

from typing import TYPE_CHECKING

from dtrain.models.place import Naming, Place
from dtrain.models.rope import Learned

if TYPE_CHECKING:
    from dtrain.models.decoder import Decoder

FUSED = "self_attn.qkv_proj.weight"
"""The tensor of queries, keys and values together (Phi-3)."""

HEAD = "lm_head.weight"
"""The output head. Some files of tied models have it too, as a copy of the embedding."""

QKV = ("query", "key", "value")
KINDS = ("weight", "bias")


def namings(model: "Decoder") -> tuple[Naming, ...]:
    """The usual names, and those of fused matrices."""
    return tuple(Naming("transformers", places(model, fused)) for fused in (False, True))


def places(model: "Decoder", fused: bool = False) -> dict[str, Place]:
    """The dotted path of each parameter that has a published name, with that name and layout.

    `fused`: queries, keys and values are one tensor, and so are the two products of a gated feed-forward layer (Phi-3).
    """
    if isinstance(model.position, Learned):
        return _gpt2(model)
    return _llama(model) | (_fused(model) if fused else {})


def _gpt2(model: "Decoder") -> dict[str, Place]:
    layer = "h.{layer}."
    names = {"embed": Place("wte.weight"), "position": Place("wpe.weight")}
    for ours, theirs in {"norm": "ln_f", "blocks.norm1": f"{layer}ln_1", "blocks.norm2": f"{layer}ln_2"}.items():
        names |= {f"{ours}.scale": Place(f"{theirs}.weight"), f"{ours}.bias": Place(f"{theirs}.bias")}
    size = model.heads * model.head_size
    for part, ours in enumerate(QKV):
        for what in KINDS:
            names[f"blocks.{ours}.{what}"] = Place(f"{layer}attn.c_attn.{what}", start=part * size, total=3 * size)
    names |= {f"blocks.out.{what}": Place(f"{layer}attn.c_proj.{what}") for what in KINDS}
    for ours, theirs in {"up": "c_fc", "down": "c_proj"}.items():
        names[f"blocks.mlp.{ours}"] = Place(f"{layer}mlp.{theirs}.weight")
        names[f"blocks.mlp.{ours}_bias"] = Place(f"{layer}mlp.{theirs}.bias")
    return names


def _llama(model: "Decoder") -> dict[str, Place]:
    """All others: Llama, Mistral, Mixtral, Qwen, Gemma, OLMo 2, and Phi-3 but for its fused tensors."""
    layer = "model.layers.{layer}."
    names = {
        "embed": Place("model.embed_tokens.weight"),
        "norm.scale": Place("model.norm.weight"),
        "head": Place("lm_head.weight", transposed=True),
    }
    norms = {"norm1": "input", "norm2": "pre_feedforward" if model.post_norm else "post_attention"}
    norms = norms if model.pre_norm else {}
    norms |= {"post1": "post_attention", "post2": "post_feedforward"} if model.post_norm else {}
    names |= {f"blocks.{ours}.scale": Place(f"{layer}{theirs}_layernorm.weight") for ours, theirs in norms.items()}
    for ours in (*QKV, "out"):
        theirs = f"{layer}self_attn.{ours[0]}_proj"
        names[f"blocks.{ours}.weight"] = Place(f"{theirs}.weight", transposed=True)
        names[f"blocks.{ours}.bias"] = Place(f"{theirs}.bias")
    names |= {f"blocks.{ours}_norm": Place(f"{layer}self_attn.{ours[0]}_norm.weight") for ours in ("query", "key")}
    experts = f"{layer}mlp" if model.qk_norm else f"{layer}block_sparse_moe"  # Qwen 3, or Mixtral
    mixtral = {"gate": "w1", "down": "w2", "up": "w3"}
    for ours, short in mixtral.items():
        names[f"blocks.mlp.{ours}"] = Place(f"{layer}mlp.{ours}_proj.weight", transposed=True)
        names[f"blocks.mlp.{ours}_bias"] = Place(f"{layer}mlp.{ours}_proj.bias")
        name = f"{ours}_proj" if model.qk_norm else short
        names[f"blocks.moe.experts.{ours}"] = Place(f"{experts}.experts.{{expert}}.{name}.weight", transposed=True)
    return names | {"blocks.moe.router": Place(f"{experts}.gate.weight", transposed=True)}


def _fused(model: "Decoder") -> dict[str, Place]:
    layer, sizes = "model.layers.{layer}.", (model.heads, model.groups, model.groups)
    starts = (0, model.heads, model.heads + model.groups)
    total = sum(sizes) * model.head_size
    names = {}
    for ours, start in zip(QKV, starts, strict=True):
        names[f"blocks.{ours}.weight"] = Place(f"{layer}{FUSED}", True, start * model.head_size, total)
    hidden = model.hidden or 4 * model.width
    for part, ours in enumerate(("gate", "up")):
        names[f"blocks.mlp.{ours}"] = Place(f"{layer}mlp.gate_up_proj.weight", True, part * hidden, 2 * hidden)
    return names
