"""A step divides its sums by their weight once, including a weight of 0."""

import jax
import numpy as np
import pytest

from dtrain.models.nn.param import initial
from dtrain.models.nn.precision import Precision
from dtrain.models.nn.single_device import SingleDeviceContext
from dtrain.optim.optimizer import SGD
from dtrain.optim.update import learning_rate, transformation
from dtrain.train.state import State
from dtrain.train.step import loss_of, means, train_step
from tests.engines import MODELS, random_batch

MODEL, OPTIMIZER = MODELS["mlp"], SGD(lr=0.1, momentum=0.0)
DECLARED = MODEL.params()
LOSS = loss_of(MODEL, lambda rows: rows, Precision())


def stepped(weight: np.ndarray) -> tuple[State, dict[str, float]]:
    def grads(params: object, batch: object) -> object:
        found = lambda params: LOSS(params, batch, SingleDeviceContext())  # noqa: E731
        return found(params), jax.grad(lambda params: found(params).sum)(params)

    update, params = transformation(OPTIMIZER, DECLARED, 10), initial(DECLARED, jax.random.key(0), "float32")
    step = train_step(grads, update, learning_rate(OPTIMIZER, 10), DECLARED)
    state, metrics = step(State(np.int32(0), params, update.init(params)), random_batch() | {"weight": weight})
    return state, jax.tree.map(float, metrics)


@pytest.mark.parametrize("scale", [1.0, 0.01])
def test_weights_below_one_are_weights(scale: float) -> None:
    draw = np.random.default_rng(1).random(16).astype(np.float32)
    (state, metrics), (reference, expected) = stepped(scale * draw), stepped(draw)
    assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert metrics["accuracy"] == pytest.approx(expected["accuracy"], rel=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), state.params, reference.params)


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
