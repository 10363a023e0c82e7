"""The names of a decoder's parameters in the checkpoints of the published families."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax

from dtrain.models.altup import ALTUP, EXPAND, MERGE
from dtrain.models.delta import Delta
from dtrain.models.families.older_names import LEARNED, ROTARY, SCALE_AND_BIAS
from dtrain.models.layer_inputs import INPUTS, NORM, TABLE
from dtrain.models.mamba import CONVOLVED, Mamba
from dtrain.models.multi_token import BLOCK, EMBED_NORM, HIDDEN_NORM, MULTI_TOKEN, PROJECTION
from dtrain.models.nn.param import paths
from dtrain.models.place import Alternating, Channels, LayersTogether, Naming, OneLayer, Place, Row
from dtrain.models.rope import Learned
from dtrain.models.short_convolution import GATES

if TYPE_CHECKING:
    from dtrain.models.decoder import Decoder

HEAD = "lm_head.weight"
"""The output head. Some files of tied models have it too, as a copy of the embedding."""
QKV = ("query", "key", "value")
MATRICES = ("gate", "up", "down")
LAYER = "model.layers.{layer}."


def namings(model: "Decoder") -> tuple[Naming, ...]:
    """The names that families give to parameters of such a model; the usual ones if no family has all of them."""
    own, learned = set(jax.tree.leaves(paths(model.params()))), isinstance(model.position, Learned)
    older = {kind: names(model) for kind, names in (LEARNED if learned else ROTARY).items()}
    tables = older if learned else {kind: _stacks(model, names) for kind, names in _tables(model).items()} | older
    if model.multi_token:
        plain = older if learned else _tables(model) | older
        tables = {kind: names | _further(model, plain[kind]) for kind, names in tables.items()}
    unused = _unused(model)
    found = [Naming("transformers", names, kind, unused) for kind, names in tables.items() if own <= names.keys()]
    usual = next(iter(tables))
    return tuple(found) or (Naming("transformers", tables[usual], usual),)


def _unused(model: "Decoder") -> frozenset[str]:
    """Keys and values that published files have for layers which share those of earlier ones."""
    parts = [f"{name}.{kind}" for name in ("k_proj", "v_proj", "k_norm", "v_norm") for kind in ("weight", "bias")]
    later = [number for number, kind in enumerate(model.kinds) if kind.shared_keys]
    return frozenset(f"{LAYER.format(layer=number)}self_attn.{part}" for number in later for part in parts)


def _further(model: "Decoder", names: dict[str, Place]) -> dict[str, Place]:
    """The names of layers that predict further tokens: as those of DeepSeek V3, after the model's own layers."""
    found, prefix = dict[str, Place](), "blocks."
    inside = {name.removeprefix(prefix): place for name, place in names.items() if name.startswith(prefix)}
    own = {f"{BLOCK}.{name}": place for name, place in inside.items()}
    own[PROJECTION] = Place(f"{LAYER}eh_proj.weight", transposed=True)
    norms = {EMBED_NORM: "enorm", HIDDEN_NORM: "hnorm", "norm": "shared_head.norm"}
    own |= {name.removeprefix(prefix): place for name, place in _norms(norms).items()}
    for number in range(1, 1 + (model.multi_token.depth if model.multi_token else 0)):
        for name, place in own.items():
            inner = replace(place, numbers=(model.layers - 1 + number,))
            found[f"{MULTI_TOKEN}.{number}.{name}"] = OneLayer(place.name, inner=inner)
    return found


def _stacks(model: "Decoder", names: dict[str, Place]) -> dict[str, Place]:
    """The names of parameters in stacks of their groups."""
    prefix = "blocks."
    if not model.stacks:
        return names
    found = {name: place for name, place in names.items() if not name.startswith(prefix)}
    for stack in model.stacks:
        own = tuple(number for number, kind in enumerate(model.kinds) if model.group(kind) == stack)
        for name, place in names.items():
            if name.startswith(prefix):
                found[f"{prefix}{stack}.{name.removeprefix(prefix)}"] = replace(place, numbers=own)
    return found


def _tables(model: "Decoder") -> dict[str, dict[str, Place]]:
    """The names of each kind of checkpoint, by one of the families that have them."""
    usual = _usual(model)
    norms = ("norm1", "norm2", "post1", "post2")
    plain = {name: place for name, place in usual.items() if not name.startswith(tuple(f"blocks.{n}" for n in norms))}
    gemma = plain | _norms({"norm1": "input_layernorm", "norm2": "pre_feedforward_layernorm",
                            "post1": "post_attention_layernorm", "post2": "post_feedforward_layernorm"})  # fmt: skip
    glm4 = plain | _norms({"norm1": "input_layernorm", "norm2": "post_attention_layernorm",
                           "post1": "post_self_attn_layernorm", "post2": "post_mlp_layernorm"})  # fmt: skip
    gates = _fused("mlp.gate_up_proj", ("mlp.gate", "mlp.up"), [model.hidden or 4 * model.width] * 2)
    sizes = [count * model.head_size for count in (model.heads, model.groups, model.groups)]
    together = _fused("self_attn.qkv_proj", [f"{name}.weight" for name in QKV], sizes)
    rotated = {f"blocks.{name}_norm": Place(f"{LAYER}self_attn.{name}_layernorm.weight") for name in QKV[:2]}
    mixtral = _experts("block_sparse_moe", {"gate": "w1", "down": "w2", "up": "w3"})
    plain_experts = _experts("mlp", {name: f"{name}_proj" for name in MATRICES})
    gate = {"blocks.moe.shared_gate": Place(f"{LAYER}mlp.shared_expert_gate.weight", transposed=True)}
    router = {"blocks.moe.router": Place(f"{LAYER}mlp.gate.wg.weight", transposed=True)}
    statics = {"blocks.moe.bias": Row(f"{LAYER}mlp.moe_statics.e_score_correction_bias")}
    qwen_experts = _together(f"{LAYER}mlp.experts.gate_up_proj", f"{LAYER}mlp.experts.down_proj",
                             run=model.experts.hidden if model.experts else 1, transposed=True)  # fmt: skip
    qwen_experts["blocks.moe.router"] = Place(f"{LAYER}mlp.gate.weight", transposed=True)
    gated_router = {"blocks.moe.router": Place(f"{LAYER}mlp.router.gate.weight", transposed=True)}
    gated_router |= {"blocks.moe.bias": Place(f"{LAYER}mlp.expert_bias")}
    gated = usual | (_delta(model.delta) if model.delta else {}) | _gated_queries(model.head_size)
    grouped = _by_group(model.delta) if model.delta else {}
    no_qk_norms = {name: place for name, place in usual.items() if not name.endswith(("query_norm", "key_norm"))}
    tables = {
        "llama": usual,
        "gemma2": gemma,
        "phi3": usual | gates | together,
        "glm": usual | gates,
        "glm4": glm4 | gates,
        "starcoder2": usual | _matrices({"mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}),
        "hunyuan_v1_dense": usual | rotated,
        "mixtral": no_qk_norms | mixtral,
        "qwen3_moe": usual | plain_experts,
        "minimax_m2": usual | mixtral | _bias("block_sparse_moe"),
        "deepseek": usual | plain_experts | _shared("shared_experts") | _bias("mlp.gate"),
        "exaone_moe": usual | plain_experts | _shared("shared_experts") | _bias("mlp"),
        "qwen2_moe": usual | plain_experts | _shared("shared_expert") | gate,
        "hunyuan_v1_moe": usual | rotated | plain_experts | _shared("shared_mlp") | router,
        "flex_olmo": gemma | plain_experts,
        "gpt_oss": usual | _gpt_oss(),
        "granitemoe": usual | _granite_experts(model, "router.layer", "input_linear.weight", "output_linear.weight"),
        "granitemoe_swa": usual | _granite_experts(model, "router", "experts.gate_up_proj", "experts.down_proj"),
        "ernie4_5_moe": usual | plain_experts | _shared("shared_experts") | statics,
        "qwen3_5": gated,
        "lfm2": _lfm2(model, usual),
        "qwen3_5_moe": gated | plain_experts | _shared("shared_expert") | gate,
        "qwen3_5_moe_joint": gated | _shared("shared_expert") | gate | qwen_experts,
        "qwen3_next": gated | plain_experts | _shared("shared_expert") | gate | grouped,
        "hy_v3": usual | plain_experts | _shared("shared_mlp") | gated_router,
        "bamba": usual | _bamba(model),
        "granitemoehybrid": _granite_hybrid(model, usual),
        "gemma4": gemma | _gemma4(model) | _layer_inputs(model),
        "gemma3n": gemma | _gemma3n(model) | _layer_inputs(model),
        "llama4": usual | _llama4(model),
    }
    if model.qk_norm_rotated:  # no other families have such norms
        return {name: tables[name] for name in ("hunyuan_v1_dense", "hunyuan_v1_moe")}
    return tables


def _usual(model: "Decoder") -> dict[str, Place]:
    """Those of Llama, which most families have."""
    names = {"embed": Place("model.embed_tokens.weight"), "head": Place(HEAD, transposed=True)}
    names |= {f"norm.{ours}": Place(f"model.norm.{theirs}") for ours, theirs in SCALE_AND_BIAS.items()}
    names |= _norms({"norm1": "input_layernorm", "norm2": "post_attention_layernorm"})
    for ours in (*QKV, "out"):
        theirs = f"{LAYER}self_attn.{ours[0]}_proj"
        names[f"blocks.{ours}.weight"] = Place(f"{theirs}.weight", transposed=True)
        names[f"blocks.{ours}.bias"] = Place(f"{theirs}.bias")
    names |= {f"blocks.{ours}_norm": Place(f"{LAYER}self_attn.{ours[0]}_norm.weight") for ours in QKV[:2]}
    names["blocks.sink"] = Place(f"{LAYER}self_attn.sinks")
    names |= _latent(model) if model.latent else {}
    return names | _matrices({f"mlp.{ours}": f"mlp.{ours}_proj" for ours in ("gate", "up", "down")})


def _latent(model: "Decoder") -> dict[str, Place]:
    """Latent attention: the queries come from a vector or from the activations."""
    own, attention = "blocks.latent", f"{LAYER}self_attn."
    names = {"down": "kv_a_proj_with_mqa", "up": "kv_b_proj", "query_down": "q_a_proj"}
    found = {f"{own}.{ours}": Place(f"{attention}{theirs}.weight", transposed=True) for ours, theirs in names.items()}
    scales = {"scale": "kv_a_layernorm", "query_scale": "q_a_layernorm"}
    found |= {f"{own}.{ours}": Place(f"{attention}{theirs}.weight") for ours, theirs in scales.items()}
    if model.latent and model.latent.query_rank:
        found["blocks.query.weight"] = Place(f"{attention}q_b_proj.weight", transposed=True)
    return found


def _delta(delta: Delta) -> dict[str, Place]:
    """Linear attention by the gated delta rule: queries, keys and values share a matrix, and their taps a tensor."""
    own, there = "blocks.delta.", f"{LAYER}linear_attn."
    names = {"gate": "in_proj_z", "strength": "in_proj_b", "decay": "in_proj_a", "out": "out_proj"}
    found = {f"{own}{ours}": Place(f"{there}{theirs}.weight", transposed=True) for ours, theirs in names.items()}
    names = {"rate": "A_log", "shift": "dt_bias", "scale": "norm.weight"}
    found |= {f"{own}{ours}": Place(f"{there}{theirs}") for ours, theirs in names.items()}
    keys, values = delta.key_heads * delta.key_dim, delta.value_heads * delta.value_dim
    found |= _fused("linear_attn.in_proj_qkv", [f"delta.{name}" for name in QKV], [keys, keys, values])
    for name, start in zip(QKV, (0, keys, 2 * keys), strict=True):
        taps = Channels(f"{there}conv1d.weight", transposed=True, start=start, total=2 * keys + values)
        found[f"{own}{name}_taps"] = taps
    return found


def _mamba(mamba: Mamba) -> dict[str, Place]:
    """State-space layers: all that comes from the activations shares a matrix, and what is convolved a tensor."""
    own, there = "blocks.mamba.", f"{LAYER}mamba."
    values, keys = mamba.heads * mamba.head_dim, mamba.groups * mamba.state
    sizes = {"gate": values, "value": values, "key": keys, "query": keys, "decay": mamba.heads}
    found = _fused("mamba.in_proj", [f"mamba.{name}" for name in sizes], [*sizes.values()])
    names = {"rate": "A_log", "shift": "dt_bias", "skip": "D", "scale": "norm.weight"}
    found |= {f"{own}{ours}": Place(f"{there}{theirs}") for ours, theirs in names.items()}
    found[f"{own}out"] = Place(f"{there}out_proj.weight", transposed=True)
    total = values + 2 * keys
    for name, start in zip(CONVOLVED, (0, values, values + keys), strict=True):
        found[f"{own}{name}_taps"] = Channels(f"{there}conv1d.weight", transposed=True, start=start, total=total)
        found[f"{own}{name}_bias"] = Place(f"{there}conv1d.bias", start=start, total=total)
    return found


def _by_group(delta: Delta) -> dict[str, Place]:
    """As in `_delta`, where each head of the keys has its outputs of all these matrices together (Qwen 3 Next)."""
    shared, tensor = delta.value_heads // delta.key_heads, f"{LAYER}linear_attn."
    values, found = shared * delta.value_dim, dict[str, Place]()
    for theirs, runs in {
        "in_proj_qkvz": {"query": delta.key_dim, "key": delta.key_dim, "value": values, "gate": values},
        "in_proj_ba": {"strength": shared, "decay": shared},
    }.items():
        for part, ours in enumerate(runs):
            how: dict[str, Any] = {"transposed": True, "runs": tuple(runs.values()), "part": part}
            found[f"blocks.delta.{ours}"] = Alternating(f"{tensor}{theirs}.weight", **how)
    return found


def _lfm2(model: "Decoder", usual: dict[str, Place]) -> dict[str, Place]:
    """Layers with a short convolution, whose gates and values share a matrix."""
    width, conv = model.width, "blocks.convolution."
    found = usual | _norms({"norm1": "operator_norm", "norm2": "ffn_norm"})
    found |= {"norm.scale": Place("model.embedding_norm.weight")}
    found |= _matrices({"mlp.gate": "feed_forward.w1", "mlp.up": "feed_forward.w3", "mlp.down": "feed_forward.w2"})
    found["blocks.out.weight"] = Place(f"{LAYER}self_attn.out_proj.weight", transposed=True)
    found |= {f"blocks.{name}_norm": Place(f"{LAYER}self_attn.{name[0]}_layernorm.weight") for name in QKV[:2]}
    found |= _fused("conv.in_proj", [f"convolution.{name}" for name in GATES], [width] * 3)
    found[f"{conv}out"] = Place(f"{LAYER}conv.out_proj.weight", transposed=True)
    found |= _experts("feed_forward", {"gate": "w1", "down": "w2", "up": "w3"})
    found["blocks.moe.bias"] = Place(f"{LAYER}feed_forward.expert_bias")
    return found | {f"{conv}taps": Channels(f"{LAYER}conv.conv.weight", transposed=True, total=width)}


def _gemma4(model: "Decoder") -> dict[str, Place]:
    """A factor of each layer, and experts beside the feed-forward layer."""
    run = model.experts.hidden if model.experts else 1
    found = _together(f"{LAYER}experts.gate_up_proj", f"{LAYER}experts.down_proj", run=run, transposed=True)
    found |= {"blocks.scale": Place(f"{LAYER}layer_scalar")}
    found |= _norms({"moe_norm": "pre_feedforward_layernorm_2", "mlp_post": "post_feedforward_layernorm_1",
                     "moe_post": "post_feedforward_layernorm_2"})  # fmt: skip
    found["blocks.moe.router"] = Place(f"{LAYER}router.proj.weight", transposed=True)
    names = {"router_scale": "scale", "expert_scale": "per_expert_scale"}
    return found | {f"blocks.moe.{ours}": Place(f"{LAYER}router.{theirs}") for ours, theirs in names.items()}


def _layer_inputs(model: "Decoder") -> dict[str, Place]:
    """Inputs of each layer, whose tables are one tensor."""
    groups = [*map(model.group, model.kinds)]
    stacks = tuple(tuple(n for n, group in enumerate(groups) if group == one) for one in dict.fromkeys(groups))
    found = _matrices({f"{INPUTS}.gate": "per_layer_input_gate", f"{INPUTS}.out": "per_layer_projection"})
    tables = {TABLE: ("embed_tokens_per_layer", False), f"{INPUTS}.projection": ("per_layer_model_projection", True)}
    for ours, (theirs, transposed) in tables.items():
        found[f"blocks.{ours}"] = LayersTogether(f"model.{theirs}.weight", transposed, stacks=stacks)
    found |= _norms({"inputs_post": "post_per_layer_input_norm"})
    return found | {f"{NORM}.scale": Place("model.per_layer_projection_norm.weight")}


def _gemma3n(model: "Decoder") -> dict[str, Place]:
    """Several streams of activations, and a product of two matrices beside attention."""
    own = {"router": "modality_router", "predict": "prediction_coefs", "correct": "correction_coefs"}
    found = _matrices({f"{ALTUP}.{ours}": f"altup.{theirs}" for ours, theirs in own.items()})
    found |= _matrices({"laurel.left": "laurel.linear_left", "laurel.right": "laurel.linear_right"})
    found |= _norms({"laurel_post": "laurel.post_laurel_norm", f"{ALTUP}.norm": "altup.router_norm"})
    found[f"blocks.{ALTUP}.scale"] = Place(f"{LAYER}altup.correct_output_scale")
    for ours, theirs in {EXPAND: "altup_projections", MERGE: "altup_unembed_projections"}.items():
        for number in range(1, model.altup.streams if model.altup else 1):
            found[f"{ALTUP}.{ours}.{number}"] = Place(f"model.{theirs}.{number - 1}.weight", transposed=True)
    return found


def _llama4(model: "Decoder") -> dict[str, Place]:
    """All experts in one tensor, gates before the others, and a shared one."""
    module = f"{LAYER}feed_forward."
    run = model.experts.hidden if model.experts else 1
    found = _together(f"{module}experts.gate_up_proj", f"{module}experts.down_proj", run=run)
    found |= _matrices({f"mlp.{name}": f"feed_forward.{name}_proj" for name in MATRICES})
    found["blocks.moe.router"] = Place(f"{module}router.weight", transposed=True)
    shared = {name: f"{module}shared_expert.{name}_proj.weight" for name in MATRICES}
    return found | {f"blocks.moe.shared.{ours}": Place(theirs, transposed=True) for ours, theirs in shared.items()}


def _gated_queries(head_size: int) -> dict[str, Place]:
    """Each head of the queries, followed by its gate."""
    tensor, found = f"{LAYER}self_attn.q_proj", dict[str, Place]()
    for part, name in enumerate(("query", "gate")):
        how: dict[str, Any] = {"runs": (head_size, head_size), "part": part}
        found[f"blocks.{name}.weight"] = Alternating(f"{tensor}.weight", transposed=True, **how)
        found[f"blocks.{name}.bias"] = Alternating(f"{tensor}.bias", **how)
    return found


def _norms(names: Mapping[str, str]) -> dict[str, Place]:
    """Scales and biases of a layer's normalisations."""
    pairs = [(ours, theirs, *kind) for ours, theirs in names.items() for kind in SCALE_AND_BIAS.items()]
    return {f"blocks.{ours}.{kind}": Place(f"{LAYER}{theirs}.{named}") for ours, theirs, kind, named in pairs}


def _matrices(names: Mapping[str, str], layer: str = LAYER, *, transposed: bool = True) -> dict[str, Place]:
    """Matrices of a layer, and their biases."""
    found = {f"blocks.{ours}": Place(f"{layer}{theirs}.weight", transposed) for ours, theirs in names.items()}
    return found | {f"blocks.{ours}_bias": Place(f"{layer}{theirs}.bias") for ours, theirs in names.items()}


def _fused(tensor: str, names: list[str] | tuple[str, ...], sizes: list[int]) -> dict[str, Place]:
    """Matrices of a layer that are concatenated in one tensor, each with so many outputs."""
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    return {
        f"blocks.{name}": Place(f"{LAYER}{tensor}.weight", True, start, sum(sizes))
        for name, start in zip(names, starts, strict=True)
    }


def _shared(module: str) -> dict[str, Place]:
    """The experts that every token is routed to."""
    return {f"blocks.moe.shared.{ours}": Place(f"{LAYER}mlp.{module}.{ours}_proj.weight", True) for ours in MATRICES}


def _gpt_oss() -> dict[str, Place]:
    """All experts in one tensor, in which gate and up alternate by output."""
    experts = f"{LAYER}mlp.experts."
    found = {f"blocks.moe.router{kind}": Place(f"{LAYER}mlp.router.{named}", transposed=named == "weight")
             for kind, named in {"": "weight", "_bias": "bias"}.items()}  # fmt: skip
    found["blocks.moe.down_bias"] = Alternating(f"{experts}down_proj_bias", together=True)
    found |= _together(f"{experts}gate_up_proj_bias", f"{experts}down_proj", "_bias")
    return found | _together(f"{experts}gate_up_proj", f"{experts}down_proj")


def _together(first: str, last: str, kind: str = "", *, run: int = 1, transposed: bool = False) -> dict[str, Place]:
    """Two tensors of all experts: gate and up in turn, `run` outputs each, and down."""
    how: dict[str, Any] = {"transposed": transposed, "together": True}
    found: dict[str, Place] = {"blocks.moe.experts.down": Alternating(last, **how)}
    for part, ours in enumerate(("gate", "up")):
        found[f"blocks.moe.experts.{ours}{kind}"] = Alternating(first, runs=(run, run), part=part, **how)
    return found


def _granite_experts(model: "Decoder", router: str, first: str, last: str) -> dict[str, Place]:
    """All experts in one tensor, with gate before up."""
    module, own = f"{LAYER}block_sparse_moe.", model.experts
    run = own.hidden if own else 1
    found = _together(f"{module}{first}", f"{module}{last}", run=run, transposed=True)
    found["blocks.moe.router"] = Place(f"{module}{router}.weight", transposed=True)
    both = _fused("shared_mlp.input_linear", ("moe.shared.gate", "moe.shared.up"),
                  [own.shared_size if own else 0] * 2)  # fmt: skip
    return found | both | {"blocks.moe.shared.down": Place(f"{LAYER}shared_mlp.output_linear.weight", True)}


def _bamba(model: "Decoder") -> dict[str, Place]:
    """Layers with other names of the feed-forward layer and of its norm."""
    found = _norms({"norm1": "input_layernorm", "norm2": "pre_ff_layernorm"})
    found |= {f"norm.{ours}": Place(f"model.final_layernorm.{theirs}") for ours, theirs in SCALE_AND_BIAS.items()}
    found |= _matrices({f"mlp.{ours}": f"feed_forward.{ours}_proj" for ours in MATRICES})
    return found | (_mamba(model.mamba) if model.mamba else {})


def _granite_hybrid(model: "Decoder", usual: dict[str, Place]) -> dict[str, Place]:
    """Experts or a feed-forward layer in the tensors of the shared one, and layers of another mixer."""
    found = usual | _granite_experts(model, "router.layer", "input_linear.weight", "output_linear.weight")
    found |= _fused("shared_mlp.input_linear", ("mlp.gate", "mlp.up"), [model.hidden or 4 * model.width] * 2)
    found["blocks.mlp.down"] = Place(f"{LAYER}shared_mlp.output_linear.weight", True)
    return found | (_mamba(model.mamba) if model.mamba else {})


def _bias(module: str) -> dict[str, Place]:
    """The routing bias."""
    return {"blocks.moe.bias": Place(f"{LAYER}{module}.e_score_correction_bias")}


def _experts(module: str, names: Mapping[str, str]) -> dict[str, Place]:
    """The router and the experts of a layer."""
    tensor = f"{LAYER}{module}.experts.{{expert}}"
    found = {f"blocks.moe.experts.{ours}": Place(f"{tensor}.{theirs}.weight", True) for ours, theirs in names.items()}
    return found | {"blocks.moe.router": Place(f"{LAYER}{module}.gate.weight", transposed=True)}
