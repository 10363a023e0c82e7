"""What a recipe needs on the hosts of a launch is found once, and refused where it surely is not there."""

from pathlib import Path

import pytest

from dtrain.core.errors import EnvironmentFault
from dtrain.core.shipped import find
from dtrain.recipe.inventory import (
    CodeNeed,
    Here,
    Need,
    PathNeed,
    SecretNeed,
    inventory,
    inventory_lines,
    problems_there,
)
from dtrain.recipe.load import load
from dtrain.track import wandb
from tests.conftest import Dtrain

SKY = "launch={kind: sky, on: v5e-16, bucket: gs://runs, image: x/y, hours: 2}"
SSH = "launch={kind: ssh, hosts: [a, b]}"
TOKENS = "data={{kind: tokens, files: [{}], length: 64, dtype: uint16}}"


def needs(*overrides: str) -> tuple[list[Need], list[str], list[str]]:
    recipe = load(find("decoder-tiny"), list(overrides))
    assert recipe.launch is not None
    found, here = inventory(recipe), Here([Path.cwd()])
    problems = [f"{key}: {message}; {hint}" for key, message, hint in problems_there(found, recipe.launch, here)]
    return found, inventory_lines(found, recipe.launch, here), problems


def test_files_that_are_only_here_are_refused_where_hosts_do_not_share_them() -> None:
    for name in ("tokens/*.bin", "./a.bin"):
        _, lines, problems = needs(TOKENS.format(f'"{name}"'), SKY)
        assert lines[0].startswith("needs data.files") and lines[0].endswith(": missing")
        assert problems[0].startswith(f"data.files: {name} is relative to a folder of this machine, whose")
    for name, place in (("gs://b/*.bin", "at an address, not checked"), ("/data/x.bin", "not checked")):
        assert needs(TOKENS.format(f'"{name}"'), SKY)[1:] == ([f"needs data.files  {name}: {place}"], [])


def test_folders_that_gke_does_not_mount_are_named() -> None:
    gke = "launch={kind: gke, on: v5e-16, image: x/y, bucket: runs, hours: 2}"
    elsewhere, there = (needs(TOKENS.format(f'"{name}"'), gke)[1] for name in ("/mnt/dtrain/*.bin", "/runs/data/*.bin"))
    assert elsewhere == [
        "needs data.files  /mnt/dtrain/*.bin: only if the image has it",
        "warning: besides the image, the hosts have /recipe (the recipe), /runs (the bucket of the runs) alone",
    ]
    assert there == ["needs data.files  /runs/data/*.bin: not checked"]


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
    assert [(type(need), need.key, need.value) for need in found] == [
        (PathNeed, "init.run", "runs/base"),
        (PathNeed, "data.sources.0.data.files", "t.bin"),
        (PathNeed, "data.sources.1.data.files", "t.bin"),
        (CodeNeed, "track.to.2.target", "own:Tracker"),
        (SecretNeed, "track.to.0", "WANDB_API_KEY"),
    ]
    assert len(problems) == 5
    assert problems[4] == (
        "track.to.0: the launched run would not have the variable WANDB_API_KEY; "
        "add it: launch.environment: [WANDB_API_KEY]"
    )
    given = load(find("decoder-tiny"), [SKY, "launch.environment=[WANDB_API_KEY]"]).launch
    assert given is not None and found[4].place(given, Here([])) == "sent"


def test_a_package_that_is_installed_may_be_in_the_image() -> None:
    target, here = load(find("decoder-tiny"), [SKY]).launch, Here([Path(__file__).parents[2]])
    assert target is not None
    assert CodeNeed("model.target", "dtrain.models.mlp:MLP").place(target, here) == "not checked"
    assert CodeNeed("model.target", "tests.user:Net").place(target, here) == "missing"


def test_a_path_beside_a_recipe_elsewhere_is_still_relative(in_process: Dtrain, tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "t.bin").write_bytes(bytes(999))
    recipe = "model: {kind: decoder, vocab: 256, context: 64, layers: 1, width: 16, heads: 2}\n"
    recipe += "optimizer: {kind: adamw, lr: 1e-3}\nbatch: 16\nsteps: 4\n"
    (tmp_path / "far" / "r.yaml").write_text(recipe)
    shown = in_process("launch", "plan", "far/r.yaml", TOKENS.format("far/t.bin"), SKY, code=2)
    assert "data.files: far/t.bin is relative" in shown.stderr
    with (tmp_path / "far" / "r.yaml").open("a") as file:
        file.write("data: {kind: tokens, files: [t.bin], length: 64}\n")
    shown = in_process("launch", "plan", "far/r.yaml", SKY, code=2)
    assert f"data.files: {tmp_path / 'far' / 't.bin'} is relative" in shown.stderr


def test_launch_plan_and_up_refuse_before_anything_costs(in_process: Dtrain) -> None:
    for verb in ("plan", "up"):
        shown = in_process("launch", verb, "decoder-tiny", TOKENS.format("'t.bin'"), SKY, code=2)
        assert "the run would fail on the hosts:\n  data.files: t.bin is relative" in shown.stderr


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
