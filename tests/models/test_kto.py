"""KTO against the published formula, computed with NumPy, and whole runs; what its data has, and what is refused."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dtrain.core.errors import DataError
from dtrain.data.feedback import Feedback
from dtrain.models.kto import KTO, JudgedModel
from dtrain.models.lora import Adapted
from dtrain.models.nn.low_rank import merged
from dtrain.models.nn.single_device import SingleDeviceContext
from tests.conftest import Dtrain
from tests.engines import initial_values, loss_alone
from tests.models.test_dpo import DECODER, LORA, log_probabilities

RATIOS, OTHERS = [0.7, -1.2, 0.1, 3.0, -0.4], [0.3, -0.1, 0.9, 0.2, -0.2]
GOOD = [True, False, True, False, True]
PUBLISHED = [0.4880023034692821, 0.9291190635926003, 0.5029999640005183, 1.138111658494048, 0.5154950367412012]
"""beta = 0.1, desirable_weight = 1, undesirable_weight = 2: `KTOTrainer.kto_loss` of trl 0.24, in float64."""
JUDGED = [
    {"prompt": f"{i} is ", "completion": ("even" if i % 2 == 0 else "odd") if i % 3 else "unknown", "label": i % 3 > 0}
    for i in range(12)
]


def feedback(folder: Path, records: list[dict[str, Any]] = JUDGED, **how: Any) -> Feedback:
    (folder / "judged.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    how = {"length": 48, "template": "plain", "cache": str(folder / "cache"), "test_files": ()} | how
    return Feedback(files=(str(folder / "judged.jsonl"),), **how)


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-np.asarray(x, np.float64)))


def test_losses_of_recorded_log_probabilities_are_the_published_ones() -> None:
    objective, weights = KTO(bad=2.0), jnp.ones(5)
    ctx = SingleDeviceContext()
    losses, margins = objective.losses(jnp.asarray(RATIOS), jnp.asarray(OTHERS), jnp.asarray(GOOD), weights, ctx)
    np.testing.assert_allclose(losses, PUBLISHED, rtol=1e-6)
    signed = 0.1 * (np.asarray(RATIOS) - np.mean(OTHERS)) * np.where(GOOD, 1, -1)
    np.testing.assert_allclose(margins, signed, rtol=1e-5)
    tripled, _ = KTO(good=3.0, bad=2.0).losses(
        jnp.asarray(RATIOS), jnp.asarray(OTHERS), jnp.asarray(GOOD), weights, ctx
    )
    np.testing.assert_allclose(tripled / losses, np.where(GOOD, 3, 1), rtol=1e-6)
    below = [-1.0] * 5  # an average below zero counts as zero
    _, margins = objective.losses(jnp.asarray(RATIOS), jnp.asarray(below), jnp.asarray(GOOD), weights, ctx)
    np.testing.assert_allclose(margins, 0.1 * np.asarray(RATIOS) * np.where(GOOD, 1, -1), rtol=1e-5)
    only = jnp.asarray([1.0, 0, 0, 0, 0])  # rows without weight, which fill a batch, do not count
    _, margins = objective.losses(jnp.asarray(RATIOS), jnp.asarray(OTHERS), jnp.asarray(GOOD), only, ctx)
    assert float(margins[0]) == pytest.approx(0.1 * (0.7 - 0.3))


def test_the_average_has_no_gradient() -> None:
    def loss(other: jax.Array) -> jax.Array:
        args = jnp.asarray(RATIOS), other, jnp.asarray(GOOD), jnp.ones(5), SingleDeviceContext()
        return KTO().losses(*args)[0].sum()

    np.testing.assert_array_equal(jax.grad(loss)(jnp.asarray(OTHERS)), np.zeros(5))


@pytest.mark.slow
def test_a_row_has_the_ratios_of_its_answer_and_of_the_next_records(tmp_path: Path) -> None:
    objective = KTO(beta=0.3, bad=1.5)
    model = JudgedModel(Adapted(DECODER, LORA), objective)
    params: Any = initial_values(model.params())
    noise = jax.tree.map(lambda x: x + 0.3 * jax.random.normal(jax.random.key(1), x.shape), params["lora"])
    params = {"base": params["base"], "lora": noise}
    rows = feedback(tmp_path, test=0.0).open("train").rows(np.arange(12))
    assert bytes(rows["token"][0][rows["document"][0] == 3].tolist()) == b"0 is odd"
    loss = loss_alone(model, params, {name: jnp.asarray(x) for name, x in rows.items()})
    combined, base = merged(model.model.combined(params)), merged(params["base"])

    def ratio(prompt: str, answer: str) -> float:
        policy, reference = (log_probabilities(DECODER, own, prompt, answer) for own in (combined, base))
        return policy - reference

    next_ones = [*JUDGED[1:], JUDGED[0]]
    ratios = np.array([ratio(one["prompt"], one["completion"]) for one in JUDGED])
    others = [ratio(one["prompt"], two["completion"]) for one, two in zip(JUDGED, next_ones, strict=True)]
    good = np.array([one["label"] for one in JUDGED])
    margins = 0.3 * (ratios - max(np.mean(others), 0)) * np.where(good, 1, -1)
    losses = np.where(good, 1, 1.5) * (1 - sigmoid(margins))
    assert float(loss.weight) == 12
    assert float(loss.sum) / 12 == pytest.approx(losses.mean(), abs=1e-6)
    assert float(loss.metrics["reward_accuracy"]) == (margins > 0).sum()
    assert float(loss.metrics["reward_margin"]) == pytest.approx(margins.sum(), abs=1e-5)


def test_every_form_of_judged_answers_is_read(tmp_path: Path) -> None:
    asked, answer = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "a"}
    last = {"prompt": "Hello", "completion": "a", "label": True}
    forms = [
        {"prompt": "Hi", "completion": "a", "label": True},
        {"prompt": [asked], "completion": [answer], "label": 1},
        {"messages": [asked, answer], "label": True},
        {"prompt": "Hi", "response": "a", "label": True, "id": 3},
        last,
    ]
    rows = feedback(tmp_path, forms, test=0.0).open("train").rows(np.arange(4))
    for values in rows.values():
        assert (values == values[0]).all()


def test_answers_that_are_not_to_be_learned_are_left_out_and_copies_held_out(tmp_path: Path) -> None:
    marked = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "a", "weight": 0}]
    records = [{"messages": marked, "label": True}, *JUDGED, *JUDGED[::-1]]
    found = feedback(tmp_path, records, test=0.25)
    own, held = (found.open(split) for split in ("train", "test"))
    assert len(own) + len(held) == 24 and "1 empty or without a target" in own.notes[0]

    def judged(source: Any) -> set[bytes]:
        rows = source.rows(np.arange(len(source)))
        first = rows["document"].min(1, keepdims=True)
        return {token[document == number].tobytes() for token, document, number in
                zip(rows["token"], rows["document"], first, strict=True)}  # fmt: skip

    assert not judged(own) & judged(held) and len(judged(held)) * 2 == len(held)


def test_an_answer_stands_beside_one_to_another_prompt(tmp_path: Path) -> None:
    """Never beside one to its own: here the first and the last prompt are the same."""
    forms = [{"prompt": who, "chosen": f"{i}+", "rejected": f"{i}-"} for i, who in enumerate("AABA")]
    rows = feedback(tmp_path, forms, test=0.0).open("train").rows(np.arange(8))

    def texts(row: int) -> tuple[str, ...]:
        token, document = rows["token"][row], rows["document"][row]
        first = int(document.min())
        return tuple(bytes(token[document == number].tolist()).decode() for number in (first, first + 1))

    found = [texts(row) for row in range(8)]
    assert found == [("A0+", "A2+"), ("A0-", "A2-"), ("A1+", "A2+"), ("A1-", "A2-"),
                     ("B2+", "B3+"), ("B2-", "B3-"), ("A3+", "A2+"), ("A3-", "A2-")]  # fmt: skip
    assert (rows["document"].max(1) == [2, 4] * 4).all()


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([{"prompt": "Hi", "completion": "a"}], "label is missing; it must be true or false"),
        ([{"prompt": "Hi", "completion": "a", "label": "good"}], "label is 'good'; it must be true or false"),
        ([{"prompt": "Hi", "label": True}], "completion is missing"),
        ([{"completion": "a", "label": True}], "has no prompt"),
        (
            [{"prompt": "Hi", "completion": answer, "label": False} for answer in "ab"],
            "all records of its file have the same prompt",
        ),
        ([{"prompt": "Hi", "completion": "a", "response": "b", "label": True}], "has completion, response, label"),
        ([{"prompt": "Hi", "chosen": "a", "rejected": "b", "label": False}], "has label, chosen, rejected"),
    ],
)
def test_records_without_a_judgement_are_refused(tmp_path: Path, records: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        feedback(tmp_path, records, test=0.0).open("train")


BASE = "model: {kind: decoder, vocab: 256, context: 48, layers: 2, width: 16, heads: 2, hidden: 24}\n"


@pytest.mark.slow
def test_a_run_learns_the_judgement_on_every_engine(dtrain: Dtrain, tmp_path: Path) -> None:
    feedback(tmp_path, JUDGED * 3)
    (tmp_path / "base.txt").write_text((tmp_path / "judged.jsonl").read_text())
    text = "data: {kind: text, files: [base.txt], length: 48, cache: cache}\n"
    (tmp_path / "base.yaml").write_text(f"{BASE}{text}batch: 4\noptimizer: {{kind: adamw, lr: 1e-3}}\nsteps: 5\n")
    dtrain("run", "base.yaml")
    (tmp_path / "kto.yaml").write_text(
        f"{BASE}data: {{kind: feedback, files: [judged.jsonl], length: 48, template: plain, test: 0.3, cache: cache}}\n"
        "objective: {kind: kto}\nlora: {rank: 4, targets: ['blocks.query.weight', 'blocks.mlp.*']}\n"
        "init: {run: runs/base}\nbatch: 4\noptimizer: {kind: adamw, lr: 3e-2}\nsteps: 8\ntrack: {every: 1}\n"
    )
    found = []
    for engine, mesh in (("jit", "{data: 2, tensor: 2}"), ("shard_map", "{data: 2, fsdp: 2}")):
        name = f"kto-{engine.replace('_', '-')}"
        dtrain("run", "kto.yaml", f"name={name}", f"engine={engine}", f"mesh={mesh}", "--devices", "4")
        lines = [json.loads(line) for line in (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()]
        found.append([line["train/loss"] for line in lines if "train/loss" in line])
    np.testing.assert_allclose(found[0], found[1], rtol=1e-4)
    assert found[0][0] == pytest.approx(0.5, abs=1e-6) and found[0][-1] < found[0][0]
    measured = json.loads(dtrain("evaluate", "kto-jit", "--json").stdout)
    assert {"loss", "reward_accuracy", "reward_margin"} <= measured["metrics"].keys()


def test_kto_and_its_data_belong_together(dtrain: Dtrain, tmp_path: Path) -> None:
    feedback(tmp_path)
    text = f"{BASE}batch: 4\noptimizer: {{kind: adamw, lr: 1e-3}}\nsteps: 5\ndata: {{kind: "
    (tmp_path / "own.yaml").write_text(f"{text}feedback, files: [judged.jsonl], length: 48, template: plain}}\n")
    found = dtrain("check", "own.yaml", code=2)
    assert "data of kind feedback has judged answers" in found.stderr and "objective: {kind: kto}" in found.stderr
    (tmp_path / "text.yaml").write_text(f"{text}text, files: [judged.jsonl], length: 48}}\nobjective: {{kind: kto}}\n")
    found = dtrain("check", "text.yaml", code=2)
    assert "kto needs judged answers; the data is of kind text" in found.stderr
    assert "kto compares the model with its frozen base, and so needs lora" in found.stderr
    kto = f"{text}feedback, files: [judged.jsonl], length: 48, template: plain}}\nobjective: {{kind: kto}}\n"
    (tmp_path / "parts.yaml").write_text(
        f"{kto}lora: {{rank: 2, targets: ['*']}}\ninit: {{run: base}}\naccumulate: 2\n"
    )
    assert "of which a microbatch has a part" in dtrain("check", "parts.yaml", code=2).stderr
    guessed = dtrain("new", "judged.jsonl", code=4)
    assert "data of kind feedback, with objective: kto, learns from them" in guessed.stderr
