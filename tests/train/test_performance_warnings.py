"""Recipes that are impure, slow or wrong on purpose are named at once, and good ones get no warning."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from dtrain.parallel.compile_cache import Counter
from dtrain.train.loop import StepEvent
from dtrain.train.performance_warnings import IN_LOOP, PerformanceWarnings, slow_input
from dtrain.train.start import cold_cache
from dtrain.train.timers import Clock
from tests.conftest import Dtrain

ROOT = Path(__file__).parents[2]
RECIPE = """
model: {{kind: custom, target: "slow_recipes:Net", args: {{how: "{model}"}}}}
data: {{kind: custom, target: "slow_recipes:Rows", args: {{how: "{data}"}}}}
optimizer: {{kind: sgd, lr: 0.5}}
batch: 8
steps: 12
track: {{every: 4}}
guard: {{nan: locate, contract: {contract}}}
"""
SLOW = {
    "model print": "the step calls Python (debug at",
    "model pure": "the step calls Python (pure at",
    "model numpy random": "tracing the step twice gave two different programs",
    "model clock": "tracing the step twice gave two different programs",
    "model global": "tracing the step twice gave two different programs",
    "model constant": "2.5 MB, as a constant; pass it in as an argument",
    "model log": "nan comes from `log` in",
    "model root": "comes from `",
    "data sleep": "input is slower than the step: ",
    "data compile": "compiled between steps 1 and 4, besides the step",
}
NAMED_LINE = {"print": 24, "pure": 27, "log": 38, "root": 40}
"""Lines of slow_recipes.py that the message names."""


def started(dtrain: Dtrain, folder: Path, which: str) -> str:
    part, _, how = which.partition(" ")
    shutil.copy(Path(__file__).with_name("slow_recipes.py"), folder)
    about = {"model": "", "data": ""} | {part: how}
    # the check of custom losses would refuse some of them before the first step
    (folder / "r.yaml").write_text(RECIPE.format(**about, contract="false"))
    return dtrain("run", "r.yaml", code=7 if how in ("log", "root") else 0).stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "which",
    [
        which if which in ("model print", "data sleep") else pytest.param(which, marks=pytest.mark.nightly)
        for which in SLOW
    ],
)
def test_each_of_ten_bad_recipes_is_named(dtrain: Dtrain, tmp_path: Path, which: str) -> None:
    shown = started(dtrain, tmp_path, which)
    before = shown.partition("step 8/12")[0] if "step 8/12" in shown else shown
    assert SLOW[which] in before  # within the first logged step after the first one
    others = [text for name, text in SLOW.items() if text != SLOW[which] and "comes from" not in text]
    # what compiles or calls Python also makes batches slow on a busy machine
    assert not [text for text in others if text in shown and not text.startswith("input is slower")]
    line = NAMED_LINE.get(which.partition(" ")[2])
    assert line is None or f"slow_recipes.py:{line}" in shown


GOOD = [
    "mlp-digits", "cnn-digits", "vit-digits", "decoder-tiny", "examples/plain_jax.yaml", "examples/linen_cnn.yaml",
    "examples/nnx_transformer.yaml", "examples/equinox_mlp.yaml", "examples/equinox_rnn.yaml", "examples/own_data.yaml",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    [name if name in ("mlp-digits", "cnn-digits") else pytest.param(name, marks=pytest.mark.nightly) for name in GOOD],
)
def test_none_of_ten_good_recipes_gets_a_warning(dtrain: Dtrain, recipe: str) -> None:
    recipe = str(ROOT / recipe) if "/" in recipe else recipe
    shown = dtrain("run", recipe, "steps=12", "track.every=4", "evaluate.every=6", "checkpoint.every=6",
                   "optimizer.schedule=constant", seconds=250).stderr  # fmt: skip
    assert "step 12/12" in shown
    assert "warning" not in shown


@pytest.mark.parametrize(
    ("data", "device", "slow"),
    [(9e-3, 0.0, True), (9e-3, 5e-3, False), (0.5e-3, 0.0, False), (1e-3, 9e-3, False), (4e-3, 0.3e-3, True)],
)
def test_input_is_slow_only_if_the_devices_were_ready_before(data: float, device: float, slow: bool) -> None:
    seconds = {"data": data, "device": device, "dispatch": 0.1e-3, "host": 0.1e-3}
    assert slow_input({part: 100 * one for part, one in seconds.items()}, steps=100) == slow


def reported(waits: Sequence[float]) -> bool:
    """Whether steps of 1 ms are said to wait for data, if they wait that long each and every fourth is logged."""
    clock, told = Clock(spent=dict.fromkeys(IN_LOOP, 0.0)), list[str]()
    warnings = PerformanceWarnings(clock, every=4, workers=0, warn=told.append)
    for step, wait in enumerate(waits, 1):
        clock.spent["data"] += wait
        clock.spent["dispatch"] += 1e-3
        warnings(StepEvent(step, None, {}, last=step == len(waits), stopping=False, reached=step))
    return bool(told)


@pytest.mark.parametrize(
    ("waits", "slow"),
    [
        ([0.06] * 8, True),
        ([0.0, 0.3] + [0.0] * 10, False),  # a machine that did something else for once
        ([0.0, 0.3, 0.0, 0.0, 0.0, 0.3, 0.0, 0.0], True),  # one large file of several batches, again and again
        ([0.0, 0.3] + [0.0] * 4 + [0.0, 0.0, 0.0, 0.3, 0.0, 0.0], False),
        ([0.0, 0.2, 0.2, 0.0], True),
        ([5.0] + [0.0] * 8, False),  # workers that start
    ],
)
def test_one_long_wait_for_data_is_not_reported_before_it_comes_again(waits: Sequence[float], slow: bool) -> None:
    assert reported(waits) == slow


def test_a_restart_that_compiles_for_long_is_named() -> None:
    assert "compiling took 40 s" in cold_cache(Counter(needed=2, read=0), 40.0)[0]
    assert not cold_cache(Counter(needed=2, read=2), 40.0)
    assert not cold_cache(Counter(needed=2, read=0), 2.0)


@pytest.mark.slow
def test_a_model_with_too_few_outputs_is_refused(dtrain: Dtrain, tmp_path: Path) -> None:
    (tmp_path / "few.py").write_text(
        "import jax.numpy as jnp\nclass Net:\n"
        "    def init(self, key, example):\n        return {'w': jnp.zeros((64, 7))}\n"
        "    def outputs(self, params, batch, ctx):\n"
        "        return batch['image'].reshape(len(batch['image']), -1) @ params['w']\n"
    )
    (tmp_path / "r.yaml").write_text("""
model: {kind: custom, target: "few:Net"}
data: digits
optimizer: {kind: sgd, lr: 0.1}
batch: 8
steps: 4
""")
    assert "the model has 7 outputs, and the data has 10 classes" in dtrain("run", "r.yaml", code=2).stderr
