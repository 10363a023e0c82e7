"""Rotary positions in a config.json, read and written."""

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from dtrain.core.types import JsonObject
from dtrain.models.families.fields import Fields
from dtrain.models.rope import LinearScaling, Llama3, Rope, Yarn

if TYPE_CHECKING:
    from dtrain.models.decoder import Decoder

SCALINGS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "truncate",
             "mscale", "mscale_all_dim"},
}  # fmt: skip
"""The supported kinds of scaling, and the fields of each."""
LOCAL, FULL = "sliding_attention", "full_attention"
"""The types of layers with a window and without."""
PARTIAL = "partial_rotary_factor"
GROWTH = "llama_4_scaling_beta"
"""The rate at which queries grow with their position; not of the rotation, but written among its fields."""


def read(fields: Fields, values: JsonObject, partial: float | None, interleaved: bool) -> Rope:
    """From `rope_parameters`, or from `rope_theta` and `rope_scaling` of older files.

    `partial`: the share of each head that is rotated where no field has it; None: the family rotates all.
    """
    old = fields.maybe("rope_scaling") or {}
    top = fields("rope_theta", "position.theta")
    if any(isinstance(value, dict) for value in values.values()):
        fields.refuse("rope_parameters: different values for some layers")
        return Rope()
    theta = values.get("rope_theta", top)
    if "rope_theta" in values:
        fields.sources["position.theta"] = f"rope_parameters.rope_theta: {theta}"
        if theta != fields.values.get("rope_theta", theta):
            fields.refuse(f"rope_theta: {top} but rope_parameters.rope_theta: {theta}")
    rope = replace(_partial(fields, values, partial), theta=theta, interleaved=interleaved)
    plain = {"rope_theta", PARTIAL, GROWTH}
    scaled = {name: value for name, value in values.items() if name not in plain and value is not None}
    if old and scaled and _plain(old) != _plain(scaled):
        fields.refuse(f"rope_scaling: {old} but rope_parameters: {values}")
    if old and values and not scaled and _plain(old):
        fields.refuse(f"rope_scaling: {old} but rope_parameters: {values}")
    where, scaling = ("rope_parameters", scaled) if scaled else ("rope_scaling", dict(old))
    fields.sources["position.scaling"] = f"{where}: {scaling or None}"
    return replace(rope, scaling=_scaling(fields, scaling, where))


def of_two(fields: Fields) -> tuple[Rope, float]:
    """The rotation, and the theta of layers with a window, whose rotation is not scaled (Gemma 3, OLMo 3)."""
    given = fields.maybe("rope_parameters") or {}
    nested = any(isinstance(value, dict) for value in given.values())
    local, theta = (given.get(LOCAL) or {}) if nested else given, fields("rope_local_base_freq", "window_theta")
    if nested and local.get("rope_type", "default") != "default":
        fields.refuse(f"rope_parameters.{LOCAL}.rope_type: {local['rope_type']}")
    if "rope_theta" in local:
        theta = local["rope_theta"]
        fields.sources["window_theta"] = f"rope_parameters.{LOCAL}.rope_theta: {theta}"
    return read(fields, (given.get(FULL) or {}) if nested else given, None, interleaved=False), theta


def _plain(scaling: JsonObject) -> JsonObject:
    """A scaling in one spelling; empty for none."""
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    rest = {name: value for name, value in scaling.items() if name not in ("type", "rope_type", "rope_theta", PARTIAL)}
    return {} if kind == "default" else {"rope_type": kind} | rest


def _partial(fields: Fields, values: JsonObject, default: float | None) -> Rope:
    given = values.get(PARTIAL)
    if default is None:
        if given not in (None, 1):
            fields.refuse(f"rope_parameters.{PARTIAL}: {given}")
        return Rope()
    share = fields.maybe(PARTIAL) if given is None else given
    fields.sources["position.partial"] = (
        f"{PARTIAL}: {default} (by default)" if share is None else f"{PARTIAL}: {share}"
    )
    return Rope(partial=default if share is None else share)


def _scaling(fields: Fields, values: JsonObject, where: str) -> LinearScaling | Llama3 | Yarn | None:
    kind = values.get("rope_type", values.get("type", "default"))
    known = SCALINGS.get(kind)
    if known is None:
        fields.refuse(f"{where}.rope_type: {kind}")
        return None
    same = "max_position_embeddings"  # repeated there by some files
    repeated = {same} if same in values and values[same] == fields.values.get(same) else set[str]()
    for name in sorted(values.keys() - known - repeated - {"rope_type", "type"}):
        fields.refuse(f"{where}.{name}: {values[name]}")
    if kind == "linear":
        return LinearScaling(factor=values["factor"])
    if kind == "default":
        return None
    # transformers takes the one at the top of config.json first
    top = fields.maybe("original_max_position_embeddings")
    original = top or values.get("original_max_position_embeddings") or fields("max_position_embeddings")
    if kind == "llama3":
        low, high = values["low_freq_factor"], values["high_freq_factor"]
        return Llama3(factor=values["factor"], low=low, high=high, original=original)
    fast, slow = values.get("beta_fast") or 32.0, values.get("beta_slow") or 1.0
    whole = values.get("truncate", True)
    yarn = Yarn(factor=values["factor"], original=original, fast=fast, slow=slow, truncate=whole)
    factor = _attention_factor(values)
    usual = factor is None or math.isclose(factor, yarn.attention, rel_tol=1e-6)
    return yarn if usual else replace(yarn, attention_factor=factor)


def _attention_factor(values: JsonObject) -> float | None:
    """The factor of queries and keys, where a field has it: as in transformers' `modeling_rope_utils`."""
    if values.get("attention_factor") is not None:
        return values["attention_factor"]
    first, second = values.get("mscale"), values.get("mscale_all_dim")
    if not first or not second:
        return None

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(values["factor"]) + 1.0 if values["factor"] > 1 else 1.0

    return scale(first) / scale(second)


def written(rope: Rope) -> JsonObject:
    """The fields in the spelling that older and newer versions of transformers read."""
    partial = {PARTIAL: rope.partial} if rope.partial != 1 else {}
    return {"rope_theta": rope.theta, "rope_scaling": scaling_fields(rope)} | partial


def scaling_fields(rope: Rope) -> JsonObject | None:
    """`rope_scaling`."""
    scaling = rope.scaling
    if scaling is None:
        return None
    config: JsonObject = {"rope_type": scaling.kind, "factor": scaling.factor}
    match scaling:
        case Llama3():
            config |= {"low_freq_factor": scaling.low, "high_freq_factor": scaling.high}
            config["original_max_position_embeddings"] = scaling.original
        case Yarn():
            config |= {"beta_fast": scaling.fast, "beta_slow": scaling.slow}
            config["original_max_position_embeddings"] = scaling.original
            config |= {} if scaling.attention_factor is None else {"attention_factor": scaling.attention_factor}
            config |= {} if scaling.truncate else {"truncate": False}
        case LinearScaling():
            pass
    return config


def of_layers(model: "Decoder") -> JsonObject:
    """`rope_parameters` where layers with a window have rotary positions of their own."""
    full, local = (_position(model, windowed) for windowed in (False, True))

    def one(rope: Rope) -> JsonObject:
        return {"rope_theta": rope.theta, **(scaling_fields(rope) or {"rope_type": "default"})}

    return {"full_attention": one(full), "sliding_attention": one(local)}


def _position(model: "Decoder", windowed: bool) -> Rope:
    ropes = [kind.position or model.position for kind in model.kinds if (kind.window is not None) == windowed]
    return next((rope for rope in (*ropes, *model.ropes) if isinstance(rope, Rope)), Rope())
