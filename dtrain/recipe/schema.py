"""The JSON Schema of recipes, from the same dataclasses that parse them."""

import dataclasses
import inspect
from typing import Any

from dtrain.recipe.field_docs import field_docs
from dtrain.recipe.recipe import Recipe


def schema() -> dict[str, Any]:
    """What an editor needs to complete and to check a recipe."""
    from pydantic import TypeAdapter

    made = TypeAdapter(Recipe).json_schema(ref_template="#/$defs/{model}")
    for name, cls in _sections().items():
        if name in made["$defs"]:
            _refine(made["$defs"][name], cls)
    _refine(made, Recipe)
    _allow_kind_alone(made, made["$defs"])
    _allow_one_string(made)
    made["properties"]["include"] = {"description": "Recipes that this one is laid over.", "type": ["string", "array"]}
    made["required"] = [key for key in made["required"] if key != "name"]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **made}


def _sections() -> dict[str, type]:
    """Every dataclass that a recipe can hold, by name."""
    import typing

    found: dict[str, type] = {}
    waiting: list[Any] = [Recipe]
    while waiting:
        hint = waiting.pop()
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            if hint.__name__ not in found:
                found[hint.__name__] = hint
                waiting += typing.get_type_hints(hint).values()
        else:
            waiting += typing.get_args(hint)
    return found


def _refine(part: dict[str, Any], cls: type) -> None:
    """Unknown keys refused, `kind` asked for, and what each key is for."""
    part["additionalProperties"] = False
    part["description"] = inspect.getdoc(cls) or ""
    if "kind" in part["properties"]:
        part["required"] = [*part.get("required", []), "kind"]
    for key, text in field_docs(cls).items():
        if key in part["properties"]:
            part["properties"][key]["description"] = text


def _allow_kind_alone(part: Any, defs: dict[str, Any]) -> None:
    """Where one of several kinds is wanted, its name alone will do: `data: digits`."""
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


def _allow_one_string(part: Any) -> None:
    """One string stands for a list of one: `files: books.txt`."""
    if isinstance(part, list):
        for inner in part:
            _allow_one_string(inner)
    elif isinstance(part, dict):
        for inner in part.values():
            _allow_one_string(inner)
        items = part.get("items")
        if part.get("type") == "array" and isinstance(items, dict) and items.get("type") == "string":
            part["type"] = ["array", "string"]
