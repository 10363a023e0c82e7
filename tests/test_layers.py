"""A file imports only lower layers; rooms of one layer never import each other."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "dtrain"

LAYERS = [
    {"errors", "fields", "hardware", "faults", "signals", "mounts", "run_json"},
    {
        "batch",
        "params",
        "folder",
        "beat",
        "parent",
        "slices",
        "attention",
        "varying",
        "remat",
        "direction",
        "lockfile",
        "process_info",
    },
    {"experts", "product", "lease", "usage", "preemption"},
    {"context", "precision", "run_control"},
    {"model", "caching"},
    {"models", "parallel", "data", "optim", "checkpoint", "track", "launch"},
    {"recipe"},
    {"train"},
    {"assembly", "record", "identity"},
    {"introduction", "forecast", "feed", "provenance"},
    {"resume", "crew", "session", "reporting"},
    {"trained"},
    {"run", "generate", "exchange", "explain", "report", "supervise", "verify", "doctor"},
    {"plan"},
    {"cli"},
    {"__main__"},
]
LEVEL = {room: level for level, rooms in enumerate(LAYERS) for room in rooms}
FILES = sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[str]:
    """The room of dtrain that each import names."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("dtrain"):
            parts = (node.module or "").split(".")
            names = [parts[1]] if len(parts) > 1 else [alias.name for alias in node.names]
            yield from (name for name in names if name != "__version__")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_down(path: Path) -> None:
    own = room_of(path)
    if own == "__init__":
        return
    for other in imports(path):
        assert other == own or LEVEL[other] < LEVEL[own], f"{path.relative_to(PACKAGE)} imports {other}"


def test_only_the_recipe_names_every_union() -> None:
    unions = {"models", "data", "parallel", "track"}
    for path in FILES:
        if room_of(path) in {
            "recipe",
            "run",
            "assembly",
            "generate",
            "introduction",
            "feed",
            "resume",
            "session",
            "reporting",
            "plan",
        }:
            continue
        assert not unions <= set(imports(path)), path


def test_the_first_screen_is_light() -> None:
    heavy = {"jax", "numpy", "optax", "orbax", "grain", "pydantic", "wandb", "yaml"}
    code = "import sys, dtrain.cli; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not heavy & set(loaded)


def test_loading_a_recipe_imports_no_heavy_library() -> None:
    code = "import sys, dtrain.recipe.load; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"optax", "orbax", "grain", "wandb", "tensorboardX", "PIL"} & set(loaded)


def test_no_file_outgrows_its_idea() -> None:
    long = {
        str(path.relative_to(PACKAGE)): lines for path in FILES if (lines := len(path.read_text().splitlines())) > 250
    }
    assert not long


def test_no_drawers() -> None:
    assert not [path for path in FILES if path.stem in {"utils", "util", "common", "helpers", "misc"}]
