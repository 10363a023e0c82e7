"""What is shown, and agreed to, before code or programs of a recipe run."""

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from dtrain.cli import app, launch
from tests.recipe.test_load import GOOD, write


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe with a model whose module leaves a file behind where it is imported."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stranger_net.py").write_text("open('ran', 'w')\nclass Net:\n    pass\n")
    rest = GOOD.replace("{kind: mlp, sizes: [64, 32, 10]}", "{kind: custom, target: 'stranger_net:Net'}")
    return write(tmp_path, f"{rest}launch: {{kind: local, python: bin/evil, environment: [HF_TOKEN]}}\n")


@pytest.mark.parametrize("verb", [["explain"], ["plan", "--quick", "--on", "v5e-16"], ["check"], ["launch", "plan"]])
def test_no_verb_imports_a_strangers_model_without_consent(stranger: Path, verb: list[str]) -> None:
    done = CliRunner().invoke(app, [*verb, str(stranger)])
    assert not Path("ran").exists()
    needs_model = verb[0] in ("explain", "plan")
    assert done.exit_code == (2 if needs_model else 0)
    assert ("then add --run-code" in done.output) == needs_model


def test_a_model_is_imported_where_that_is_agreed_to(stranger: Path) -> None:
    done = CliRunner().invoke(app, ["explain", str(stranger), "--run-code"])
    assert Path("ran").exists()
    assert "stranger_net:Net lacks params" in done.output


def test_a_launch_shows_what_it_starts_before_it_starts(stranger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(question: str, yes: bool) -> None:
        typer.echo(f"{question} {yes}", err=True)
        raise typer.Exit(130)

    monkeypatch.setattr(launch, "confirm", refuse)
    monkeypatch.setenv("HF_TOKEN", "x")
    shown = CliRunner().invoke(app, ["launch", "up", str(stranger)]).output
    assert shown.splitlines()[-5:] == [
        "hosts: here",
        "program: bin/evil -m dtrain run",
        "environment variables sent: HF_TOKEN",
        "model code: stranger_net:Net",
        "Start it? False",
    ]
    override = "launch={kind: ssh, hosts: [ada@a, b], environment: []}"
    shown = CliRunner().invoke(app, ["launch", "up", str(stranger), override]).output
    assert "hosts: ada@a, b\nprogram: python3 -m dtrain run\nenvironment variables sent: none\n" in shown
