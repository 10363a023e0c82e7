"""The commands that a run prints at its end work as they are printed."""

import shlex
from pathlib import Path

import pytest

from dtrain.cli.next_commands import next_commands
from dtrain.core.shipped import find
from dtrain.recipe.load import load
from tests.conftest import Dtrain

SHORT = ("steps=4", "epochs=null", "optimizer.schedule=constant", "evaluate.every=0", "checkpoint.every=4")
KINDS = {
    "mlp-digits": (),
    "cnn-digits": (),
    "decoder-tiny": (),
    "chat-tiny": (),
    "dpo-tiny": ("chat-tiny",),
    "lora-tiny": ("decoder-tiny",),
}
"""Recipes, each with the recipes of the runs that it starts from."""


def printed(stderr: str) -> list[list[str]]:
    """The words of each command after `next:`, without the program."""
    start = stderr.index("next: ") + len("next: ")
    lines = [line.strip() for line in stderr[start:].splitlines()]
    commands = [shlex.split(line) for line in lines if "dtrain" in line.split(" ")[0]]
    return [command[1:] for command in commands]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name == "dpo-tiny" else pytest.mark.nightly) for name in KINDS],
)
def test_the_commands_after_a_run_work_as_printed(name: str, dtrain: Dtrain, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue("tmp_path")
    (folder / "questions.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')
    for before in KINDS[name]:
        dtrain("run", before, *SHORT, seconds=300)
    commands = printed(dtrain("run", name, *SHORT, seconds=300).stderr)
    assert commands
    for command in commands:
        words = ["questions.jsonl" if word == "FILE" else word for word in command if word != "FILE..."]
        dtrain(*words, seconds=300)


def test_chat_is_offered_where_there_is_a_template() -> None:
    for own, offered in (("data.template=chatml", True), ("data.template=null", False)):
        recipe = load(find("chat-tiny"), [own])
        assert ("--chat" in next_commands(Path("runs/a"), recipe)) == offered
