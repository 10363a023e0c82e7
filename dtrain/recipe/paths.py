"""Paths in a recipe: relative to the file that they are written in, else to the working folder.

A path is relative to its file if its first part, up to a glob, exists there. It is then made absolute, so that it
means the same in the run folder's copy of the recipe. A glob without a fixed first part (`*.txt`, unlike `./*.txt`),
and every path on the command line, is relative to the working folder.
"""

import copy
import glob
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dtrain.core.types import JsonObject
from dtrain.data.templates import NAMED
from dtrain.recipe.yaml import Node, shown

CODE_SECTIONS = ("model", "data", "optimizer")
"""Sections that may name code of a user's own."""
CODE_LISTS = (("track", "to"), ("evaluate", "measures"))
"""Lists whose entries may, by their section and key."""
DATA_FILES = ("data.root", "data.file", "data.test_file", "data.tokenizer", "data.template")
DATA_GLOBS = ("data.files", "data.test_files")
SOURCES = "data.sources.*."
"""Before the keys of each source of a mixture."""
GLOBS = (*DATA_GLOBS, *(f"{SOURCES}{key}" for key in DATA_GLOBS), "evaluate.questions")
FILES = (*DATA_FILES, *(f"{SOURCES}{key}" for key in DATA_FILES), "data.columns.*.tokenizer")
FOLDERS = tuple(f"{section}.folder" for section in CODE_SECTIONS)
"""Where the modules of a user's code are searched for."""
ORIGINS = tuple(f"{place}.{key}" for place in ("init", "objective.teacher", "parts.*") for key in ("run", "weights"))
PATHS = (*FILES, *ORIGINS, *FOLDERS, *GLOBS)
"""Keys whose values are paths on this machine; * stands for every name, or every item of a list."""
ELSEWHERE = ("/", "~", "{dtrain}", "bytes")
"""Prefixes of paths that are not relative, and of values that are not paths."""


def with_absolute_paths(tree: Node) -> tuple[Node, dict[str, str]]:
    """The recipe with paths relative to their file made absolute, and these paths by key."""
    taken: dict[str, str] = {}
    for key in PATHS:
        tree = _at(tree, key.split("."), "", taken, key in GLOBS)
    if not isinstance(tree.value, dict):
        return tree, taken
    for name in (name for name in CODE_SECTIONS if name in tree.value):
        tree = _replaced(tree, name, _with_folder(tree.value[name], name, taken))
    for section, key in CODE_LISTS:
        tree = _with_folders(tree, section, key, taken)
    return tree, taken


def absolute(values: JsonObject) -> JsonObject:
    """The plain values of a recipe with every path made absolute, by the working folder, whether it exists or not.

    So a run's copy of its recipe means the same wherever it is read, and whatever was removed since.
    """
    values = copy.deepcopy(values)
    for key in PATHS:
        for _, around, name in places(values, key):
            found = around[name]
            if isinstance(found, str):
                around[name] = _from_here(found, False)
            elif isinstance(found, list | tuple):
                around[name] = [_from_here(item, True) if isinstance(item, str) else item for item in found]
    here, listed = Path.cwd(), [one for section, key in CODE_LISTS for one in values.get(section, {}).get(key, [])]
    for section in (*(values.get(name, {}) for name in CODE_SECTIONS), *listed):
        module = str(section.get("target", "")).partition(":")[0].partition(".")[0]
        if module.isidentifier() and not section.get("folder") and has_module(here, module):
            section["folder"] = str(here)
    return values


def has_module(folder: Path, name: str) -> bool:
    """Whether a folder has a module of that name."""
    return _exists(folder / f"{name}.py") or _exists(folder / name)


def places(values: Any, key: str) -> Iterator[tuple[str, Any, Any]]:
    """Where plain values have a key of PATHS: its dotted path, and the container and name of its value."""
    waiting = [("", values, key.split("."))]
    while waiting:
        before, around, (first, *rest) = waiting.pop(0)
        for name in _names(around, first):
            if not rest:
                yield f"{before}{name}", around, name
            else:
                waiting.append((f"{before}{name}.", around[name], rest))


def _names(around: Any, part: str) -> list[Any]:
    """The names, or numbers of items, in a container that a part of a key stands for."""
    if part == "*":
        is_list = isinstance(around, list | tuple)
        return list(range(len(around)) if is_list else around if isinstance(around, dict) else ())
    return [part] if isinstance(around, dict) and part in around else []


def _from_here(text: str, pattern: bool) -> str:
    if is_elsewhere(text):
        return text
    here = Path.cwd()
    return str(Path(glob.escape(str(here)) if pattern else here) / text)


def is_elsewhere(text: str) -> bool:
    """Whether a value is not a path below a folder: empty, absolute, an address, or a name that dtrain gives."""
    return not text or text in NAMED or text.startswith(ELSEWHERE) or "://" in text or "\0" in text


def fixed_parts(parts: Sequence[str]) -> int:
    """How many parts of a path come before the first with a glob."""
    return next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts))


def _at(tree: Node, parts: Sequence[str], key: str, taken: dict[str, str], pattern: bool) -> Node:
    """The tree with the path, or each path of a list, at `parts` resolved; with `pattern` it is a glob."""
    if not parts:
        if isinstance(tree.value, tuple):
            items = (_at(item, [], f"{key}.{i}", taken, pattern) for i, item in enumerate(tree.value))
            return Node(tuple(items), tree.mark)
        return Node(_resolved(tree, key, taken, pattern), tree.mark) if isinstance(tree.value, str) else tree
    for name in _names(tree.value, parts[0]):
        child = _at(tree.value[name], parts[1:], f"{key}.{name}".lstrip("."), taken, pattern)
        if isinstance(tree.value, tuple):
            tree = Node((*tree.value[:name], child, *tree.value[name + 1 :]), tree.mark)
        else:
            tree = _replaced(tree, name, child)
    return tree


def _resolved(node: Node, key: str, taken: dict[str, str], pattern: bool) -> str:
    text: str = node.value
    if not node.mark.line or is_elsewhere(text):
        return text  # a value without a line is from the command line
    folder, parts = _folder(node), Path(text).parts
    fixed = fixed_parts(parts)
    if folder == Path.cwd() and parts[:1] != ("..",):
        return str(Path(text))
    dots = text.startswith("./")
    if not (fixed or dots) or not _exists(folder.joinpath(*parts[:fixed])):
        return text
    whole = str(Path(glob.escape(str(folder)) if pattern else folder) / text)
    taken[key] = whole
    return whole


def _replaced(tree: Node, name: str, child: Node) -> Node:
    return Node({**tree.value, name: child}, tree.mark, tree.keys)


def _with_folders(tree: Node, section: str, key: str, taken: dict[str, str]) -> Node:
    """The recipe with the `folder` of each entry of a list of CODE_LISTS set."""
    around = tree.value.get(section)
    listed = around.value.get(key) if around and isinstance(around.value, dict) else None
    if not around or not listed:
        return tree
    if not isinstance(listed.value, tuple):  # one entry stands for a list of one
        return _replaced(tree, section, _replaced(around, key, _with_folder(listed, f"{section}.{key}", taken)))
    named = enumerate(listed.value)
    items = tuple(_with_folder(item, f"{section}.{key}.{number}", taken) for number, item in named)
    return _replaced(tree, section, _replaced(around, key, Node(items, listed.mark)))


def _with_folder(section: Node, name: str, taken: dict[str, str]) -> Node:
    """The section with its `folder` set, if the module of its `target` is in the recipe's folder."""
    if not isinstance(section.value, dict) or "folder" in section.value:
        return section
    target: Any = section.value.get("target")
    if target is None or not isinstance(target.value, str) or not target.mark.line:
        return section
    folder, module = _folder(target), target.value.partition(":")[0].partition(".")[0]
    if not module.isidentifier() or folder == Path.cwd():
        return section
    if not has_module(folder, module):
        return section
    taken[f"{name}.folder"] = str(folder)
    return _replaced(section, "folder", Node(str(folder), target.mark))


def _folder(node: Node) -> Path:
    return Path(node.mark.source).parent.resolve()


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # the name is too long or not valid
        return False


def unusable(text: str) -> str:
    """Why the string cannot be a name or a path; empty if it can."""
    if "\0" in text:
        return "contains a NUL character"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "contains a lone surrogate, which is not a character"
    return ""


def unknown_homes(tree: Node) -> Iterator[tuple[str, str]]:
    """Yield (key, message) for each path that starts with the ~ of an unknown user."""
    for key in (*PATHS, "data.cache", "launch.identity", "launch.known_hosts"):
        for where, around, name in places(_plain(tree), key):
            found = around[name]
            for text in found if isinstance(found, list) else [found]:
                if isinstance(text, str) and text.startswith("~"):
                    try:
                        Path(text).expanduser()
                    except RuntimeError:
                        yield where, f"no home folder for {shown(text.partition('/')[0])}"


def _plain(node: Node) -> Any:
    """The values of a node without their marks."""
    if isinstance(node.value, dict):
        return {name: _plain(child) for name, child in node.value.items()}
    return [_plain(item) for item in node.value] if isinstance(node.value, tuple) else node.value
