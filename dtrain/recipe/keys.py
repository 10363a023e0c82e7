"""Every key of a recipe with its type, default and meaning, from its JSON Schema: for completion, hints and docs."""

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from dtrain import __version__
from dtrain.core.types import JsonObject

DEEPEST = 4
BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


@dataclass(frozen=True)
class Key:
    """A key of a recipe. A section with several kinds has the keys of each."""

    path: str
    """Dotted: optimizer.schedule.warmup."""
    kind: str
    """The kind of the section that has this key; empty if the section has no kinds."""
    type: str
    default: str
    """As in YAML; empty if the key must be given, or is computed from others."""
    values: tuple[str, ...]
    """All values that it can have, if they are named ones."""
    text: str


def keys() -> list[Key]:
    """Every key, in the order of the recipe."""
    from dtrain.recipe.schema import schema

    whole: JsonObject = dict(schema())
    return list(_keys(whole, whole, "", ""))


def cached_keys() -> list[Key]:
    """The same, kept in a file of the user's cache folder: the schema takes half a second, which completion has not."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = root / "dtrain" / f"keys-{__version__}-{_changed()}.json"
    with suppress(OSError, ValueError, TypeError):
        return [Key(**row | {"values": tuple(row["values"])}) for row in json.loads(path.read_text())]
    found = keys()
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps([asdict(key) for key in found]))
    return found


def _changed() -> int:
    """When the newest module that defines keys was changed."""
    here = Path(__file__).parents[1]
    return max(int(path.stat().st_mtime) for path in here.glob("*/*.py"))


def _keys(part: JsonObject, whole: JsonObject, path: str, kind: str) -> Iterator[Key]:
    if path.count(".") >= DEEPEST:
        return
    for name, about in part.get("properties", {}).items():
        here = f"{path}.{name}" if path else name
        members = [whole["$defs"][one["$ref"].rpartition("/")[2]] for one in _refs(about)]
        kinds = tuple(m["properties"]["kind"]["const"] for m in members if "const" in m["properties"].get("kind", {}))
        yield Key(
            here, kind, _type(about, whole), _default(about), _values(about) or kinds, about.get("description", "")
        )
        if about.get("type") == "array":
            continue
        for member in members:
            yield from _keys(member, whole, here, member["properties"].get("kind", {}).get("const", ""))


def _refs(about: JsonObject) -> list[JsonObject]:
    options = [about, *about.get("anyOf", ()), *about.get("allOf", ())]
    return [one for one in options if "$ref" in one]


def _values(about: JsonObject) -> tuple[str, ...]:
    """Named values, in the spelling of YAML."""
    if about.get("type") == "boolean":
        return ("true", "false")
    return tuple(map(str, about.get("enum", [about["const"]] if "const" in about else ())))


def _type(about: JsonObject, whole: JsonObject) -> str:
    if values := _values(about):
        return "true or false" if about.get("type") == "boolean" else " | ".join(values)
    if "$ref" in about:
        return about["$ref"].rpartition("/")[2]
    if "anyOf" in about:
        options = [_type(one, whole) for one in about["anyOf"] if one.get("type") != "null" and "enum" not in one]
        return " | ".join(dict.fromkeys(options))
    named = about.get("type", "any")
    if isinstance(named, list):
        named = " or ".join(named)
    if named == "array" and isinstance(about.get("items"), dict):
        return f"list of {_type(about['items'], whole)}"
    bounds = " ".join(f"{sign} {about[key]:g}" for key, sign in BOUNDS.items() if abs(about.get(key, 1e9)) < 1e8)
    return f"{named} {bounds}".strip()


def _default(about: JsonObject) -> str:
    if "default" not in about or about["default"] is None:
        return ""
    return json.dumps(about["default"])
