"""Words of other tools, options that are keys, completion, colours."""

import subprocess
import sys
from pathlib import Path

import pytest
import shellingham
import typer
from typer.main import get_command

from dtrain.cli import app, completion
from dtrain.cli.synonyms import OPTIONS, SYNONYMS, key_of
from dtrain.core.slices import target
from dtrain.recipe.keys import cached_keys, keys
from dtrain.recipe.other_names import NAMES
from tests.conftest import Dtrain, bare_environment


def verbs() -> set[str]:
    names = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    groups = {group.name: group.typer_instance for group in app.registered_groups}
    inner = {
        f"{name} {command.name or command.callback.__name__}"
        for name, group in groups.items()
        for command in (group.registered_commands if group else ())
        if command.callback
    }
    return names | {name for name in groups if name} | inner


def test_every_synonym_leads_to_a_verb_and_is_none_itself() -> None:
    known = {verb.rstrip("_") for verb in verbs()} | {"profile"}
    assert set(SYNONYMS.values()) <= known
    assert not set(SYNONYMS) & known


@pytest.mark.parametrize(("word", "verb"), [("train", "run"), ("eval", "evaluate"), ("list", "ls"), ("rnu", "run")])
def test_a_wrong_verb_names_the_right_one(in_process: Dtrain, word: str, verb: str) -> None:
    assert f"Did you mean '{verb}'?" in in_process(word, "x", code=2).stderr


def test_help_and_version_are_verbs_too(in_process: Dtrain) -> None:
    def words(*command: str) -> list[str]:
        return in_process(*command).stdout.split()

    whole = words("--help")
    assert words("help")[: len(whole)] == whole
    assert words("help", "report") == words("report", "--help")
    assert words("help", "launch", "plan") == words("launch", "plan", "--help")
    assert in_process("launch", "help").stdout == in_process("launch", "--help").stdout
    assert in_process("version").stdout == in_process("--version").stdout


@pytest.mark.parametrize(
    ("option", "meant"),
    [
        ("--lr", "Write optimizer.lr=...;"), ("--epochs", "Write epochs=...;"), ("--batch-size", "Write batch=...;"),
        ("--optimizer.lr", "Write optimizer.lr=...;"), ("--output-dir", "Write --runs-dir"),
        ("--proceses", "--processes"), ("--nonsense", "No such option: --nonsense"),
    ],
)  # fmt: skip
def test_an_option_that_is_a_key_is_named(in_process: Dtrain, option: str, meant: str) -> None:
    shown = " ".join(in_process("run", "mlp-digits", option, "1", code=2, COLUMNS="200").stderr.split())
    assert meant in shown


@pytest.mark.parametrize("option", ["--out", "-o", "--output-dir"])
def test_a_target_is_an_argument(in_process: Dtrain, option: str) -> None:
    shown = " ".join(in_process("export", "one", option, "two", code=2, COLUMNS="200").stderr.split())
    assert f"No such option: {option}. Write the target without an option: it is an argument" in shown


def test_keys_are_those_of_the_recipe() -> None:
    found = keys()
    for _ in range(2):  # from the schema or an older file, and from the file
        cached_keys.cache_clear()
        assert cached_keys() == found
    leaves_by_path = {(key.path, key.kind): key for key in found}
    rate, final = leaves_by_path["optimizer.lr", "adamw"], leaves_by_path["optimizer.schedule.final", "cosine"]
    assert (rate.type.split()[0], rate.default, final.default) == ("number", "", "0.0")
    assert leaves_by_path["engine", ""].values == ("auto", "jit", "shard_map", "pmap")
    assert leaves_by_path["optimizer.schedule.warmup", "cosine"].text.startswith("Steps of linear warm-up")
    known = {key.path for key in found}
    assert all(key_of(option) in known | {"--runs-dir", "--devices"} for option in (*OPTIONS, *NAMES))
    assert set(NAMES.values()) <= known
    assert not set(NAMES) & {path for path in known if "." not in path}


def test_completion_knows_recipes_keys_values_runs_and_targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("")
    (tmp_path / "runs" / "abc").mkdir(parents=True)
    (tmp_path / "runs" / "abc" / "run.json").write_text("")
    assert completion.recipes("m") == ["mlp-digits", "mlp-mnist", "mine.yaml"]
    assert "optimizer.lr=" in completion.overrides([], "optimizer.l")
    assert completion.overrides([], "engine=") == ["engine=auto", "engine=jit", "engine=shard_map", "engine=pmap"]
    assert completion.overrides(["run", "x", "engine"], "=") == ["auto", "jit", "shard_map", "pmap"]
    assert completion.overrides(["run", "x", "engine", "="], "s") == ["shard_map"]
    context = typer.Context(get_command(app))
    assert completion.runs(context, "a") == ["abc"]
    assert "evaluate" in completion.topics(context, "eval")
    assert all(target(name) for name in completion.targets(""))


def test_the_shell_gets_completions(tmp_path: Path) -> None:
    asked = {"_DTRAIN_COMPLETE": "complete_bash", "COMP_WORDS": "dtrain run mlp-d", "COMP_CWORD": "2"}
    code = "import sys; sys.argv = ['dtrain']; from dtrain.__main__ import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        env=bare_environment() | asked,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.split() == ["mlp-digits"]


def test_no_file_is_changed_unasked(
    in_process: Dtrain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(shellingham, "detect_shell", lambda: ("bash", "/bin/bash"))
    assert "stands alone" in in_process("--install-completion", "nosuch", code=2).stderr
    assert "not a terminal" in in_process("--install-completion", code=2).stderr
    monkeypatch.setattr(shellingham, "detect_shell", lambda: ("nosuch", "/bin/nosuch"))
    assert "no completion for nosuch" in in_process("--install-completion", code=2).stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_no_color_takes_all_colours_away(dtrain: Dtrain) -> None:
    code = "import sys, pty; sys.exit(pty.spawn([sys.executable, '-m', 'dtrain', 'check', 'nosuch']) >> 8)"
    for value, coloured in (("", True), ("1", False)):
        environment = bare_environment() | {"NO_COLOR": value, "TERM": "xterm"}
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, env=environment, capture_output=True, timeout=200, check=False)
        assert done.returncode == 2
        assert (b"\x1b[31m" in done.stdout) == coloured, done.stdout
