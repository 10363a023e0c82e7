import dataclasses
import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from dtrain.core.errors import DataError, DtrainError, RecipeError
from dtrain.data.idx import FILES
from dtrain.recipe import examine as module
from dtrain.recipe.examine import CheckReport, examine
from dtrain.recipe.load import load
from dtrain.recipe.recipe import Recipe
from tests.recipe.test_load import GOOD, write

TEXT = """
model: {kind: decoder, vocab: 256, context: 64, layers: 1, width: 8, heads: 1}
data: {kind: text, files: [words.txt], length: 16}
optimizer: {kind: sgd, lr: 0.1}
batch: 4
steps: 30
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with some data, on a machine with one device."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "devices_here", lambda: 1)
    Path("words.txt").write_text("to be or not to be " * 40)
    np.save("tokens.npy", np.arange(300, dtype=np.uint16))
    for split, count in (("train", 20), ("test", 10)):
        for name, dims in zip(FILES[split], ((count, 8, 8), (count,)), strict=True):
            header = bytes([0, 0, 8, len(dims)]) + struct.pack(f">{len(dims)}I", *dims)
            Path("idx").mkdir(exist_ok=True)
            Path(f"idx/{name}.gz").write_bytes(gzip.compress(header + bytes(int(np.prod(dims)))))
    return tmp_path


def found(body: str, *overrides: str, devices: int | None = None, data: bool = True) -> CheckReport:
    return examine(write(Path(), body), overrides, devices, data)


def refusal(body: str, *overrides: str, data: bool = True) -> DtrainError:
    with pytest.raises((RecipeError, DataError)) as caught:
        found(body, *overrides, data=data)
    return caught.value


@pytest.mark.parametrize(
    ("body", "override", "code", "message"),
    [
        (TEXT, "data.files=[nope/*.txt]", 4, "data.files: no file of text matches nope/*.txt"),
        (TEXT, "data.tokenizer=gpt2", 4, "data.tokenizer: gpt2: no such tokenizer"),
        (TEXT, "data.length=70", 2, "model: rows of 70 tokens are longer than context = 64"),
        (TEXT, "model.vocab=100", 2, "model: the data's largest token is 116 (words.txt); the model's vocab is 100"),
        (TEXT, "data={kind: tokens, files: [tokens.npy], length: 16}", 2, "largest token is 269 (tokens.npy)"),
        (GOOD, "data={kind: idx, root: idx, classes: 7}", 2, "model: sizes ends with 10; the data has 7 classes"),
        (GOOD, "data={kind: idx, root: none, download: false}", 4, "data.root: none lacks train-images"),
        (GOOD, "data={kind: images, root: idx, size: 8}", 4, "data.root: idx contains no image in a class folder"),
        (GOOD, "data={kind: synthetic, image: [8, 8, 3]}", 2, "model: sizes begins with 64; the data's images are 8"),
        (GOOD, "data.pixels.crop=9", 2, "data.pixels.crop: shifts of 9 pixels in images of 8 x 8; at most 7"),
    ],
)
def test_what_a_run_would_refuse_is_found_before_it(body: str, override: str, code: int, message: str) -> None:
    error = refusal(body, override)
    assert (error.exit_code, error.message.count("\n")) == (code, 0)
    assert message in error.message


def test_a_warm_up_longer_than_the_epochs_is_found() -> None:
    body = GOOD.replace("steps: 100", "epochs: 3")
    error = refusal(body, "optimizer.schedule.warmup=5000")
    assert error.exit_code == 2
    assert "optimizer.schedule.warmup: 5000 warm-up steps in a run of 135" in error.message
    assert "not checked: the data (--no-data); whether the warm-up is" in found(body, data=False).verdict()
    assert "epochs: 2,000,000,000 epochs of 1,437 examples" in refusal(body, "epochs=2000000000", "batch=1").message


def test_everything_is_found_at_once() -> None:
    error = refusal(
        TEXT, "data.files=[nope]", "checkpoint.best=eval/acuracy", "model.hiden=3", "batch=0", "mesh.tensor=3"
    )
    places = {line.partition(": ")[0].rpartition("  ")[2] for line in error.message.splitlines()}
    assert places == {"model.hiden", "batch", "mesh.tensor", "checkpoint.best", "data.files"}
    assert error.exit_code == 2


def test_the_last_line_names_what_was_not_checked() -> None:
    assert (
        found(GOOD).verdict() == "recipe: no mistake found in the recipe, one example of its data, its mesh on 1 device"
    )
    assert found(GOOD, devices=8).verdict().endswith("its data, its mesh on 8 devices")
    verdict = found(GOOD, "data={kind: idx, root: none}").verdict()
    assert verdict.endswith("not checked: data: none lacks train-images-idx3-ubyte; the run downloads MNIST into it")
    assert "its data" not in verdict
    assert "the devices (the mesh needs 1 device or a multiple)" in found(GOOD, "launch=local").verdict()


def test_a_run_of_adapters_is_no_start_and_the_command_that_joins_them_is_named(tmp_path: Path) -> None:
    adapters = "lora: {rank: 2, targets: [layer0.weight]}\ninit: {run: base}\n"
    for name, lora in (("whole", ""), ("adapters", adapters)):
        (tmp_path / name).mkdir()
        write(tmp_path / name, GOOD + lora)
    assert not found(GOOD, "init.run=whole").warnings
    (warning,) = found(GOOD, "init.run=adapters").warnings
    assert "init.run: adapters has adapters alone (lora), so `run` would refuse it here" in warning
    assert "dtrain export adapters adapters-whole" in warning


def test_a_mesh_that_needs_more_devices_is_named() -> None:
    examined = found(GOOD, "mesh.fsdp=4")
    (warning,) = examined.warnings
    assert "the mesh needs 4 devices or a multiple; this machine has 1" in warning
    assert "not checked: the mesh on other machines" in examined.verdict()


def test_intervals_longer_than_the_run_are_warned_of() -> None:
    assert found(GOOD, "evaluate.every=101", "checkpoint.every=500").warnings == [
        "evaluate.every = 101: the run has only 100 steps, so this happens only at its end",
        "checkpoint.every = 500: the run has only 100 steps, so this happens only at its end",
    ]
    assert not found(GOOD, "evaluate.every=100").warnings


@pytest.mark.parametrize("mixed", [False, True])
def test_tokens_that_a_file_cannot_hold_are_refused(tmp_path: Path, mixed: bool) -> None:
    (tmp_path / "t.bin").write_bytes(bytes(4096))
    tokens = f"{{kind: tokens, files: ['{tmp_path}/t.bin'], length: 16}}"
    wide = tokens.replace("16}", "16, dtype: uint32}")
    parts = (
        f"{{kind: mixture, sources: [{{name: a, weight: 1, data: {wide}}}, {{name: b, weight: 1, data: {tokens}}}]}}"
    )

    def loaded(data: str) -> object:
        return load("decoder-tiny", ["model.vocab=128256", "data=null", f"data={data}", "epochs=null", "steps=50"])

    assert loaded(wide)
    with pytest.raises(RecipeError, match=r"data\.(sources\.1\.data\.)?dtype: uint16 holds tokens below 65,536"):
        loaded(parts if mixed else tokens)


@pytest.mark.parametrize("data", [True, False])
@pytest.mark.parametrize("section", dataclasses.fields(Recipe), ids=lambda field: field.name)
def test_a_section_that_cannot_be_parsed_is_one_mistake(section: dataclasses.Field[object], data: bool) -> None:
    """Whatever other checks need of it."""
    assert f"{section.name}: " in str(refusal(GOOD, f"{section.name}=[[1]]", data=data))
