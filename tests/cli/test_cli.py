import json
from pathlib import Path

import pytest

from tests.conftest import Dtrain

VERBS = ["run", "check", "report", "doctor", "recipes ls", "recipes show", "recipes cp", "recipes schema"]


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
def test_every_verbs_help_ends_with_an_example(dtrain: Dtrain, verb: str) -> None:
    shown = dtrain(*verb.split(), "--help").stdout.strip().splitlines()
    assert shown[-1].strip().startswith("Example: dtrain " + verb)


def test_a_misspelt_verb_is_named(dtrain: Dtrain) -> None:
    assert "Did you mean 'run'" in dtrain("rnu", code=2).stderr


def test_check_prints_the_resolved_recipe(in_process: Dtrain, tmp_path: Path) -> None:
    words = ("check", "mlp-digits", "optimizer.lr=1e-2", "--devices", "8")
    assert in_process(*words).stdout == ""
    done = in_process(*words, "--resolved")
    assert "no mistake found" in done.stderr
    (tmp_path / "again.yaml").write_text(done.stdout)
    assert in_process("check", "again.yaml", "--resolved").stdout == done.stdout
    assert json.loads(in_process("check", "mlp-digits", "--json").stdout)["model"]["kind"] == "mlp"


@pytest.mark.slow
def test_check_refuses_with_code_two(dtrain: Dtrain) -> None:
    refused = dtrain("check", "mlp-digits", "optimizer.lrr=1", code=2)
    assert "did you mean 'lr'?" in refused.stderr
    assert refused.stdout == ""


@pytest.mark.slow
def test_recipes_are_listed_shown_and_copied(in_process: Dtrain, tmp_path: Path) -> None:
    assert "mlp-digits" in in_process("recipes", "ls").stdout
    shown = in_process("recipes", "show", "mlp-digits").stdout
    in_process("recipes", "cp", "mlp-digits", "mine.yaml")
    assert (tmp_path / "mine.yaml").read_text() == shown
    assert "already exists" in in_process("recipes", "cp", "mlp-digits", "mine.yaml", code=2).stderr
    assert "did you mean 'mlp-digits'?" in in_process("recipes", "show", "mlp-digts", code=2).stderr
    assert json.loads(in_process("recipes", "schema").stdout)["title"] == "Recipe"


@pytest.mark.slow
def test_a_missing_recipe_is_refused(dtrain: Dtrain) -> None:
    assert "No such file" in dtrain("run", "nowhere.yaml", code=2).stderr
    assert "did you mean 'mlp-digits'?" in dtrain("run", "mlp-digts", code=2).stderr


@pytest.mark.slow
def test_doctor_checks_what_a_run_needs(dtrain: Dtrain) -> None:
    found = {finding["what"]: finding for finding in json.loads(dtrain("doctor", "--json").stdout)}
    assert {"python", "jax", "devices", "memory", "disk"} <= set(found)
    assert found["devices"]["verdict"] == "ok"
