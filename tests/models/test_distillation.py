"""Distillation: the published loss, computed with NumPy, on every engine; a teacher is neither trained nor saved."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dtrain.core.weights_source import WeightsSource
from dtrain.data.batch import Feature
from dtrain.models.decoder import Decoder
from dtrain.models.distillation import Distillation, DistilledModel
from dtrain.models.nn.context import Context
from dtrain.models.nn.param import Tree
from dtrain.models.nn.single_device import SingleDeviceContext
from tests.conftest import Dtrain
from tests.engines import initial_values, loss_alone

STUDENT = Decoder(vocab=27, context=12, layers=1, width=8, heads=2, hidden=12, init=0.5, pad_vocab=10)
TEACHER = Decoder(vocab=27, context=16, layers=2, width=16, heads=2, hidden=24, init=0.6, tied=True, pad_vocab=10)
HOW: dict[str, Any] = {"teacher": WeightsSource(run="runs/none"), "temperature": 2.5, "share": 0.3}


def logits(model: Decoder, params: Tree, batch: dict[str, jax.Array]) -> np.ndarray:
    def compiled(params: Tree) -> jax.Array:
        x, _ = model.activations(params, batch, jnp.ones(batch["token"].shape), SingleDeviceContext())
        return model.head.logits(x, model.unembedding(params), "float32")

    return np.asarray(jax.jit(compiled)(params), np.float64)[..., : model.vocab]


def log_softmax(values: np.ndarray) -> np.ndarray:
    values = values - values.max(-1, keepdims=True)
    return values - np.log(np.exp(values).sum(-1, keepdims=True))


def case(**student: Any) -> tuple[DistilledModel, Any, dict[str, jax.Array]]:

    model = DistilledModel(dataclasses.replace(STUDENT, **student), TEACHER, Distillation(**HOW))
    token = jax.random.randint(jax.random.key(1), (3, 12), 0, 27)
    target = jnp.where(jnp.arange(12) < 3, -1, jnp.roll(token, -1, 1))
    batch = {"token": token, "target": target, "weight": jnp.asarray([1.0, 0.0, 1.0])}
    return model, initial_values(model.params()), batch


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [1, 3])
def test_the_loss_is_the_published_one(chunks: int) -> None:
    model, params, batch = case(loss_chunks=chunks, z_loss=1e-3)
    own = {name: value for name, value in params.items() if name != "teacher"}
    ours, theirs = logits(model.model, own, batch), logits(TEACHER, params["teacher"], batch)
    p, q = log_softmax(theirs / 2.5), log_softmax(ours / 2.5)
    weight = (np.asarray(batch["target"]) >= 0) * np.asarray(batch["weight"])[:, None]
    kl = ((np.exp(p) * (p - q)).sum(-1) * weight).sum()
    taken = np.take_along_axis(log_softmax(ours), np.maximum(batch["target"], 0)[..., None], -1)[..., 0]
    nll = -(taken * weight).sum()
    log_z = ours.max(-1) + np.log(np.exp(ours - ours.max(-1, keepdims=True)).sum(-1))
    expected = 0.3 * 2.5**2 * kl + 0.7 * nll + 1e-3 * (log_z**2 * weight).sum()
    loss = loss_alone(model, params, batch, train=True)
    assert float(loss.sum) == pytest.approx(expected, rel=2e-6)
    assert float(loss.weight) == weight.sum()
    assert float(loss.metrics["nll"]) == pytest.approx(nll, rel=2e-6)
    # evaluated, it is the model's own loss
    plain = loss_alone(model.model, own, batch, train=False)
    assert float(loss_alone(model, params, batch, train=False).sum) == float(plain.sum)


@pytest.mark.slow
def test_only_the_student_has_gradients() -> None:
    model, params, batch = case()
    gradients = jax.jit(jax.grad(lambda tree: model.loss(tree, batch, SingleDeviceContext(train=True)).sum))(params)
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(gradients["teacher"]))
    assert all(np.any(leaf) for leaf in jax.tree.leaves(gradients["blocks"]))
    declared = jax.tree.leaves(model.params()["teacher"])
    assert not any(param.trained or param.saved for param in declared)

    # a student with the teacher's own parameters has no divergence from it, and so no gradient
    same = DistilledModel(TEACHER, TEACHER, Distillation(**(HOW | {"share": 1.0})))
    twin = {**params["teacher"], "teacher": params["teacher"]}
    loss, gradients = jax.jit(jax.value_and_grad(lambda tree: same.loss(tree, batch, context()).sum))(twin)
    assert float(loss) == pytest.approx(0, abs=1e-4)
    assert all(np.abs(leaf).max() < 1e-4 for leaf in jax.tree.leaves(gradients))


def context() -> Context:
    return SingleDeviceContext(train=True)


BIG = """
model: {kind: decoder, vocab: 256, context: 48, layers: 2, width: 32, heads: 2, hidden: 48}
data: {kind: text, files: [text.txt], length: 48, cache: cache}
optimizer: {kind: adamw, lr: 3e-3}
batch: 8
steps: 10
"""
ASKED = """
include: small.yaml
evaluate: {every: 3, questions: [q.jsonl], tokens: 2}
optimizer: {kind: adamw, lr: 3e-3, ema: 0.9}
"""
SMALL = """
include: big.yaml
model: {kind: decoder, vocab: 256, context: 48, layers: 2, width: 16, heads: 2, hidden: 24}
objective: {kind: distillation, teacher: {run: runs/big}, temperature: 2, share: 0.9}
steps: 6
track: {every: 1}
checkpoint: {every: 3}
"""


@pytest.fixture
def recipes(dtrain: Dtrain, tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text("".join(f"{i} times {i + 1} is {i * (i + 1)}\n" for i in range(400)))
    (tmp_path / "big.yaml").write_text(BIG)
    (tmp_path / "small.yaml").write_text(SMALL)
    dtrain("run", "big.yaml")
    return tmp_path


def losses(folder: Path, name: str) -> list[float]:
    rows = [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    return [row["train/loss"] for row in rows if "train/loss" in row]


@pytest.mark.nightly
def test_every_engine_and_source_gives_the_same_numbers(dtrain: Dtrain, recipes: Path) -> None:
    dtrain("export", "big", "published")
    weights = "objective.teacher={run: '', weights: published}"
    cases = {"one": [], "files": [weights]}
    for engine in ("jit", "shard_map"):
        for number, mesh in enumerate(("{data: 2, tensor: 2}", "{fsdp: 4}")):
            cases[f"{engine[:3]}{number}"] = [f"engine={engine}", f"mesh={mesh}", "--devices", "4"]
    for name, how in cases.items():
        dtrain("run", "small.yaml", f"name={name}", *how)
        np.testing.assert_allclose(losses(recipes, name), losses(recipes, "one"), rtol=2e-5)
    assert losses(recipes, "files") == losses(recipes, "one")
    assert losses(recipes, "one")[-1] < losses(recipes, "one")[0]
    assert "teacher.blocks.mlp" in dtrain("explain", "small.yaml").stdout


@pytest.mark.nightly
def test_a_run_resumes_with_its_teacher_and_is_used_without(dtrain: Dtrain, recipes: Path) -> None:
    dtrain("run", "small.yaml", "name=whole")
    dtrain("run", "small.yaml", "steps=3")
    assert "resumed from step 3" in dtrain("run", "small.yaml").stderr
    assert losses(recipes, "small") == losses(recipes, "whole")
    size = sum(path.stat().st_size for path in (recipes / "runs/small/checkpoints/6").rglob("*"))
    saved = sum(path.stat().st_size for path in (recipes / "runs/big/checkpoints/10").rglob("*"))
    assert size < saved  # without the teacher
    # another teacher under the same name is refused
    (recipes / "runs/big").rename(recipes / "runs/aside")
    dtrain("run", "big.yaml", "seed=1")
    shown = dtrain("run", "small.yaml", "steps=8", code=5).stderr
    assert "is not the checkpoint that this run was started from" in shown
    # the trained model needs no teacher
    (recipes / "runs/big").rename(recipes / "runs/other")
    assert "loss" in dtrain("evaluate", "small").stdout
    dtrain("export", "small", "exported")
    assert "objective.teacher: runs/big is not a run" in dtrain("run", "small.yaml", "steps=8", code=2).stderr


@pytest.mark.nightly
def test_what_cannot_be_a_teacher_is_refused(dtrain: Dtrain, recipes: Path) -> None:
    wrong = dtrain("run", "small.yaml", "model.vocab=300", code=2).stderr
    assert "the teacher has vocab 256 (256 rows), the model 300 (304 rows)" in wrong
    dtrain("run", "mlp-digits", "steps=1", "optimizer.schedule.warmup=0")
    wrong = dtrain("run", "small.yaml", "objective.teacher={run: runs/mlp-digits}", code=2).stderr
    assert "runs/mlp-digits has a model of kind mlp" in wrong
    assert "context" in dtrain("run", "small.yaml", "model.context=64", "data.length=64", code=4).stderr


@pytest.mark.slow
def test_check_names_what_a_distillation_cannot_have(dtrain: Dtrain, tmp_path: Path) -> None:
    teacher = "objective={kind: distillation, teacher: {run: runs/big}}"
    shown = dtrain("check", "mlp-digits", teacher, code=2).stderr
    assert "distillation needs a decoder; the model is of kind mlp" in shown
    lora = ["lora={rank: 2, targets: [blocks.query.weight]}", "init.run=runs/none"]
    assert "distillation trains all parameters" in dtrain("check", "decoder-tiny", teacher, *lora, code=2).stderr
    assert "objective.teacher.run: runs/big is no run folder" in dtrain("check", "decoder-tiny", teacher).stderr
    both = "objective={kind: distillation, teacher: {run: a, weights: b}}"
    assert "run = a is given as well" in dtrain("check", "decoder-tiny", both, code=2).stderr
    none = "objective={kind: distillation, teacher: {step: best}}"
    assert "objective.teacher.run: missing" in dtrain("check", "decoder-tiny", none, code=2).stderr
    steps = "objective={kind: distillation, teacher: {weights: b, step: 3}}"
    assert "files of parameters have no steps" in dtrain("check", "decoder-tiny", steps, code=2).stderr


def test_the_forward_pass_of_the_teacher_counts() -> None:
    model, _, _ = case()
    example = {"token": Feature((12,), "int32"), "target": Feature((12,), "int32")}
    own, teacher = (one.flops(example, 4, one.params()).step for one in (STUDENT, TEACHER))
    assert model.flops(example, 4, model.params()).step == pytest.approx(own + teacher / 3)


@pytest.mark.nightly
def test_a_distilled_model_answers_questions_and_its_teacher_cannot_change(dtrain: Dtrain, recipes: Path) -> None:
    (recipes / "q.jsonl").write_text('{"prompt": "1 times 2 is ", "answer": "2"}\n')
    (recipes / "asked.yaml").write_text(ASKED)
    assert "exact_match" in dtrain("run", "asked.yaml").stderr
    assert "exact_match" in dtrain("evaluate", "asked", "--questions", "q.jsonl", "--tokens", "2").stdout
    dtrain("run", "big.yaml", "name=other", "seed=1")
    changed = ["objective.teacher.run=runs/other", "--allow-changes", "steps=8"]
    assert "the teacher of a run cannot change" in dtrain("run", "asked.yaml", *changed, code=2).stderr
    (recipes / "link").symlink_to(recipes / "runs" / "big")
    linked = ["objective.teacher.run=link", "--allow-changes", "steps=8"]
    assert "resumed from step 6" in dtrain("run", "asked.yaml", *linked).stderr  # the same folder by another name
    assert "takes the parameters of its teacher" in dtrain("import", "small.yaml", "runs/big", code=2).stderr
    dtrain("export", "big", "published")
    file = "objective.teacher={run: '', weights: published/model.safetensors}"
    dtrain("run", "small.yaml", "name=file", file)
    gone = "objective.teacher={run: '', weights: nowhere}"
    assert "objective.teacher.weights: nowhere does not exist" in dtrain("run", "small.yaml", gone, code=4).stderr
