"""Initial parameters from another run's checkpoint: by path, onto any mesh, and every difference is said."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from dtrain.assembly.assemble import assemble
from dtrain.assembly.state import create_state
from dtrain.core.errors import CheckpointError, RecipeError
from dtrain.recipe.load import load
from dtrain.recipe.recipe import Init
from dtrain.weights.initial import Initial, Origin, initial_from
from tests.conftest import Dtrain
from tests.weights.test_load import IMAGES, saved_run


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A run with checkpoints of steps 1 to 3, the second one with the best loss, with averaged parameters."""
    saved_run(tmp_path, {1: 0.5, 2: 0.25, 3: 0.75})
    return tmp_path / "runs" / "small"


def start(base: Path, *overrides: str, devices: int = 1, **settings: object) -> tuple[Initial, dict[str, np.ndarray]]:
    """What a new run takes from the base, and its initial parameters by path."""
    recipe = load(base.parents[1] / "small.yaml", overrides)
    assembly = assemble(recipe, jax.devices()[:devices], IMAGES, 10)
    initial = initial_from(assembly, Origin(Init(run=str(base), **settings)), print)  # pyright: ignore[reportArgumentType]
    state = create_state(assembly.make, assembly.shapes, initial.read())
    placed = jax.tree.leaves(jax.tree.map(lambda x, shape: x.sharding == shape.sharding, state, assembly.shapes))
    assert all(placed)
    return initial, {
        ".".join(str(key.key) for key in path): np.asarray(jax.device_get(leaf))
        for path, leaf in jax.tree_util.tree_leaves_with_path(state.params)
    }


def averages(base: Path, step: int) -> dict[str, np.ndarray]:
    from dtrain.core.run_dir import Folder
    from dtrain.weights.load import load_run

    params = load_run(Folder(base), [], print, step=step).params
    return {
        ".".join(str(key.key) for key in path): np.asarray(jax.device_get(leaf))
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }


@pytest.mark.slow
@pytest.mark.parametrize("place", [["mesh={data: 1}"], ["engine=shard_map", "mesh={fsdp: 8}"]])
@pytest.mark.parametrize(("step", "number"), [("newest", 3), ("best", 2), (1, 1)])
def test_the_parameters_are_the_averages_of_that_checkpoint(
    base: Path, place: list[str], step: str | int, number: int
) -> None:
    initial, params = start(base, *place, devices=8 if "mesh={data: 1}" not in place else 1, step=step)
    expected = averages(base, number)
    assert params.keys() == expected.keys()
    for name, value in params.items():
        np.testing.assert_array_equal(value, expected[name])
    assert initial.lines == [initial.lines[0]]
    assert "4 of 4 parameters" in initial.lines[0]
    assert initial.origin.endswith(f"runs/small at step {number}")


@pytest.mark.slow
def test_what_does_not_fit_is_initialised_at_random_and_named(base: Path) -> None:
    data = "data={kind: images, root: nowhere, size: [8, 8], channels: 1}"
    initial, params = start(base, data, "model.sizes=[64, 16, 16, 10]")
    expected = averages(base, 3)
    np.testing.assert_array_equal(params["layer0.weight"], expected["layer0.weight"])
    np.testing.assert_array_equal(params["layer0.bias"], expected["layer0.bias"])
    assert initial.keys.keys() == {"layer0.weight", "layer0.bias"}
    assert initial.lines[1:] == [
        "initialised at random: layer1.bias (16,), there (10,), layer1.weight (16, 16), there (16, 10), "
        "layer2.bias (10,), layer2.weight (16, 10)",
        "not used of the other run: layer1.bias, layer1.weight",
    ]
    fresh = start(base, data, "model.sizes=[64, 16, 16, 10]", new=("layer0.bias",))[1]
    for name in ("layer1.weight", "layer2.weight"):
        np.testing.assert_array_equal(params[name], fresh[name])
        assert np.abs(params[name]).max() > 0


def test_other_names_are_mapped_by_patterns(base: Path) -> None:
    mapped = {"layer2.*": "layer1.*"}
    initial, params = start(base, "model.sizes=[64, 16, 16, 10]", map=mapped, new=("layer1.*",))
    expected = averages(base, 3)
    for part in ("weight", "bias"):
        np.testing.assert_array_equal(params[f"layer2.{part}"], expected[f"layer1.{part}"])
    assert initial.lines[1:] == ["initialised at random: layer1.bias (16,), layer1.weight (16, 16)"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"map": {"layer7.*": "layer1.*"}}, r"init\.map: 'layer7\.\*' matches no parameter"),
        ({"map": {"layer1.*": "head.*"}}, r"init\.map: .* has no parameter head\.bias, for layer1\.bias"),
        ({"map": {"layer1.*": "layer1.bias"}}, r"'layer1\.\*' has 1 stars and 'layer1\.bias' 0"),
        ({"map": {"layer1.bia?": "layer1.bias"}}, "has more than stars"),
        ({"new": ("nothing",)}, r"init\.new: 'nothing' matches no parameter"),
        ({"new": ("*",)}, "no parameter of .* has a name and shape of this model"),
        ({"new": ("layer1.bias",), "map": {"layer1.*": "layer0.*"}}, "layer1.bias is both in map and in new"),
    ],
)
def test_patterns_that_cannot_be_meant_are_refused(base: Path, settings: dict[str, object], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        start(base, **settings)


def test_a_run_that_is_not_there_is_refused(base: Path) -> None:
    with pytest.raises(RecipeError, match="is not a run folder"):
        initial_from_path(base, base / "no")
    with pytest.raises(CheckpointError, match="has no checkpoint of step 9"):
        start(base, step=9)


def initial_from_path(base: Path, run: Path) -> Initial:
    assembly = assemble(load(base.parents[1] / "small.yaml"), jax.devices()[:1], IMAGES, 10)
    return initial_from(assembly, Origin(Init(run=str(run))), print)


@pytest.mark.slow
def test_a_run_starts_from_another_and_resumes_without_it(dtrain: Dtrain, tmp_path: Path) -> None:
    short = ["steps=40", "optimizer.schedule.warmup=0"]
    dtrain("run", "mlp-digits", *short, "name=base")
    measured = dtrain("evaluate", "runs/base", "--json").stdout
    next_run = ["run", "mlp-digits", "optimizer={kind: sgd, lr: 1e-20}", "init.run=runs/base", "name=next"]
    first = dtrain(*next_run, "steps=4")
    assert "initialised from runs/base at step 40, the newest: 6 of 6 parameters" in first.stderr
    assert (
        dtrain("evaluate", "runs/next", "--json").stdout.partition('"metrics"')[2] == measured.partition('"metrics"')[2]
    )
    (tmp_path / "runs" / "base").rename(tmp_path / "gone")
    again = dtrain(*next_run, "steps=8")
    assert "resumed from step 4 (same recipe, code, software, devices and mesh: the same bits)" in again.stderr
    assert "is not a run folder" in dtrain(*next_run, "steps=8", "name=third", code=2).stderr
    checked = dtrain("check", "mlp-digits", "init.run=runs/base")
    assert "init.run: runs/base is no run folder on this machine" in checked.stderr
    assert "not checked: which parameters runs/base has" in checked.stderr
    assert (
        "expected a whole number or 'newest' or 'best'"
        in dtrain("check", "mlp-digits", "init={run: a, step: last}", code=2).stderr
    )


@pytest.fixture
def published(dtrain: Dtrain, tmp_path: Path) -> Path:
    """A folder of published weights, and a small recipe of the same model."""
    (tmp_path / "text.txt").write_text("".join(f"{i} times {i + 1} is {i * (i + 1)}\n" for i in range(300)))
    recipe = "model: {kind: decoder, vocab: 250, context: 32, layers: 2, width: 16, heads: 2, hidden: 24}\n"
    recipe += "data: {kind: text, files: [text.txt], length: 32, cache: cache}\nbatch: 8\nsteps: 4\n"
    (tmp_path / "small.yaml").write_text(recipe + "optimizer: {kind: adamw, lr: 3e-3}\ntrack: {every: 1}\n")
    dtrain("run", "small.yaml", "name=base")
    dtrain("export", "base", "published")
    return tmp_path


def losses(folder: Path, name: str) -> list[float]:
    rows = [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    return [row["train/loss"] for row in rows if "train/loss" in row]


@pytest.mark.slow
def test_published_weights_are_as_good_as_the_run_they_came_from(dtrain: Dtrain, published: Path) -> None:
    dtrain("run", "small.yaml", "name=run", "init.run=runs/base")
    shown = dtrain("run", "small.yaml", "name=files", "init.weights=published").stderr
    assert "initialised from published: 12 of 12 parameters" in shown
    assert losses(published, "files") == losses(published, "run")
    split = ["mesh={fsdp: 2, tensor: 2}", "--devices", "4"]
    dtrain("run", "small.yaml", "name=split", "init.weights=published", *split)  # vocab 250 in 256 rows
    np.testing.assert_allclose(losses(published, "split"), losses(published, "run"), rtol=2e-5)
    shown = dtrain("run", "small.yaml", "name=new", "init={weights: published, new: [head]}").stderr
    assert "11 of 12 parameters" in shown
    assert "initialised at random: head" in shown
    assert losses(published, "new")[0] > losses(published, "run")[0]


@pytest.mark.nightly
def test_frozen_published_weights_must_stay_the_same(dtrain: Dtrain, published: Path) -> None:
    lora = ["lora={rank: 2, targets: [blocks.query.weight]}", "init.weights=published", "name=tuned"]
    dtrain("run", "small.yaml", *lora, "steps=2")
    assert "resumed from step 2" in dtrain("run", "small.yaml", *lora).stderr
    dtrain("run", "small.yaml", *[*lora[:2], "name=whole"])
    assert losses(published, "tuned") == losses(published, "whole")
    dtrain("evaluate", "tuned")
    dtrain("run", "small.yaml", "name=other", "seed=2")
    dtrain("export", "other", "others")
    for file in (published / "others").iterdir():
        (published / "published" / file.name).write_bytes(file.read_bytes())
    shown = dtrain("run", "small.yaml", *lora, "steps=8", code=5).stderr
    assert "published does not have the parameters that this run was started from" in shown


@pytest.mark.nightly
def test_published_weights_of_another_model_are_refused(dtrain: Dtrain, published: Path) -> None:
    start = ["run", "small.yaml", "name=wrong", "init.weights=published"]
    shown = dtrain(*start, "model.position={kind: rope, theta: 500}", code=4).stderr
    assert "hint: to use the file's settings: model.position.theta=10000.0\n" in shown
    assert "model.layers: 3" in dtrain(*start, "model.layers=3", code=4).stderr
    assert "init.weights: nowhere does not exist" in dtrain(*start[:3], "init.weights=nowhere", code=4).stderr
    frozen = ["lora={rank: 2, targets: [blocks.query.weight]}", "init={weights: published, new: ['base.head']}"]
    assert "lora.train: [head]" in dtrain(*start[:3], *frozen, code=2).stderr
    mapped = "init={weights: published, map: {head: embed}}"
    assert "published parameters have fixed names" in dtrain("check", "small.yaml", mapped, code=2).stderr
    assert "init.weights: nowhere does not exist" in dtrain("check", "small.yaml", "init.weights=nowhere").stderr


@pytest.mark.nightly
def test_import_can_write_the_recipe_alone(dtrain: Dtrain, published: Path) -> None:
    shown = dtrain("import", "published", "--out", "big", "--recipe-only").stderr
    assert "big-tune.yaml tunes the parameters of published" in shown
    assert not (published / "runs" / "big").exists()
    assert shown.rstrip().endswith("run big-tune.yaml   # tunes it, once chat.jsonl has your conversations")
    (published / "chat.jsonl").write_text('{"prompt": "1 times 2", "response": "2"}\n' * 20)
    short = ["epochs=null", "steps=2", "data.template=plain", "optimizer.schedule=constant", "data.test=0.2"]
    assert "initialised from" in dtrain("run", "big-tune.yaml", *short).stderr
    again = dtrain("import", "published", "--out", "big", "--recipe-only", code=2).stderr
    assert "big-tune.yaml exists already" in again
    shown = dtrain("import", "published", "--out", "large", "--recipe-only").stderr
    assert shown.rstrip().endswith("run large-tune.yaml   # tunes it")
    wrong = dtrain("import", "published", "--out", "b2", "model.nonsense=3", "--recipe-only", code=2).stderr
    assert "takes no overrides" in wrong
    wrong = dtrain("import", "small.yaml", "published", "--recipe-only", code=2).stderr
    assert "--recipe-only needs --out" in wrong


@pytest.mark.nightly
def test_weights_without_a_tokenizer_can_be_given_one(dtrain: Dtrain, published: Path) -> None:
    (published / "alone").mkdir()
    for name in ("config.json", "model.safetensors"):
        (published / "alone" / name).write_bytes((published / "published" / name).read_bytes())
    shown = dtrain("import", "alone", "--out", "a").stderr
    assert "next: name a tokenizer's folder in a-tune.yaml, as data.tokenizer; then" in shown
    assert "generate" not in shown and "tokenizer: FOLDER" in (published / "a-tune.yaml").read_text()
    assert "bfloat16 # of what is frozen" not in (published / "a-tune.yaml").read_text()
    config = json.loads((published / "alone" / "config.json").read_text())
    (published / "alone" / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    dtrain("import", "alone", "--out", "half", "--recipe-only")
    assert "  dtype: bfloat16 # of what is frozen, as it was published" in (published / "half-tune.yaml").read_text()
    shown = dtrain("import", "alone", "--out", "b", "--tokenizer", "published").stderr
    (command,) = [line for line in shown.splitlines() if line.startswith("next: ")]
    assert command.endswith("generate b --prompt '...'")
    assert dtrain("generate", "b", "--prompt", "1 times", "--tokens", "2").stdout
    assert (
        "--tokenizer: small.yaml" in dtrain("import", "alone", "--out", "c", "--tokenizer", "small.yaml", code=2).stderr
    )
    assert "--tokenizer needs --out" in dtrain("import", "small.yaml", "alone", "--tokenizer", "x", code=2).stderr
