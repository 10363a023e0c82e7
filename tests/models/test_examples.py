"""The examples and other models of users train alike on every engine and mesh, randomness and statistics included."""

import ast
import dataclasses
import importlib
import re
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest

from dtrain import layers
from dtrain.assembly import step
from dtrain.assembly.assemble import assemble
from dtrain.assembly.input import eval_batches, refuse_broken_contract
from dtrain.assembly.state import create_state
from dtrain.checkpoint import manifest
from dtrain.core.errors import RecipeError
from dtrain.data.batches import TrainBatches
from dtrain.data.order import Order
from dtrain.models.nn.param import paths
from dtrain.models.nn.single_device import SingleDeviceContext
from dtrain.parallel.engine import Put
from dtrain.recipe.load import load
from tests.conftest import Dtrain
from tests.engines import random_batch, worst

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.yaml"))
NEEDS = {"linen": "flax", "nnx": "flax", "equinox": "equinox"}
LONGER = dict.fromkeys(("byol", "clip_pairs", "ctc", "diffusion", "mae", "pinn", "wgan_gp"), 60)
"""Most lines of examples with a loss of their own."""
SETTINGS = ["batch=32", "epochs=null", "steps=10", "optimizer={kind: sgd, lr: 0.1, momentum: 0.5}"]
SLOWER = {"mae": ["optimizer.lr=0.01"]}
"""Examples that diverge at that rate, so that rounding grows."""
CASES = {
    "jit-fsdp": ["engine=jit", "mesh={data: 2, fsdp: 4}"],
    "shard_map-data": ["engine=shard_map", "mesh={data: 8}"],
    "shard_map-fsdp": ["engine=shard_map", "mesh={data: 2, fsdp: 4}"],
    "pmap": ["engine=pmap", "mesh={data: 8}"],
}


def library(name: str) -> None:
    """Skip the test if the example's library is not installed."""
    for word, package in NEEDS.items():
        if word in name:
            pytest.importorskip(package, reason=f"{package} is not installed")


def trained(name: str, *overrides: str, devices: int = 8) -> tuple[list[float], Any, Any]:
    """The losses of three steps, the gradients of the first one, and the parameters after the third.

    `name`: of an example, or of a class in tests/models/user_models.py.
    """
    own = [] if name in NAMES else [f"model.target=tests.models.user_models:{name}"]
    changes = [*SETTINGS, *own, *SLOWER.get(name, []), *overrides]
    recipe = load(EXAMPLES / f"{'plain_jax' if own else name}.yaml", changes)
    return three_steps(recipe, devices)


def three_steps(recipe: Any, devices: int) -> tuple[list[float], Any, Any]:
    """As `trained`, of a recipe."""
    source = recipe.data.open("train")
    assembly = assemble(recipe, jax.devices()[:devices], source.example, 10)
    put = Put(assembly.engine, assembly.layout, recipe.batch)
    batches = TrainBatches(
        source, Order(len(source), 0, None), recipe.batch, local=put.held, start=0, steps=3, keyed=True
    )
    state = create_state(assembly.make, assembly.shapes)
    step, losses, gradients = assembly.engine.compile(assembly.train(), "cpu"), [], None
    for number in range(3):
        state, metrics = step(state, put(batches[number]))
        losses.append(float(jax.block_until_ready(metrics)["loss"]))
        gradients = gradients or jax.device_get(jax.tree.leaves(state.optimizer))  # the momentum after one step
    return losses, gradients, jax.device_get(state.params)


@cache
def one_device(name: str, parts: int) -> tuple[list[float], Any, Any]:
    return trained(name, "mesh={data: 1}", f"accumulate={parts}", devices=1)


USERS = [*NAMES, "Contrastive", "Running", "Denoiser"]
EVERY = [(name, case, parts) for name in USERS for case in CASES for parts in (1, 2)]
IN_CI = {(name, list(CASES)[number % len(CASES)], 1 + number // len(CASES) % 2) for number, name in enumerate(USERS)}
IN_CI |= {("linen_cnn", "shard_map-fsdp", 1), ("Contrastive", "shard_map-fsdp", 1)}
"""Each model in one of the cases, in turn, whole or in microbatches; the full product at night."""


@pytest.mark.slow
@pytest.mark.newest
@pytest.mark.parametrize(
    ("name", "case", "parts"), [pytest.param(*one, marks=() if one in IN_CI else pytest.mark.nightly) for one in EVERY]
)
def test_losses_and_gradients_are_those_of_one_device(name: str, case: str, parts: int) -> None:
    library(name)
    losses, gradients, params = trained(name, *CASES[case], f"accumulate={parts}")
    reference_losses, reference_gradients, reference_params = one_device(name, parts)
    assert losses == pytest.approx(reference_losses, rel=2e-6)
    assert worst(gradients, reference_gradients) < 1e-5
    assert worst(params, reference_params) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linen_rnn", "nnx_rnn"])
@pytest.mark.parametrize("case", ["shard_map-fsdp", pytest.param("jit-fsdp", marks=pytest.mark.nightly)])
def test_recurrent_modules_of_flax_train_alike_on_every_engine(name: str, case: str) -> None:
    library("nnx")
    target = f"model.target=tests.models.user_modules:{name}"
    losses, gradients, params = trained("plain_jax", target, *CASES[case])
    wanted_losses, wanted_gradients, wanted_params = trained("plain_jax", target, "mesh={data: 1}", devices=1)
    assert losses == pytest.approx(wanted_losses, rel=2e-6)
    assert worst(gradients, wanted_gradients) < 1e-5
    assert worst(params, wanted_params) < 1e-5


@pytest.mark.slow
def test_a_linen_module_that_dtrain_cannot_switch_to_training_is_refused() -> None:
    nn = pytest.importorskip("flax.linen", reason="flax is not installed")
    from dtrain.flax import Linen
    from tests.models.user_modules import Averages, OwnName, Rows

    batch = random_batch() | {"row": np.arange(16, dtype=np.uint32)}
    first, key = {"image": batch["image"][:1]}, jax.random.key(0)
    message = "OwnName has BatchNorm, Dropout, batch_stats, and no argument of its __call__ says whether it trains"
    with pytest.raises(RecipeError, match=message) as refused:
        Linen(OwnName()).init(key, first)
    assert "mode='its name'" in refused.value.hint
    for model in (Linen(OwnName(), mode="is_train"), Linen(Averages())):
        params = model.init(key, first)
        loss = model.loss(params, batch, SingleDeviceContext(train=True))
        assert any(float(jax.numpy.abs(value).max()) > 0 for value in loss.statistics.values())
        moved = {name: value / 16 for name, value in loss.statistics.items()}
        before = dict(zip(jax.tree.leaves(paths(params)), jax.tree.leaves(params), strict=True))
        assert all(not np.allclose(moved[name], before[name]) for name in moved)
    assert Linen(OwnName(), mode=None).init(key, first)
    assert Linen(Rows()).init(key, first)
    assert Linen(nn.Dense(10)).init(key, {"image": batch["image"][:1]})


def test_arrays_that_a_model_names_exact_keep_their_dtype() -> None:
    recipe = load(EXAMPLES / "plain_jax.yaml", [*SETTINGS, "precision.compute=bfloat16"])
    model = dataclasses.replace(recipe.model, target="tests.models.user_modules:Prices")
    batch = {"price": np.full(4, 101_487.0, np.float32), "label": np.full(4, 101_487.0, np.float32)}
    loss = step.loss_of(model.for_example(batch), lambda rows: rows, recipe.precision)
    assert float(loss({"value": jax.numpy.zeros(())}, batch, SingleDeviceContext()).sum) == 4 * 101_487
    cast = recipe.precision.cast_batch({name: jax.numpy.asarray(value) for name, value in batch.items()})
    assert (cast["label"].dtype, cast["price"].dtype) == ("float32", "bfloat16")


def test_keys_differ_by_example_step_seed_and_name() -> None:
    def draw(seed: int, name: str, rows: list[int]) -> np.ndarray:
        ctx, batch = SingleDeviceContext(train=True, seed=seed), {"row": np.array(rows, np.uint32)}
        return jax.device_get(jax.random.key_data(ctx.keys(batch, name)))

    drawn = np.concatenate([draw(0, "", [0, 1, 64]), draw(1, "", [0]), draw(0, "noise", [0])])
    assert len({tuple(key) for key in drawn}) == 5
    np.testing.assert_array_equal(draw(0, "", [64, 0]), drawn[[2, 0]])
    with_dropout = trained("plain_jax", "mesh={data: 1}", devices=1)[0]
    assert with_dropout != trained("plain_jax", "mesh={data: 1}", "model.args={drop: 0.0}", devices=1)[0]


def test_a_statistic_is_the_mean_over_the_examples_of_the_step() -> None:
    _, _, params = trained("Running", *CASES["shard_map-fsdp"], "accumulate=2")
    recipe = load(EXAMPLES / "plain_jax.yaml", SETTINGS)
    source, expected = recipe.data.open("train"), np.zeros(64)
    for number in range(3):
        rows = source.rows(Order(len(source), 0, None)(np.arange(32) + 32 * number))
        image = jax.device_get(recipe.data.prepare(rows, jax.random.key(0), True)["image"]).reshape(32, -1)
        expected = 0.9 * expected + 0.1 * image.mean(0)
    np.testing.assert_allclose(params["mean"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Unknown", "loss() returns the statistic 'out.bias', which is trained"),
        ("Mishapen", "the statistic mean has shape (3,); the parameter has (64,)"),
        ("Patterned", "'projet' matches no parameter"),
        ("Integers", "init() returns count of type int32; parameters are floating-point"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused_with_the_reason(name: str, message: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(message)):
        trained(name, devices=1)


@pytest.mark.slow
def test_keys_of_one_name_are_drawn_once(name: str = "Twice") -> None:
    with pytest.raises(RecipeError, match=r"user_models\.py:\d+: ctx\.keys is called twice with one name"):
        trained(name, "mesh={data: 1}", devices=1)
    losses, _, _ = trained("Named", *CASES["shard_map-data"], "accumulate=2")
    assert losses == pytest.approx(trained("Named", "mesh={data: 1}", devices=1)[0], rel=2e-6)


def evaluated(name: str, *overrides: str, devices: int = 8) -> tuple[float, np.ndarray, Any]:
    """The mean loss of the held-out examples, what is predicted for them, and the check of the contract."""
    own = [*SETTINGS, f"model.target=tests.models.user_models:{name}", *overrides]
    recipe = load(EXAMPLES / "plain_jax.yaml", own)
    source = recipe.data.open("test")
    assembly = assemble(recipe, jax.devices()[:devices], source.example, 10)
    state = create_state(assembly.make, assembly.shapes)
    state = dataclasses.replace(state, step=state.step + 5)
    measure = assembly.engine.compile(assembly.evaluate(), "cpu")
    predict = assembly.engine.compile(assembly.predict(state, source.example), "cpu")
    sums, outputs = [], []
    for batch in eval_batches(assembly, source, None):
        sums.append(jax.block_until_ready(jax.device_get(measure(state, batch))))
        outputs.append(jax.block_until_ready(jax.device_get(predict(state, batch)))["restored"])
    mean = sum(float(one.sum) for one in sums) / sum(float(one.weight) for one in sums)
    return (
        mean,
        np.concatenate(outputs)[: len(source)],
        partial(refuse_broken_contract, assembly, measure, source, state),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [name if name == "shard_map-fsdp" else pytest.param(name, marks=pytest.mark.nightly) for name in CASES]
)
def test_evaluations_and_predictions_draw_the_same_numbers_on_every_mesh(case: str) -> None:
    mean, outputs, check = evaluated("Denoiser", "mesh={data: 1}", devices=1)
    check()
    for other in (CASES[case], [*CASES[case], "evaluate.batch=64"]):
        one, rows, check = evaluated("Denoiser", *other)
        check()
        assert one == pytest.approx(mean, rel=2e-6)
        np.testing.assert_allclose(rows, outputs, rtol=2e-5, atol=2e-5)
    assert evaluated("Denoiser", "mesh={data: 1}", "seed=1", devices=1)[0] != mean


def test_random_numbers_by_place_are_refused_with_what_to_use() -> None:
    *_, check = evaluated("ByPlace", "mesh={data: 1}", devices=1)
    with pytest.raises(RecipeError, match="of the loss changes if examples change places") as refused:
        check()
    assert "ctx.keys(batch, name)" in refused.value.hint


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "message", "hint"),
    [
        ("TrainsByPlace", "in training, sum of the loss changes if examples change places", "ctx.keys"),
        ("TrainsByMean", "in training, the loss is not a sum over examples", "ctx.sum_over_examples"),
    ],
)
def test_what_depends_on_the_mesh_in_training_alone_is_refused(name: str, message: str, hint: str) -> None:
    for where in (("mesh={data: 1}",), CASES["shard_map-fsdp"]):
        *_, check = evaluated(name, *where, devices=1 if len(where) == 1 else 8)
        with pytest.raises(RecipeError, match=message) as refused:
            check()
        assert hint in refused.value.hint
    *_, check = evaluated("TrainsByMeanOfAll", *CASES["shard_map-fsdp"])
    check()


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [name if name == "shard_map-fsdp" else pytest.param(name, marks=pytest.mark.nightly) for name in CASES]
)
def test_a_model_knows_the_number_of_its_step(case: str) -> None:
    losses, gradients, _ = trained("Denoiser", *CASES[case], "accumulate=2", "optimizer.lr=1e-9")
    alone = trained("Denoiser", "mesh={data: 1}", "optimizer.lr=1e-9", devices=1)
    assert losses == pytest.approx(alone[0], rel=2e-6) and worst(gradients, alone[1]) < 1e-5
    assert evaluated("Denoiser", "mesh={data: 1}", devices=1)[0] > 1.3 * losses[0]  # 5 updates: times 1.5


@pytest.mark.parametrize("name", NAMES)
def test_the_users_file_is_short(name: str) -> None:
    tree = ast.parse((EXAMPLES / f"{name}.py").read_text())
    lines = (EXAMPLES / f"{name}.py").read_text().splitlines()
    assert len([line for line in lines if line.strip()]) - len(
        (ast.get_docstring(tree) or "").splitlines()
    ) <= LONGER.get(name, 25)
    assert not [line for line in lines if "import dtrain." in line]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name", [name if name == "plain_jax" else pytest.param(name, marks=pytest.mark.nightly) for name in NAMES]
)
def test_a_resumed_run_ends_with_the_same_bits(dtrain: Dtrain, tmp_path: Path, name: str) -> None:
    library(name)
    recipe, place = EXAMPLES / f"{name}.yaml", ["engine=shard_map", "mesh={data: 2, fsdp: 2}", "--devices", "4"]
    length = ["epochs=null", "evaluate.every=0", "optimizer={kind: sgd, lr: 0.01}"]
    dtrain("run", recipe, *length, *place, "steps=12", "name=straight")
    dtrain("run", recipe, *length, *place, "steps=5", "name=halves")
    done = dtrain("run", recipe, *length, *place, "steps=12", "name=halves")
    assert "resumed from step 5" in done.stderr
    straight, halves = (
        manifest.read(tmp_path / "runs" / run / "checkpoints" / "12").checksum for run in ("straight", "halves")
    )
    assert straight == halves


@pytest.mark.parametrize("name", [name for name in NAMES if name != "nnx_transformer"])
def test_explain_shows_how_the_parameters_are_split(in_process: Dtrain, name: str) -> None:
    library(name)
    shown = in_process("explain", EXAMPLES / f"{name}.yaml", "--devices", "4", "mesh={fsdp: 4}", "--run-code").stdout
    assert "embed" in shown
    assert "replicated on every device" in shown


@pytest.mark.slow
def test_the_sum_over_alignments_is_that_of_optax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    module = importlib.import_module("ctc")
    rows = [module.Tones("train")[index] for index in range(8)]
    digits = np.stack([row["digits"] for row in rows])
    log_p = jax.nn.log_softmax(jax.random.normal(jax.random.key(0), (8, module.FRAMES, 11)))
    with jax.numpy_rank_promotion("allow"):
        expected = optax.ctc_loss(log_p, np.zeros((8, module.FRAMES)), digits, (digits == 0).astype(float))
    np.testing.assert_allclose(module.ctc(log_p, digits), expected, rtol=1e-5)


@pytest.mark.slow
def test_batch_normalisation_is_that_of_flax() -> None:
    """Loss and new statistics of a training step against Flax's own call with the whole batch."""
    nn = pytest.importorskip("flax.linen", reason="flax is not installed")
    from dtrain.flax import Linen

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x: jax.Array, train: bool) -> jax.Array:
            x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(nn.Conv(8, (3, 3))(x))
            return nn.Dense(10)(nn.relu(x).reshape(len(x), -1))

    batch = random_batch() | {"row": np.arange(16, dtype=np.uint32)}
    model, ctx = Linen(Net()), SingleDeviceContext(train=True)
    params = model.init(jax.random.key(0), {"image": batch["image"][:1]})
    loss = jax.jit(lambda p, b: model.loss(p, b, ctx))(params, batch)
    logits, new = Net().apply(params, batch["image"], train=True, mutable=["batch_stats"])
    expected = layers.classify(logits, batch, ctx)
    assert float(loss.sum) == pytest.approx(float(expected.sum), rel=1e-6)
    own = {name: value / 16 for name, value in loss.statistics.items()}
    theirs = dict(zip(jax.tree.leaves(paths(new)), jax.tree.leaves(new), strict=True))
    assert own.keys() == theirs.keys()
    assert all(np.allclose(own[name], theirs[name], rtol=1e-5, atol=1e-7) for name in own)
    still = jax.jit(lambda p, b: model.loss(p, b, SingleDeviceContext()))(params, batch)
    assert not still.statistics


def test_each_kind_of_step_draws_numbers_of_its_own() -> None:
    batch = {"row": np.arange(2, dtype=np.uint32)}
    kinds: list[dict[str, Any]] = [
        {"train": True},
        {"purpose": "evaluation"},
        {"purpose": "prediction"},
        {"purpose": "samples"},
    ]
    drawn = [jax.random.key_data(SingleDeviceContext(**kind).keys(batch, "noise")).tolist() for kind in kinds]
    assert len({str(one) for one in drawn}) == len(kinds)
