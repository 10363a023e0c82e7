"""Loading parameters from a run's checkpoints: which checkpoint, which arrays, and from the run folder alone."""

import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from dtrain.assembly.assemble import assemble
from dtrain.assembly.state import State, create_state
from dtrain.checkpoint.partial import UNREAD
from dtrain.checkpoint.store import Store
from dtrain.core.errors import CheckpointError, DataError, RecipeError
from dtrain.core.files import overwrite
from dtrain.core.run_dir import Folder
from dtrain.data.arrays import Arrays, image_example
from dtrain.data.batch import Example
from dtrain.data.source import UNKNOWN
from dtrain.data.windows import row_example
from dtrain.optim.update import averaged
from dtrain.recipe.load import load, text
from dtrain.train.import_run import import_params
from dtrain.train.provenance import conditions
from dtrain.train.provenance import conditions_of as notes
from dtrain.train.resume import refuse_other_data
from dtrain.weights.export import export, refuse_other_formats
from dtrain.weights.load import load_run

IMAGES = image_example((8, 8, 1), 10)
IMAGE_DATA = "{kind: images, root: nowhere, size: [8, 8], channels: 1}"
RECIPE = """
model: {kind: mlp, sizes: [64, 16, 10]}
data: {kind: images, root: nowhere, size: [8, 8], channels: 1}
optimizer: {kind: adamw, lr: 1e-3, ema: 0.9}
checkpoint: {best: eval/loss, keep: 9}
batch: 64
steps: 10
"""


def write_recipe(tmp_path: Path, changes: dict[str, str] | None = None) -> Path:
    recipe = RECIPE
    for old, new in (changes or {}).items():
        assert old in recipe
        recipe = recipe.replace(old, new)
    (tmp_path / "small.yaml").write_text(recipe)
    return tmp_path / "small.yaml"


def saved_run(
    tmp_path: Path, losses: dict[int, float | None], changes: dict[str, str] | None = None, example: Example = IMAGES
) -> tuple[Folder, dict[int, State]]:
    """A run folder with a checkpoint for each step, some without a loss, and the states in them."""
    recipe, place = load(write_recipe(tmp_path, changes)), Folder(tmp_path / "runs" / "small")
    place.path.mkdir(parents=True)
    overwrite(place.recipe, text(recipe))
    made = assemble(recipe, jax.devices()[:2], example, 10)
    first, states = create_state(made.make, made.shapes), {}
    about = notes(conditions(made), recipe, Arrays({}, example, "digest"), 0, 0, False, {}, 0.0)
    with Store(place.checkpoints.absolute(), recipe.checkpoint) as store:
        for step, loss in losses.items():
            params = jax.tree.map(lambda x, by=step: x * by, first.params)
            states[step] = State(first.step, params, jax.tree.map(lambda x, by=step: x + by, first.optimizer))
            store.save(step, states[step], about, {} if loss is None else {"eval/loss": loss})
        store.wait()
    return place, states


def same(a: Any, b: Any) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.array_equal(np.asarray(x), np.asarray(y)) for x, y in pairs)


def quiet(_: str) -> None:
    return None


@pytest.mark.slow
def test_the_newest_the_best_and_any_step_can_be_taken(tmp_path: Path) -> None:
    losses = {2: 0.7, 4: 0.2, 6: 0.2, 7: float("nan"), 8: None, 9: 0.9}
    place, states = saved_run(tmp_path, losses)
    shown = {}
    for step, how in ((9, {}), (6, {"best": True}), (2, {"step": 2})):
        found = load_run(place, [], quiet, **how)
        assert found.step == step
        assert same(found.params, averaged(states[step].optimizer, states[step].params))
        shown[step] = found.chosen
    chosen = {9: "step 9, the newest", 6: "step 6, the best of 4 checkpoints by eval/loss: 0.2", 2: "step 2"}
    assert shown == {step: f"{why} (averaged parameters)" for step, why in chosen.items()}
    with pytest.raises(CheckpointError, match="no checkpoint of step 3") as caught:
        load_run(place, [], quiet, step=3)
    assert caught.value.hint == "saved steps: 2, 4, 6, 7, 8, 9"
    with pytest.raises(RecipeError, match="--step and --best"):
        load_run(place, [], quiet, step=3, best=True)
    with pytest.raises(RecipeError, match=r"has no checkpoint\.best"):
        load_run(place, ["checkpoint.best=null"], quiet, best=True)
    with pytest.raises(CheckpointError, match=r"no checkpoint of .* has a value of eval/accuracy"):
        load_run(place, ["checkpoint.best=eval/accuracy"], quiet, best=True)

    inside = next(path for path in (place.checkpoints / "6").rglob("*") if path.is_file() and "state" in path.parts)
    inside.write_bytes(inside.read_bytes()[:-1] + b"?")
    with pytest.raises(CheckpointError, match="checkpoint 6 is damaged"):
        load_run(place, [], quiet, best=True)
    for state in (path for path in place.checkpoints.rglob("*") if path.is_file() and "state" in path.parts):
        state.write_bytes(b"")
    with pytest.raises(CheckpointError, match="none of its 6 checkpoints can be used, each is damaged") as caught:
        load_run(place, [], quiet)
    assert "copy an undamaged one" in caught.value.hint


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer", ["kind: adamw, lr: 1e-3, ema: 0.9", "kind: adamw, lr: 1e-3", "kind: muon, lr: 1e-3"]
)
def test_nothing_but_the_parameters_is_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    place, states = saved_run(tmp_path, {4: None}, {"kind: adamw, lr: 1e-3, ema: 0.9": optimizer})
    wanted: list[Any] = []
    restore = Store.restore

    def watched(store: Store, step: int, shapes: Any) -> Any:
        wanted.append(shapes)
        return restore(store, step, shapes)

    monkeypatch.setattr(Store, "restore", watched)
    found = load_run(place, [], quiet)
    assert same(found.params, averaged(states[4].optimizer, states[4].params))
    read = [leaf for leaf in jax.tree.leaves(wanted) if leaf is not UNREAD]
    assert len(read) == len(jax.tree.leaves(found.params)) == 4
    with pytest.raises(CheckpointError, match=r"layer0\.weight: saved as float32\[64, 16\], the recipe has"):
        load_run(place, ["model.sizes=[64, 8, 10]"], quiet)


def test_a_run_folder_alone_is_enough_to_export(tmp_path: Path) -> None:
    place, _ = saved_run(tmp_path, {4: None})
    shutil.copytree(place.path, tmp_path / "copy")
    found = load_run(Folder(tmp_path / "copy"), [], quiet)
    assert found.assembly.layout.example == IMAGES
    for name, written in (
        ("a.safetensors", "a.safetensors"),
        ("out", "out/model.safetensors"),
        ("v1.0", "v1.0/model.safetensors"),
    ):
        lines = export(found, tmp_path / name)
        assert lines[0].startswith(f"{tmp_path / written}: ")
        (tmp_path / "plain").touch()
        assert (tmp_path / written).stat().st_mode == (tmp_path / "plain").stat().st_mode
    with pytest.raises(RecipeError, match=r"export writes \.safetensors and \.stablehlo files"):
        refuse_other_formats(tmp_path / "model.bin")


@pytest.mark.slow
def test_import_takes_a_run_and_needs_no_data(tmp_path: Path) -> None:
    digits = {IMAGE_DATA: "digits"}
    place, states = saved_run(tmp_path, {4: None}, digits)
    notes: list[str] = []
    tokens = "model={kind: decoder, vocab: 32, context: 16, layers: 1, width: 8, heads: 2}"
    other = load(tmp_path / "small.yaml", ["name=other", tokens, "data={kind: tokens, files: [gone.bin], length: 8}"])
    with pytest.raises(DataError, match=r'kind: "mlp" .*model\.kind: "decoder"'):
        import_params(other, tmp_path / "runs", place.path, notes.append)
    assert not (tmp_path / "runs" / "other").exists()
    tanh = load(tmp_path / "small.yaml", ["name=next", "model.activation=tanh"])
    with pytest.raises(DataError, match=r'activation: "relu" .*model\.activation: "tanh"'):
        import_params(tanh, tmp_path / "runs", place.path, notes.append)
    import_params(tanh, tmp_path / "runs", place.path, notes.append, allow_changes=True)
    assert notes[-2] == f"{place.path}: step 4, the newest (averaged parameters)"
    assert notes[-1].startswith("imported despite the differences: ")
    found = load_run(Folder(tmp_path / "runs" / "next"), [], quiet)
    assert same(found.params, averaged(states[4].optimizer, states[4].params))
    with pytest.raises(RecipeError, match="already has saved steps"):
        import_params(tanh, tmp_path / "runs", place.path, notes.append)
    with pytest.raises(RecipeError, match="models of kind mlp have only dtrain's own names"):
        export(found, tmp_path / "x.safetensors", names="published")
    assert not (tmp_path / "x.safetensors").exists()
    other = load(tmp_path / "small.yaml", ["name=other", "model.sizes=[64, 8, 10]"])
    with pytest.raises(DataError, match=r"sizes: \[64, 16, 10\] +model\.sizes: \[64, 8, 10\]"):
        import_params(other, tmp_path / "runs", place.path, notes.append)


@pytest.mark.slow
def test_no_file_has_the_padding_of_a_vocabulary(tmp_path: Path) -> None:
    decoder = "{kind: decoder, vocab: 30, context: 16, layers: 1, width: 8, heads: 2}"
    data = "{kind: tokens, files: [gone.bin], length: 8}"
    changes = {"{kind: mlp, sizes: [64, 16, 10]}": decoder, IMAGE_DATA: data}
    place, _ = saved_run(tmp_path, {4: None}, changes, row_example(8, packed=False))
    found = load_run(place, [], quiet)
    assert found.params["embed"].shape == (32, 8)
    export(found, tmp_path / "a.safetensors", names="published")
    assert load_file(tmp_path / "a.safetensors")["model.embed_tokens.weight"].shape == (30, 8)
    for name, source in (("file", tmp_path / "a.safetensors"), ("run", place.path)):
        import_params(load(tmp_path / "small.yaml", [f"name={name}"]), tmp_path / "runs", source, quiet)
        embed = load_run(Folder(tmp_path / "runs" / name), [], quiet).params["embed"]
        assert np.array_equal(embed[:30], found.params["embed"][:30])
        assert not np.asarray(embed[30:]).any()


def test_the_first_run_after_an_import_accepts_its_data_and_a_later_one_no_other() -> None:
    train = Arrays({}, IMAGES, "digest")
    refuse_other_data({"data": UNKNOWN}, train)
    refuse_other_data({"data": "digest"}, train)
    with pytest.raises(DataError, match="the data changed"):
        refuse_other_data({"data": "another digest"}, train)
