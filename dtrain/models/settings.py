"""The settings that decide a model's outputs besides its parameters: two models that share them compute the same.

Settings that only concern training, or how a step is computed, are left out.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from dtrain.models.decoder import Decoder
from dtrain.models.layer_pattern import ATTENTION
from dtrain.models.resnet import ResNet
from dtrain.models.rope import Learned
from dtrain.models.vit import ViT

TRAINING = {
    "preset",
    "context",
    "init",
    "depth_init",
    "z_loss",
    "balance",
    "capacity",
    "bias_rate",
    "dropout",
    "multi_token",
}
IN_SHAPES = {"image", "classes"}
"""Settings of classifiers of images that the shapes of parameters show, or that decide nothing: a new head has other
classes, and a net of convolutions takes pictures of any size."""
COMPUTING = {"remat", "unroll", "loss_chunks", "pad_vocab"}

PLACE = "folder"
"""Where the module of a custom model lies: on another machine it is another folder."""

ABSENT = "not set"

LATER: dict[str, object] = {
    "norm_scale": True, "qk_norm_rotated": False, "qkv_clip": None, "parallel": False, "embed_multiplier": 1.0,
    "residual_multiplier": 1.0, "logit_multiplier": 1.0, "pattern": [], "attention_multiplier": None,
    "query_growth": None, "experts.shared_gate": False, "experts.bias": False, "experts.groups": 1,
    "experts.active_groups": 1, "position.partial": 1.0, "position.interleaved": False,
    "out_bias": False, "mlp_bias": False, "parallel_norms": False, "latent": None, "sinks": False, "head_bias": False,
    "experts.group_by": 2, "experts.biases": False, "experts.router_bias": False,
    "experts.shared_hidden": None, "attention_gate": False, "delta": None, "convolution": None, "mamba": None,
    "experts.beside": False, "value_norm": False, "layer_scale": False, "position.proportional": False,
    "layer_inputs": 0, "experts.before": False, "qk_norm_plain": False, "query_growth.first": 0,
    "query_growth.unrotated": False, "altup": None, "laurel_rank": 0, "layer_inputs_vocab": 0,
}  # fmt: skip
"""Settings of decoders that earlier versions did not have, with the values that say what those versions computed."""

LATER_KIND: dict[str, object] = {
    "dense": False, "mixer": ATTENTION, "head_dim": None, "kv_heads": None, "shared_values": False,
    "shared_keys": False, "hidden": None, "chunk": None, "sparsity": 0.0,
}  # fmt: skip
"""The same of kinds of layers."""

LATER_YARN: dict[str, object] = {"mscale_all_dim": 0.0, "truncate": True}
"""The same of the scaling yarn."""

Settings = dict[str, Any]
"""JSON values by dotted name."""


def settings(model: Any) -> Settings:
    """The settings of a model, with every default resolved."""
    own = [field.name for field in dataclasses.fields(model) if field.name != PLACE]
    flat = _flat({name: getattr(model, name) for name in own})
    if isinstance(model, ViT):  # as many patches in other rows have other positions
        return flat | {"image": list(model.image or ())}
    if isinstance(model, ResNet):
        return flat | {"blocks": list(model.counts)}
    return flat | (_resolved(model) if isinstance(model, Decoder) else {})


def later(recorded: Settings) -> Settings:
    """The settings of a decoder that an earlier version did not have, with the values of what it computed."""
    part = {"position": "position.theta", "experts": "experts.count", "query_growth": "query_growth.rate"}
    found = {
        name: value for name, value in LATER.items() if "." not in name or part[name.partition(".")[0]] in recorded
    }
    if recorded.get("position.scaling.kind") == "yarn":
        found |= {f"position.scaling.{name}": value for name, value in LATER_YARN.items()}
    return found


def completed(recorded: Settings) -> Settings:
    """The settings that an earlier version of dtrain recorded in a file's header, with those that it did not have."""
    if recorded.get("kind") != "decoder":
        return recorded
    biases = {name: recorded.get("bias", False) for name in BIASES}
    whole = later(recorded) | biases | recorded
    if "experts.bias_rate" in whole:
        whole["experts.bias"] = whole["experts.bias"] or whole.pop("experts.bias_rate") > 0
    if whole.get("experts.shared_hidden") is None and "experts.shared" in whole:
        whole["experts.shared_hidden"] = whole["experts.shared"] * whole["experts.hidden"] or None
    if "position.scaling" in whole:
        whole["position.scaling"] = _whole_scaling(whole["position.scaling"])
    if isinstance(pattern := whole.get("pattern"), list):
        whole["pattern"] = [_whole_kind(kind) for kind in pattern]
    return whole


def _whole_scaling(scaling: Any) -> Any:
    yarn = isinstance(scaling, dict) and scaling.get("kind") == "yarn"
    return {"attention_factor": None, **LATER_YARN, **scaling} if yarn else scaling


def _whole_kind(kind: Any) -> Any:
    position = kind.get("position") if isinstance(kind, dict) else None
    if not isinstance(position, dict) or "scaling" not in position:
        return kind
    return kind | {"position": {"proportional": False, **position, "scaling": _whole_scaling(position["scaling"])}}


def differing(ours: Mapping[str, object], theirs: Mapping[str, object], context: int) -> list[str]:
    """The names of the settings that differ, for rows of at most `context` tokens."""
    if ours.get("kind") != theirs.get("kind"):
        return ["kind"]
    both = [
        name
        for name in [*theirs, *(ours.keys() - theirs.keys())]
        if name not in TRAINING | {PLACE} | (IN_SHAPES - ours.keys())
    ]
    names = [name for name in both if ours.get(name) != theirs.get(name)]
    if "layers" in ours and "layers" in theirs and kinds(ours, context) == kinds(theirs, context):
        return [name for name in names if name not in OF_KINDS]
    return names


OF_KINDS = ("window", "global_every", "window_theta", "pattern")
"""Settings from which the kind of each layer follows."""
BIASES = ("out_bias", "mlp_bias")


def kinds(values: Mapping[str, Any], context: int) -> list[tuple[object, ...]]:
    """Of each layer its window, None where a query attends to all keys of a row of `context` tokens, its own rotary
    positions, None where they are the model's, and what LATER_KIND names."""
    window, every, theta = values.get("window"), values.get("global_every") or 0, values.get("window_theta")
    shared = {name.removeprefix("position."): value for name, value in values.items() if name.startswith("position.")}
    usual = {name: values.get(name, own) for name, own in LATER_KIND.items()}
    if values.get("pattern"):
        own = [
            (kind["window"], kind["position"], *(kind.get(name) or own for name, own in usual.items()))
            for kind in values["pattern"]
        ]
        one = [kind for kind, given in zip(own, values["pattern"], strict=True) for _ in range(given["count"])]
    else:
        near = (window, shared | {"theta": theta, "scaling": None} if window and theta else None, *usual.values())
        one = [near] * (every - 1) + [(None, None, *usual.values())] if every else [near]
    layers = [one[number % len(one)] for number in range(values["layers"])]
    return [
        (None if size is not None and size >= context else size, None if rope == shared else rope, *others)
        for size, rope, *others in layers
    ]


def _resolved(model: Decoder) -> Settings:
    scalar, multiplier = model.query_pre_attn_scalar, model.attention_multiplier
    wide = not model.experts or model.experts.beside or any(kind.dense for kind in model.kinds)
    return {
        "kv_heads": model.groups,
        "head_dim": model.head_size,
        "hidden": (model.hidden or 4 * model.width) if wide else None,
        "bias": model.bias or (model.qkv_bias and model.out_bias and model.mlp_bias),
        **{name: model.bias or getattr(model, name) for name in ("qkv_bias", "out_bias", "mlp_bias")},
        "query_pre_attn_scalar": None if scalar == model.head_size else scalar,
        **({"experts.bias": model.experts.biased} if model.experts else {}),
        **({"experts.shared_hidden": model.experts.shared_size or None} if model.experts else {}),
        **({"latent.value_dim": model.latent.values(model.head_size)} if model.latent else {}),
        "attention_multiplier": None if multiplier == model.head_size**-0.5 else multiplier,
    } | ({"context": model.context} if isinstance(model.position, Learned) else {})


def _plain(value: object) -> object:
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value


def _flat(values: Mapping[str, object], path: str = "") -> Settings:
    flat: Settings = {}
    for name, value in values.items():
        if name in TRAINING | COMPUTING | IN_SHAPES:
            continue
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            plain = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            flat |= {f"{path}{name}": plain} if name == "scaling" else _flat(plain, f"{path}{name}.")
        else:
            several = isinstance(value, tuple)
            flat[f"{path}{name}"] = [_plain(one) for one in value] if several else value  # pyright: ignore[reportGeneralTypeIssues]
    return flat
