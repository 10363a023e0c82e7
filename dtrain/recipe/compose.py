"""Combine a recipe, its includes and the overrides of the command line into one tree of nodes."""

import math
import re
from collections.abc import Sequence
from pathlib import Path

from dtrain.core.errors import RecipeError
from dtrain.core.shipped import shipped
from dtrain.recipe.problems import nearest
from dtrain.recipe.yaml import MAX_DEPTH, Budget, Mark, Node, parse, read, shown

MAX_INCLUDES = 16
PRESETS = Path(__file__).parents[1] / "models" / "presets.yaml"


def compose(path: Path, overrides: Sequence[str] = ()) -> Node:
    """The recipe merged over its includes, with the `key=value` overrides merged over both."""
    over = overriding(overrides)
    return _with_preset(merge(_included(path, (), Budget()), over))


def name_of_run(path: Path, overrides: Sequence[str] = ()) -> str:
    """The name of the recipe's run: its key `name`, or else from the name of the file. Nothing else is checked."""
    return str(compose(path, overrides).plain().get("name") or name_of(path))


def name_of(path: Path) -> str:
    """The name of a run of this file."""
    return nearest_name(path.stem)


def nearest_name(text: str) -> str:
    """The name of a run that is most like a text; empty if it has no letter and no digit."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:63].rstrip("-")


def overriding(overrides: Sequence[str]) -> Node:
    """The `key=value` overrides as one tree."""
    tree = Node({}, Mark("arguments"))
    for override in overrides:
        tree = merge(tree, _override(override), ())  # both of two alternatives stay, and are refused
    return tree


def presets() -> dict[str, Node]:
    """Published decoder shapes, by name."""
    return read(PRESETS).value


def _with_preset(tree: Node) -> Node:
    """The tree with the fields of the model's preset filled in; fields that the recipe gives take precedence."""
    model = tree.value.get("model") if isinstance(tree.value, dict) else None
    preset = model.value.get("preset") if model and isinstance(model.value, dict) else None
    if preset is None or preset.value is None:
        return tree
    if not isinstance(preset.value, str):
        raise RecipeError(
            f"{preset.mark}  model.preset: expected the name of a preset; `dtrain recipes presets` lists them"
        )
    known = presets()
    if preset.value not in known:
        near = nearest(preset.value, known)
        hint = f"did you mean {near!r}?" if near else f"one of {', '.join(known)}"
        raise RecipeError(f"{preset.mark}  model.preset: unknown preset {shown(repr(preset.value))}; {hint}")
    mark = Mark(f"preset {preset.value}")
    under = Node({"model": _placed(known[preset.value], mark)}, mark, {"model": mark})
    return merge(under, tree)


def least_devices(tree: Node) -> int:
    """The smallest number of devices that the recipe's mesh fits on, read from the tree without checking it."""
    mesh = tree.plain().get("mesh", {})
    if not isinstance(mesh, dict):
        return 1
    given = mesh.get("slices")
    slices = given if isinstance(given, dict) else {}
    open_axes = [axis for axis in slices if mesh.get(axis, -1 if axis == "data" else 1) == -1]
    factors = [*mesh.values(), *(slices[axis] for axis in open_axes)]
    return math.prod(size for size in factors if type(size) is int and size > 0)


def _included(path: Path, trail: tuple[Path, ...], budget: Budget) -> Node:
    own = read(path, budget)
    if path.resolve() in trail or len(trail) >= MAX_INCLUDES:
        chain = " -> ".join(str(step) for step in (*trail, path.resolve()))
        raise RecipeError(f"include: a cycle, or more than {MAX_INCLUDES} levels: {chain}")
    if not isinstance(own.value, dict):
        raise RecipeError(f"{own.mark}  a recipe must be a mapping of keys to values")
    if "include" not in own.value:
        return own
    named = own.value["include"]
    files = named.value if isinstance(named.value, tuple) else (named,)
    tree = Node({}, own.mark)
    for file in files:
        if not isinstance(file.value, str):
            wanted = "a path relative to this file, or the name of a recipe that comes with dtrain"
            raise RecipeError(f"{file.mark}  include: expected {wanted}, or a list of such")
        named = path.parent / file.value
        named = named if named.exists() else shipped().get(file.value, named)
        included = _included(named, (*trail, path.resolve()), budget)
        tree = merge(tree, included)
    rest = Node({key: value for key, value in own.value.items() if key != "include"}, own.mark, own.keys)
    return merge(tree, rest)


WORDS = ("balanced",)
"""Values of keys that take a word or a mapping, where the word is no kind of section: class_weights."""


ALTERNATIVES = ({"steps", "epochs"}, {"run", "weights"})
"""Keys of one section that exclude each other: one of them replaces the other."""


def merge(under: Node, over: Node, alternatives: Sequence[set[str]] = ALTERNATIVES) -> Node:
    """Merge `over` over `under`, key by key. A section of another `kind` replaces the whole section, and a key its
    alternative."""
    if isinstance(under.value, str) and under.value in WORDS:  # a word in place of a mapping, and no kind
        return over
    if isinstance(under.value, str) and isinstance(over.value, dict) and "kind" not in over.value:
        under = Node({"kind": under}, under.mark, {"kind": under.mark})  # `data: digits` is short for its kind
    if isinstance(over.value, str) and isinstance(under.value, dict) and "kind" in under.value:
        over = Node({"kind": over}, over.mark, {"kind": over.mark})
    if not (isinstance(under.value, dict) and isinstance(over.value, dict)):
        return over
    kinds = [node.value["kind"].value for node in (under, over) if "kind" in node.value]
    if len(kinds) == 2 and kinds[0] != kinds[1]:
        return over
    given = [(keys, keys & over.value.keys()) for keys in alternatives]
    replaced = {key for keys, own in given if len(own) == 1 for key in keys - own}
    value = {key: node for key, node in under.value.items() if key not in replaced}
    for key, node in over.value.items():
        value[key] = merge(value[key], node, alternatives) if key in value else node
    marks = {key: mark for key, mark in {**under.keys, **over.keys}.items() if key in value}
    return Node(value, under.mark if under.value else over.mark, marks)


def _override(text: str) -> Node:
    """`optimizer.lr=3e-4` as a tree with this one value; `launch=@pod.json` reads it from a YAML or JSON file."""
    key, equals, value = text.partition("=")
    mark = Mark(f"argument {shown(repr(text))}")
    if not equals or not all(key.split(".")) or key.count(".") >= MAX_DEPTH:
        raise RecipeError(f"{mark}: an override is key=value, as in optimizer.lr=3e-4")
    if value.startswith("@"):  # a YAML value cannot start with @
        node = read(Path(value[1:]))
    else:
        node = _placed(parse(value, mark.source), mark) if value else Node("", mark)
    for part in reversed(key.split(".")):
        node = Node({part: node}, mark, {part: mark})
    return node


def _placed(node: Node, mark: Mark) -> Node:
    """A copy of the nodes in which every mark is `mark`."""
    if isinstance(node.value, dict):
        value = {key: _placed(child, mark) for key, child in node.value.items()}
        return Node(value, mark, dict.fromkeys(value, mark))
    return Node(tuple(_placed(c, mark) for c in node.value) if isinstance(node.value, tuple) else node.value, mark)
