"""The hooks between steps."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from dtrain.models.nn.model import Loss
from dtrain.recipe.recipe import Evaluate
from dtrain.train.hooks import IN_FLIGHT, Evaluation, Log
from dtrain.train.loop import StepEvent
from dtrain.train.timers import Clock

BATCHES = 7


def evaluation(rows: list[Any], **changes: Any) -> Evaluation:
    def batches() -> Iterator[tuple[str, dict[str, Any]]]:
        yield from (("", {"x": jnp.float32(number)}) for number in range(BATCHES))

    compiled = jax.jit(lambda _, batch: Loss(batch["x"], jnp.float32(2), {"accuracy": jnp.float32(1)}))
    log = Log(1, lambda step, values: rows.append((step, values)), Clock())
    return Evaluation(Evaluate(every=5), compiled, batches, log, Clock(), **changes)  # pyright: ignore


def test_an_evaluation_reads_its_sums_at_the_end_with_few_batches_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    read, waited, rows = [], [], []
    get, wait = jax.device_get, jax.block_until_ready
    monkeypatch.setattr(jax, "device_get", lambda x: read.append(x) or get(x))
    monkeypatch.setattr(jax, "block_until_ready", lambda x: waited.append(x) or wait(x))
    found = evaluation(rows).measure(5, ())  # pyright: ignore
    assert found == {"eval/loss": 21 / 14, "eval/accuracy": 0.5}
    assert len(read) == 1
    assert [float(one.sum) for one in waited[1:]] == [max(0, n + 1 - IN_FLIGHT) for n in range(BATCHES)]
    assert [step for step, _ in rows] == [5]


def test_an_evaluation_gives_way_to_a_stop_also_at_the_last_step() -> None:
    answers, rows = iter([False, False, True]), []
    hook = evaluation(rows, stop=lambda: next(answers))
    at = StepEvent(10, (), {}, last=True, stopping=False, reached=10)  # pyright: ignore
    hook(at)
    assert at.stopping
    assert hook.abandoned
    assert (at.results, rows) == ({}, [])
