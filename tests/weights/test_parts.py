"""Parts of a model from several origins: trained further, or frozen, not saved and read again at every start."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from dtrain.inference.open_run import open as open_run
from dtrain.models.nn.param import paths
from tests.conftest import Dtrain

MODULE = """
import jax
import jax.numpy as jnp

from dtrain import Loss, layers


class Coder:
    \"\"\"The first stage: pictures from their codes.\"\"\"

    def params(self):
        encoder, decoder = layers.dense(64, 32, "embed hidden"), layers.dense(32, 64, "hidden embed")
        return {"vq": {"encoder": encoder, "decoder": decoder}}

    def loss(self, params, batch, ctx):
        x = batch["image"].reshape(len(batch["image"]), -1)
        code = layers.linear(ctx.gather(params["vq"]["encoder"]), x)
        error = ((layers.linear(ctx.gather(params["vq"]["decoder"]), code) - x) ** 2).mean(1)
        weight = batch.get("weight", jnp.ones(len(x)))
        return Loss((error * weight).sum(), weight.sum(), {})


class Reader:
    \"\"\"The second stage: the digit from the codes of the first, and from numbers of a third model.\"\"\"

    def params(self):
        return {
            "code": Coder().params()["vq"],
            "text": {"layer0": layers.dense(64, 16, "embed hidden"), "layer1": layers.dense(16, 10, "embed classes")},
            "head": layers.dense(32, 10, "embed classes"),
        }

    def loss(self, params, batch, ctx):
        return layers.classify(self.logits(params, batch, ctx), batch, ctx)

    def logits(self, params, batch, ctx):
        x = batch["image"].reshape(len(batch["image"]), -1)
        code = layers.linear(ctx.gather(params["code"]["encoder"]), x)
        first, last = (ctx.gather(params["text"][f"layer{i}"]) for i in (0, 1))
        other = layers.linear(last, jax.nn.relu(layers.linear(first, x)))
        return layers.linear(ctx.gather(params["head"]), code) + other

    def predict(self, params, batch, ctx):
        return {"probability": jax.nn.softmax(self.logits(params, batch, ctx))}
"""
FIRST = """
model: {kind: custom, target: stages:Coder}
data: digits
optimizer: {kind: adamw, lr: 0.001}
batch: 64
steps: 4
"""
TEXT = """
model: {kind: mlp, sizes: [64, 16, 10]}
data: digits
optimizer: {kind: adamw, lr: 0.001, ema: 0.5}
batch: 64
steps: 4
"""
SECOND = """
model: {kind: custom, target: stages:Reader}
data: digits
optimizer: {kind: adamw, lr: 0.001}
parts:
  code: {run: runs/first, path: vq, frozen: true}
  text: {run: runs/text, frozen: true, dtype: bfloat16}
batch: 64
steps: 4
checkpoint: {every: 2}
"""


@pytest.fixture
def stages(dtrain: Dtrain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Dtrain:
    """The command line, in a folder with two trained stages and the recipe of a third."""
    (tmp_path / "stages.py").write_text(MODULE)
    whole = SECOND.partition("parts:")[0] + SECOND.partition("bfloat16}\n")[2]
    for name, text in (("first", FIRST), ("text", TEXT), ("second", SECOND), ("whole", whole)):
        (tmp_path / f"{name}.yaml").write_text(text)
    dtrain("run", "first.yaml")
    dtrain("run", "text.yaml")
    monkeypatch.chdir(tmp_path)
    return dtrain


def values(name: str) -> dict[str, jax.Array]:
    params = open_run(name).params
    return dict(zip(jax.tree.leaves(paths(params)), jax.tree.leaves(params), strict=True))


def saved_bytes(tmp_path: Path, name: str) -> int:
    return sum(path.stat().st_size for path in (tmp_path / "runs" / name / "checkpoints").rglob("*") if path.is_file())


@pytest.mark.slow
def test_frozen_parts_are_read_at_every_start_and_never_saved(stages: Dtrain, tmp_path: Path) -> None:
    done = stages("run", "second.yaml")
    assert "code: from " in done.stderr and "runs/first at step 4, the newest: 4 of 4 parameters" in done.stderr
    assert "330 of them trained" in done.stderr
    second, first, text = (values(name) for name in ("second", "first", "text"))
    for name, value in first.items():
        np.testing.assert_array_equal(second[name.replace("vq", "code")], value)
    for name, value in text.items():  # the average of the other run, in the dtype of the part
        assert second[f"text.{name}"].dtype == "bfloat16"
        np.testing.assert_array_equal(second[f"text.{name}"], value.astype("bfloat16"))
    trained = stages("run", "whole.yaml")
    assert "of them trained" not in trained.stderr
    assert saved_bytes(tmp_path, "second") < 0.4 * saved_bytes(tmp_path, "whole")

    stages("run", "second.yaml", "name=killed", DTRAIN_FAULT="term@step:3", code=75)
    done = stages("run", "second.yaml", "name=killed")
    assert "resumed from step 4" in done.stderr and "the same bits" in done.stderr
    killed = values("killed")
    assert all(np.array_equal(killed[name], second[name]) for name in second)
    mesh = ("engine=shard_map", "mesh={data: 2, fsdp: 4}", "--devices", "8")
    stages("run", "second.yaml", "name=mesh", *mesh)
    np.testing.assert_allclose(values("mesh")["head.weight"], second["head.weight"], atol=2e-6)
    found = json.loads(stages("evaluate", "second", "--json").stdout)["metrics"]
    other = json.loads(stages("evaluate", "mesh", "--json", *mesh[1:]).stdout)["metrics"]
    assert found["loss"] == pytest.approx(other["loss"], rel=2e-6)
    stages("export", "second", "all.safetensors")

    later = stages("run", "whole.yaml", "name=third", "init={run: runs/second}", code=2)
    assert "does not save code.decoder.bias, which came from elsewhere" in later.stderr
    stages("run", "second.yaml", "name=third", "init={run: runs/second}")


@pytest.mark.slow
def test_parts_that_are_not_frozen_are_trained_and_saved(stages: Dtrain) -> None:
    parts = "parts={code: {run: runs/first, path: vq}, text: {run: runs/text}}"
    stages("run", "whole.yaml", parts, "name=second", "optimizer.lr=1e-30", "steps=1")
    second, first = values("second"), values("first")
    for name, value in first.items():
        np.testing.assert_allclose(second[name.replace("vq", "code")], value, rtol=1e-6)
    stages("run", "whole.yaml", parts, "name=moved")
    assert not np.array_equal(values("moved")["code.encoder.weight"], first["vq.encoder.weight"])


@pytest.mark.slow
def test_a_part_from_files_of_weights(stages: Dtrain) -> None:
    stages("export", "text", "text.safetensors")
    stages("run", "whole.yaml", "name=second", "parts={text: {weights: text.safetensors, frozen: true}}")
    assert np.array_equal(values("second")["text.layer0.weight"], values("text")["layer0.weight"])


@pytest.mark.slow
def test_an_origin_that_changed_is_refused(stages: Dtrain, tmp_path: Path) -> None:
    stages("run", "second.yaml")
    shutil.rmtree(tmp_path / "runs" / "first")
    stages("run", "first.yaml", "seed=5")
    refused = stages("run", "second.yaml", "steps=6", code=5)
    assert "is not the checkpoint that this run was started from" in refused.stderr
    shutil.rmtree(tmp_path / "runs" / "first")
    assert "restore that folder" in stages("run", "second.yaml", "steps=6", code=5).stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("parts={cod: {run: runs/first}}", "parts.cod: no parameter's path begins so"),
        ("parts.code={run: runs/first, path: vqq, frozen: true}", "no parameter of"),
        ("parts.text={run: runs/first, path: vq, frozen: true}", "parts.text: no parameter of"),
        ("parts={code: {run: runs/first, path: vq}, code.encoder: {run: runs/first}}", "inside of the part code"),
        ("parts.code={run: runs/firs, path: vq}", "is not a run folder"),
    ],
)
def test_parts_that_do_not_fit_are_refused_before_the_first_step(stages: Dtrain, override: str, message: str) -> None:
    assert message in stages("run", "second.yaml", override, code=2).stderr


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("parts={layer0: {run: a, frozn: true}}", "parts.layer0.frozn: unknown key; did you mean 'frozen'?"),
        ("parts={layer0: {frozen: true}}", "parts.layer0.run: missing"),
        ("parts={layer0: {run: a, dtype: bfloat16}}", "parts.layer0.dtype: parameters that are trained"),
        ("parts={layer9: {run: a}}", "parts.layer9: no parameter's path begins so; paths begin with layer0"),
        ("parts=[a]", "parts: "),
    ],
)
def test_mistakes_in_parts_are_found_by_check(in_process: Dtrain, override: str, message: str) -> None:
    assert message in in_process("check", "mlp-digits", override, code=2).stderr


def test_check_names_what_it_did_not_compare(in_process: Dtrain) -> None:
    done = in_process("check", "mlp-digits", "parts={layer0: {run: runs/other, frozen: true}}")
    assert "parts.layer0.run: runs/other is no run folder" in done.stdout + done.stderr
