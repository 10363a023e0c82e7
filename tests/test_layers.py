"""The architecture: which package may import which; CONTRIBUTING.md prints the same table."""

import ast
import re
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "dtrain"

LAYERS = [
    ["core"],
    ["data", "track", "launch"],
    ["models/nn"],
    ["models", "optim", "checkpoint", "parallel"],
    ["recipe"],
    ["assembly"],
    ["weights", "plan"],
    ["inference"],
    ["train"],
    ["runtime"],
    ["cli"],
]
"""From the lowest to the highest: a file imports its own package and those of lower layers."""
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}
FILES = sorted(PACKAGE.rglob("*.py"))
ADAPTERS = {"flax", "equinox"}
"""Public modules for other libraries' models, which nothing in dtrain imports."""
TOP = {"__init__", "__main__"} | ADAPTERS
"""The public API, which names modules of all layers and imports none at once, the command, and the adapters."""
STARTED = {"transformers_program"}
"""What another Python starts, without dtrain."""


def package_of(module: str) -> str:
    """The package of a dotted name below dtrain: its first folder, or `models/nn`."""
    parts = module.split(".")
    return "models/nn" if parts[:2] == ["models", "nn"] else parts[0]


def imports(path: Path) -> Iterator[str]:
    """The dotted name below dtrain of each module that is imported at run time, inside functions too."""
    tree = ast.parse(path.read_text())
    guarded = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and id(node) not in guarded and (node.module or "").startswith("dtrain"):
            base = (node.module or "").removeprefix("dtrain").lstrip(".")
            yield from (base or alias.name for alias in node.names if base or alias.name != "__version__")


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def test_imports_go_down() -> None:
    found = []
    for path in FILES:
        own = package_of(dotted(path))
        for name in imports(path) if dotted(path) not in TOP else ():
            other = package_of(name)
            if other != own and LEVEL[other] >= LEVEL[own]:
                found.append(f"{path.relative_to(ROOT)} imports dtrain.{name}")
    assert not found


def test_the_top_folder_has_only_packages() -> None:
    found = {path.relative_to(PACKAGE).parts[0] for path in FILES}
    assert found == {name for name in LEVEL if "/" not in name} | {f"{name}.py" for name in TOP}
    assert len(found - {f"{name}.py" for name in ADAPTERS}) <= 18


def test_contributing_prints_the_same_layers() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    rows = re.findall(r"^\| \d+ \| (.*?) \|", text, re.MULTILINE)
    assert [re.findall(r"`([a-z/]+)/`", row) for row in rows] == LAYERS


@pytest.mark.slow
def test_only_the_recipe_names_every_union() -> None:
    unions = {"models", "data", "parallel", "track", "optim"}
    for path in FILES:
        members = {package_of(name) for name in imports(path) if "." in name}
        if package_of(dotted(path)) not in {"recipe", "train", "plan"}:
            assert not unions <= members, path


def test_importing_the_cli_imports_no_heavy_library() -> None:
    heavy = {"jax", "numpy", "optax", "orbax", "grain", "pydantic", "wandb", "yaml"}
    assert not heavy & loaded_by("import dtrain.cli")


@pytest.mark.slow
def test_loading_a_recipe_imports_no_heavy_library() -> None:
    assert not {"optax", "orbax", "grain", "wandb", "tensorboardX", "PIL"} & loaded_by("import dtrain.recipe.load")


@pytest.mark.parametrize("package", ["core", "launch"])
def test_it_imports_no_jax(package: str) -> None:
    modules = ", ".join(f"dtrain.{dotted(path)}" for path in FILES if dotted(path).startswith(f"{package}."))
    assert "jax" not in loaded_by(f"import {modules}")


def loaded_by(code: str) -> set[str]:
    shown = f"import sys; {code}; print(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", shown], capture_output=True, text=True, check=True).stdout.split())


def test_no_file_is_too_long() -> None:
    long = {
        str(path.relative_to(PACKAGE)): lines for path in FILES if (lines := len(path.read_text().splitlines())) > 450
    }
    assert not long


def test_no_file_has_a_catch_all_name() -> None:
    assert not [path for path in FILES if path.stem in {"utils", "util", "common", "helpers", "misc"}]


def test_no_function_is_too_long() -> None:
    long = [
        f"{path.relative_to(PACKAGE)}: {node.name} has {lines} lines"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > 100
    ]
    assert not long


def test_a_small_module_has_two_importers() -> None:
    """But for verbs of the command line, members of unions, and modules that users or other programs start."""
    importers: dict[str, set[str]] = {}
    names = {dotted(path) for path in FILES}
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dtrain"):
                base = (node.module or "").removeprefix("dtrain").lstrip(".")
                for alias in node.names:
                    name = ".".join(filter(None, (base, alias.name)))
                    importers.setdefault(name if name in names else base, set()).add(dotted(path))
    apart = [
        f"{path.relative_to(PACKAGE)} has {lines} lines, and one importer"
        for path in FILES
        if path.stem not in TOP | STARTED
        and (lines := len(path.read_text().splitlines())) < 80
        and len(by := importers.get(dotted(path), set())) < 2
        and not by & {"cli.__init__", "recipe.recipe"}
    ]
    assert not apart


def test_tests_import_public_names() -> None:
    """A name with an underscore may change with its module; what a test needs has a public name."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {alias.name}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dtrain")
        for alias in node.names
        if alias.name.startswith("_") and not alias.name.startswith("__")
    ]
    assert not found


def test_members_of_unions_are_not_asked_what_they_are() -> None:
    """By isinstance or by comparing `kind`, outside of the member's package: the union answers for itself."""
    from dtrain.recipe import recipe

    unions = ("Model", "Data", "Engine", "Objective", "Tracker", "Launch")
    members = [member for name in unions for member in typing.get_args(getattr(recipe, name))]
    homes = {member.__name__: package_of(member.__module__.removeprefix("dtrain.")) for member in members}
    homes |= {"MixtureSource": "data"}
    kinds: dict[str, set[str]] = {}
    for member in members:
        kinds.setdefault(member.kind, set()).add(homes[member.__name__])
    found = []
    for path in FILES:
        own = package_of(dotted(path))
        for node in ast.walk(ast.parse(path.read_text())):
            asked = isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance"
            names = {part.id for part in ast.walk(node.args[1]) if isinstance(part, ast.Name)} if asked else set()
            compared = isinstance(node, ast.Compare) and ast.unparse(node.left).endswith(".kind")
            words = {part.value for part in ast.walk(node) if isinstance(part, ast.Constant)} if compared else set()
            foreign = any(own not in kinds[word] for word in words & kinds.keys())
            if foreign or any(homes.get(name, own) != own for name in names):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")  # pyright: ignore[reportAttributeAccessIssue]
    assert not found
