"""Strict YAML: every value keeps its position in the file; nothing is guessed.

YAML 1.2's core schema, so that `1e-4` is a number, `no` a string and `010` ten. Refused: aliases, tags, duplicate
keys, keys that are not strings, nesting over 32 levels, anything that is not a regular file. A recipe may come from
an untrusted source, so its size with all includes is limited: see `Budget`.
"""

import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from dtrain.core.errors import RecipeError

MAX_BYTES = 256 * 1024
MAX_DEPTH = 32
MAX_DIGITS = 100
MAX_KEY = 200
MAX_FILES = 64
MAX_VALUES = 10_000
SHOWN = 60
"""Largest number of characters of a value that a message shows."""

RESOLVERS = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", list("-+.0123456789")),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+.")),
)


@dataclass(frozen=True)
class Mark:
    """A position in a file, or the name of another source."""

    source: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}" if self.line else self.source


@dataclass(frozen=True)
class Node:
    """A value and its position. Collections contain nodes; a mapping also has the position of each key."""

    value: Any
    mark: Mark
    keys: Mapping[str, Mark] = field(default_factory=dict)

    def plain(self) -> Any:
        """The value without positions; lists as tuples."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        return tuple(node.plain() for node in self.value) if isinstance(self.value, tuple) else self.value

    def key(self, name: str) -> Mark:
        """Position of a key."""
        return self.keys.get(name, self.mark)


@dataclass
class Budget:
    """What a recipe and all that it includes may still read."""

    files: int = MAX_FILES
    bytes: int = MAX_BYTES
    values: int = MAX_VALUES


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, object] = {}


for _name, _pattern, _first in RESOLVERS:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(f"^(?:{_pattern})$"), _first)


def read(path: Path, budget: Budget | None = None) -> Node:
    """Read a file as nodes. Raises RecipeError, with file:line:column, if it is too large or not strict YAML."""
    budget = budget or Budget()
    try:
        raw, size = _content(path, budget.bytes)
    except (OSError, ValueError) as error:
        near = ", ".join(sorted(p.name for p in path.parent.glob("*.yaml"))[:8]) if path.parent.is_dir() else ""
        hint = f"{path.parent}/ has {near}" if near else "`dtrain recipes ls` lists those that come with dtrain"
        raise RecipeError(f"{shown(str(path))}: {getattr(error, 'strerror', '') or error}", hint) from error
    budget.files, budget.bytes = budget.files - 1, budget.bytes - len(raw)
    if budget.files < 0:
        raise RecipeError(f"{path}: a recipe has at most {MAX_FILES} files, with all that it includes")
    if budget.bytes < 0:
        found = f"{path}: {size:,} bytes"
        raise RecipeError(f"{found}; a recipe has at most {MAX_BYTES:,}, with all that it includes")
    try:
        return parse(raw.decode(), str(path), budget)
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path}: not UTF-8: {error}") from error


def _content(path: Path, most: int) -> tuple[bytes, int]:
    """The first `most` + 1 bytes of a regular file, and its size. Raises OSError for anything else."""
    if not stat.S_ISREG(path.stat().st_mode):  # before it is opened: opening a device can act on it
        raise OSError(0, "not a regular file")
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(0, "not a regular file")
        raw = file.read(most + 1)
        return raw, max(len(raw), os.fstat(file.fileno()).st_size)


def parse(text: str, source: str, budget: Budget | None = None) -> Node:
    """Parse YAML text into nodes; an empty text is an empty mapping."""
    try:
        _scan(text, source, budget or Budget())
        root = yaml.compose(text, _Loader)
    except yaml.MarkedYAMLError as error:
        at = _mark(source, error.problem_mark or error.context_mark)
        raise RecipeError(f"{at}  {shown(error.problem or error.context or '', 200)}") from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:  # such as "\UFFFFFFFF", not a character
        raise RecipeError(f"{source}: {shown(' '.join(str(error).split()), 200)}") from error
    return _node(root, source) if root else Node({}, Mark(source, 1, 1))


def _scan(text: str, source: str, budget: Budget) -> None:
    """Check the parser's events first: they cost little, however far aliases or nesting would expand."""
    depth = 0
    for event in yaml.parse(text, _Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent):
            message = f"aliases (*{shown(event.anchor)}) are not supported; write the value out, or use include:"
            raise RecipeError(f"{_mark(source, event.start_mark)}  {message}")
        if depth > MAX_DEPTH:
            raise RecipeError(f"{_mark(source, event.start_mark)}  nested more than {MAX_DEPTH} levels deep")
        if isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent) and event.tag:
            raise RecipeError(f"{_mark(source, event.start_mark)}  tags ({shown(event.tag)}) are not supported")
        if isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent | yaml.DocumentStartEvent):
            budget.values -= 1
        if budget.values < 0:
            message = f"a recipe has at most {MAX_VALUES:,} keys and values, with all that it includes"
            raise RecipeError(f"{_mark(source, event.start_mark)}  {message}")


def shown(text: str, most: int = SHOWN) -> str:
    """Text of a recipe as messages show it: shortened, and with unprintable characters escaped."""
    cut = text if len(text) <= most else f"{text[:most]}..."
    return cut if cut.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in cut)


def _node(node: Any, source: str) -> Node:
    at = _mark(source, node.start_mark)
    if isinstance(node, yaml.SequenceNode):
        return Node(tuple(_node(item, source) for item in node.value), at)
    if isinstance(node, yaml.MappingNode):
        return _mapping(node, source, at)
    return Node(_scalar(node.tag.rpartition(":")[2], node.value), at)


def _mapping(node: Any, source: str, at: Mark) -> Node:
    found: dict[str, Node] = {}
    keys: dict[str, Mark] = {}
    for key, value in node.value:
        where = _mark(source, key.start_mark)
        if not isinstance(key, yaml.ScalarNode) or not isinstance(_scalar(key.tag.rpartition(":")[2], key.value), str):
            raise RecipeError(f"{where}  a key must be a string; quote it if it is meant as one")
        if len(key.value) > MAX_KEY:
            raise RecipeError(f"{where}  a key of {len(key.value):,} characters; at most {MAX_KEY}")
        if key.value in found:
            raise RecipeError(f"{where}  {shown(key.value)}: duplicate key; first at {keys[key.value]}")
        found[key.value], keys[key.value] = _node(value, source), where
    return Node(found, at, keys)


def _scalar(tag: str, text: str) -> Any:
    if tag == "null":
        return None
    if tag == "bool":
        return text.lower() == "true"
    if tag == "int":
        if len(text) > MAX_DIGITS:
            raise RecipeError(f"a number of {len(text):,} digits: {text[:20]}...; at most {MAX_DIGITS}")
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
    if tag == "float":
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text


def _mark(source: str, mark: Any) -> Mark:
    return Mark(source, mark.line + 1, mark.column + 1) if mark else Mark(source)


def dump(value: object) -> str:
    """Plain values as YAML text that `parse` reads as the same values."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=100)


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers = _Loader.yaml_implicit_resolvers

    def ignore_aliases(self, data: object) -> bool:
        return True


def walk(node: Node, path: str = "") -> Iterator[tuple[str, Node]]:
    """Every node with its dotted path."""
    yield path, node
    children = node.value.items() if isinstance(node.value, dict) else ()
    children = enumerate(node.value) if isinstance(node.value, tuple) else children
    for key, child in children:
        yield from walk(child, f"{path}.{key}" if path else str(key))
