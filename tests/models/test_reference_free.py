"""Preference tuning without a reference: losses of recorded log-probabilities are the published ones; whole runs."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dtrain.models.lora import Adapted
from dtrain.models.reference_free import ORPO, ReferenceFree, ReferenceFreeModel, SimPO
from tests.conftest import Dtrain
from tests.engines import initial_values, loss_alone
from tests.models.test_dpo import DECODER, LORA, PAIRS, log_probabilities, pairs

CHOSEN, REJECTED = [-0.1, -1.5, -0.7, -3.2, -2.0], [-0.9, -0.4, -0.7, -5.0, -0.01]
RATIOS = [-0.01739421655221244, -0.5223209287327877, -0.17328679513998632, -0.03702666226748945, -1.614081088500983]
"""beta x log sigmoid of the log odds ratio, beta = 0.25: `ORPOTrainer.odds_ratio_loss` of trl 0.24."""
SIMPO = [0.2632824673380311, 3.578319821093369, 1.1711006659477778, 0.024422845933779178, 5.7780993895846695]
"""beta = 2.5, gamma = 0.8: `CPOTrainer.cpo_loss` of trl 0.24, loss_type simpo."""
LOSSES: list[ReferenceFree] = [ORPO(beta=0.25), SimPO(beta=2.5, margin=0.8)]


@pytest.mark.parametrize(
    ("objective", "expected"),
    [(LOSSES[0], [-chosen - ratio for chosen, ratio in zip(CHOSEN, RATIOS, strict=True)]), (LOSSES[1], SIMPO)],
)
def test_losses_of_recorded_log_probabilities_are_the_published_ones(objective: Any, expected: list[float]) -> None:
    losses, margins = objective.losses(jnp.asarray(CHOSEN), jnp.asarray(REJECTED))
    np.testing.assert_allclose(losses, expected, rtol=2e-6)
    np.testing.assert_allclose(margins, objective.beta * (np.asarray(CHOSEN) - REJECTED), rtol=1e-5)


def test_an_answer_that_is_certain_has_finite_odds() -> None:
    losses, slopes = jax.value_and_grad(lambda x: ORPO().losses(x, jnp.asarray([-1.0]))[0].sum())(jnp.asarray([0.0]))
    assert np.isfinite(losses)
    assert np.isfinite(slopes).all()


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("objective", LOSSES, ids=["orpo", "simpo"])
def test_a_row_has_the_mean_log_probabilities_of_its_two_answers(
    tmp_path: Path, objective: ReferenceFree, lora: bool
) -> None:
    model = ReferenceFreeModel(Adapted(DECODER, LORA) if lora else DECODER, objective)
    params: Any = initial_values(model.params())
    batch = {name: jnp.asarray(x) for name, x in pairs(tmp_path, test=0.0).open("train").rows(np.arange(12)).items()}
    loss = loss_alone(model, params, batch)
    plain, losses, right = params["base"] if lora else params, [], 0
    for record in PAIRS:
        means = []
        for name in ("chosen", "rejected"):
            tokens = len(record[name].encode()) + 1  # and the one that ends it
            means.append(log_probabilities(DECODER, plain, record["prompt"], record[name]) / tokens)
        one, margin = objective.losses(jnp.asarray(means[:1]), jnp.asarray(means[1:]))
        losses.append(float(one[0]))
        right += float(margin[0]) > 0
    assert float(loss.sum) / 12 == pytest.approx(np.mean(losses), rel=1e-5)
    assert (float(loss.weight), float(loss.metrics["reward_accuracy"])) == (12, right)


RECIPE = """\
model: {kind: decoder, vocab: 256, context: 48, layers: 2, width: 16, heads: 2, hidden: 24}
data: {kind: preference, files: [pairs.jsonl], length: 48, template: plain, test: 0.3, cache: cache}
optimizer: {kind: adamw, lr: 1e-2}
batch: 4
steps: 8
track: {every: 1}
"""


@pytest.mark.slow
def test_a_run_learns_the_preference_on_every_engine_and_is_evaluated(dtrain: Dtrain, tmp_path: Path) -> None:
    pairs(tmp_path, PAIRS * 3)
    found = []
    for engine, mesh in (("jit", "{data: 2, tensor: 2}"), ("shard_map", "{data: 1, fsdp: 2, tensor: 2}")):
        name = f"orpo-{engine.replace('_', '-')}"
        (tmp_path / "orpo.yaml").write_text(RECIPE + "objective: {kind: orpo}\n")
        dtrain("run", "orpo.yaml", f"engine={engine}", f"name={name}", "--devices", "4", f"mesh={mesh}")
        rows = [json.loads(line) for line in (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()]
        found.append([row["train/loss"] for row in rows if "train/loss" in row])
    np.testing.assert_allclose(found[0], found[1], rtol=2e-5)
    assert found[0][-1] < 0.8 * found[0][0]
    assert "reward_accuracy" in dtrain("evaluate", "orpo-jit", "--devices", "4").stdout
    refused = dtrain("run", "orpo.yaml", "objective={kind: simpo, margn: 1}", "name=other", code=2).stderr
    assert "did you mean 'margin'?" in refused
    weighted = dtrain("run", "orpo.yaml", "model.z_loss=0.1", "name=other", code=2).stderr
    assert "model.z_loss: orpo leaves it out" in weighted
    experts = "model.experts={count: 4, active: 2, hidden: 8}"
    assert "leaves out the losses that balance" in dtrain("run", "orpo.yaml", experts, "name=other", code=2).stderr
    chat = "data={kind: chat, files: [pairs.jsonl], length: 48, template: plain}"
    assert "orpo needs pairs of answers" in dtrain("run", "orpo.yaml", chat, "name=other", code=2).stderr
