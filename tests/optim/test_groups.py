"""Groups of parameters by pattern: frozen ones stay and have no optimizer state, others move by their own rate."""

from typing import Any

import jax
import numpy as np
import pytest

from dtrain.assembly import state, step
from dtrain.core.errors import RecipeError
from dtrain.models.mlp import MLP
from dtrain.models.nn.param import dotted, paths
from dtrain.optim.groups import Group, grouped
from dtrain.optim.optimizer import SGD, AdamW, Muon
from dtrain.optim.update import learning_rate, transformation
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
