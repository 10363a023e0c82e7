"""The model card beside exported weights says where they come from, and replaces no file of the user's."""

import json
from pathlib import Path

import yaml

from dtrain.core.run_dir import Folder
from dtrain.weights.card import MARK, base_kind, record_base, write_card

RECIPE = """\
name: tuned
data: {kind: chat, files: [/home/someone/secret/chat.jsonl]}
init: {run: runs/base}
lora: {rank: 4}
objective: {kind: orpo, beta: 0.1}
"""


def runs(tmp_path: Path) -> Folder:
    published = tmp_path / "Published-7B"
    published.mkdir()
    (published / "README.md").write_text("---\nlicense: apache-2.0\n---\n# It\n")
    base, tuned = Folder(tmp_path / "runs" / "base"), Folder(tmp_path / "runs" / "tuned")
    for run in (base, tuned):
        run.path.mkdir(parents=True)
    base.recipe.write_text("name: base\n")
    record_base(base.path, published)
    tuned.recipe.write_text(RECIPE)
    rows = [
        {"step": 10, "eval/loss": 0.5},
        {"step": 20, "eval/loss": 0.25, "time/x": 1},
        {"step": 30, "eval/loss": 9.0},
    ]
    tuned.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 4')
    return tuned


def test_a_card_names_base_licence_data_objective_and_scores_of_its_step(tmp_path: Path) -> None:
    tuned, out = runs(tmp_path), tmp_path / "out"
    out.mkdir()
    assert "a model card" in write_card(out, tuned, 20, "bfloat16")
    text = (out / "README.md").read_text()
    front = yaml.safe_load(text.split("---\n")[1])
    assert (front["base_model"], front["license"]) == ("Published-7B", "apache-2.0")
    for part in (
        "Step 20 of a training with dtrain",
        "exported in bfloat16",
        "| base | Published-7B; licence: apache-2.0 |",
        "| data | chat, chat.jsonl |",
        "| objective | {kind: orpo, beta: 0.1} |",
        "| scores | loss 0.25 on held-out data at step 20 |",
        "rank: 4",
    ):
        assert part in text
    assert "secret" not in text
    write_card(out, tuned, 5, "float32")
    assert "scores" not in (out / "README.md").read_text()


def test_what_is_not_known_is_said_and_a_card_of_the_user_stays(tmp_path: Path) -> None:
    tuned, out = runs(tmp_path), tmp_path / "out"
    out.mkdir()
    (tmp_path / "runs" / "base" / "base.json").unlink()
    write_card(out, tuned, 20, "float32")
    assert "| base | base; licence: unknown" in (out / "README.md").read_text()
    (tmp_path / "runs" / "base" / "recipe.yaml").unlink()
    tuned.recipe.write_text("name: alone\n")
    write_card(out, tuned, 20, "float32")
    text = (out / "README.md").read_text()
    assert "none: trained from the start" in text
    assert "base_model" not in text
    (out / "README.md").write_text("mine")
    assert "was not written by dtrain, and stays" in write_card(out, tuned, 20, "float32")
    assert MARK not in (out / "README.md").read_text()


def test_the_type_of_the_base_is_found_in_a_run_or_in_the_weights_that_it_names(tmp_path: Path) -> None:
    tuned = runs(tmp_path)
    assert base_kind(tuned) == ""  # imported without a config.json
    for damaged in ('{"name": ', "[]"):
        (tuned.path / "base.json").write_text(damaged)
        assert base_kind(tuned) == ""
        out = tmp_path / "out"
        out.mkdir(exist_ok=True)
        write_card(out, tuned, 20, "float32")
        assert "unknown: look it up" in (out / "README.md").read_text()
    (tuned.path / "base.json").unlink()
    (tmp_path / "Published-7B" / "config.json").write_text('{"model_type": "phi3"}')
    record_base(tmp_path / "runs" / "base", tmp_path / "Published-7B")
    assert base_kind(tuned) == "phi3"
    tuned.recipe.write_text(f"name: tuned\ninit: {{weights: {tmp_path / 'Published-7B'}}}\n")
    assert base_kind(tuned) == "phi3"
