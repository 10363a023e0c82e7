"""A step divides its sums by their weight once, including a weight of 0."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dtrain.assembly.state import State
from dtrain.assembly.step import loss_of, means, parameter_norm, train_step
from dtrain.data.batch import Batch
from dtrain.models.nn.model import Loss
from dtrain.models.nn.param import Param, Tree, initial, merged, normal, paths, trained
from dtrain.models.nn.precision import Precision
from dtrain.models.nn.single_device import SingleDeviceContext
from dtrain.optim.optimizer import SGD
from dtrain.optim.shared import Linear
from dtrain.optim.update import learning_rate, transformation
from dtrain.train.hooks import norms_of
from tests.engines import MODELS, random_batch

MODEL, OPTIMIZER = MODELS["mlp"], SGD(lr=0.1, momentum=0.0)
DECLARED = MODEL.params()
LOSS = loss_of(MODEL, lambda rows: rows, Precision())


def stepped(
    weight: np.ndarray, optimizer: SGD = OPTIMIZER, begin: State | None = None
) -> tuple[State, dict[str, float]]:
    def grads(params: object, batch: object) -> object:
        found = lambda params: LOSS(params, batch, SingleDeviceContext())  # noqa: E731
        return found(params), jax.grad(lambda params: found(params).sum)(params)

    update, params = transformation(optimizer, DECLARED, 10), initial(DECLARED, jax.random.key(0), "float32")
    step = train_step(grads, update, learning_rate(optimizer, 10), DECLARED)
    begin = begin or State(np.int32(0), params, update.init(params))
    state, metrics = jax.jit(step)(begin, random_batch() | {"weight": weight})
    return state, jax.tree.map(float, metrics)


def test_a_step_counts_one_update_and_the_learning_rate_is_that_of_its_number() -> None:
    optimizer, state, rates = SGD(lr=1.0, momentum=0.0, schedule=Linear(warmup=4)), None, []
    for _ in range(3):
        state, metrics = stepped(np.ones(16, np.float32), optimizer, state)
        rates.append(metrics["lr"])
    assert state is not None
    assert (int(state.step), rates) == (3, pytest.approx([0.2, 0.4, 0.6]))


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1.0, 0.01])
def test_weights_below_one_are_weights(scale: float) -> None:
    draw = np.random.default_rng(1).random(16).astype(np.float32)
    (state, metrics), (reference, expected) = stepped(scale * draw), stepped(draw)
    assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert metrics["accuracy"] == pytest.approx(expected["accuracy"], rel=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), state.params, reference.params)


@pytest.mark.parametrize(("at", "due"), [(2, True), (1, False)])
def test_norms_are_those_of_the_arrays_and_are_computed_when_due(at: int, due: bool) -> None:
    def grads(params: object, batch: object) -> object:
        found = lambda params: LOSS(params, batch, SingleDeviceContext())  # noqa: E731
        return found(params), jax.grad(lambda params: found(params).sum)(params)

    update, params = transformation(OPTIMIZER, DECLARED, 10), initial(DECLARED, jax.random.key(0), "float32")
    step = train_step(grads, update, learning_rate(OPTIMIZER, 10), DECLARED, norms_every=3)
    batch = random_batch() | {"weight": np.ones(16, np.float32)}
    state, metrics = jax.jit(step)(State(np.int32(at), params, update.init(params)), batch)
    found = norms_of(metrics)
    names = jax.tree.leaves(paths(DECLARED))
    assert set(found) == {f"norm/{kind}/{name}" for kind in ("grad", "update", "param") for name in names}
    if not due:
        assert not any(found.values())
        return
    gradients = [value for name, value in found.items() if name.startswith("norm/grad/")]
    assert np.sqrt(np.sum(np.square(gradients))) == pytest.approx(float(metrics["grad_norm"]), rel=1e-5)
    for name, old, new in zip(names, jax.tree.leaves(params), jax.tree.leaves(state.params), strict=True):
        assert found[f"norm/param/{name}"] == pytest.approx(np.linalg.norm(new), rel=1e-5)
        assert found[f"norm/update/{name}"] == pytest.approx(np.linalg.norm(new - old), rel=1e-4, abs=1e-7)


def test_norms_and_gradients_are_those_of_parameters_that_are_trained() -> None:
    frozen = DECLARED | {"layer0": {name: replace(one, trained=False) for name, one in DECLARED["layer0"].items()}}

    def grads(params: Tree, batch: Batch) -> tuple[Loss, Tree]:
        found = lambda own: LOSS(merged(own, params, frozen), batch, SingleDeviceContext())  # noqa: E731
        return found(trained(params, frozen)), jax.grad(lambda own: found(own).sum)(trained(params, frozen))

    update, params = transformation(OPTIMIZER, frozen, 10), initial(frozen, jax.random.key(0), "float32")
    step = train_step(grads, update, learning_rate(OPTIMIZER, 10), frozen, norms_every=1, gradients_too=True)
    batch = random_batch() | {"weight": np.ones(16, np.float32)}
    _, metrics = jax.jit(step)(State(np.int32(0), params, update.init(trained(params, frozen))), batch)
    names = {name for name in jax.tree.leaves(paths(DECLARED)) if not name.startswith("layer0.")}
    assert set(norms_of(metrics)) == {f"norm/{kind}/{name}" for kind in ("grad", "update", "param") for name in names}
    assert metrics["gradients"].keys() == names
    for name, gradient in metrics["gradients"].items():
        assert norms_of(metrics)[f"norm/grad/{name}"] == pytest.approx(float(np.linalg.norm(gradient)), rel=1e-5)


def test_a_stack_of_layers_has_a_norm_for_each() -> None:
    values = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    found = parameter_norm(jnp.asarray(values), Param((2, 3, 4), "layer in out", init=normal(1.0)))
    np.testing.assert_allclose(found, [np.linalg.norm(values[0]), np.linalg.norm(values[1])], rtol=1e-6)


def test_a_batch_without_weight_moves_nothing() -> None:
    state, metrics = stepped(np.zeros(16, np.float32))
    assert metrics["loss"] == metrics["grad_norm"] == 0
    jax.tree.map(np.testing.assert_array_equal, state.params, initial(DECLARED, jax.random.key(0), "float32"))
    assert (
        means(LOSS(state.params, random_batch() | {"weight": np.zeros(16, np.float32)}, SingleDeviceContext()))[
            "accuracy"
        ]
        == 0
    )
