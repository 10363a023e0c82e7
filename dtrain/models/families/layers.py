"""The kinds of a decoder's layers in a config.json, read and written: windows, and layers that do not rotate."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING

from dtrain.core.types import JsonObject
from dtrain.models.families import rotary
from dtrain.models.families.fields import Fields
from dtrain.models.families.part import Part
from dtrain.models.families.rotary import FULL, LOCAL
from dtrain.models.layer_pattern import LayerKind, compressed, expanded
from dtrain.models.rope import NoPosition, Rope

if TYPE_CHECKING:
    from dtrain.models.decoder import Decoder

Rule = Callable[[Fields, int], Sequence[str]]
"""(fields, number of layers) → the type of each layer, where there is no field `layer_types`."""


def everywhere(_: Fields, layers: int) -> list[str]:
    """Each layer has the window."""
    return [LOCAL] * layers


def every(number: int, field: str = "") -> Rule:
    """Each layer but every n-th has the window; n is that of the `field`, if there is one."""

    def rule(fields: Fields, layers: int) -> list[str]:
        period = (fields.maybe(field) if field else None) or number
        period = len(period) if isinstance(period, str) else period  # "LLLG"
        return [FULL if index % period == 0 else LOCAL for index in range(1, layers + 1)]

    return rule


def first_of(number: int) -> Rule:
    """Each layer but the first of n has the window."""
    return lambda _, layers: [FULL if index % number == 0 else LOCAL for index in range(layers)]


def after_first(fields: Fields, layers: int) -> list[str]:
    """Layers from `max_window_layers` on have the window (Qwen)."""
    first = fields("max_window_layers")
    return [FULL if index < first else LOCAL for index in range(layers)]


def windows(
    rule: Rule,
    size: int | None,
    *,
    switch: bool = False,
    rotates: Callable[[str, int | None], bool] = lambda *_: True,
    own_types: bool = True,
    always: bool = False,
    first: int | None = None,
    number: bool = False,
) -> Part:
    """The window of each layer, and the layers that do not rotate.

    `size`: the default of `sliding_window`. `switch`: whether `use_sliding_window` must say so (Qwen). `rotates`:
    whether a layer of that type rotates, in a model with that window. `own_types`: whether `layer_types` is used; else
    it is refused where it contradicts. `always`: whether `layer_types` is always written. `first`: the default of
    `max_window_layers`, where the family has that. `number`: whether the window must be a number, also where no layer
    has it.
    """

    def read(fields: Fields) -> JsonObject:
        layers, window = fields("num_hidden_layers"), fields("sliding_window", "window")
        fields.known |= {"layer_types", "use_sliding_window", "max_window_layers"}
        fields.known |= {"sliding_window_pattern", "_sliding_window_pattern"}
        window = None if switch and not fields("use_sliding_window") else window
        given = fields.values.get("layer_types")
        types = (given if own_types else None) or rule(fields, layers)
        if given and not own_types and FULL in given and window:
            fields.refuse(f"layer_types: {', '.join(sorted(set(given)))}, sliding_window: {window}")
        if given and (len(given) != layers or set(given) - {LOCAL, FULL}):
            fields.refuse(f"layer_types: {', '.join(sorted(set(given)))}, {len(given)} of {layers} layers")
            return {}
        spread = f"sliding_window: {window} in {types.count(LOCAL) if window else 0} of {layers} layers"
        fields.sources |= {"window": spread, "global_every": spread, "pattern": spread}
        kinds = [
            LayerKind(
                window=window if kind == LOCAL else None, position=None if rotates(kind, window) else NoPosition()
            )
            for kind in types
        ]
        return settings(kinds, fields.context)

    def write(model: "Decoder") -> JsonObject:
        window = window_of(model) or (size if number else None)
        types = [LOCAL if kind.window else FULL for kind in model.kinds]
        config: JsonObject = {"sliding_window": window}
        config |= {"use_sliding_window": window is not None} if switch else {}
        config |= {"max_window_layers": 0} if first is not None else {}
        usual = Fields({}, {"max_window_layers": 0}, Path("config.json"))
        if always or (own_types and window and types != list(rule(usual, model.layers))):
            config["layer_types"] = types
        return config

    switches: JsonObject = {"use_sliding_window": False} if switch else {}
    switches |= {"max_window_layers": first} if first is not None else {}
    return Part({"sliding_window": size} | switches, read, write)


def settings(kinds: Sequence[LayerKind], context: int) -> JsonObject:
    """`window` and `global_every` where these are enough, else `pattern`. A window that no row of `context` tokens
    reaches is left out, but where layers without one do not rotate."""
    if all(kind.position is None for kind in kinds):
        kinds = [replace(kind, window=None) if kind.window and kind.window >= context else kind for kind in kinds]
    if len(set(kinds)) == 1 and kinds[0].position is None:
        return {"window": kinds[0].window}
    local = kinds[0]
    for period in range(2, len(kinds) + 1):
        if local.window and local.position is None and list(kinds) == _alternating(local, period, len(kinds)):
            return {"window": local.window, "global_every": period}
    return {"pattern": compressed(kinds)}


def window_of(model: "Decoder") -> int | None:
    """The window that layers have, or None."""
    return next((kind.window for kind in model.kinds if kind.window), None)


def _alternating(local: LayerKind, period: int, layers: int) -> list[LayerKind]:
    return [LayerKind() if number % period == 0 else local for number in range(1, layers + 1)]


def of_some_versions(plain: Part) -> Part:
    """Windows that are refused: versions of transformers differ in which layers have them (Qwen 3 MoE)."""

    def read(fields: Fields) -> JsonObject:
        found = plain.read(fields)
        if found != {"window": None}:
            fields.refuse(f"use_sliding_window: True, sliding_window: {fields('sliding_window')}")
        return {"window": None}

    return Part(plain.defaults, read, plain.write)


def own_rotation(rule: Rule, size: int, theta: float, local_theta: float) -> Part:
    """Windows as in `windows`, in layers with rotary positions of their own, unscaled (Gemma 3, OLMo 3).

    `theta`: the default of `rope_theta`. `local_theta`: that of `rope_local_base_freq`.
    """
    plain = windows(rule, size, always=True)

    def read(fields: Fields) -> JsonObject:
        rope, own = rotary.of_two(fields)
        context, fields.context = fields.context, 1 << 62  # a window of any size has the other rotation
        found, fields.context = plain.read(fields), context
        if "pattern" in found:
            local_rope = Rope(theta=own)
            found["pattern"] = tuple(
                replace(kind, position=local_rope) if kind.window else kind for kind in found["pattern"]
            )
        return {"position": rope} | found | ({"window_theta": own} if found.get("window") else {})

    def write(model: "Decoder") -> JsonObject:
        ropes = rotary.of_layers(model)
        config = rotary.written(model.position if isinstance(model.position, Rope) else Rope()) | plain.write(model)
        config["sliding_window"] = config["sliding_window"] or size  # a number, also where no layer has it
        return config | {"rope_parameters": ropes, "rope_local_base_freq": ropes[LOCAL]["rope_theta"]}

    own = {"rope_local_base_freq": local_theta, "rope_theta": theta}
    return Part({**plain.defaults, **own}, read, write)


def theta_of_layers(rule: Rule, size: int) -> Part:
    """Windows as in `windows`, and a theta for each layer, 0 for one that does not rotate (Granite with windows)."""
    plain, name = windows(rule, size, always=True, number=True), "layer_rope_theta"

    def read(fields: Fields) -> JsonObject:
        rope = rotary.read(fields, fields.maybe("rope_parameters") or {}, None, interleaved=False)
        found, thetas = plain.read(fields), fields.maybe(name)
        if not thetas:
            return {"position": rope} | found
        kinds = kinds_of(found | {"layers": fields("num_hidden_layers")})
        if len(thetas) != len(kinds):
            fields.refuse(f"{name}: {len(thetas)} of {len(kinds)} layers")
            return {}
        fields.sources["pattern"] = f"{name}: {', '.join(map(str, sorted(set(thetas))))}"

        def own(theta: float) -> Rope | NoPosition | None:
            return NoPosition() if not theta else None if theta == rope.theta else replace(rope, theta=float(theta))

        layers = [replace(kind, position=own(theta)) for kind, theta in zip(kinds, thetas, strict=True)]
        return {"position": rope, "pattern": compressed(layers)}

    def write(model: "Decoder") -> JsonObject:
        ropes = [kind.position or model.position for kind in model.kinds]
        if not isinstance(model.position, Rope):
            return {}
        thetas = [rope.theta if isinstance(rope, Rope) else 0 for rope in ropes]
        return rotary.written(model.position) | plain.write(model) | {name: thetas}

    return Part({**plain.defaults, "rope_theta": 10_000.0}, read, write)


def kinds_of(found: JsonObject) -> list[LayerKind]:
    """The kind of each layer, from the settings that have it."""
    near, every = LayerKind(window=found.get("window")), found.get("global_every")
    plain = [near] * (every - 1) + [LayerKind()] if every else [near]
    return list(islice(cycle(expanded(found.get("pattern", ())) or plain), found["layers"]))
