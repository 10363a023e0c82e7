"""What the user is shown, and must agree to, before code or programs that a recipe names run."""

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from dtrain.cli import app, launch
from tests.recipe.test_load import GOOD, write


@pytest.fixture
def untrusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe with a model whose module writes a file when it is imported."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "untrusted_net.py").write_text("open('ran', 'w').close()\nclass Net:\n    pass\n")
    rest = GOOD.replace("{kind: mlp, sizes: [64, 32, 10]}", "{kind: custom, target: 'untrusted_net:Net'}")
    return write(tmp_path, f"{rest}launch: {{kind: local, python: bin/evil, environment: [HF_TOKEN]}}\n")


@pytest.mark.parametrize("verb", [["explain"], ["plan", "--quick", "--on", "v5e-16"], ["check"], ["launch", "plan"]])
def test_no_verb_imports_a_custom_model_without_consent(untrusted: Path, verb: list[str]) -> None:
    done = CliRunner().invoke(app, [*verb, str(untrusted)])
    assert not Path("ran").exists()
    needs_model = verb[0] in ("explain", "plan")
    assert done.exit_code == (2 if needs_model else 0)
    assert ("then add --run-code" in done.output) == needs_model


def test_a_model_is_imported_where_that_is_agreed_to(untrusted: Path) -> None:
    done = CliRunner().invoke(app, ["explain", str(untrusted), "--run-code"])
    assert Path("ran").exists()
    assert "untrusted_net:Net lacks params" in done.output


def test_a_launch_shows_what_it_starts_before_it_starts(untrusted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(question: str, yes: bool) -> None:
        typer.echo(f"{question} {yes}", err=True)
        raise typer.Exit(130)

    monkeypatch.setattr(launch, "confirm", refuse)
    monkeypatch.setenv("HF_TOKEN", "x")
    shown = CliRunner().invoke(app, ["launch", "up", str(untrusted)]).output
    runs = "run folders: runs on each host (launch.runs); --runs-dir has this machine's record"
    assert shown.splitlines()[-7:] == [
        "hosts: here",
        "program: bin/evil -m dtrain run",
        runs,
        "environment variables sent: HF_TOKEN",
        "model code: untrusted_net:Net",
        "needs model.target  untrusted_net:Net: here",
        "Start it? False",
    ]
    override = "launch={kind: ssh, hosts: [ada@a, b], environment: []}"
    shown = CliRunner().invoke(app, ["launch", "up", str(untrusted), override]).output
    assert f"hosts: ada@a, b\nprogram: python3 -m dtrain run\n{runs}\nenvironment variables sent: none\n" in shown
