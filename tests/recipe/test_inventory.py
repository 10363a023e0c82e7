"""What a recipe needs on the hosts of a launch is found once, and refused where it surely is not there."""

from pathlib import Path

import pytest

from dtrain.core.errors import EnvironmentFault
from dtrain.core.shipped import find
from dtrain.recipe.inventory import Need, inventory, inventory_lines, place_of, problems_there
from dtrain.recipe.load import load
from dtrain.track import wandb
from tests.conftest import Dtrain

SKY = "launch={kind: sky, on: v5e-16, bucket: gs://runs, image: x/y, hours: 2}"
SSH = "launch={kind: ssh, hosts: [a, b]}"
TOKENS = "data={{kind: tokens, files: [{}], length: 64, dtype: uint16}}"


def needs(*overrides: str) -> tuple[list[Need], list[str], list[str]]:
    recipe = load(find("decoder-tiny"), list(overrides))
    assert recipe.launch is not None
    found, folders = inventory(recipe), [Path.cwd()]
    problems = [f"{key}: {message}; {hint}" for key, message, hint in problems_there(found, recipe.launch, folders)]
    return found, inventory_lines(found, recipe.launch, folders), problems


def test_files_that_are_only_here_are_refused_where_hosts_do_not_share_them() -> None:
    for name in ("tokens/*.bin", "./a.bin", str(Path.cwd() / "b.bin")):
        _, lines, problems = needs(TOKENS.format(f'"{name}"'), SKY)
        assert lines[0].startswith("needs data.files") and lines[0].endswith(": missing")
        assert problems[0].startswith(f"data.files: {name} is on this machine, and the hosts do not have")
    for name, place in (("gs://b/*.bin", "in the bucket"), ("/data/x.bin", "not checked")):
        assert needs(TOKENS.format(f'"{name}"'), SKY)[1:] == ([f"needs data.files  {name}: {place}"], [])


def test_hosts_of_the_user_may_have_them(tmp_path: Path) -> None:
    assert needs(TOKENS.format('"x.bin"'), SSH)[1:] == (["needs data.files  x.bin: not checked"], [])
    path = tmp_path / "x.bin"
    path.write_bytes(bytes(8))
    assert needs(TOKENS.format(f'"{path}"'), "launch=local")[1:] == ([f"needs data.files  {path}: here"], [])
    assert needs(TOKENS.format('"no.bin"'), "launch=local")[2] == [
        "data.files: no.bin does not exist; name an existing one"
    ]


def test_what_comes_with_dtrain_is_not_listed() -> None:
    assert needs("data.cache=x", SKY) == ([], [], [])


def test_sources_of_mixtures_runs_code_and_secrets_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("")
    source = TOKENS.format('"t.bin"').removeprefix("data=")
    found, _, problems = needs(
        f"data={{kind: mixture, sources: [{{name: a, weight: 1, data: {source}}}, "
        f"{{name: b, weight: 1, data: {source}}}]}}",
        "init={run: runs/base}",
        "track.to=[{kind: wandb}, {kind: wandb, mode: offline}, {kind: custom, target: 'own:Tracker'}]",
        SKY,
    )
    assert [(need.key, need.kind, need.value) for need in found] == [
        ("init.run", "run", "runs/base"),
        ("data.sources.0.data.files", "files", "t.bin"),
        ("data.sources.1.data.files", "files", "t.bin"),
        ("track.to.2.target", "code", "own:Tracker"),
        ("track.to.0", "secret", "WANDB_API_KEY"),
    ]
    assert len(problems) == 5
    assert problems[4] == (
        "track.to.0: the launched run would not have the variable WANDB_API_KEY; "
        "add it: launch.environment: [WANDB_API_KEY]"
    )
    given = load(find("decoder-tiny"), [SKY, "launch.environment=[WANDB_API_KEY]"]).launch
    assert given is not None and place_of(found[4], given, []) == "here"


def test_launch_plan_and_up_refuse_before_anything_costs(in_process: Dtrain) -> None:
    for verb in ("plan", "up"):
        shown = in_process("launch", verb, "decoder-tiny", TOKENS.format("'t.bin'"), SKY, code=2)
        assert "the run would fail on the hosts:\n  data.files: t.bin is on this machine" in shown.stderr


def test_a_tracker_without_a_key_is_found_before_a_run_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(EnvironmentFault, match="no API key is configured"):
        wandb.WandB().check()
    wandb.WandB(mode="offline").check()
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password x\n")
    wandb.WandB().check()
