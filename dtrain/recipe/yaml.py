"""Strict YAML: every value keeps its place in the file; nothing is guessed.

YAML 1.2's core schema, so that `1e-4` is a number, `no` a word and `010` ten. Refused: aliases,
tags, duplicate keys, keys that are not strings, files over 256 KB or nested over 32 deep.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dtrain.errors import RecipeError

MAX_BYTES = 256 * 1024
MAX_DEPTH = 32
MAX_DIGITS = 100

RESOLVERS = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+.")),
)


@dataclass(frozen=True)
class Mark:
    """A place that can be pointed to."""

    source: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}" if self.line else self.source


@dataclass(frozen=True)
class Node:
    """A value and its place. Collections hold nodes; a mapping also knows where each key stands."""

    value: Any
    mark: Mark
    keys: tuple[tuple[str, Mark], ...] = ()

    def plain(self) -> Any:
        """The value without places; lists as tuples."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        return tuple(node.plain() for node in self.value) if isinstance(self.value, tuple) else self.value

    def key(self, name: str) -> Mark:
        """Where that key stands."""
        return dict(self.keys).get(name, self.mark)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}


for _name, _pattern, _first in RESOLVERS:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(f"^(?:{_pattern})$"), _first)


def read(path: Path) -> Node:
    """The file as nodes; RecipeError with file:line:column where it is not strict YAML."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        near = ", ".join(sorted(p.name for p in path.parent.glob("*.yaml"))[:8]) if path.parent.is_dir() else ""
        hint = f"{path.parent}/ has {near}" if near else "`dtrain recipes ls` lists those that come with dtrain"
        raise RecipeError(f"{path}: {error.strerror}", hint) from error
    if len(raw) > MAX_BYTES:
        raise RecipeError(f"{path}: {len(raw):,} bytes; a recipe has at most {MAX_BYTES:,}")
    try:
        return parse(raw.decode(), str(path))
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: not UTF-8: {error}") from error


def parse(text: str, source: str) -> Node:
    """YAML text as nodes; an empty text is an empty mapping."""
    try:
        _refuse_aliases(text, source)
        root = yaml.compose(text, _Loader)
    except yaml.MarkedYAMLError as error:
        at = _mark(source, error.problem_mark or error.context_mark)
        raise RecipeError(f"{at}  {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise RecipeError(f"{source}: {error}") from error
    return _node(root, source) if root else Node({}, Mark(source, 1, 1))


def _refuse_aliases(text: str, source: str) -> None:
    """Read the events alone first: they cost little however far aliases or nesting would expand."""
    depth = 0
    for event in yaml.parse(text, _Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        at = _mark(source, event.start_mark)
        if isinstance(event, yaml.AliasEvent):
            raise RecipeError(f"{at}  aliases (*{event.anchor}) are not read; write the value out, or use include:")
        if depth > MAX_DEPTH:
            raise RecipeError(f"{at}  nested more than {MAX_DEPTH} deep")
        if isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent) and event.tag:
            raise RecipeError(f"{at}  tags ({event.tag}) are not read")


def _node(node: Any, source: str) -> Node:
    at = _mark(source, node.start_mark)
    if isinstance(node, yaml.SequenceNode):
        return Node(tuple(_node(item, source) for item in node.value), at)
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, source, at)
    return Node(_scalar(node.tag.rpartition(":")[2], node.value), at)


def _mapping(node: Any, source: str, at: Mark) -> Node:
    found: dict[str, Node] = {}
    keys = []
    for key, value in node.value:
        where = _mark(source, key.start_mark)
        if not isinstance(key, yaml.ScalarNode) or not isinstance(_scalar(key.tag.rpartition(":")[2], key.value), str):
            raise RecipeError(f"{where}  keys are words; quote this one if it is meant as a word")
        if key.value in found:
            raise RecipeError(f"{where}  {key.value}: this key stands twice; first at {dict(keys)[key.value]}")
        found[key.value] = _node(value, source)
        keys.append((key.value, where))
    return Node(found, at, tuple(keys))


def _scalar(tag: str, text: str) -> Any:
    if tag == "null":
        return None
    if tag == "bool":
        return text.lower() == "true"
    if tag == "int":
        if len(text) > MAX_DIGITS:
            raise RecipeError(f"a number of {len(text):,} digits: {text[:20]}...")
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
    if tag == "float":
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text


def _mark(source: str, mark: Any) -> Mark:
    return Mark(source, mark.line + 1, mark.column + 1) if mark else Mark(source)


def dump(value: Any) -> str:
    """Plain values as YAML that reads back as the same values."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=100)


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers

    def ignore_aliases(self, data: Any) -> bool:
        return True


def walk(node: Node, path: str = "") -> Iterator[tuple[str, Node]]:
    """Every node with its dotted path."""
    yield path, node
    children = node.value.items() if isinstance(node.value, dict) else ()
    children = enumerate(node.value) if isinstance(node.value, tuple) else children
    for key, child in children:
        yield from walk(child, f"{path}.{key}" if path else str(key))
