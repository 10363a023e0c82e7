"""An export is opened in transformers, in a Python of its own, and compared; a fault in it is found."""

import json
import os
from pathlib import Path

import pytest

from dtrain.core.run_dir import Folder
from dtrain.inference.verified_export import verify
from dtrain.weights.load import load_run
from tests.conftest import Dtrain

PYTHON = os.environ.get("DTRAIN_TEST_HF_PYTHON", "")
SMALL = "model={layers: 2, width: 32, heads: 4, kv_heads: 2, hidden: 48, qkv_bias: true}"


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="DTRAIN_TEST_HF_PYTHON names no Python with transformers and peft")
def test_an_export_is_compared_with_transformers(dtrain: Dtrain, tmp_path: Path) -> None:
    dtrain("run", "chat-tiny", SMALL, "name=small", "epochs=3", "evaluate.questions=[]", "evaluate.every=0")
    done = dtrain("export", "small", "out", "--verify", "--python", PYTHON).stderr
    assert "verified with transformers 5" in done
    assert "the most probable continuations of 4 prompts are the same: 128 tokens" in done
    assert "the tokenizer gives the prompts the same tokens" in done
    found = json.loads((tmp_path / "out" / "verification.json").read_text())
    assert found["agrees"]
    assert found["logits"] < 1e-5


@pytest.mark.nightly
@pytest.mark.skipif(not PYTHON, reason="DTRAIN_TEST_HF_PYTHON names no Python with transformers and peft")
def test_a_fault_in_an_export_is_found(dtrain: Dtrain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    dtrain("run", "chat-tiny", SMALL, "name=small", "epochs=3", "evaluate.questions=[]", "evaluate.every=0")
    dtrain("export", "small", "out", "--verify", "--python", PYTHON)
    config = tmp_path / "out" / "config.json"
    whole = config.read_text()
    run = load_run(Folder(tmp_path / "runs" / "small"), [], lambda _: None)
    for change, message in (
        ({"rope_theta": 99.0}, "DIFFER"),
        ({"rms_norm_eps": 0.1}, "DIFFER"),
        ({"num_hidden_layers": 1}, "tensors that do not match: unexpected_keys: model.layers.1"),
    ):
        config.write_text(json.dumps(json.loads(whole) | change))
        result = verify(run, tmp_path / "out", "float32", PYTHON, lambda _: None)
        assert not result.agrees
        assert message in "\n".join(result.lines())
    config.write_text(whole)
    dtrain("export", "small", "out")
    assert not (tmp_path / "out" / "verification.json").exists()  # of the export before
    names = tmp_path / "out" / "tokenizer.json"
    names.write_text(names.read_text().replace('"F"', '"FF"', 1))
    assert "the tokenizer gives prompts" in verify(run, tmp_path / "out", "float32", PYTHON, lambda _: None).prompts


@pytest.mark.slow
def test_what_cannot_be_verified_is_said(dtrain: Dtrain, tmp_path: Path) -> None:
    dtrain("run", "mlp-digits", "steps=2", "epochs=null", "name=one", "evaluate.every=0", "optimizer.schedule.warmup=0")
    assert "the model is not a decoder" in dtrain("export", "one", "out", "--verify", code=2).stderr
    assert not (tmp_path / "out").exists()
    assert "add --verify" in dtrain("export", "one", "out", "--python", "x", code=2).stderr
    assert "give a folder" in dtrain("export", "one", "out.safetensors", "--verify", code=2).stderr
    dtrain("run", "chat-tiny", SMALL, "name=small", "epochs=1", "evaluate.questions=[]", "evaluate.every=0")
    missing = dtrain("export", "small", "out", "--verify", "--python", tmp_path / "nothing", code=3).stderr
    assert "cannot import transformers and torch: the export was not verified" in missing
    assert (tmp_path / "out" / "config.json").exists()
