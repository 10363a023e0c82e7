"""Read the rotary positions of a Hugging Face config.json, in the spellings of older and newer files."""

import math

from dtrain.core.types import JsonObject
from dtrain.models.hf_fields import Fields
from dtrain.models.rope import LinearScaling, Llama3, Rope, Yarn

SCALINGS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "truncate"},
}
"""The supported kinds of scaling, and the fields of each."""


def positions(fields: Fields) -> JsonObject:
    """The settings `position`, and `window_theta` where layers with a window have their own."""
    new = fields.values.get("rope_parameters") or {}
    fields.known |= {"rope_parameters", "rope_scaling"}
    if "rope_local_base_freq" not in fields.defaults:
        return {"position": _rope(fields, new)}
    local, local_theta = new.get("sliding_attention") or {}, fields("rope_local_base_freq", "window_theta")
    if local.get("rope_type", "default") != "default":
        fields.refuse(f"rope_parameters.sliding_attention.rope_type: {local['rope_type']}")
    if "rope_theta" in local:
        local_theta = local["rope_theta"]
        fields.sources["window_theta"] = f"rope_parameters.sliding_attention.rope_theta: {local_theta}"
    return {"position": _rope(fields, new.get("full_attention") or {}), "window_theta": local_theta}


def _rope(fields: Fields, new: JsonObject) -> Rope:
    """From `rope_parameters`, or from `rope_theta` and `rope_scaling` of older files."""
    old = fields.values.get("rope_scaling") or {}
    top = fields("rope_theta", "position.theta")
    if any(isinstance(value, dict) for value in new.values()):
        fields.refuse("rope_parameters: different values for some layers")
        return Rope()
    theta = new.get("rope_theta", top)
    if "rope_theta" in new:
        fields.sources["position.theta"] = f"rope_parameters.rope_theta: {theta}"
        if theta != fields.values.get("rope_theta", theta):
            fields.refuse(f"rope_theta: {top} but rope_parameters.rope_theta: {theta}")
    plain = {"rope_theta", "partial_rotary_factor"}
    scaled = {name: value for name, value in new.items() if name not in plain and value is not None}
    if new.get("partial_rotary_factor") not in (None, 1):
        fields.refuse(f"rope_parameters.partial_rotary_factor: {new['partial_rotary_factor']}")
    where, scaling = ("rope_parameters", scaled) if scaled else ("rope_scaling", dict(old))
    fields.sources["position.scaling"] = f"{where}: {scaling or None}"
    return Rope(theta=theta, scaling=_scaling(fields, scaling, where))


def _scaling(fields: Fields, values: JsonObject, where: str) -> LinearScaling | Llama3 | Yarn | None:
    kind = values.get("rope_type", values.get("type", "default"))
    known = SCALINGS.get(kind)
    if known is None:
        fields.refuse(f"{where}.rope_type: {kind}")
        return None
    for name in sorted(values.keys() - known - {"rope_type", "type"}):
        fields.refuse(f"{where}.{name}: {values[name]}")
    if kind == "linear":
        return LinearScaling(factor=values["factor"])
    if kind == "llama3":
        low, high = values["low_freq_factor"], values["high_freq_factor"]
        return Llama3(factor=values["factor"], low=low, high=high, original=values["original_max_position_embeddings"])
    if kind == "default":
        return None
    # transformers takes the one at the top of config.json first
    top = fields.values.get("original_max_position_embeddings")
    fields.known.add("original_max_position_embeddings")
    original = top or values.get("original_max_position_embeddings") or fields("max_position_embeddings")
    fast, slow = values.get("beta_fast") or 32.0, values.get("beta_slow") or 1.0
    yarn = Yarn(factor=values["factor"], original=original, fast=fast, slow=slow)
    attention = values.get("attention_factor")
    if attention is not None and not math.isclose(attention, yarn.attention, rel_tol=1e-6):
        fields.refuse(f"{where}.attention_factor: {attention}")
    if not values.get("truncate", True):
        fields.refuse(f"{where}.truncate: False")
    return yarn
