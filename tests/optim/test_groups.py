"""Groups of parameters by pattern: frozen ones stay and have no optimizer state, others move by their own rate."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from dtrain.assembly import state, step
from dtrain.core.errors import RecipeError
from dtrain.inference.open_run import open as open_run
from dtrain.models.custom import Custom
from dtrain.models.lora import Lora, adapted
from dtrain.models.mlp import MLP
from dtrain.models.nn.param import dotted, paths
from dtrain.optim.custom import CustomOptimizer
from dtrain.optim.groups import Group, grouped
from dtrain.optim.optimizer import SGD, Adafactor, AdamW, Lion, Muon
from dtrain.optim.update import averaged, learning_rate, transformation
from dtrain.parallel.engine import Put
from dtrain.parallel.mesh import Mesh
from dtrain.parallel.rules import Layout
from tests.conftest import Dtrain
from tests.engines import ENGINES, EXAMPLES, example_of, random_batch

MODEL = MLP(sizes=(64, 32, 10))
MESHES = {"jit": Mesh(data=2, fsdp=2), "shard_map": Mesh(data=2, fsdp=2), "pmap": Mesh(data=4)}


def trained(optimizer: Any, engine: str = "jit", steps: int = 2) -> tuple[dict[str, np.ndarray], dict[str, Any], Any]:
    """The parameters before and after some steps, by path, and the last state."""
    mesh = MESHES[engine]
    devices, sizes = jax.devices()[:4], mesh.sizes(4)
    layout = Layout(
        sizes, mesh.table(), grouped(MODEL.params(), optimizer.groups), mesh.build(sizes, devices), example_of(MODEL)
    )
    update = transformation(optimizer, layout.declared, 100)
    make = state.state_initializer(layout.declared, update, "float32", 0)
    shapes = state.abstract(make, layout, optimizer.state_dims, optimizer.apart)
    grads = ENGINES[engine].grads(layout, step.loss_of(MODEL, lambda rows: rows, step.Precision()), 2)
    one = step.train_step(grads, update, learning_rate(optimizer, 100), layout.declared)
    now, rows = state.create_state(make, shapes), Put(ENGINES[engine], layout, EXAMPLES)(random_batch(MODEL))
    out = (state.placement(shapes), layout.sharding(jax.sharding.PartitionSpec()))
    compiled = ENGINES[engine].compile(ENGINES[engine].trace(layout, one, now, rows, out=out, donate=False), "cpu")
    before = leaves_by_path(now.params)
    for _ in range(steps):
        now, _ = compiled(now, rows)
    return before, leaves_by_path(now.params), now


def leaves_by_path(tree: Any) -> dict[str, np.ndarray]:
    return dict(zip(jax.tree.leaves(paths(tree)), jax.tree.leaves(jax.device_get(tree)), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("engine", MESHES)
@pytest.mark.parametrize("ema", [None, 0.5])
def test_frozen_parameters_stay_and_have_no_optimizer_state(engine: str, ema: float | None) -> None:
    optimizer = AdamW(lr=1e-2, decay=0.1, clip=1.0, ema=ema, groups=(Group(match="layer0.*", frozen=True),))
    before, after, now = trained(optimizer, engine)
    moved = {name for name in before if not np.array_equal(before[name], after[name])}
    assert moved == {"layer1.weight", "layer1.bias"}
    kept = [dotted(path) for path, _ in jax.tree_util.tree_leaves_with_path(now.optimizer)]
    assert any("layer1" in path for path in kept)
    assert not [path for path in kept if "layer0" in path]


@pytest.mark.slow
def test_a_rate_multiplies_the_step_and_zero_stops_it() -> None:
    plain, half = (SGD(lr=0.25, momentum=0, groups=groups) for groups in ((), (Group(match="layer1.*", lr=0.5),)))
    (start, one, _), (_, other, _) = trained(plain, steps=1), trained(half, steps=1)
    np.testing.assert_array_equal(one["layer0.weight"], other["layer0.weight"])
    np.testing.assert_allclose(
        other["layer1.weight"] - start["layer1.weight"], (one["layer1.weight"] - start["layer1.weight"]) / 2, atol=1e-7
    )
    before, after, _ = trained(SGD(lr=0.25, groups=(Group(match="*", lr=0),)))
    assert all(np.array_equal(before[name], after[name]) for name in before)


@pytest.mark.slow
def test_decay_of_a_group_precedes_that_of_the_model() -> None:
    decays = SGD(lr=0.1, decay=0.5, momentum=0)
    off = SGD(lr=0.1, decay=0.5, momentum=0, groups=(Group(match="layer0.weight", decay=False),))
    (start, one, _), (_, other, _) = trained(decays, steps=1), trained(off, steps=1)
    difference = one["layer0.weight"] - other["layer0.weight"]
    np.testing.assert_allclose(difference, -0.1 * 0.5 * start["layer0.weight"], atol=1e-6)
    np.testing.assert_array_equal(one["layer1.weight"], other["layer1.weight"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ("[{match: layr0.weight}]", "optimizer.groups: 'layr0.weight' matches no parameter"),
        ("[{match: 'layer0.*'}, {match: '*.bias'}]", "parameter layer0.bias matches 'layer0.*' and '*.bias'"),
        ("[{match: '*', frozen: true}]", "every parameter is frozen"),
        ("[{match: '*', frozn: true}]", "did you mean 'frozen'?"),
        ("[{match: '*', lr: -1}]", "optimizer.groups"),
    ],
)
def test_patterns_that_cannot_be_meant_are_refused_by_check(in_process: Dtrain, groups: str, message: str) -> None:
    assert message in in_process("check", "mlp-digits", f"optimizer.groups={groups}", code=2).stderr


def test_muon_without_a_hidden_matrix_is_refused() -> None:
    declared = grouped(MODEL.params(), [Group(match="layer0.weight", frozen=True)])
    with pytest.raises(RecipeError, match="muon finds no hidden matrix"):
        transformation(Muon(lr=0.1), declared, 10)


def test_two_groups_of_one_pattern_are_refused() -> None:
    with pytest.raises(RecipeError, match="two groups have the same pattern"):
        grouped(MODEL.params(), [Group(match="*"), Group(match="*", lr=2)])


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray], pattern: str = "") -> bool:
    return all(np.array_equal(one[name], other[name]) for name in one if name.startswith(pattern))


SETTINGS = {
    "adamw": (AdamW(lr=0.01, decay=0.1), {"b1": 0.5, "b2": 0.9, "epsilon": 1e-3}),
    "sgd": (SGD(lr=0.01, decay=0.1), {"momentum": 0.3, "nesterov": True}),
    "lion": (Lion(lr=0.01), {"b1": 0.5, "b2": 0.7}),
    "adafactor": (Adafactor(lr=0.01), {"factor_from": 8}),
    "muon": (Muon(lr=0.01), {"momentum": 0.5, "b2": 0.9}),
    "custom": (CustomOptimizer(lr=0.01, target="optax:adam"), {"b1": 0.5}),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SETTINGS)
def test_a_group_has_other_settings_of_the_optimizer(kind: str) -> None:
    plain, args = SETTINGS[kind]
    _, one, _ = trained(replace(plain, groups=(Group(match="*", args=args),)))
    whole = replace(plain, args=args) if kind == "custom" else replace(plain, **args)
    _, other, _ = trained(whole)
    assert same(one, other)
    _, unchanged, _ = trained(plain)
    assert not same(one, unchanged)
    _, own, _ = trained(replace(plain, groups=(Group(match="layer0.*", args=args),)), steps=1)
    _, first, _ = trained(plain, steps=1)
    assert same(own, first, "layer1")  # the other layer's first step is that of the optimizer


@pytest.mark.slow
@pytest.mark.parametrize("engine", MESHES)
def test_a_group_is_updated_at_some_steps_with_its_own_count(engine: str) -> None:
    group = Group(match="layer1.*", every=2, start=1)
    optimizer = AdamW(lr=0.01, decay=0.1, groups=(group,))
    found = [trained(optimizer, engine, steps)[1] for steps in range(5)]
    moved = [not same(before, after, "layer1") for before, after in pairwise(found)]
    assert moved == [False, True, False, True]
    assert all(not same(before, after, "layer0") for before, after in pairwise(found))
    _, _, now = trained(optimizer, engine, 4)
    counts = {
        dotted(path): int(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(now.optimizer)
        if dotted(path).endswith("count")
    }
    assert {name.split(".")[1]: count for name, count in counts.items()} == {"group0": 2, "others": 4}


@pytest.mark.slow
@pytest.mark.parametrize("engine", MESHES)
def test_a_group_is_clipped_by_its_own_norm(engine: str) -> None:
    def moved(optimizer: Any) -> dict[str, float]:
        before, after, _ = trained(optimizer, engine, steps=1)
        change = {name: np.square(after[name] - before[name]).sum() for name in before}
        return {
            layer: float(np.sqrt(change[f"{layer}.weight"] + change[f"{layer}.bias"])) for layer in ("layer0", "layer1")
        }

    free = moved(SGD(lr=1.0, momentum=0))
    own = moved(SGD(lr=1.0, momentum=0, groups=(Group(match="layer1.*", clip=1e-3),)))
    assert own == pytest.approx({"layer0": free["layer0"], "layer1": 1e-3}, rel=1e-4)
    both = moved(SGD(lr=1.0, momentum=0, clip=2e-3, groups=(Group(match="layer1.*", clip=1e-3),)))
    assert both == pytest.approx({"layer0": 2e-3, "layer1": 1e-3}, rel=1e-4)


@pytest.mark.slow
def test_a_group_has_an_average_of_its_own() -> None:
    optimizer = SGD(lr=0.25, groups=(Group(match="layer1.*", ema=0.5),))
    start, _, _ = trained(optimizer, steps=0)
    _, after, now = trained(optimizer, steps=1)
    mean = leaves_by_path(averaged(now.optimizer, now.params))
    assert same(mean, after, "layer0")
    share = min(0.5, 1 / 10)
    for name in ("layer1.weight", "layer1.bias"):
        np.testing.assert_allclose(mean[name], share * start[name] + (1 - share) * after[name], rtol=1e-6)
    off = SGD(lr=0.25, ema=0.5, groups=(Group(match="*", ema=0),))
    assert off.averages and averaged(trained(off, steps=1)[2].optimizer, None) is None


def test_mistakes_in_groups_are_found_by_check(in_process: Dtrain) -> None:
    def refused(group: str) -> str:
        return in_process("check", "mlp-digits", f"optimizer.groups=[{{match: 'layer0.*', {group}}}]", code=2).stderr

    assert "optimizer.groups.0.args: args of layer0.*: 'b3' is no setting of it" in refused("args: {b3: 0.5}")
    assert "its settings are b1, b2, epsilon; lr, clip, ema" in refused("args: {lr: 0.5}")
    assert "b1: expected a number" in refused("args: {b1: fast}")
    assert "a frozen group is never updated" in refused("frozen: true, every: 2")
    assert "unknown key; did you mean 'every'" in refused("evry: 2")


TARGET = """
import jax
import jax.numpy as jnp

from dtrain import Loss, layers


class Net:
    averages = {"target.*": ("online.*", 0.75)}

    def params(self):
        return {name: {"out": layers.dense(64, 8, "embed hidden")} for name in ("online", "target")}

    def loss(self, params, batch, ctx):
        x = batch["image"].reshape(len(batch["image"]), -1)
        one, other = (layers.linear(ctx.gather(params[name]["out"]), x) for name in ("online", "target"))
        error = ((one - jax.lax.stop_gradient(other) - 1) ** 2).mean(1)
        weight = batch.get("weight", jnp.ones(len(x)))
        return Loss((error * weight).sum(), weight.sum(), {})


class Wrong(Net):
    def __init__(self, averages, shape=8):
        self.averages = {to: tuple(of) for to, of in averages.items()}
        self.shape = shape

    def params(self):
        return super().params() | {"other": {"out": layers.dense(64, self.shape, "embed hidden")}}
"""
RECIPE = """
model: {kind: custom, target: net:Net}
data: digits
optimizer: {kind: adamw, lr: 0.01}
batch: 64
steps: 4
checkpoint: {every: 1, keep: 9}
"""


@pytest.mark.slow
def test_a_parameter_follows_the_average_of_another_on_every_mesh(
    dtrain: Dtrain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "net.py").write_text(TARGET)
    (tmp_path / "r.yaml").write_text(RECIPE)
    dtrain("run", "r.yaml")
    for name, engine in (("jit", "jit"), ("manual", "shard_map")):
        dtrain("run", "r.yaml", f"name={name}", f"engine={engine}", "mesh={data: 2, fsdp: 4}", "--devices", "8")
    dtrain("run", "r.yaml", "name=still", "optimizer.lr=1e-30")
    dtrain("run", "r.yaml", "name=killed", DTRAIN_FAULT="kill@step:3", code=-9)
    dtrain("run", "r.yaml", "name=killed")
    dtrain("run", "r.yaml", "name=next", "init.run=runs/r")
    monkeypatch.chdir(tmp_path)

    def params(name: str, step: int) -> dict[str, np.ndarray]:
        return leaves_by_path(open_run(name, step).params)

    for number in (2, 3, 4):
        before, after = params("r", number - 1), params("r", number)
        for name in ("out.weight", "out.bias"):
            expected = 0.75 * before[f"target.{name}"] + 0.25 * after[f"online.{name}"]
            np.testing.assert_allclose(after[f"target.{name}"], expected, rtol=1e-6, atol=1e-9)
    still = params("still", 1)
    np.testing.assert_allclose(still["target.out.weight"], still["online.out.weight"], rtol=1e-6)  # it starts there
    for name in ("jit", "manual"):
        for path, values in params(name, 4).items():
            np.testing.assert_allclose(values, params("r", 4)[path], atol=2e-6)
    assert same(params("killed", 4), params("r", 4))
    assert not same(params("next", 1), params("r", 4))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("averages", "message"),
    [
        ("{target.*: [onlin.*, 0.5]}", "target.out.bias follows onlin.out.bias, which is no parameter"),
        ("{traget.*: [online.*, 0.5]}", "'traget.*' matches no parameter"),
        ("{target.*: [other.*, 0.5]}", "target.out.bias (8,), other.out.bias (4,)"),
        ("{target.*: [online.*, 1.5]}", "0 <= decay < 1"),
        ("{target.*: [online.out.weight, 0.5]}", "give both the same number"),
        ("{target.*: [other.*, 0.5], other.*: [online.*, 0.5]}", "which is an average itself"),
    ],
)
def test_averages_that_cannot_be_are_refused(dtrain: Dtrain, tmp_path: Path, averages: str, message: str) -> None:
    (tmp_path / "net.py").write_text(TARGET)
    (tmp_path / "r.yaml").write_text(RECIPE)
    shape = 8 if "average itself" in message else 4
    model = f"model={{kind: custom, target: 'net:Wrong', args: {{averages: {averages}, shape: {shape}}}}}"
    assert message in dtrain("run", "r.yaml", model, code=2).stderr


def test_adapters_of_a_model_with_averages_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "net.py").write_text(TARGET)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match=r"lora: target\.out\.bias is an average of parameters"):
        adapted(Custom(target="net:Net"), Lora(rank=2, targets=("online.*weight",))).params()
