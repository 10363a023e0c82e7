"""The settings that decide a model's outputs besides its parameters: two models that share them compute the same.

Settings that only concern training, or how a step is computed, are left out.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from dtrain.models.decoder import Decoder
from dtrain.models.resnet import ResNet
from dtrain.models.rope import Learned
from dtrain.models.vit import ViT

TRAINING = {"preset", "context", "init", "depth_init", "z_loss", "balance", "capacity", "dropout"}
IN_SHAPES = {"image", "classes"}
"""Settings of classifiers of images that the shapes of parameters show, or that decide nothing: a new head has other
classes, and a net of convolutions takes pictures of any size."""
COMPUTING = {"remat", "unroll", "loss_chunks", "pad_vocab"}

PLACE = "folder"
"""Where the module of a custom model lies: on another machine it is another folder."""

ABSENT = "not set"

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
    if "layers" in ours and "layers" in theirs and windows(ours, context) == windows(theirs, context):
        return [name for name in names if name not in ("window", "global_every")]
    return names


def windows(values: Mapping[str, Any], context: int) -> list[int | None]:
    """The window of each layer; None where a query attends to all keys of a row of `context` tokens.

    Layers with a window keep it in any row if `window_theta` gives them other rotary positions.
    """
    window, every = values.get("window"), values.get("global_every") or 0
    if window is None or (window >= context and values.get("window_theta") is None):
        window = None
    return [None if every and number % every == 0 else window for number in range(1, values["layers"] + 1)]


def _resolved(model: Decoder) -> Settings:
    scalar = model.query_pre_attn_scalar
    return {
        "kv_heads": model.groups,
        "head_dim": model.head_size,
        "hidden": None if model.experts else model.hidden or 4 * model.width,
        "qkv_bias": model.bias or model.qkv_bias,
        "query_pre_attn_scalar": None if scalar == model.head_size else scalar,
    } | ({"context": model.context} if isinstance(model.position, Learned) else {})


def _flat(values: Mapping[str, object], path: str = "") -> Settings:
    flat: Settings = {}
    for name, value in values.items():
        if name in TRAINING | COMPUTING | IN_SHAPES:
            continue
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            plain = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
            flat |= {f"{path}{name}": plain} if name == "scaling" else _flat(plain, f"{path}{name}.")
        else:
            flat[f"{path}{name}"] = list(value) if isinstance(value, tuple) else value
    return flat
