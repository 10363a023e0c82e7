"""Preference tuning against the published loss, computed with NumPy, on every engine; what it cannot do is refused."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dtrain.core.errors import RecipeError
from dtrain.data.preference import Preference
from dtrain.data.templates import NAMED
from dtrain.models.decoder import Decoder
from dtrain.models.dpo import DPO, PreferenceModel
from dtrain.models.lora import Adapted, Lora
from dtrain.models.nn.low_rank import merged
from dtrain.models.nn.param import Tree
from dtrain.models.nn.quantised import Width, is_quantised, quantise
from dtrain.models.nn.single_device import SingleDeviceContext
from tests.conftest import Dtrain
from tests.engines import initial_values, loss_alone

PAIRS = [{"prompt": f"{i} is ", "chosen": "even" if i % 2 == 0 else "odd", "rejected": "unknown"} for i in range(12)]
DECODER = Decoder(vocab=256, context=48, layers=2, width=16, heads=2, hidden=24, init=0.2)
LORA = Lora(rank=4, targets=("blocks.query.weight", "blocks.mlp.*"))


def pairs(folder: Path, records: list[dict[str, Any]] = PAIRS, **how: Any) -> Preference:
    (folder / "pairs.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    how = {"length": 48, "template": "plain", "cache": str(folder / "cache"), "test_files": ()} | how
    return Preference(files=(str(folder / "pairs.jsonl"),), **how)


@partial(jax.jit, static_argnums=0)
def logits_of(model: Decoder, params: Tree, tokens: jax.Array) -> jax.Array:
    x, _ = model.activations(params, {"token": tokens}, jnp.ones(tokens.shape), SingleDeviceContext())
    return model.head.logits(x, model.unembedding(params), "float32")


def log_probabilities(model: Decoder, params: Tree, text: str, answer: str) -> float:
    """The sum of the log-probabilities of an answer and its end token after a text, in float64, from plain logits."""
    tokens = np.frombuffer(f"{text}{answer}\0".encode(), np.uint8).astype(np.int32)
    padded = np.zeros((1, DECODER.context), np.int32)  # of one length; no token attends to a later one
    padded[0, : len(tokens) - 1] = tokens[:-1]
    logits = np.asarray(logits_of(model, params, padded), np.float64)[0, : len(tokens) - 1, :256]
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    first = len(text.encode()) - 1
    return float(logp[np.arange(first, len(logp)), tokens[1 + first :]].sum())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [None, "nf4"])
def test_the_loss_is_the_published_one(tmp_path: Path, dtype: Width | None) -> None:
    """Also against a base in nf4, whose values are those of the reference."""
    model = PreferenceModel(Adapted(DECODER, replace(LORA, dtype=dtype)), DPO(beta=0.3))
    params: Any = initial_values(model.params())

    def kept(form: Any, value: jax.Array) -> Any:
        if not is_quantised(form):
            return value.astype(form.dtype).astype(jnp.float32)  # as they are computed with
        codes, scales = quantise(value, form, jnp)
        return replace(form, codes=codes, scales=scales.astype(jnp.float32))

    whole = initial_values(DECODER.params())
    params["base"] = jax.tree.map(kept, params["base"], whole, is_leaf=is_quantised)
    noise = jax.tree.map(lambda x: x + 0.3 * jax.random.normal(jax.random.key(1), x.shape), params["lora"])
    params = {"base": params["base"], "lora": noise}
    source = pairs(tmp_path, test=0.0).open("train")
    batch = {name: jnp.asarray(value) for name, value in source.rows(np.arange(12)).items()}
    loss = loss_alone(model, params, batch)
    combined, base = merged(model.model.combined(params)), merged(params["base"])
    losses, right = [], 0
    for record in PAIRS:
        policy, reference = (
            [log_probabilities(DECODER, own, record["prompt"], record[name]) for name in ("chosen", "rejected")]
            for own in (combined, base)
        )
        margin = 0.3 * ((policy[0] - reference[0]) - (policy[1] - reference[1]))
        losses.append(np.log1p(np.exp(-margin)))
        right += margin > 0
    assert float(loss.weight) == 12
    assert float(loss.sum) / 12 == pytest.approx(np.mean(losses), abs=1e-6)
    assert float(loss.metrics["reward_accuracy"]) == right
    # at the start, the adapters add nothing: the loss is log 2
    untrained = {**params, "lora": initial_values(model.params())["lora"]}
    start = loss_alone(model, untrained, batch)
    assert float(start.sum) / 12 == pytest.approx(np.log(2), abs=1e-6)


def test_every_form_of_pairs_is_read(tmp_path: Path) -> None:
    asked, answers = {"role": "user", "content": "Hi"}, [{"role": "assistant", "content": text} for text in ("a", "b")]
    forms = [
        {"prompt": "Hi", "chosen": "a", "rejected": "b"},
        {"prompt": [asked], "chosen": [answers[0]], "rejected": [answers[1]]},
        {"chosen": [asked, answers[0]], "rejected": [asked, answers[1]]},
        {"prompt": "Hi", "chosen": [asked, answers[0]], "rejected": [asked, answers[1]]},
    ]
    rows = pairs(tmp_path, forms, test=0.0).open("train").rows(np.arange(4))
    for values in rows.values():
        assert (values == values[0]).all()
    assert bytes(rows["token"][0][rows["document"][0] == 1].tolist()) == b"Hib"
    both = pairs(tmp_path, [*forms, forms[0] | {"chosen": "x" * 60}], test=0.0).open("train")
    assert len(both) == 4
    assert "1 longer than a row" in both.notes[0]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "mesh", ["{data: 2, tensor: 2}", pytest.param("{data: 1, fsdp: 4}", marks=pytest.mark.nightly)]
)
def test_every_engine_gives_the_same_numbers(dtrain: Dtrain, tmp_path: Path, mesh: str) -> None:
    pairs(tmp_path)
    base = "model: {kind: decoder, vocab: 256, context: 48, layers: 2, width: 16, heads: 2, hidden: 24}\n"
    base += "data: {kind: text, files: [pairs.jsonl.txt], length: 48, cache: cache}\nbatch: 4\n"
    (tmp_path / "pairs.jsonl.txt").write_text((tmp_path / "pairs.jsonl").read_text() * 4)
    (tmp_path / "base.yaml").write_text(base + "optimizer: {kind: adamw, lr: 1e-3}\nsteps: 5\n")
    dtrain("run", "base.yaml")
    tuned = "include: base.yaml\ninit: {run: runs/base}\nlora: {rank: 4, targets: [blocks.query.weight]}\n"
    tuned += "data: {kind: preference, files: [pairs.jsonl], length: 48, template: plain, test: 0.3, cache: cache}\n"
    tuned += "objective: {kind: dpo}\noptimizer: {kind: adamw, lr: 1e-2}\nsteps: 6\ntrack: {every: 1}\n"
    (tmp_path / "dpo.yaml").write_text(tuned)
    found = []
    for engine in ("jit", "shard_map"):
        name = f"dpo-{engine.replace('_', '-')}"
        dtrain("run", "dpo.yaml", f"engine={engine}", f"name={name}", "--devices", "4", f"mesh={mesh}")
        rows = [json.loads(line) for line in (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()]
        found.append([row["train/loss"] for row in rows if "train/loss" in row])
        assert any("eval/reward_accuracy" in row for row in rows)
        assert not any("eval/perplexity" in row for row in rows)
    np.testing.assert_allclose(found[0], found[1], rtol=2e-5)
    assert found[0][0] == pytest.approx(np.log(2), abs=1e-5)
    assert found[0][-1] < found[0][0]
    for name in ("dpo-jit", "dpo-shard-map"):
        measured = json.loads(dtrain("evaluate", name, "--json", "--devices", "4").stdout)["metrics"]
        logged = json.loads((tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()[-1])
        assert measured.keys() == {"loss", "reward_accuracy", "reward_margin"}
        for metric, value in measured.items():
            assert value == pytest.approx(logged[f"eval/{metric}"], rel=1e-5)
    assert "gives them no reward" in dtrain("evaluate", "dpo-jit", "--against", "base", code=2).stderr
    assert "reward_margin" in dtrain("evaluate", "dpo-jit", "--against", "dpo-shard-map").stdout
    (tmp_path / "chat.jsonl").write_text('{"prompt": "1 is ", "response": "odd"}\n' * 8)
    chat = "data={kind: chat, files: [chat.jsonl], length: 48, template: plain, test: 0.3, cache: cache}"
    assert "perplexity" in dtrain("evaluate", "dpo-jit", chat, "objective=null").stdout
    dtrain("generate", "dpo-jit", "--chat", "--prompt", "1", "--tokens", "1")  # by the template of its answers
    dtrain("export", "dpo-jit", "exported")
    assert (tmp_path / "exported" / "chat_template.jinja").read_text() == NAMED["plain"]


def test_a_base_of_which_a_parameter_is_trained_is_no_reference() -> None:
    moving = replace(LORA, train=("norm.*",))
    with pytest.raises(RecipeError, match=r"its frozen base, and norm\.scale is trained"):
        PreferenceModel(Adapted(DECODER, moving), DPO()).params()


@pytest.mark.slow
def test_what_dpo_cannot_do_is_refused(dtrain: Dtrain, tmp_path: Path) -> None:
    pairs(tmp_path)
    data = "data={kind: preference, files: [pairs.jsonl], length: 48}"
    assert "data of kind preference has pairs" in dtrain("check", "decoder-tiny", data, code=2).stderr
    shown = dtrain("check", "decoder-tiny", "objective={kind: dpo}", code=2).stderr
    assert "dpo needs pairs of answers; the data is of kind text" in shown
    assert "so needs lora" in shown
    lora = ["lora={rank: 2, targets: [x]}", "init.run=runs/none"]
    assert "dpo needs a decoder" in dtrain("check", "mlp-digits", "objective={kind: dpo}", data, *lora, code=2).stderr
    moving = "lora={rank: 2, targets: [blocks.query.weight], train: ['norm.*']}"
    shown = dtrain("check", "decoder-tiny", "objective={kind: dpo}", data, moving, "init.run=runs/none", code=2).stderr
    assert "lora.train: dpo compares the model with its frozen base" in shown
    wrong = dtrain("check", "decoder-tiny", "objective={kind: dpo, bta: 1}", data, *lora, code=2).stderr
    assert "did you mean 'beta'" in wrong or "did you mean beta" in wrong
