"""The documentation: its site builds, its links lead somewhere, its commands run as they are written."""

import dataclasses
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
from dtrain.plan.rates import Rates
from dtrain.recipe import recipe
from dtrain.recipe.keys import known_part
from dtrain.recipe.parse import fields, section
from dtrain.recipe.problems import Problems
from dtrain.recipe.yaml import parse
from tests.browser import CHROMIUM, Browser
from tests.conftest import bare_environment
from tests.docs_blocks import BLOCK, LANGUAGES, PAGES, ROOT, blocks, has_session, session, unlike

UNIONS = ("Model", "Data", "Engine", "Tracker", "Launch")
NOT_RUN = {"text-to-image.md": "its commands take an hour"}
"""Pages that show what was printed once, as `text`."""
PARTIAL = re.compile(r": missing(; |$)")
"""A problem that sections of a recipe have where the rest of it is missing."""


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def commands(path: Path) -> Iterator[list[str]]:
    """Every `dtrain` command line of a page, in a block of any kind."""
    for language, text in blocks(path):
        for line in re.sub(r"\\\n\s*", " ", text).splitlines():
            line = line.removeprefix("$ ") if language == "console" else line
            if line.startswith("dtrain ") and not line.startswith("dtrain VERB"):
                described = re.split(r"\s#|\s\|", line)[0]
                yield shlex.split(described)[1:]


IN_CI = {"README.md": None, "first-run.md": 2, "own-model.md": None}
"""The pages whose commands run in every CI run, and how many of their first ones; all pages whole at night."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "count"),
    [
        *(pytest.param(page, IN_CI[page.name], id=relative(page)) for page in PAGES if page.name in IN_CI),
        *(
            pytest.param(page, None, id=f"{relative(page)}-whole", marks=pytest.mark.nightly)
            for page in PAGES
            if has_session(page) and IN_CI.get(page.name, 0) is not None
        ),
    ],
)
def test_the_commands_of_a_page_run_in_an_empty_folder_and_print_what_it_shows(
    page: Path, count: int | None, tmp_path: Path
) -> None:
    left_out = ""
    for command, shown in session(page)[:count]:
        python = Path(sys.executable)
        if re.search(r"^(from|import) transformers", command, re.MULTILINE):
            if not os.environ.get("DTRAIN_TEST_HF_PYTHON"):
                left_out = "transformers is not installed: set DTRAIN_TEST_HF_PYTHON; the rest of the page ran"
                continue
            python = Path(os.environ["DTRAIN_TEST_HF_PYTHON"])
        path = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-c", f"set -euo pipefail\n{command}"],
            cwd=tmp_path,
            env=bare_environment() | {"PATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=280 if count else 580,
            check=False,
        )
        printed = done.stdout.replace(f"{tmp_path}/", "").replace(f"{Path(sys.executable).parent}/", "")
        assert shown or not done.returncode, f"{command}\n{printed[-3000:]}"
        missing = unlike(shown, printed, timed=command.startswith("dtrain bench"))
        assert not missing, f"{command}\n{printed}"
    if left_out:
        pytest.skip(left_out)


def test_what_a_page_shows_is_compared_but_for_times() -> None:
    shown = ["a loss 0.400 (3 steps, 7.6 s)", "...", "  time   1 s = start 1", "acc 97.50%"]
    printed = "first\na loss 0.401 (3 steps, 99 s)\nbetween\n  time   2 s = other 2\nacc 97.50%\n"
    assert not unlike(shown, printed)
    assert unlike(shown, printed.replace("0.401", "0.5")) == shown[:1]
    assert unlike(shown, printed.replace("3 steps", "4 steps")) == shown[:1]
    assert unlike(shown, printed.replace("acc", "accuracy")) == shown[3:]
    assert unlike([shown[3], shown[0]], printed) == shown[:1], "in this order"
    assert not unlike(["10.1 ms, 20%"], "11.2 ms, 30%\n", timed=True)


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_every_block_is_of_a_language_that_a_test_checks(page: Path) -> None:
    known = LANGUAGES.keys() | ({"text"} if page.name in NOT_RUN else set())
    assert not [text for language, text in blocks(page) if language not in known]


def sections(page: Path) -> Iterator[str]:
    """The recipes of a page and sections of them, those in its sentences, too: `guard: {nan: locate}`."""
    names = "|".join(field.name for field in dataclasses.fields(recipe.Recipe))
    yield from (text for _, text in blocks(page, "yaml"))
    yield from re.findall(r"<<'YAML'\n(.*?)^YAML$", page.read_text(), re.DOTALL | re.MULTILINE)
    prose = BLOCK.sub("", page.read_text())
    for span in re.findall(r"`([^`]+)`", prose):
        text = " ".join(span.split())
        if re.match(rf"({names}): \S", text) and "..." not in text:
            yield text


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_recipes_and_sections_of_a_page_are_valid(page: Path) -> None:
    for text in sections(page):
        problems = Problems()
        node = parse(text, relative(page))
        if isinstance(node.value, dict) and "prices" in node.value:
            section(Rates, node, "", problems)
        elif isinstance(node.value, dict) and "include" not in node.value and "program" not in node.value:
            fields(recipe.Recipe, node, "", problems, recipe.Recipe)
        assert not [line for line in problems.lines if not PARTIAL.search(line)], text


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page, "python") and not has_session(page)], ids=relative
)
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path) -> None:
    """Its blocks one after the other, as one program."""
    program = "\n".join(text for _, text in blocks(page, "python"))
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, cwd=tmp_path, env=bare_environment(), capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


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
def test_every_override_of_a_command_names_a_key(page: Path) -> None:
    for words in commands(page):
        given = [match[1] for word in words if (match := re.match(r"([a-z][\w.]*)=", word))]
        for name in given if words[0] in ("run", "check", "plan", "sweep", "explain", "evaluate", "verify") else ():
            known = known_part(name)
            assert name == known or name.startswith("model.args."), (words, known)


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


def build_site(folder: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    build_site(tmp_path / "site")
    for page in (tmp_path / "site").rglob("*.html"):
        assert not re.findall(
            r"""<(?:script|img)[^>]*src="?https?:|<link[^>]*stylesheet[^>]*https?:""", page.read_text()
        )
    keys = (tmp_path / "site" / "reference" / "keys.html").read_text()
    assert "optimizer.schedule of kind wsd" in keys
    assert "dtrain.Param" in (tmp_path / "site" / "reference" / "api.html").read_text()
    assert "dtrain launch up" in (tmp_path / "site" / "reference" / "verbs.html").read_text()


@pytest.mark.nightly
@pytest.mark.skipif(not CHROMIUM, reason="no Chromium on PATH")
def test_the_search_of_the_site_works_where_it_is_opened_as_files(tmp_path: Path) -> None:
    build_site(tmp_path / "site")
    with Browser(tmp_path / "browser") as browser:
        browser.open((tmp_path / "site" / "tutorials" / "pod.html").as_uri())
        browser.until("document.querySelector('.md-search') && !document.querySelector('.md-search').hidden")
        browser.click(".md-search__input")
        browser.text("class_weights")
        browser.until("document.querySelectorAll('.md-search-result__link').length > 0")
        found = browser.value("[...document.querySelectorAll('.md-search-result__link')].map(one => one.href)")
    assert any("runs.html#rare-classes-and-dropout" in address for address in found), found
