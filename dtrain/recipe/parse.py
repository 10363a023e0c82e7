"""Parse nodes into the frozen dataclasses of the recipe, and report every problem at once.

Structure (keys, kinds, missing keys) is checked here, so that each message can give its position and the nearest
correct spelling; `values` checks plain values.
"""

import ast
import dataclasses
import inspect
import textwrap
import types
import typing
from collections.abc import Iterator
from difflib import SequenceMatcher
from functools import cache, partial
from typing import Any

from dtrain.core.errors import FieldError
from dtrain.recipe.other_names import own_name
from dtrain.recipe.problems import Problems, described, listed, nearest
from dtrain.recipe.values import FAILED, accepts, validated
from dtrain.recipe.yaml import Node, dump, parse, shown


def field_docs(cls: type) -> dict[str, str]:
    """The string below each field of a dataclass, fields of its base classes included."""
    docs = {}
    for owner in reversed(cls.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
        assert isinstance(body, ast.ClassDef)
        for this, after in zip(body.body, body.body[1:], strict=False):
            if (
                isinstance(this, ast.AnnAssign)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
            ):
                assert isinstance(this.target, ast.Name)
                docs[this.target.id] = str(after.value.value)
    return docs


MISSING = dataclasses.MISSING
ALIKE = 0.8
"""Above this likeness a key is a misspelling of its neighbour, even if another section has a key of its name."""


def section(cls: type, node: Node, path: str, problems: Problems, root: type | None = None) -> Any:
    """Parse an object of the dataclass; FAILED if a value was refused. Unknown keys are reported and ignored."""
    values = fields(cls, node, path, problems, root or cls)
    if any(value is FAILED for value in values.values()):
        return FAILED
    try:
        return cls(**values)
    except FieldError as error:
        at = next((node.value[part].mark for part in [error.field.split(".")[0]] if part in node.value), node.mark)
        where = ".".join(part for part in (path, error.field) if part)
        problems.add(at, where, error.message, error.hint)
        return FAILED


def problems_of_section(cls: type, values: dict[str, Any]) -> list[str]:
    """What is wrong with plain values of a section, a line for each problem."""
    problems = Problems()
    section(cls, parse(dump(values), ""), "", problems)
    return [line.partition("  ")[2] for line in problems.lines]


def fields(cls: type, node: Node, path: str, problems: Problems, root: type) -> dict[str, Any]:
    """Values of the keys that are given; FAILED for each that was refused or is missing."""
    if not isinstance(node.value, dict):
        hint = partial(_example, cls, node)
        problems.add(node.mark, path, f"expected a mapping with {listed(_names(cls))}; found {described(node)}", hint)
        return {"": FAILED}
    hints, values = _hints(cls), {}
    for key, child in node.value.items():
        here = f"{path}.{key}" if path else key
        if key in hints:
            doc = partial(_doc, cls, key)
            values[key] = value(
                hints[key], _of_default_kind(cls, key, child), here, problems=problems, root=root, doc=doc
            )
        else:
            problems.add(node.key(key), here, "unknown key", partial(_suggestion, key, cls, path, root))
    for missing in (f for f in dataclasses.fields(cls) if _required(f) and f.name not in node.value):
        wanted = f"{path}.{missing.name}" if path else missing.name
        problems.add(node.mark, wanted, "missing", _described(hints[missing.name]))
        values[missing.name] = FAILED
    return values


def _of_default_kind(cls: type, key: str, node: Node) -> Node:
    """Add the default's `kind` to a mapping without one, for a field that has a default."""
    default = next(f.default_factory for f in dataclasses.fields(cls) if f.name == key)
    if not (isinstance(default, type) and dataclasses.is_dataclass(default)) or "kind" not in _hints(default):
        return node
    if not isinstance(node.value, dict) or "kind" in node.value:
        return node
    return Node({"kind": Node(_kind(default), node.mark)} | node.value, node.mark, node.keys)


def value(hint: Any, node: Node, path: str, problems: Problems, root: type, doc: Any = str) -> Any:
    """Parse a value of the hinted type: a section, a member of a union of sections, or a plain value."""
    sections, optional = _sections(hint)
    if optional and node.value is None:
        return None
    if len(sections) == 1:
        return section(sections[0], node, path, problems, root)
    if sections:
        return _member(sections, node, path, problems, root)
    return _several(hint, node, path, problems, root, doc)


def _several(hint: Any, node: Node, path: str, problems: Problems, root: type, doc: Any) -> Any:
    """Parse a list of sections, sections by name, or a plain value."""
    inner, by_name = _tuple_of_sections(hint), _dict_of_sections(hint)
    if by_name and isinstance(node.value, dict):
        items = {key: value(by_name, child, f"{path}.{key}", problems, root) for key, child in node.value.items()}
        return FAILED if any(item is FAILED for item in items.values()) else items
    if inner and isinstance(node.value, str | dict):
        return _all((value(inner, node, path, problems, root),))  # one section stands for a list of one
    if inner and isinstance(node.value, tuple):
        return _all(tuple(value(inner, child, f"{path}.{i}", problems, root) for i, child in enumerate(node.value)))
    return validated(hint, node, path, problems, doc)


def _all(items: tuple[object, ...]) -> Any:
    return FAILED if any(item is FAILED for item in items) else items


def _member(members: list[type], node: Node, path: str, problems: Problems, root: type) -> Any:
    """Parse the member of a union that `kind` names; a single word is a kind without further keys."""
    kinds = {_kind(member): member for member in members}
    given = Node({"kind": node}, node.mark, {"kind": node.mark}) if isinstance(node.value, str) else node
    if not isinstance(given.value, dict):
        message = f"expected one of {listed(kinds)}, or a mapping with one of them as `kind`; found {described(node)}"
        problems.add(node.mark, path, message)
        return FAILED
    kind = given.value.get("kind")
    if kind is None:
        problems.add(node.mark, f"{path}.kind", "missing", f"one of {listed(kinds)}")
        return FAILED
    if not isinstance(kind.value, str) or kind.value not in kinds:
        if not isinstance(kind.value, str):
            problems.add(kind.mark, f"{path}.kind", f"expected one of {listed(kinds)}; found {described(kind)}")
            return FAILED
        near = nearest(kind.value, kinds)
        hint = f"did you mean '{near}'?" if near else f"one of {listed(kinds)}"
        problems.add(kind.mark, f"{path}.kind", f"unknown kind {described(kind)}", hint)
        return FAILED
    return section(kinds[kind.value], given, path, problems, root)


def _example(cls: type, node: Node) -> str:
    """How to write the section, with the value that was found under each key that accepts it."""
    if node.value is None or isinstance(node.value, dict | tuple):
        return ""
    # a list accepts one item, but that would be an odd example
    hints = {name: hint for name, hint in _hints(cls).items() if typing.get_origin(hint) is not tuple}
    plain = [name for name, hint in hints.items() if name != "kind" and not _sections(hint)[0]]
    fitting = [name for name in plain if accepts(_hints(cls)[name], node)][:3]
    written = str(node.value).lower() if isinstance(node.value, bool) else shown(str(node.value))
    return f"write {' or '.join(f'{{{name}: {written}}}' for name in fitting)}" if fitting else ""


def _doc(cls: type, key: str) -> str:
    return field_docs(cls).get(key, "")


@cache
def _hints(cls: type) -> dict[str, object]:
    hints = typing.get_type_hints(cls, include_extras=True)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls) if f.init}


def _names(cls: type) -> list[str]:
    return list(_hints(cls))


def _required(f: dataclasses.Field[object]) -> bool:
    return f.init and f.default is MISSING and f.default_factory is MISSING


def _sections(hint: object) -> tuple[list[type], bool]:
    """The dataclasses that the hint allows, and whether it allows null."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        members = typing.get_args(hint)
        found = [m for m in members if dataclasses.is_dataclass(m) and isinstance(m, type)]
        return found, type(None) in members
    return ([hint] if dataclasses.is_dataclass(hint) and isinstance(hint, type) else []), False


def _tuple_of_sections(hint: object) -> Any:
    args = typing.get_args(hint) if typing.get_origin(hint) is tuple else ()
    return args[0] if len(args) == 2 and args[1] is Ellipsis and _sections(args[0])[0] else None


def _dict_of_sections(hint: object) -> Any:
    args = typing.get_args(hint) if typing.get_origin(hint) is dict else ()
    return args[1] if len(args) == 2 and _sections(args[1])[0] else None


def _kind(cls: type) -> str:
    return next(str(f.default) for f in dataclasses.fields(cls) if f.name == "kind")


def _suggestion(key: str, cls: type, path: str, root: type) -> str:
    near, here = nearest(key, _names(cls)), f"{path}.{key}" if path else key
    others = [known for known in _everywhere(root) if not (path and known.startswith(f"{path}."))]  # other kinds' keys
    known_here = [*others, *(_everywhere(cls, path) if path else ())]
    elsewhere = [known for known in known_here if known.rpartition(".")[2] == key and known != here]
    named = own_name(key, _names(cls))
    if named in known_here and named != near and named.rpartition(".")[2] != near and not elsewhere:
        # another tool calls it so
        return f"did you mean {named}?"
    if near and (not elsewhere or SequenceMatcher(None, key, near).ratio() > ALIKE):
        return f"did you mean '{near}'?"
    if elsewhere:
        return f"did you mean {' or '.join(sorted(set(elsewhere))[:3])}?"
    name = f"{path} of kind {_kind(cls)}" if "kind" in _hints(cls) else path or "a recipe"
    return f"the keys of {name} are {listed(_names(cls))}"


@cache
def _everywhere(cls: type, path: str = "") -> tuple[str, ...]:
    """The dotted path of every key that a recipe may have."""

    def found() -> Iterator[str]:
        for name, hint in _hints(cls).items():
            here = f"{path}.{name}" if path else name
            yield here
            for inner in _sections(hint)[0]:
                yield from _everywhere(inner, here)

    return tuple(found())


def _described(hint: object) -> str:
    sections, _ = _sections(hint)
    if len(sections) > 1:
        return f"a mapping with kind: {listed([_kind(s) for s in sections])}"
    return "a mapping" if sections else ""
