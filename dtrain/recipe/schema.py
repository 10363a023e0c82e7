"""JSON Schema of recipes, generated from the dataclasses that parse them."""

import dataclasses
import inspect
import typing
from typing import Any

from dtrain.core.types import JsonObject
from dtrain.recipe.parse import field_docs
from dtrain.recipe.recipe import Recipe


def schema() -> dict[str, object]:
    """The JSON Schema with which an editor completes and checks a recipe."""
    from pydantic import TypeAdapter

    result = TypeAdapter(Recipe).json_schema(ref_template="#/$defs/{model}")
    for name, cls in _sections().items():
        if name in result["$defs"]:
            _refine(result["$defs"][name], cls)
    _refine(result, Recipe)
    _allow_kind_alone(result, result["$defs"])
    _allow_one_string(result)
    result["properties"]["include"] = {
        "description": "Recipes that this one extends: paths relative to this file, or names of shipped ones.",
        "type": ["string", "array"],
    }
    result["required"] = [key for key in result["required"] if key != "name"]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **result}


def _sections() -> dict[str, type]:
    """Every dataclass that a recipe can contain, by name."""
    sections: dict[str, type] = {}
    hints: list[Any] = [Recipe]
    while hints:
        hint = hints.pop()
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            if hint.__name__ not in sections:
                sections[hint.__name__] = hint
                hints += typing.get_type_hints(hint).values()
        else:
            hints += typing.get_args(hint)
    return sections


def _refine(part: JsonObject, cls: type) -> None:
    """Refuse unknown keys, require `kind`, and describe each key."""
    docs, hints = field_docs(cls), typing.get_type_hints(cls)
    part["additionalProperties"] = False
    part["description"] = inspect.getdoc(cls) or ""
    if "kind" in part["properties"]:
        docs["kind"] = _of_section(cls)
        part["required"] = [*part.get("required", []), "kind"]
    for field in dataclasses.fields(cls):
        value: Any = None if field.default_factory is dataclasses.MISSING else field.default_factory()
        if dataclasses.is_dataclass(value):  # its keys have defaults of their own
            kind = getattr(value, "kind", None)
            part["properties"][field.name]["default"] = {"kind": kind} if kind else {}
    for key, about in part["properties"].items():
        about["description"] = docs.get(key) or _of_section(hints.get(key))


def _of_section(hint: Any) -> str:
    """The first sentence about the section that a key has, if it has one; of a kind, about that kind."""
    for one in (hint, *typing.get_args(hint)):
        if dataclasses.is_dataclass(one) and isinstance(one, type):
            return (inspect.getdoc(one) or "").partition("\n\n")[0].replace("\n", " ")
    return ""


def _allow_kind_alone(part: object, defs: JsonObject) -> None:
    """Allow the name of a kind in place of its section: `data: digits`."""
    if isinstance(part, list):
        for inner in part:
            _allow_kind_alone(inner, defs)
    elif isinstance(part, dict):
        for inner in part.values():
            _allow_kind_alone(inner, defs)
        members = [defs[one["$ref"].rpartition("/")[2]] for one in part.get("anyOf", ()) if "$ref" in one]
        kinds = [member["properties"]["kind"]["const"] for member in members if "kind" in member["properties"]]
        if kinds:
            part["anyOf"] = [*part["anyOf"], {"enum": kinds}]


def _allow_one_string(part: object) -> None:
    """Allow one string in place of a list of one: `files: books.txt`."""
    if isinstance(part, list):
        for inner in part:
            _allow_one_string(inner)
    elif isinstance(part, dict):
        for inner in part.values():
            _allow_one_string(inner)
        items = part.get("items")
        if part.get("type") == "array" and isinstance(items, dict) and items.get("type") == "string":
            part["type"] = ["array", "string"]
