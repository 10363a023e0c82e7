"""Text from a trained run, by hand and by the command line."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dtrain.generate import Sampling
from tests.conftest import Dtrain

TINY = [
    "model={kind: decoder, vocab: 256, context: 32, layers: 2, width: 16, heads: 2}",
    "data.length=16",
    "batch=8",
    "steps=4",
    "evaluate.every=0",
    "optimizer.schedule.warmup=0",
]


@pytest.fixture
def trained(dtrain: Dtrain, tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 20)
    data = ["data.files=[a.txt]", "data.cache=cache", "name=small"]
    dtrain("run", "decoder-tiny", *TINY, *data, "--devices", "4", "mesh={data: 2, tensor: 2}")
    return tmp_path / "runs" / "small"


@pytest.mark.slow
def test_text_is_the_same_for_the_same_seed_and_any_devices(dtrain: Dtrain, trained: Path) -> None:
    ask = ["generate", trained, "--prompt", "the ", "--tokens", "12"]
    found = [dtrain(*ask, *more).stdout for more in (["--devices", "4"], ["--devices", "4"])]
    assert found[0] == found[1]
    assert found[0].startswith("the ")
    greedy = [dtrain(*ask, "--temperature", "0", *more).stdout for more in (["--devices", "4"], [])]
    assert greedy[0] == greedy[1]
    assert len(dtrain(*ask, "--samples", "3", "--devices", "4").stdout.split("-" * 20)) == 4


@pytest.mark.slow
def test_what_cannot_be_generated_is_refused(dtrain: Dtrain, trained: Path) -> None:
    long = dtrain("generate", trained, "--prompt", "x" * 40, "--devices", "4", code=2)
    assert "a prompt of 40 tokens leaves no room in context = 32" in long.stderr
    assert not long.stdout
    assert len(dtrain("generate", trained, "--prompt", "the ", "--tokens", "80", "--devices", "4").stdout) > 60
    assert "holds no run" in dtrain("generate", trained.parent / "other", code=2).stderr
    assert "top-p 2.0" in dtrain("generate", trained, "--top-p", "2", "--devices", "4", code=2).stderr


def drawn(logits: Any, **how: Any) -> set[int]:
    sampling = Sampling(**how)
    draw = jax.jit(lambda number: sampling.draw(jnp.asarray([logits]), number)[0])
    return {int(draw(number)) for number in range(200)}


def test_sampling_keeps_to_what_it_may_draw() -> None:
    logits = np.log([0.5, 0.25, 0.15, 0.1])
    assert drawn(logits, temperature=1.0) == {0, 1, 2, 3}
    assert drawn(logits, temperature=0.0) == {0}
    assert drawn(logits, temperature=1.0, top_k=2) == {0, 1}
    assert drawn(logits, temperature=1.0, top_p=0.7) == {0, 1}
    assert drawn(logits, temperature=1.0, top_p=0.4) == {0}
