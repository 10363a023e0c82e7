"""From nodes to the frozen dataclasses of the recipe, with every problem found at once.

Structure (keys, kinds, what is missing) is walked here, so that each message can point to its place
and offer the nearest right spelling; pydantic judges the values.
"""

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from dtrain.errors import FieldError
from dtrain.recipe.yaml import Mark, Node

MISSING = dataclasses.MISSING


@dataclass
class Problems:
    """What is wrong, each with its place."""

    lines: list[str] = field(default_factory=list)

    def add(self, mark: Mark, path: str, message: str, hint: str = "") -> None:
        """One more problem."""
        self.lines.append(f"{mark}  {path + ': ' if path else ''}{message}" + (f"; {hint}" if hint else ""))


def section(cls: type, node: Node, path: str, problems: Problems, root: type | None = None) -> Any:
    """An object of the dataclass, or None where problems were added."""
    root = root or cls
    if not isinstance(node.value, dict):
        problems.add(node.mark, path, f"expected a mapping with {_listed(_names(cls))}; found {_shown(node)}")
        return None
    before, hints, values = len(problems.lines), _hints(cls), {}
    for key, child in node.value.items():
        here = f"{path}.{key}" if path else key
        if key in hints:
            values[key] = value(hints[key], _of_default_kind(cls, key, child), here, problems, root)
        else:
            problems.add(node.key(key), here, "unknown key", _suggestion(key, cls, path, root))
    for missing in (f for f in dataclasses.fields(cls) if _required(f) and f.name not in node.value):
        wanted = f"{path}.{missing.name}" if path else missing.name
        problems.add(node.mark, wanted, "missing", _described(hints[missing.name]))
    if len(problems.lines) > before:
        return None
    try:
        return cls(**values)
    except FieldError as error:
        at = next((node.value[part].mark for part in [error.field.split(".")[0]] if part in node.value), node.mark)
        where = ".".join(part for part in (path, error.field) if part)
        problems.add(at, where, error.message, error.hint)
        return None


def _of_default_kind(cls: type, key: str, node: Node) -> Node:
    """A mapping without a `kind`, for a field that has a default: of the default's kind."""
    made = next(f.default_factory for f in dataclasses.fields(cls) if f.name == key)
    if not (isinstance(made, type) and dataclasses.is_dataclass(made)) or "kind" not in _hints(made):
        return node
    if not isinstance(node.value, dict) or "kind" in node.value:
        return node
    return Node({"kind": Node(_kind(made), node.mark)} | node.value, node.mark, node.keys)


def value(hint: Any, node: Node, path: str, problems: Problems, root: type) -> Any:
    """A value of the hinted type: a section, one of a union of sections, or what pydantic judges."""
    sections, optional = _sections(hint)
    if optional and node.value is None:
        return None
    if len(sections) == 1:
        return section(sections[0], node, path, problems, root)
    if sections:
        return _member(sections, node, path, problems, root)
    inner = _tuple_of_sections(hint)
    if inner and isinstance(node.value, tuple):
        return tuple(value(inner, child, f"{path}.{i}", problems, root) for i, child in enumerate(node.value))
    return _plain(hint, node, path, problems)


def _member(members: list[type], node: Node, path: str, problems: Problems, root: type) -> Any:
    """The union's member that `kind` names; a word alone is a kind without further keys."""
    kinds = {_kind(member): member for member in members}
    given = Node({"kind": node}, node.mark, (("kind", node.mark),)) if isinstance(node.value, str) else node
    if not isinstance(given.value, dict):
        problems.add(node.mark, path, f"expected a mapping with kind: {_listed(kinds)}; found {_shown(node)}")
        return None
    kind = given.value.get("kind")
    if kind is None:
        problems.add(node.mark, f"{path}.kind", "missing", f"one of {_listed(kinds)}")
        return None
    if kind.value not in kinds:
        near = difflib.get_close_matches(str(kind.value), kinds, 1)
        hint = f"did you mean '{near[0]}'?" if near else f"one of {_listed(kinds)}"
        problems.add(kind.mark, f"{path}.kind", f"no kind {_shown(kind)}", hint)
        return None
    return section(kinds[kind.value], given, path, problems, root)


def _plain(hint: Any, node: Node, path: str, problems: Problems) -> Any:
    from pydantic import ValidationError

    try:
        return _adapter(hint).validate_python(node.plain(), strict=True)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            at, where = node, path
            for part in (p for p in detail["loc"] if isinstance(at.value, dict | tuple)):
                children: Any = at.value
                inside = part in children if isinstance(children, dict) else isinstance(part, int)
                at, where = (children[part], f"{where}.{part}") if inside else (at, where)
            message = detail["msg"].replace("Input should be", "expected", 1).replace("valid tuple", "list")
            problems.add(at.mark, where, f"{message[0].lower()}{message[1:]}; found {_shown(at)}")
        return None


@cache
def _adapter(hint: Any) -> Any:
    from pydantic import ConfigDict, TypeAdapter

    return TypeAdapter(hint, config=ConfigDict(allow_inf_nan=False))


@cache
def _hints(cls: type) -> dict[str, Any]:
    hints = typing.get_type_hints(cls, include_extras=True)
    return {f.name: hints[f.name] for f in dataclasses.fields(cls) if f.init}


def _names(cls: type) -> list[str]:
    return list(_hints(cls))


def _required(f: dataclasses.Field[Any]) -> bool:
    return f.init and f.default is MISSING and f.default_factory is MISSING


def _sections(hint: Any) -> tuple[list[type], bool]:
    """The dataclasses that the hint allows, and whether it allows null."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        members = typing.get_args(hint)
        found = [m for m in members if dataclasses.is_dataclass(m) and isinstance(m, type)]
        return found, type(None) in members
    return ([hint] if dataclasses.is_dataclass(hint) and isinstance(hint, type) else []), False


def _tuple_of_sections(hint: Any) -> Any:
    args = typing.get_args(hint) if typing.get_origin(hint) is tuple else ()
    return args[0] if len(args) == 2 and args[1] is Ellipsis and _sections(args[0])[0] else None


def _kind(cls: type) -> str:
    return next(str(f.default) for f in dataclasses.fields(cls) if f.name == "kind")


def _suggestion(key: str, cls: type, path: str, root: type) -> str:
    near = difflib.get_close_matches(key, _names(cls), 1, cutoff=0.6)
    if near:
        return f"did you mean '{near[0]}'?"
    here = f"{path}.{key}" if path else key
    elsewhere = [known for known in _everywhere(root) if known.rpartition(".")[2] == key and known != here]
    if elsewhere:
        return f"did you mean {' or '.join(sorted(set(elsewhere))[:3])}?"
    name = f"{path} of kind {_kind(cls)}" if "kind" in _hints(cls) else path or "a recipe"
    return f"{name} has {_listed(_names(cls))}"


@cache
def _everywhere(cls: type, path: str = "") -> tuple[str, ...]:
    """The dotted path of every key a recipe may have."""

    def found() -> Iterator[str]:
        for name, hint in _hints(cls).items():
            here = f"{path}.{name}" if path else name
            yield here
            for inner in _sections(hint)[0]:
                yield from _everywhere(inner, here)

    return tuple(found())


def _described(hint: Any) -> str:
    sections, _ = _sections(hint)
    if len(sections) > 1:
        return f"a mapping with kind: {_listed([_kind(s) for s in sections])}"
    return "a mapping" if sections else ""


def _listed(names: Any) -> str:
    return ", ".join(names)


def _shown(node: Node) -> str:
    found = node.value
    if isinstance(found, dict):
        return f"a mapping with {_listed(list(found)[:4]) or 'no key'}"
    if isinstance(found, tuple):
        return f"a list of {len(found)}"
    return "nothing" if found is None else str(found).lower() if isinstance(found, bool) else repr(found)
