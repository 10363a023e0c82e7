"""Sizes of models that recipes leave out, numbers as labels, dropout, and weights of classes."""

import json
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dtrain.assembly.assemble import assemble
from dtrain.assembly.input import host_batches
from dtrain.assembly.state import create_state
from dtrain.core.errors import DataError, FieldError, RecipeError
from dtrain.data.arrays import Arrays
from dtrain.data.batch import IMAGE, LABEL, WEIGHT, Feature
from dtrain.data.class_weights import class_counts, class_weights
from dtrain.data.prediction_inputs import with_classes
from dtrain.models.custom import Custom
from dtrain.models.mlp import MLP
from dtrain.models.nn.single_device import SingleDeviceContext
from dtrain.optim.optimizer import AdamW
from dtrain.optim.shared import Cosine, Schedule
from dtrain.optim.update import learning_rate
from dtrain.parallel.engine import Put
from dtrain.recipe.examine import examine
from dtrain.recipe.load import load
from dtrain.recipe.recipe import Evaluate, Model
from dtrain.recipe.sizes import with_sizes
from tests.conftest import Dtrain
from tests.engines import example_of, small, worst

MEMBERS = [member for member in get_args(Model) if member is not Custom]
OPTIMIZER = "optimizer: {kind: sgd, lr: 0.1, momentum: 0.9}\nbatch: 16\nsteps: 4\n"


def written(folder: Path, model: str, data: str, more: str = "") -> Path:
    path = folder / "left-out.yaml"
    path.write_text(f"model: {model}\ndata: {data}\n{OPTIMIZER}{more}")
    return path


def table(folder: Path, label: str) -> str:
    """A table with a column of texts; its label is a class or a number."""
    draw = np.random.default_rng(0)
    size, city = draw.uniform(20, 200, 200), draw.choice(["Bonn", "Lyon"], 200)
    price = 1000 * size + np.where(city == "Lyon", 50_000, 0)
    rows = zip(size, city, price, np.where(price > 100_000, "dear", "cheap"), strict=True)
    lines = ["size,city,price,grade", *(f"{a:.3f},{b},{c:.1f},{d}" for a, b, c, d in rows)]
    (folder / "homes.csv").write_text("\n".join(lines) + "\n")
    columns = "columns: [size, city]"
    predict = "number" if label == "price" else "class"
    return f"{{kind: table, files: [{folder}/homes.csv], label: {label}, predict: {predict}, {columns}}}"


@pytest.mark.parametrize("member", MEMBERS, ids=[member.__name__ for member in MEMBERS])
def test_every_model_takes_its_sizes_from_the_data(member: Any) -> None:
    given = small(member)
    example = example_of(given)
    sizes = [one.name for one in fields(member) if one.name in ("sizes", "image", "classes", "vocab", "context")]
    without = replace(given, **{name: next(f.default for f in fields(member) if f.name == name) for name in sizes})
    assert set(without.left_out) == set(sizes)
    assert not given.left_out
    if "sizes" in sizes:
        without = replace(without, hidden=given.sizes[1:-1])
    assert without.sized(example) == given
    assert without.sized({}) == without  # the data does not show them
    assert without.mismatch(example) or without.mismatch({"other": example[next(iter(example))]})


@pytest.mark.parametrize("model", ["mlp", "cnn", "{kind: vit, patch: 2}", "{kind: mlp, hidden: [32, 16]}"])
def test_a_recipe_for_pictures_may_name_the_kind_of_model_alone(tmp_path: Path, model: str) -> None:
    recipe = with_sizes(load(written(tmp_path, model, "digits")))
    assert not recipe.model.left_out
    assert not recipe.model.mismatch(recipe.data.open("train").example)
    checked = examine(written(tmp_path, model, "digits"), [], None, data=True)
    assert "one example of its data" in checked.verdict()


def test_the_vocabulary_is_that_of_the_tokenizer_and_not_of_the_text(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("abc " * 400)
    data = f"{{kind: text, files: [{tmp_path}/text.txt], length: 24}}"
    recipe = with_sizes(load(written(tmp_path, "{kind: decoder, layers: 1, width: 8, heads: 2}", data)))
    assert (recipe.model.vocab, recipe.model.context) == (256, 24)


ROWS = """
import numpy as np


class Rows:
    def __init__(self, split):
        pass

    def __len__(self):
        return 40

    def rows(self, indices):
        label = np.asarray(indices, np.float32)
        return {"features": np.stack([label, label], 1), "label": label}
"""


def test_sizes_that_the_data_does_not_show_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "rows_of_numbers.py").write_text(ROWS)
    path = written(tmp_path, "mlp", f"{{kind: custom, target: 'rows_of_numbers:Rows', folder: {tmp_path}}}")
    with pytest.raises(DataError, match=r"not in the data: set model\.mean, model\.std"):
        with_sizes(load(path))
    given = with_sizes(load(path, ["model.label=number", "model.mean=0", "model.std=2"])).model
    assert given.sizes == (2, 128, 1)


def test_numbers_of_an_npz_file_have_their_mean_and_deviation(tmp_path: Path) -> None:
    label = np.linspace(0, 10, 400).astype(np.float16)
    np.savez(tmp_path / "rows.npz", features=np.zeros((400, 3), np.float32), label=label)
    recipe = load(written(tmp_path, "mlp", f"{{kind: npz, file: {tmp_path}/rows.npz, test: 0.5}}"))
    source = recipe.data.open("train")
    labels = source.rows(np.arange(len(source)))[LABEL].astype(np.float64)
    model = with_sizes(recipe).model
    assert (model.label, model.sizes) == ("number", (3, 128, 1))
    assert (model.mean, model.std) == pytest.approx((labels.mean(), labels.std()))


def test_classes_of_half_precision_and_labels_of_several_values_are_refused(tmp_path: Path) -> None:
    for label in (np.zeros(40, np.float16), np.zeros((40, 2), np.float32)):
        np.savez(tmp_path / "rows.npz", features=np.zeros((40, 3), np.float32), label=label)
        path = written(tmp_path, "{kind: mlp, sizes: [3, 8, 2]}", f"{{kind: npz, file: {tmp_path}/rows.npz}}")
        with pytest.raises(RecipeError, match=r"label is a number|label \[2\]"):
            examine(path, [], None, data=True)


def test_tokens_without_a_tokenizer_need_a_vocabulary(tmp_path: Path) -> None:
    np.arange(400, dtype=np.uint16).tofile(tmp_path / "a.bin")
    data = f"{{kind: tokens, files: [{tmp_path}/a.bin], length: 8}}"
    with pytest.raises(RecipeError, match=r"model\.vocab: it is left out") as refused:
        with_sizes(load(written(tmp_path, "{kind: decoder, layers: 1, width: 8, heads: 2, vocab: 0}", data)))
    assert "set model.vocab to the number of tokens, or data.tokenizer" in str(refused.value)


def test_what_init_takes_was_trained_for_its_own_numbers(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    path = written(tmp_path, "mlp", table(tmp_path, "price"), "init: {run: runs/other}\n")
    with pytest.raises(RecipeError, match=r"model\.mean, model\.std: what init takes"):
        with_sizes(load(path, ["model.label=number"]))


@pytest.mark.parametrize("steps", [2, 7, 14, 25, 105, 399, 1000])
@pytest.mark.parametrize("train", [56, 1437, 10**6])
def test_there_are_at_most_ten_evaluations(steps: int, train: int) -> None:
    every = Evaluate().interval(steps, 32, train, 1, decides=False)
    assert 1 < len({*range(every, steps + 1, every), steps}) <= 10
    if steps * 32 >= 2 * train:  # whole epochs, up to a batch
        epochs = every * 32 / train
        assert round(epochs) >= 1
        assert abs(epochs - round(epochs)) * train <= 32


def test_evaluations_by_default_take_a_tenth_of_the_time_and_a_setting_is_kept() -> None:
    assert Evaluate().interval(1000, 10, 10**6, 1_500, decides=False) == 500  # 2 x 1,500 / 3 of 10,000 examples
    assert Evaluate().interval(1000, 10, 10**6, 5_000, decides=False) == 0
    assert Evaluate().interval(1000, 10, 10**6, 5_000, decides=True) == 100
    assert Evaluate(every=0).interval(1000, 10, 1000, 1, decides=True) == 0
    assert Evaluate(every=7).interval(1000, 10, 1000, 1, decides=False) == 7


def test_sizes_of_the_data_that_a_model_cannot_have_are_refused_once(tmp_path: Path) -> None:
    path = written(tmp_path, "{kind: vit, patch: 3}", "digits")
    with pytest.raises(RecipeError) as refused:
        examine(path, [], None, data=True)
    assert "patch = 3 does not divide the image's height 8; the sizes are those of the data" in str(refused.value)
    assert len(refused.value.problems) == 1


@pytest.mark.slow
def test_a_run_keeps_the_sizes_and_resumes(dtrain: Dtrain, tmp_path: Path) -> None:
    path = written(tmp_path, "mlp", "digits")
    dtrain("run", path)
    kept = load(tmp_path / "runs/left-out/recipe.yaml").model
    assert kept.sizes == (64, 128, 10)
    assert "already finished" in dtrain("run", path).stderr
    assert "loss" in dtrain("run", path, "--extend", "4steps").stdout
    assert "64" in dtrain("explain", path).stdout
    assert "fits" in dtrain("plan", path, "--quick", "--on", "v5e-1").stdout
    assert "10" in dtrain("evaluate", "left-out").stdout


@pytest.mark.slow
def test_a_number_is_predicted_in_its_own_unit(dtrain: Dtrain, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    path = written(tmp_path, "mlp", table(tmp_path, "price"))
    overrides = ["steps=600", "optimizer={kind: adamw, lr: 1e-2}", "stop={metric: eval/mae, patience: 9}"]
    dtrain("run", path, *overrides)
    result = json.loads(dtrain("evaluate", "left-out", "--json").stdout)
    model = load(tmp_path / "runs/left-out/recipe.yaml").model
    assert model.label == "number"
    assert model.std > 10_000
    assert result["metrics"]["mae"] < 0.05 * model.std
    rows = [json.loads(line) for line in dtrain("predict", "left-out", "homes.csv").stdout.splitlines()]
    assert np.mean([abs(row["value"] - row["label"]) for row in rows]) < 0.05 * model.std
    (tmp_path / "homes.csv").unlink()  # a finished run does not need its data to say that it is finished
    assert "already finished" in dtrain("run", path, *overrides).stderr


def test_the_loss_of_a_number_is_half_the_squared_error_in_deviations() -> None:
    model = MLP(sizes=(1, 1), label="number", mean=10.0, std=4.0)
    params = {"layer0": {"weight": jnp.zeros((1, 1)), "bias": jnp.array([0.5])}}  # predicts 10 + 0.5 * 4 = 12
    batch = {"features": jnp.zeros((2, 1)), LABEL: jnp.array([8.0, 18.0]), WEIGHT: jnp.array([1.0, 3.0])}
    loss = model.loss(params, batch, SingleDeviceContext())
    assert float(loss.sum) == pytest.approx((1.0 * 1**2 + 3.0 * 1.5**2) / 2)
    assert float(loss.metrics["mae"]) == pytest.approx(1 * 4 + 3 * 6)
    assert model.predict(params, batch, SingleDeviceContext())["value"].tolist() == [12.0, 12.0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sizes": (4, 2), "hidden": (3,)}, "either sizes"),
        ({"sizes": (4,)}, "at least two sizes"),
        ({"sizes": (4, 2), "label": "number"}, "ends with 1"),
        ({"sizes": (4, 2), "mean": 1.0}, "a number that is predicted"),
    ],
)
def test_what_an_mlp_cannot_be_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        MLP(**given)


def test_a_class_is_not_predicted_as_a_number_nor_a_number_as_a_class(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    for model, label in (("{kind: mlp, sizes: [3, 8, 2]}", "price"), ("{kind: mlp, label: number}", "grade")):
        with pytest.raises(RecipeError, match="the model predicts"):
            examine(written(tmp_path, model, table(tmp_path, label)), [], None, data=True)


def trained(path: Path, devices: int, *overrides: str) -> tuple[list[float], Any]:
    """The losses of three steps, and the parameters after them."""
    recipe = load(path, overrides)
    source = recipe.data.open("train")
    assembly = assemble(recipe, jax.devices()[:devices], source.example, 10)
    put = Put(assembly.engine, assembly.layout, recipe.batch)
    batches = host_batches(assembly, source, put.held, 0, 3)
    state = create_state(assembly.make, assembly.shapes)
    step, losses = assembly.engine.compile(assembly.train(), "cpu"), []
    for number in range(3):
        state, metrics = step(state, put(batches[number]))
        losses.append(float(jax.block_until_ready(metrics)["loss"]))
    return losses, jax.device_get(state.params)


@cache
def recipe_with(folder: Path, model: str) -> Path:
    return written(folder, model, "digits", 'class_weights: {"3": 4, "7": 0.5}\naccumulate: 2\n')


CASES = {
    "jit": ["engine=jit", "mesh={data: 2, fsdp: 2, tensor: 2}"],
    "shard_map": ["engine=shard_map", "mesh={data: 2, fsdp: 2, tensor: 2}"],
    "pmap": ["engine=pmap", "mesh={data: 8}"],
}
NETS = {
    "mlp": "{kind: mlp, hidden: [32, 16], dropout: 0.3}",
    "cnn": "{kind: cnn, stages: [16, 32], dropout: 0.3}",
    "vit": "{kind: vit, patch: 2, layers: 2, width: 32, dropout: 0.3}",
}


EVERY_CHANGE = {("mlp", "jit"), ("mlp", "pmap"), ("mlp", "shard_map"), ("cnn", "shard_map"), ("vit", "jit")}
"""Pairs of a net and a case that are not left to the night."""


@pytest.mark.slow
@pytest.mark.newest
@pytest.mark.parametrize(
    ("net", "case"),
    [
        pytest.param(net, case, marks=() if (net, case) in EVERY_CHANGE else pytest.mark.nightly)
        for net in NETS
        for case in CASES
    ],
)
def test_dropout_and_weights_of_classes_are_those_of_one_device(tmp_path: Path, net: str, case: str) -> None:
    path = recipe_with(tmp_path, NETS[net])
    losses, params = trained(path, 8, *CASES[case])
    of_one, params_of_one = trained(path, 1)
    assert losses == pytest.approx(of_one, rel=2e-6)
    assert worst(params, params_of_one) < 1e-5
    assert losses[0] != trained(path, 1, "model.dropout=0")[0][0]
    assert losses[0] != trained(path, 1, "class_weights=null")[0][0]


def test_dropout_drops_its_share_in_training_alone() -> None:
    model = MLP(sizes=(4, 4000, 1), label="number", mean=0.0, std=1.0, dropout=0.25)
    params = {
        "layer0": {"weight": jnp.ones((4, 4000)), "bias": jnp.zeros(4000)},
        "layer1": {"weight": jnp.ones((4000, 1)) / 16000, "bias": jnp.zeros(1)},
    }
    batch = {"features": jnp.ones((3, 4)), "row": jnp.arange(3, dtype=jnp.uint32)}
    context = SingleDeviceContext(train=True, seed=1)
    value = model.outputs(params, batch, context)[:, 0]
    kept = np.asarray(value) * 0.75  # the share of the 4,000 values that are kept, each divided by 0.75
    assert np.allclose(kept, 0.75, atol=0.03)
    assert len(set(kept.tolist())) == 3  # every example has numbers of its own
    value = model.outputs(params, batch, SingleDeviceContext())
    assert value[:, 0].tolist() == pytest.approx([1.0] * 3, rel=1e-4)


def test_balanced_weights_are_one_on_average_and_named_ones_are_as_given(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    source = load(written(tmp_path, "mlp", table(tmp_path, "grade"))).data.open("train")
    counts = class_counts(source)
    assert sum(counts.values()) == len(source)
    balanced = class_weights("balanced", source)
    assert balanced is not None
    shares = np.array(list(counts.values())) * balanced
    assert np.allclose(shares, len(source) / 2)
    assert class_weights({"dear": 3.0}, source).tolist() == [1.0, 3.0]  # pyright: ignore[reportOptionalMemberAccess]
    assert class_weights({}, source) is None
    with pytest.raises(DataError, match="no class 'deer'"):
        class_weights({"deer": 3.0}, source)


def test_weights_of_classes_reach_the_training_batches_alone(tmp_path: Path) -> None:
    recipe = load(written(tmp_path, "mlp", "digits", 'class_weights: {"3": 4}\n'))
    source = recipe.data.open("train")
    assembly = assemble(recipe, jax.devices()[:1], source.example, 10)
    batch = host_batches(assembly, source, np.arange(16), 0, 1)[0]
    assert batch[WEIGHT].tolist() == np.where(batch[LABEL] == 3, 4.0, 1.0).tolist()
    assert IMAGE in batch


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ('data={kind: text, files: ["{dtrain}/data/alice.txt"], length: 8}', "has no classes"),
        ("data={kind: digits, pixels: {mixup: 0.2}}", "mixes two images"),
    ],
)
def test_weights_of_classes_are_refused_where_there_is_not_one_class(tmp_path: Path, more: str, message: str) -> None:
    path = written(tmp_path, "mlp", "digits", "class_weights: balanced\n")
    with pytest.raises(RecipeError, match=message):
        load(path, [more])


@pytest.mark.slow
def test_weights_are_printed_and_wrong_names_refused_before_compiling(dtrain: Dtrain, tmp_path: Path) -> None:
    path = written(tmp_path, "mlp", "digits")
    refused = dtrain("run", path, "class_weights={cat: 2}", code=4).stderr
    assert "no class 'cat'" in refused
    assert "compiled" not in refused
    shown = dtrain("run", path, "class_weights={'3': 4}", "name=weighted")
    assert "weights of the classes: 0 1, 1 1, 2 1, 3 4, 4 1" in shown.stdout + shown.stderr


def test_a_warm_up_below_one_is_that_share_of_any_run() -> None:
    for kind in get_args(Schedule):
        schedule = kind(warmup=0.1)
        assert [schedule.warmup_steps(steps) for steps in (1, 2, 10, 1000)] == [0, 0, 1, 100]
        assert kind(warmup=0.99).warmup_steps(4) == 3  # shorter than the run
        assert kind(warmup=7).warmup_steps(1000) == 7
    by_share, by_steps = (learning_rate(AdamW(lr=1.0, schedule=Cosine(warmup=given)), 40) for given in (0.25, 10))
    assert [float(by_share(step)) for step in range(40)] == [float(by_steps(step)) for step in range(40)]
    with pytest.raises(FieldError) as refused:
        learning_rate(AdamW(lr=1.0, schedule=Cosine(warmup=40)), 40)
    assert refused.value.hint == "optimizer.schedule.warmup=0.1 is a tenth of a run of any length"


def test_examples_of_classes_in_another_order_keep_their_files() -> None:
    class Named(Arrays):
        class_names = ("b", "a")

        def place(self, index: int) -> str:
            return f"{index}.png"

    features = {LABEL: np.array([0, 1], np.int32)}
    source = with_classes(Named(features, {LABEL: Feature((), "int32", 2)}, ""), ("a", "b"))
    assert source.rows(np.arange(2))[LABEL].tolist() == [1, 0]
    assert [source.place(index) for index in range(2)] == ["0.png", "1.png"]
