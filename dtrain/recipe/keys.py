"""Every key of a recipe with its type, default and meaning, from its JSON Schema: for completion, hints and docs."""

import functools
import json
import os
from collections.abc import Iterable, Iterator, Set
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from dtrain import __version__
from dtrain.core.types import JsonObject

DEEPEST = 6
NUMBER, NAME = "N", "NAME"
"""What stands in a path for the place in a list, and for a name that the user gives."""
BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


@dataclass(frozen=True)
class Key:
    """A key of a recipe. A section with several kinds has the keys of each."""

    path: str
    """Dotted: optimizer.schedule.warmup; optimizer.groups.N.lr of each mapping in a list, parts.NAME.run of each by
    name."""
    kind: str
    """The kind of the section that has this key; empty if the section has no kinds."""
    type: str
    default: str
    """As in YAML; empty if there is none."""
    values: tuple[str, ...]
    """All values that it can have, if they are named ones."""
    text: str
    required: bool = False

    @property
    def section(self) -> tuple[str, str]:
        """The path of the section that has this key, and its kind."""
        return self.path.rpartition(".")[0], self.kind

    @property
    def typed(self) -> bool:
        """Whether the path can be an override as it is: it has no place in a list, and no name that the user gives."""
        return self.path != "include" and not {NUMBER, NAME} & set(self.path.split("."))


@functools.cache
def keys() -> list[Key]:
    """Every key, in the order of the recipe."""
    from dtrain.recipe.schema import schema

    whole: JsonObject = dict(schema())
    return list(dict.fromkeys(_keys(whole, whole, "", "")))


@functools.cache
def cached_keys() -> list[Key]:
    """The same, kept in a file of the user's cache folder: the schema takes half a second, which completion has not."""
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # a user without a home
        return keys()
    path = root / "dtrain" / f"keys-{__version__}-{_changed()}.json"
    with suppress(OSError, ValueError, TypeError):
        return [Key(**row | {"values": tuple(row["values"])}) for row in json.loads(path.read_text())]
    found = keys()
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps([asdict(key) for key in found]))
    return found


def named_kinds(found: Iterable[Key]) -> dict[str, list[Key]]:
    """The keys `kind`, by the name of the kind that each selects."""
    named: dict[str, list[Key]] = {}
    for key in found:
        if key.path.endswith("kind"):
            named.setdefault(key.kind, []).append(key)
    return named


def known_part(topic: str) -> str:
    """The longest beginning of a dotted path that is a key's; empty if none is. optimizer.groups.0.lr is that of
    optimizer.groups.N.lr, parts.base.run that of parts.NAME.run."""
    known = {key.path for key in cached_keys()}
    found: list[str] = []
    for part in topic.rstrip(".=").split("."):
        names = [part, NUMBER] if part.isdecimal() else [part, NAME]
        inner = [".".join([*found, name]) for name in names]
        fitting = [name for name, path in zip(names, inner, strict=True) if path in known or has_inner(known, path)]
        if not fitting:
            break
        found.append(fitting[0])
    while found and ".".join(found) not in known:
        found.pop()
    return ".".join(found)


def has_inner(known: Set[str], path: str) -> bool:
    """Whether there are keys within that path."""
    return any(one.startswith(f"{path}.") for one in known)


def _changed() -> int:
    """When the newest module that defines keys was changed."""
    here = Path(__file__).parents[1]
    return max(int(path.stat().st_mtime) for path in here.rglob("*.py"))


def _keys(part: JsonObject, whole: JsonObject, path: str, kind: str) -> Iterator[Key]:
    if path.count(".") >= DEEPEST:
        return
    for name, about in part.get("properties", {}).items():
        here = f"{path}.{name}" if path else name
        members = [_member(one, whole) for one in _refs(about)]
        kinds = tuple(filter(None, map(_kind, members)))
        text = " ".join(about.get("description", "").split())
        values, required = _choices(about) or kinds, name in part.get("required", ()) and name != "kind"
        yield Key(here, kind, _type(about, whole), _default(about), values, text, required)
        for member in members:
            yield from _keys(member, whole, here, _kind(member))
        for place, inner in ((NUMBER, about.get("items")), (NAME, about.get("additionalProperties"))):
            if isinstance(inner, dict):
                for one in _refs(inner):
                    member = _member(one, whole)
                    yield from _keys(member, whole, f"{here}.{place}", _kind(member))


def _refs(about: JsonObject) -> list[JsonObject]:
    options = [about, *about.get("anyOf", ()), *about.get("oneOf", ()), *about.get("allOf", ())]
    return [one for one in options if "$ref" in one]


def _member(one: JsonObject, whole: JsonObject) -> JsonObject:
    return whole["$defs"][one["$ref"].rpartition("/")[2]]


def _kind(member: JsonObject) -> str:
    return member.get("properties", {}).get("kind", {}).get("const", "")


def _options(about: JsonObject) -> list[JsonObject]:
    """What it may be, without null, and without the names that stand for whole sections."""
    options = about.get("anyOf") or about["oneOf"]
    sections = any("$ref" in one for one in options)
    return [one for one in options if one.get("type") != "null" and not (sections and "enum" in one)]


def _values(about: JsonObject) -> tuple[str, ...]:
    """Named values, in the spelling of YAML."""
    if about.get("type") == "boolean":
        return ("true", "false")
    return tuple(map(str, about.get("enum", [about["const"]] if "const" in about else ())))


def _choices(about: JsonObject) -> tuple[str, ...]:
    """The named values, also of one that may be something else as well, such as a list."""
    options = _options(about) if "anyOf" in about or "oneOf" in about else [about]
    return tuple(value for one in options for value in _values(one))


def _type(about: JsonObject, whole: JsonObject) -> str:
    if values := _values(about):
        return "true or false" if about.get("type") == "boolean" else " | ".join(values)
    if "$ref" in about:
        member = _member(about, whole)
        return _kind(member) or ("mapping" if "properties" in member else _type(member, whole))
    if "anyOf" in about or "oneOf" in about:
        options = [_type(one, whole) for one in _options(about)]
        return " | ".join(dict.fromkeys(options))
    named = about.get("type", "any")
    if isinstance(named, list):
        named = " or ".join(named)
    if named == "array" and isinstance(about.get("items"), dict):
        return f"list of {_type(about['items'], whole)}".replace("list of mapping", "list of mappings")
    if named == "object":
        inner = about.get("additionalProperties")
        return f"mapping of names to {_type(inner, whole)}" if isinstance(inner, dict) and inner else "mapping"
    limits = {key: about[key] for key in BOUNDS if abs(about.get(key, 1e9)) < 1e8}
    bounds = " ".join(f"{BOUNDS[key]} {value:g}" for key, value in limits.items()).replace("≥ 1e-30", "> 0")
    return f"{named} {bounds}".strip()


def _default(about: JsonObject) -> str:
    if "default" not in about or about["default"] is None:
        return ""
    return json.dumps(about["default"])
