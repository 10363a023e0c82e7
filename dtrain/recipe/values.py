"""Check plain values of a recipe: pydantic validates them, and messages state what is expected in plain words."""

import types
import typing
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Literal

from dtrain.core.types import Sentence
from dtrain.recipe.problems import Problems, described, nearest
from dtrain.recipe.yaml import Node

FAILED: Any = object()
"""Stands for a value that was refused."""

TINY = 1e-20
"""A lower bound below this only keeps a number above zero in float32; the message is `above 0`."""

EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number such as 3e-4",
    "bool_type": "true or false",
    "string_type": "a string",
    "tuple_type": "a list",
    "dict_type": "a mapping such as {{key: value}}",
    "finite_number": "a finite number",
    "greater_than": "a number above {gt}",
    "greater_than_equal": "a number of at least {ge}",
    "less_than": "a number below {lt}",
    "less_than_equal": "a number of at most {le}",
    "too_short": "a list of at least {min_length}",
}
"""What was expected, by pydantic's type of error."""


def validated(hint: object, node: Node, path: str, problems: Problems, doc: Callable[[], str]) -> Any:
    """The value, of the hinted type, or FAILED if it was refused. `doc` returns the field's documentation."""
    from pydantic import ValidationError

    node = as_list(hint, node)
    if _wrong_length(hint, node, path, problems, doc):
        return FAILED
    try:
        return _adapter(hint).validate_python(node.plain(), strict=True)
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)
        items = [detail for detail in details if detail["type"] != "too_short"]
        expected: dict[str, list[str]] = {}
        marks: dict[str, Node] = {}
        for detail in items or details:  # pydantic also calls a list too short if its items were refused
            at, where = node, path
            for part in (p for p in detail["loc"] if isinstance(at.value, dict | tuple)):
                children: Any = at.value
                inside = part in children if isinstance(children, dict) else isinstance(part, int)
                at, where = (children[part], f"{where}.{part}") if inside else (at, where)
            marks[where] = at
            expected.setdefault(where, []).append(_expected(detail, hint, at))
        if len(marks) > 1:  # an item was refused: then the value is the member of a union that has items
            marks.pop(path, None)
        for where, at in marks.items():  # of a union, pydantic reports what each member expects
            near = nearest(at.value, _choices(hint)) if isinstance(at.value, str) else ""
            near = "" if near == at.value else near  # it is a value of another member of the union
            message = f"expected {' or '.join(dict.fromkeys(expected[where]))}; found {described(at)}"
            problems.add(at.mark, where, message, f"did you mean '{near}'?" if near else "")
        return FAILED


def accepts(hint: object, node: Node) -> bool:
    """Whether the value is of the hinted type."""
    problems = Problems()
    validated(hint, node, "", problems, str)
    return not problems.count


def as_list(hint: object, node: Node) -> Node:
    """Turn one string into a list of one where a list of strings is expected, and one size into height and width."""
    items = _tuple_args(hint)
    if not items or isinstance(node.value, dict | tuple | bool) or node.value is None:
        return node
    kinds = {_base(item) for item in items if item is not Ellipsis}
    if items[-1] is Ellipsis and kinds == {str} and isinstance(node.value, str):
        return Node((node,), node.mark)
    if len(items) == 2 and items[0] == items[1] and kinds == {int} and isinstance(node.value, int):
        return Node((node, node), node.mark)
    return node


def _wrong_length(hint: object, node: Node, path: str, problems: Problems, doc: Callable[[], str]) -> bool:
    """Whether a list was expected and the value is none, or is of the wrong length; adds the problem."""
    items = _tuple_args(hint)
    if not items or (isinstance(node.value, tuple) and (items[-1] is Ellipsis or len(node.value) == len(items))):
        return False
    kinds = {_base(item) for item in items if item is not Ellipsis}
    if items[-1] is Ellipsis:
        wanted = f"a list such as {'[64, 32]' if kinds == {int} else '[a, b]'}"
    else:
        text = doc().partition(".")[0]
        what = "numbers" if kinds <= {int, float} else "items"
        wanted = f"a list of {len(items)} {what}" + (f" ({text[0].lower()}{text[1:]})" if text else "")
    problems.add(node.mark, path, f"expected {wanted}; found {described(node)}")
    return True


def _expected(detail: Mapping[str, Any], hint: Any, at: Node) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "string_pattern_mismatch":
        return _sentence(hint) or "another form"
    if kind == "literal_error":
        return str(context["expected"])
    if kind == "greater_than_equal" and 0 < context["ge"] < TINY and at.value <= 0:
        kind, context = "greater_than", {"gt": 0}
    numbers = {name: f"{bound:,.10g}" if isinstance(bound, float) else f"{bound}" for name, bound in context.items()}
    if kind in EXPECTED:
        return EXPECTED[kind].format(**numbers)
    message = str(detail["msg"])
    return message.removeprefix("Input should be ")


@cache
def _adapter(hint: Any) -> Any:
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(hint, config=ConfigDict(allow_inf_nan=False))


def _bare(hint: object) -> Any:
    """The hint without None and without annotations."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        members = [member for member in typing.get_args(hint) if member is not type(None)]
        return _bare(members[0]) if len(members) == 1 else hint
    return _bare(typing.get_args(hint)[0]) if typing.get_origin(hint) is typing.Annotated else hint


def _tuple_args(hint: object) -> tuple[object, ...]:
    bare = _bare(hint)
    return typing.get_args(bare) if typing.get_origin(bare) is tuple else ()


def _base(hint: object) -> Any:
    """The type of the values that the hint allows: str, int or float."""
    bare = _bare(hint)
    return type(typing.get_args(bare)[0]) if typing.get_origin(bare) is Literal else bare


def _sentence(hint: object) -> str:
    """Description of a string type with a pattern."""
    for part in typing.get_args(hint):
        found = part.text if isinstance(part, Sentence) else _sentence(part)
        if found:
            return found
    return next((one.text for one in getattr(hint, "__metadata__", ()) if isinstance(one, Sentence)), "")


def _choices(hint: object) -> list[str]:
    """Every string literal of the hint."""
    parts = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return [part for part in parts if isinstance(part, str)]
    return [choice for part in parts for choice in _choices(part)]
