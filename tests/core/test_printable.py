"""Control characters of text that was read do not reach the terminal."""

import json
from pathlib import Path

from typer.testing import CliRunner

from dtrain.cli import app
from dtrain.core.errors import DataError
from dtrain.core.printable import printable

HOSTILE = "a\x1b]0;title\x07\x9b31mred\u202eback"


def test_control_characters_become_visible() -> None:
    assert printable(HOSTILE) == "a\\x1b]0;title\\x07\\x9b31mred\\u202eback"
    assert printable("two\nlines\tand é 🙂") == "two\nlines\tand é 🙂"


def test_a_run_folder_of_others_writes_no_escape_sequence(tmp_path: Path) -> None:
    place = tmp_path / "runs" / "a"
    place.mkdir(parents=True)
    values = {"name": "a", "state": "failed", "reason": HOSTILE, "step": 1, "steps": 2, "started": 1.0, "ended": 2.0}
    (place / "run.json").write_text(json.dumps(values | {"changes": [{"step": 1, "recipe": [HOSTILE]}]}))
    (place / "metrics.jsonl").write_text(json.dumps({"step": 1, f"eval/{HOSTILE}": 1.0, "train/loss": 1.0}) + "\n")
    for words in (["ls"], ["report", str(place)], ["report", str(place), str(place)]):
        shown = CliRunner().invoke(app, [*words, *(["--runs-dir", str(tmp_path / "runs")] if words == ["ls"] else [])])
        assert not any(character in shown.output for character in "\x1b\x07\x9b\u202e"), shown.output


def test_errors_write_none(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(f"{HOSTILE},y\n1,2\n")
    data = f"{{kind: table, files: ['{tmp_path}/t.csv'], label: z}}"
    shown = CliRunner().invoke(app, ["check", "mlp-digits", "data=null", f"data={data}"])
    assert shown.exit_code != 0
    assert "\x1b]" not in shown.output
    assert isinstance(DataError(HOSTILE).message, str)
