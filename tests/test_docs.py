"""The documentation: its site builds, its links lead somewhere, its commands run as they are written."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.main import get_command

from dtrain.cli import app
from dtrain.recipe import recipe
from tests.conftest import bare_environment

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
UNIONS = ("Model", "Data", "Engine", "Tracker", "Launch")


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(path: Path, language: str) -> list[str]:
    return [text for named, text in BLOCK.findall(path.read_text()) if named == language]


def commands(path: Path) -> Iterator[list[str]]:
    """Every `dtrain` command line of a page, in a block of any kind."""
    for _, text in BLOCK.findall(path.read_text()):
        for line in text.replace("\\\n", " ").splitlines():
            if line.startswith("dtrain ") and not line.startswith("dtrain VERB"):
                described = re.split(r"\s{2,}|\s#|\s\|", line)[0]
                yield shlex.split(described)[1:]


IN_CI = {"first-run.md": 2, "own-model.md": None}
"""The pages whose commands run in every CI run, and how many of their first blocks; all pages whole at night."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "count"),
    [
        *(pytest.param(page, IN_CI[page.name], id=relative(page)) for page in PAGES if page.name in IN_CI),
        *(
            pytest.param(page, None, id=f"{relative(page)}-whole", marks=pytest.mark.nightly)
            for page in PAGES
            if blocks(page, "bash") and IN_CI.get(page.name, 0) is not None
        ),
    ],
)
def test_the_commands_of_a_page_run_in_an_empty_folder(page: Path, count: int | None, tmp_path: Path) -> None:
    script = "set -euo pipefail\n" + "\n".join(blocks(page, "bash")[:count])
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env=bare_environment() | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=280 if count else 580,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=relative)
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    """Its blocks one after the other, as one program."""
    program = "\n".join(blocks(page, "python"))
    for library in re.findall(r"^(?:from|import) (transformers|flax|equinox)", program, re.MULTILINE):
        pytest.importorskip(library, reason=f"{library} is not installed")
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, cwd=tmp_path, env=bare_environment(), capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_the_first_recipe_of_the_readme_prints_what_it_shows(tmp_path: Path) -> None:
    """All but times and speeds, which differ from machine to machine."""
    recipe, shown = blocks(ROOT / "README.md", "yaml")[0], blocks(ROOT / "README.md", "text")[0].splitlines()
    (tmp_path / "digits.yaml").write_text(recipe)
    command = [str(Path(sys.executable).parent / "dtrain"), *shown[0].split()[2:]]
    done = subprocess.run(
        command, cwd=tmp_path, env=bare_environment(), capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]

    def stable(text: str) -> list[str]:
        plain = re.sub(r"\S*/bin/dtrain", "dtrain", text)
        return [re.sub(r"[\d.]+ m?s\b.*|, [\d.]+ s\)", "", line) for line in plain.splitlines()]

    printed = stable(f"{done.stdout}{done.stderr}")
    for line in stable("\n".join(line for line in shown[1:] if line != "...")):
        assert line in printed, line


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_every_command_names_a_verb_and_options_that_exist(page: Path) -> None:
    for words in commands(page):
        command = get_command(app)
        while hasattr(command, "commands"):
            inner = command.commands  # pyright: ignore[reportAttributeAccessIssue]
            assert words[0].rstrip(",") in inner, words
            command, words = inner[words[0]], words[1:]
        known = {spelling for one in command.params for spelling in (*one.opts, *one.secondary_opts)}
        options = [word.partition("=")[0] for word in words if re.fullmatch(r"--?[a-z][\w-]*(=.*)?", word)]
        assert set(options) <= known | {"--help", "-h"}, words


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    generated = {"verbs.md", "keys.md", "metrics.md", "readers.md", "api.md", "measurements.md"}
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text().replace("\n", " ")):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, heading = target.partition("#")
        other = (page.parent / name).resolve() if name else page
        if other.parent.name == "reference" and other.name in generated:
            continue
        assert other.exists(), target
        if heading and other.suffix == ".md":
            titles = re.findall(r"^#+ (.*)$", other.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}
            assert heading in anchors, target


@pytest.mark.parametrize("union", UNIONS)
def test_the_reference_names_every_kind(union: str) -> None:
    text = (ROOT / "docs" / "reference.md").read_text()
    members = typing.get_args(getattr(recipe, union))
    kinds = {typing.get_type_hints(member)["kind"].__args__[0] for member in members}
    assert all(f"`{kind}`" in text for kind in kinds), kinds


def test_the_film_has_the_commands_of_its_program_and_what_they_print(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("film", ROOT / "docs" / "film.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["film"] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
        module.film([["cat digits.yaml", "echo '<b> & c'"], ["false"]], tmp_path / "film.svg")
    finally:
        del sys.modules["film"]

    def texts(path: Path) -> list[str]:
        return [element.text or "" for element in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]

    found = texts(tmp_path / "film.svg")
    assert found[:3] == ["$", "cat", "digits.yaml"]
    assert "batch: 64" in found
    assert "<b> & c" in found
    assert found[-1] == "false"
    whole = " ".join(texts(module.OUT))
    for command in (command for scene in module.SCENES for command in scene):
        assert f"$ {command}" in whole, "`make film` records it again"


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    keys = (tmp_path / "site" / "reference" / "keys.html").read_text()
    assert "optimizer.schedule of kind wsd" in keys
    assert "dtrain.Param" in (tmp_path / "site" / "reference" / "api.html").read_text()
    assert "dtrain launch up" in (tmp_path / "site" / "reference" / "verbs.html").read_text()
