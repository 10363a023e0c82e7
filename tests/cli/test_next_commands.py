"""What a finished run proposes can be typed as it stands."""

from pathlib import Path

import pytest

from dtrain.cli.next_commands import next_commands
from dtrain.recipe.load import load


@pytest.mark.parametrize(
    ("recipe", "override", "proposed"),
    [
        ("mlp-digits", "seed=1", ["report", "evaluate", "predict x FILE..."]),
        ("mlp-digits", "data={kind: custom, target: rows:Rows}", ["report", "evaluate", "predict x"]),
        ("decoder-tiny", "seed=1", ["report", "generate"]),
        ("chat-tiny", "seed=1", ["report", "generate x --chat", "evaluate x --questions FILE"]),
    ],
)
def test_the_proposed_commands_are_for_such_a_run(recipe: str, override: str, proposed: list[str]) -> None:
    lines = next_commands(Path("runs/x"), load(recipe, [override])).splitlines()
    assert len(lines) == len(proposed)
    assert all(words in line for words, line in zip(proposed, lines, strict=True))
    assert lines[-1].endswith("FILE...") == proposed[-1].endswith("FILE...")
