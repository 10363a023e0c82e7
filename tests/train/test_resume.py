"""Where a start of a run begins, and what it promises about the numbers: only what was compared."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dtrain.checkpoint import manifest
from dtrain.core.errors import CheckpointError, DataError, EnvironmentFault, RecipeError
from dtrain.core.run_dir import MANIFEST, Folder
from dtrain.recipe.load import load
from dtrain.track.console import Console
from dtrain.train import provenance, record, start
from dtrain.train.run import run
from dtrain.weights.load import load_run
from tests.waiting import until

RECIPE = """
model: {kind: mlp, sizes: [64, 16, 10]}
data: digits
optimizer: {kind: sgd, lr: 0.1, schedule: {kind: cosine}}
batch: 64
steps: 6
mesh: {data: 8}
checkpoint: {every: 2, keep: 9}
evaluate: {every: 3}
"""
MODULE = """
from my_layers import WIDTH
from dtrain.models.nn.model import Flops, Loss, Metric
from dtrain.models.nn.layers import classify, dense, linear

class Net:
    metrics = (Metric("error", higher_is_better=False),)
    def params(self): return {"out": dense(WIDTH, 10, "embed classes")}
    def loss(self, params, batch, ctx):
        x = batch["image"].reshape(len(batch["image"]), -1)
        found = classify(linear(ctx.gather(params["out"]), x), batch, ctx)
        return Loss(found.sum, found.weight, {"error": found.weight - found.metrics["accuracy"], "other": found.weight})
    def flops(self, example, examples): return Flops(1.0, "none")
    def mismatch(self, example): return ""
"""


@pytest.fixture
def trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Run the recipe in this process and return the output of the console."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(RECIPE)

    def call(*overrides: str, allow: bool = False) -> str:
        log = tmp_path / "runs" / "small" / "log.txt"
        before = len(log.read_text()) if log.exists() else 0
        run(load(Path("small.yaml"), overrides), Path("runs"), Console(), allow_changes=allow)
        return log.read_text()[before:]

    return call


def checksum(tmp_path: Path, step: int = 6) -> list[int]:
    return list(manifest.read(tmp_path / "runs" / "small" / "checkpoints" / str(step)).checksum)


def back_to(tmp_path: Path, step: int) -> None:
    """Change the run folder as if the run had been stopped at that step."""
    place = Folder(tmp_path / "runs" / "small")
    for path in place.checkpoints.iterdir():
        if int(path.name) > step:
            shutil.rmtree(path)
    place.write_record(place.read_record() | {"state": "stopped", "step": step})


@pytest.mark.slow
def test_the_same_bits_are_promised_only_where_all_agrees(
    trial: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial()
    before = checksum(tmp_path)
    back_to(tmp_path, 4)
    assert "resumed from step 4 (same recipe, code, software, devices and mesh: the same bits)" in trial()
    assert checksum(tmp_path) == before

    back_to(tmp_path, 4)
    older = {**record.versions(), "jax": "0.1.0", "python": "3.0.1"}
    monkeypatch.setattr(provenance, "versions", lambda: older)
    shown = trial()
    assert "the numbers may differ" in shown
    assert re.search(r"  jax: was \S+, now 0\.1\.0\n  python: was \S+, now 3\.0\.1\n", shown)


@pytest.mark.slow
@pytest.mark.parametrize("changed", ["my_net.py", "my_layers.py"])
def test_changed_code_of_a_custom_model_is_named(trial: Callable[..., str], tmp_path: Path, changed: str) -> None:
    (tmp_path / "my_net.py").write_text(MODULE)
    (tmp_path / "my_layers.py").write_text("WIDTH = 64\n")
    custom = ("model={kind: custom, target: 'my_net:Net'}", "checkpoint.best=eval/error")
    trial(*custom)
    back_to(tmp_path, 4)
    with (tmp_path / changed).open("a") as file:
        file.write("# another line\n")
    shown = trial(*custom)
    assert "the numbers may differ" in shown
    assert re.search(rf"  code {changed}: was \w+, now \w+\n", shown)
    assert Folder(tmp_path / "runs" / "small").read_record()["higher_is_better"] == {"error": False}


@pytest.mark.parametrize(
    ("best", "message"),
    [
        ("eval/accuracy", r"eval/accuracy is not measured\n.*one of eval/error, eval/loss, eval/other"),
        ("eval/other", "not known whether a higher or a lower eval/other is better"),
    ],
)
def test_a_best_that_no_evaluation_gives_is_refused_before_the_first_step(
    trial: Callable[..., str], tmp_path: Path, best: str, message: str
) -> None:
    (tmp_path / "my_net.py").write_text(MODULE)
    (tmp_path / "my_layers.py").write_text("WIDTH = 64\n")
    with pytest.raises(RecipeError, match=message):
        trial("model={kind: custom, target: 'my_net:Net'}", f"checkpoint.best={best}")
    run_folder = Folder(tmp_path / "runs" / "small")
    assert run_folder.read_record()["exit_code"] == 2
    assert "error: checkpoint.best" in run_folder.log.read_text()
    assert "compiled in" not in run_folder.log.read_text()  # nothing waits for the compiler before it is found
    assert not run_folder.metrics.exists()


@pytest.mark.slow
def test_a_newest_checkpoint_that_was_deleted_is_reported(trial: Callable[..., str], tmp_path: Path) -> None:
    trial()
    before = checksum(tmp_path)
    place = Folder(tmp_path / "runs" / "small")
    place.write_record(place.read_record() | {"state": "stopped"})
    shutil.rmtree(place.checkpoints / "6")
    shown = trial()
    assert "run.json records a checkpoint of step 6, which is missing; the run resumes from step 4" in shown
    assert checksum(tmp_path) == before


@pytest.mark.slow
def test_a_renamed_checkpoint_blocks_nothing(trial: Callable[..., str], tmp_path: Path) -> None:
    trial()
    before = checksum(tmp_path)
    place = Folder(tmp_path / "runs" / "small")
    back_to(tmp_path, 4)
    (place.checkpoints / "4").rename(place.checkpoints / "30")
    (place.checkpoints / "0099").mkdir()
    shown = trial()
    assert "it has step 4, renamed or copied" in shown
    assert "0099 is not a checkpoint folder: ignored" in shown
    assert "resumed from step 2" in shown
    assert checksum(tmp_path) == before
    for step in ("2", "4", "6"):
        (place.checkpoints / step).rename(place.checkpoints / f"{step}0")
    place.write_record(place.read_record() | {"state": "stopped"})
    with pytest.raises(CheckpointError, match="can be used"):
        trial()


def test_a_run_folder_that_is_moved_while_it_is_written_to_is_not_made_again(
    trial: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive = start._alive

    def moved(on: Any, at: Any) -> None:
        place = tmp_path / "runs" / "small"
        if at.step == 5:
            until((place / "checkpoints" / "4" / MANIFEST).exists)  # until then orbax may make folders
            place.rename(tmp_path / "moved")
        alive(on, at)

    monkeypatch.setattr(start, "_alive", moved)
    with pytest.raises(EnvironmentFault, match=r"moved or deleted"):
        trial()
    assert not (tmp_path / "runs" / "small").exists()
    assert (tmp_path / "moved" / "checkpoints" / "4").is_dir()


@pytest.mark.slow
def test_a_recipe_without_the_keys_of_this_version_is_the_same(trial: Callable[..., str], tmp_path: Path) -> None:
    trial()
    place = Folder(tmp_path / "runs" / "small")
    written = place.recipe.read_text()
    older = re.sub(r"(, )?\b(colour|mixup|cutmix|smoothing): 0\.0", "", written)
    assert older != written
    place.recipe.write_text(older)
    back_to(tmp_path, 4)
    assert "resumed from step 4" in trial()


@pytest.mark.parametrize("text", ["[]\n", "a: 1\n", "{", "\x00", "model: 1\ndata: 1\noptimizer: 1\n"])
def test_a_damaged_recipe_in_the_run_folder_is_refused(trial: Callable[..., str], tmp_path: Path, text: str) -> None:
    place = Folder(tmp_path / "runs" / "small")
    (place.checkpoints / "4").mkdir(parents=True)
    place.recipe.write_text(text)
    with pytest.raises(EnvironmentFault, match=r"recipe\.yaml is damaged"):
        trial()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """A file system of this many kilobytes; skipped if the user may not mount one."""
    mounted: list[Path] = []

    def make(kilobytes: int) -> Path:
        path = tmp_path / "disk"
        path.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(path)]
        if (
            os.geteuid()
            or not shutil.which("mount")
            or subprocess.run(command, capture_output=True, check=False).returncode
        ):
            pytest.skip("mounting a small file system takes root")
        mounted.append(path)
        return path

    yield make
    for path in mounted:
        subprocess.run(["umount", str(path)], check=True)


def fill(path: Path, left: int) -> None:
    """Fill the file system except for this many bytes."""
    (path / "filler").write_bytes(b"x" * (shutil.disk_usage(path).free - left))


@pytest.mark.slow
@pytest.mark.parametrize("what", ["checkpoint", "metrics", "start"])
def test_a_full_disk_is_one_line_and_run_json_has_the_same_code(
    trial: Callable[..., str], tmp_path: Path, disk: Callable[[int], Path], what: str, capfd: pytest.CaptureFixture[str]
) -> None:
    place = disk({"checkpoint": 96, "metrics": 64, "start": 40}[what])
    (tmp_path / "runs").symlink_to(place)
    run_folder, options = (
        Folder(place / "small"),
        ["checkpoint.every=0", "steps=3000", "track.every=1", "evaluate.every=0"],
    )
    if what == "start":
        run_folder.path.mkdir()
        fill(place, 0)
    with pytest.raises(EnvironmentFault) as caught:
        trial(*(options if what == "metrics" else []))
    assert re.search(r"No space left on device(: \S+)?$", caught.value.message)
    assert caught.value.message.count("\n") == 0
    assert not list(run_folder.path.glob(".probe-*"))
    if what == "checkpoint":
        found: dict[str, Any] = run_folder.read_record()
        assert (found["state"], found["exit_code"]) == ("failed", 3)
        assert run_folder.log.read_text().endswith("free some space, or write elsewhere\n")
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.slow
def test_a_start_that_is_refused_changes_nothing_of_a_finished_run(trial: Callable[..., str], tmp_path: Path) -> None:
    trial()
    folder = Folder(tmp_path / "runs" / "small")
    before = folder.recipe.read_text(), folder.record.read_text()
    other = "model={kind: mlp, sizes: [64, 24, 10]}"
    for overrides in (["steps=4", "model.activation=tanh"], ["steps=12", other]):  # its length, the shapes
        with pytest.raises((RecipeError, CheckpointError)):
            trial(*overrides, allow=True)
        assert (folder.recipe.read_text(), folder.record.read_text()) == before
    trial("model.activation=tanh", allow=True)  # no step is left that it could train
    assert folder.recipe.read_text() == before[0]
    assert folder.read_record()["changes"] == []
    assert "already finished" in trial()


@pytest.mark.slow
def test_each_checkpoint_is_used_with_the_recipe_that_it_was_saved_with(
    trial: Callable[..., str], tmp_path: Path
) -> None:
    trial()
    trial("steps=12", "model.activation=tanh", allow=True)
    folder, said = Folder(tmp_path / "runs" / "small"), list[str]()
    used = {step: load_run(folder, [], said.append, step=step).recipe.model for step in (6, 12)}
    assert [model.activation for model in used.values()] == ["relu", "tanh"]  # pyright: ignore[reportAttributeAccessIssue]
    assert said == [
        "the recipe was changed after step 6, whose own is used: model.activation: was relu, now tanh; "
        "steps: was 6, now 12"
    ]
    folder.recipe.write_text(folder.recipe.read_text().replace("tanh", "gelu"))  # by hand
    assert load_run(folder, [], said.append, step=6).recipe.model.activation == "gelu"  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.slow
def test_a_start_that_fails_early_keeps_what_the_model_declares(trial: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "my_layers.py").write_text("WIDTH = 64\n")
    (tmp_path / "my_net.py").write_text(MODULE.replace(', "other": found.weight', ""))
    custom = ("model={kind: custom, target: 'my_net:Net'}", "checkpoint.best=eval/error", "guard.contract=false")
    trial(*custom)
    back_to(tmp_path, 4)
    folder = Folder(tmp_path / "runs" / "small")
    (tmp_path / "my_net.py").rename(tmp_path / "gone.py")
    sys.modules.pop("my_net")
    with pytest.raises(RecipeError):
        trial(*custom)
    (tmp_path / "gone.py").rename(tmp_path / "my_net.py")
    assert folder.read_record()["state"] == "failed"
    assert folder.read_record()["higher_is_better"]["error"] is False
    assert load_run(folder, [], print, best=True).chosen.startswith("step ")


@pytest.mark.slow
def test_what_a_finished_run_lost_is_trained_again(trial: Callable[..., str], tmp_path: Path) -> None:
    trial()
    folder, before, said = Folder(tmp_path / "runs" / "small"), checksum(tmp_path), list[str]()
    for damage in (shutil.rmtree, lambda path: (path / MANIFEST).unlink(), cut):
        damage(folder.checkpoints / "6")
        if damage is shutil.rmtree:
            load_run(folder, [], said.append)
        assert "resumed from step 4" in trial()
        assert checksum(tmp_path) == before
        assert "already finished" in trial()
    assert said[0].startswith("warning: run.json records a checkpoint of step 6, which is missing")
    shutil.rmtree(folder.checkpoints)
    with pytest.raises(CheckpointError, match="records a checkpoint of step 6, but the run folder has no checkpoint"):
        trial()


def cut(checkpoint: Path) -> None:
    """Take the last bytes of the largest file."""
    largest = max((path for path in checkpoint.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size - 1)


@pytest.mark.slow
def test_another_batch_says_which_examples_come_again_or_are_skipped(trial: Callable[..., str], tmp_path: Path) -> None:
    trial()
    back_to(tmp_path, 4)
    assert "batch: was 64, now 128: 256 examples were used, and the 256 after these are skipped" in trial(
        "batch=128", allow=True
    )
    back_to(tmp_path, 4)
    shutil.copy(tmp_path / "small.yaml", tmp_path / "other.yaml")
    assert "now 32: 256 examples were used, and 128 of them come again" in trial("batch=32", allow=True)
    change = Folder(tmp_path / "runs" / "small").read_record()["changes"][-1]
    assert (change["step"], change["recipe"]) == (4, ["batch: was 128, now 32"])


@pytest.mark.slow
def test_held_out_examples_that_changed_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = "".join(f"{n},{n % 2}\n" for n in range(40))
    for name in ("t.csv", "n.csv", "m.csv"):
        Path(name).write_text("a,y\n" + rows)
    recipe = "model: {kind: mlp, hidden: [8]}\ndata: {kind: table, files: [t.csv], label: y, test_files: [n.csv]}\n"
    Path("t.yaml").write_text(recipe + "optimizer: {kind: sgd, lr: 0.1}\nbatch: 8\nsteps: 4\n")
    run(load(Path("t.yaml")), Path("runs"), Console(silent=True))
    with Path("n.csv").open("a") as file:
        file.write("99,1\n")
    with pytest.raises(DataError, match="the held-out data changed: the run was evaluated on table:test:"):
        run(load(Path("t.yaml"), ["steps=8"]), Path("runs"), Console(silent=True), allow_changes=True)
    run(load(Path("t.yaml"), ["steps=8", "data.test_files=[m.csv]"]), Path("runs"), Console(), allow_changes=True)
