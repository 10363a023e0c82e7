"""The updates, compared with optax's own optimizers."""

import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dtrain.core.errors import FieldError
from dtrain.models.mlp import MLP
from dtrain.models.nn.param import Param, normal, stacked, zeros
from dtrain.optim.optimizer import SGD, Adafactor, AdamW, Lion, Muon, Optimizer
from dtrain.optim.shared import WSD, Constant, Cosine, Linear, Schedule, Steps
from dtrain.optim.update import averaged, learning_rate, transformation
from tests.engines import initial_values

DECLARED = MLP(sizes=(24, 16, 12, 10)).params()
PARAMS = initial_values(DECLARED)
MATRICES = jax.tree.map(lambda param: param.decay, DECLARED)
MEMBERS = typing.get_args(Optimizer)


def gradients(step: int) -> object:
    return jax.tree.map(lambda p: jnp.sin(p * 31 + step), PARAMS)


def walk(update: optax.GradientTransformation, steps: int = 5) -> object:
    params, state = PARAMS, update.init(PARAMS)
    for step in range(steps):
        updates, state = optax.with_extra_args_support(update).update(gradients(step), state, params, step=step)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.slow
@pytest.mark.newest
def test_adamw_is_that_of_optax_except_for_its_bias_correction() -> None:
    ours = transformation(AdamW(lr=1e-2, decay=0.1, b2=0.95, clip=1.0), DECLARED, 10)
    theirs = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2, b2=0.95, weight_decay=0.1, mask=MATRICES))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), walk(ours), walk(theirs))


def test_adam_is_that_of_the_paper_in_float64() -> None:
    """Kingma & Ba 2015, algorithm 1, in NumPy; optax's bias correction in float32 is off by 1e-5."""
    declared, start = {"w": Param((50,), "_", zeros)}, np.linspace(-1, 1, 50)
    update, params = transformation(AdamW(lr=1e-2), declared, 1000), {"w": jnp.asarray(start, jnp.float32)}
    state, w, m, v = update.init(params), start.copy(), np.zeros(50), np.zeros(50)
    for t in range(1, 101):
        g = np.float32(np.sin(np.arange(50) * 31 + t)).astype(np.float64)
        updates, state = update.update({"w": jnp.asarray(g, jnp.float32)}, state, params, step=t)
        params = optax.apply_updates(params, updates)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        w = w - 1e-2 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
    np.testing.assert_allclose(params["w"], w, atol=1.5e-6)


def test_the_rate_is_that_of_the_step_whatever_updates_were_skipped() -> None:
    update = transformation(SGD(lr=1.0, momentum=0.0, schedule=Linear()), DECLARED, 10)
    updates, _ = update.update(PARAMS, update.init(PARAMS), PARAMS, step=jnp.int32(5))
    jax.tree.map(lambda u, p: np.testing.assert_allclose(u, -0.5 * p, rtol=1e-6), updates, PARAMS)


@pytest.mark.slow
def test_sgd_and_lion_are_those_of_optax() -> None:
    for ours, theirs in (
        (SGD(lr=0.1, momentum=0.8, nesterov=True), optax.sgd(0.1, momentum=0.8, nesterov=True)),
        (Lion(lr=1e-2, decay=0.1, decay_all=True), optax.lion(1e-2, weight_decay=0.1)),
    ):
        walked = walk(transformation(ours, DECLARED, 10)), walk(theirs)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), *walked)


@pytest.mark.slow
def test_muon_orthogonalises_hidden_matrices_only() -> None:
    update = transformation(Muon(lr=1.0), DECLARED, 10)
    updates, _ = update.update(gradients(1), update.init(PARAMS), PARAMS, step=0)
    hidden, head = updates["layer1"]["weight"], updates["layer2"]["weight"]
    singular = np.linalg.svd(np.asarray(hidden), compute_uv=False) / (0.2 * np.sqrt(16))
    assert 0.6 < singular.min() < singular.max() < 1.3
    np.testing.assert_allclose(np.abs(head), 1, rtol=1e-3)  # Adam's first step is the sign
    np.testing.assert_allclose(np.abs(updates["layer1"]["bias"]), 1, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("member", MEMBERS)
def test_every_optimizer_descends(member: type) -> None:
    update = transformation(member(lr=3e-2, schedule=Cosine(warmup=3), decay=1e-3, clip=1.0, ema=0.5), DECLARED, 40)
    params, state = PARAMS, update.init(PARAMS)
    loss = lambda params: sum(jnp.square(p - 0.1).sum() for p in jax.tree.leaves(params))  # noqa: E731
    first = float(loss(params))
    move = jax.jit(lambda params, state, step: update.update(jax.grad(loss)(params), state, params, step=step))
    for step in range(40):
        updates, state = move(params, state, step)
        params = optax.apply_updates(params, updates)
    assert float(loss(params)) < 0.9 * first
    assert jax.tree.structure(averaged(state, None)) == jax.tree.structure(params)


@pytest.mark.slow
def test_the_average_is_that_of_the_parameters() -> None:
    update = transformation(SGD(lr=0.1, momentum=0.0, ema=0.9), DECLARED, 10)
    params, state, expected = PARAMS, update.init(PARAMS), PARAMS
    for step in range(100):
        updates, state = update.update(gradients(step), state, params, step=step)
        params = optax.apply_updates(params, updates)
        decay = min(0.9, (1 + step) / (10 + step))
        expected = jax.tree.map(lambda a, b, decay=decay: decay * a + (1 - decay) * b, expected, params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), averaged(state, None), expected)
    assert averaged(optax.EmptyState(), params) is params


@pytest.mark.slow
def test_the_average_of_a_short_run_has_little_of_the_initial_values() -> None:
    update = transformation(SGD(lr=0.0, momentum=0.0, ema=0.9999), DECLARED, 400)
    state, moved = update.init(PARAMS), jax.tree.map(lambda p: p + 1, PARAMS)
    for step in range(400):
        _, state = update.update(gradients(0), state, moved, step=step)
    left = jax.tree.map(lambda mean, new: np.abs(mean - new).max(), averaged(state, None), moved)
    assert max(jax.tree.leaves(left)) < 1e-5  # with a constant decay it would be 0.96


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Constant(), {0: 1, 50: 1, 99: 1}),
        (Cosine(final=0.1), {0: 1, 50: 0.55, 100: 0.1}),
        (Linear(final=0.5), {0: 1, 50: 0.75, 100: 0.5}),
        (WSD(cooldown=0.2), {0: 1, 80: 1, 90: 0.5, 100: 0}),
        (Constant(warmup=9), {0: 0.1, 4: 0.5, 9: 1, 50: 1}),
        (Cosine(warmup=20), {20: 1 / 1, 60: 0.5, 100: 0}),
        (Cosine(cycles=2), {0: 1, 25: 0.5, 49: 0.000986636, 50: 1, 75: 0.5, 100: 0}),  # of 50 steps each
        (Steps(at=(0.5, 75)), {0: 1, 49: 1, 50: 0.1, 74: 0.1, 75: 0.01, 100: 0.01}),
        (Steps(at=(30,), factor=0.5, warmup=9), {0: 0.1, 9: 1, 29: 1, 30: 0.5}),
    ],
)
def test_schedules_pass_through_their_points(schedule: Schedule, expected: dict[int, float]) -> None:
    rate = learning_rate(SGD(lr=2.0, schedule=schedule), 100)
    for step, fraction in expected.items():
        assert float(rate(step)) == pytest.approx(2 * fraction, abs=1e-6)


def test_a_warm_up_as_long_as_the_run_is_refused() -> None:
    with pytest.raises(FieldError, match="warm-up of 10 steps in a run of 10; it must be shorter"):
        learning_rate(SGD(lr=1.0, schedule=Cosine(warmup=10)), 10)


@pytest.mark.slow
def test_adafactor_is_that_of_optax_and_stores_rows_and_columns() -> None:
    ours = transformation(Adafactor(lr=1e-2, factor_from=8), DECLARED, 10)
    theirs = optax.chain(
        optax.scale_by_factored_rms(min_dim_size_to_factor=8), optax.clip_by_block_rms(1.0), optax.scale(-1e-2)
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), walk(ours), walk(theirs))
    shapes = {leaf.shape for leaf in jax.tree.leaves(ours.init(PARAMS))}
    assert (24,) in shapes
    assert (24, 16) not in shapes


@pytest.mark.slow
def test_adafactor_treats_a_stack_of_layers_as_its_layers() -> None:
    one = {"w": Param((16, 4, 3), "embed heads _", normal(1.0), fan_in=("embed",))}
    stack = stacked(one, 3)
    values = initial_values(stack)["w"]
    gradient = jnp.sin(values * 31) * jnp.arange(1.0, 4).reshape(3, 1, 1, 1)

    def moved(declared: object, w: jax.Array, g: jax.Array) -> jax.Array:
        update = transformation(Adafactor(lr=1e-2, factor_from=8), declared, 10)
        return update.update({"w": g}, update.init({"w": w}), {"w": w}, step=0)[0]["w"]

    singles = jnp.stack([moved(one, w, g) for w, g in zip(values, gradient, strict=True)])
    np.testing.assert_allclose(moved(stack, values, gradient), singles, rtol=1e-6)


@pytest.mark.slow
def test_padding_does_not_count_in_adafactors_means() -> None:
    plain = {"w": Param((45, 16), "vocab embed", normal(1.0))}
    padded = {"w": Param((48, 16), "vocab embed", normal(1.0), unpadded=(45, 16))}
    g = jnp.sin(jnp.arange(45 * 16.0)).reshape(45, 16)
    found = []
    for declared, gradient in ((plain, g), (padded, jnp.pad(g, ((0, 3), (0, 0))))):
        update = transformation(Adafactor(lr=1e-2, factor_from=8), declared, 10)
        found.append(update.update({"w": gradient}, update.init(None), {"w": gradient}, step=0)[0]["w"])
    np.testing.assert_allclose(found[1][:45], found[0], rtol=1e-5)
    assert not found[1][45:].any()
