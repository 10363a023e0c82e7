"""The verbs agree: the same arguments have the same names, and do the same, in each of them."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from dtrain.cli import app
from tests.conftest import Dtrain

LISTS = {"ls", "recipes ls", "recipes presets", "launch list", "report", "evaluate", "explain", "plan", "check",
         "doctor", "sweep", "profile", "bench", "verify"}  # fmt: skip
"""The verbs that print a table."""


def verbs(group: Any, prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, command in group.commands.items():
        inner = verbs(command, f"{prefix}{name} ") if hasattr(command, "commands") else {f"{prefix}{name}": command}
        found |= inner
    return found


VERBS = verbs(get_command(app))


def options(verb: str) -> set[str]:
    return {spelling for one in VERBS[verb].params for spelling in one.opts if spelling.startswith("--")}


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_that_takes_a_run_takes_a_folder_of_runs(verb: str) -> None:
    metavars = {str(one.metavar) for one in VERBS[verb].params if one.param_type_name == "argument"}
    if metavars & {"RUN", "RUN...", "[RUN]...", "RUN|RECIPE"}:
        assert "--runs-dir" in options(verb)


@pytest.mark.parametrize("verb", sorted(LISTS))
def test_every_table_can_be_json(verb: str) -> None:
    assert "--json" in options(verb)


FILES = {"DATA", "TARGET", "to", "[RECIPE] SOURCE [KEY=VALUE]...", "[FILE|KEY=VALUE]..."}
"""Arguments that are files, which every shell completes by itself."""


@pytest.mark.parametrize("verb", VERBS)
def test_every_argument_is_completed(verb: str) -> None:
    """By names that dtrain knows, unless it is a file."""
    arguments = [one for one in VERBS[verb].params if one.param_type_name == "argument"]
    names = {str(one.metavar or one.name) for one in arguments if not one._custom_shell_complete}
    assert names <= FILES


def test_options_of_one_name_have_one_help() -> None:
    for name in ("--runs-dir", "--json", "--debug", "--devices", "--step", "--best"):
        texts = {one.help for verb in VERBS.values() for one in verb.params if name in one.opts and not one.hidden}
        assert len(texts) == 1, (name, texts)


def test_runs_are_listed_by_folder_name_pattern_and_folder_of_runs(in_process: Dtrain, tmp_path: Path) -> None:
    for name in ("runs/a-1", "runs/a-2", "runs/b", "elsewhere/c"):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "recipe.yaml").write_text("")

    def names(*words: str) -> list[str]:
        return sorted(one["name"] for one in json.loads(in_process("ls", *words, "--json").stdout))

    assert names() == ["a-1", "a-2", "b"]
    assert names("a-*") == ["a-1", "a-2"]
    assert names("b", "runs/a-1") == ["a-1", "b"]
    assert names("elsewhere") == ["c"]
    assert names("--runs-dir", "elsewhere") == ["c"]
    assert names("c", "--runs-dir", "elsewhere") == ["c"]
    (tmp_path / "b").mkdir()  # data of the run's name
    assert names("b") == ["b"]
    assert "`dtrain ls --runs-dir elsewhere` lists" in in_process("ls", "z", "--runs-dir", "elsewhere", code=2).stderr
    assert "no run" in in_process("ls", "x" * 5000, code=2).stderr
    assert "did you mean 'a-1'" in in_process("ls", "a-11", code=2).stderr
    (tmp_path / "empty").mkdir()
    assert names("empty") == []
    assert "no runs in empty" in in_process("ls", "empty").stderr
    assert "no runs in empty" in in_process("ls", "empty", "b").stderr


def test_explain_takes_the_devices_of_a_slice(in_process: Dtrain) -> None:
    on = in_process("explain", "decoder-tiny", "mesh={data: 1, fsdp: -1}", "--on", "v5e-8").stdout
    assert "mesh fsdp 8 on 8 devices" in on
    assert "on 8 devices, engine jit\n" in on  # known for a slice alone
    anywhere = in_process("explain", "decoder-tiny", "mesh={data: 1, fsdp: -1}", "--devices", "8").stdout
    assert on.replace("engine jit", "engine auto") == anywhere
    both = in_process("explain", "decoder-tiny", "--on", "v5e-8", "--devices", "2", code=2).stderr
    assert "--on v5e-8 and --devices 2 exclude each other" in both
    assert "did you mean" in in_process("explain", "decoder-tiny", "--on", "v5e-88", code=2).stderr
    assert "--json goes with the table" in in_process("explain", "decoder-tiny", "--json", "--hlo", code=2).stderr


def test_recipes_and_presets_are_listed_as_json(in_process: Dtrain) -> None:
    listed = json.loads(in_process("recipes", "ls", "--json").stdout)
    assert {"name", "about"} == set(listed[0])
    assert "llama3-8b" in [one["name"] for one in json.loads(in_process("recipes", "presets", "--json").stdout)]
