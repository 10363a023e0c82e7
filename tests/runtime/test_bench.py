"""`dtrain bench`: what it measures adds up, and a slow part is found where it is."""

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from dtrain.recipe.load import load
from dtrain.runtime.bench import Bench, Cost, assemblies
from tests.conftest import Dtrain, bare_environment
from tests.waiting import until

RECIPE = Path(__file__).parents[2] / "recipes" / "mlp-digits.yaml"
FOUND = Bench(
    "small", "1 x cpu", 64, 100, 3, run=Cost(2.0, 3.0), step=Cost(1.5, 2.5), read=Cost(0.1, 0.1), put=Cost(0.1, 0.1),
    product_ms=0.5, rate=2e11, rate_of="measured", convention="6N",
)  # fmt: skip


def test_the_parts_add_up_to_the_step() -> None:
    text = "\n".join(FOUND.lines)
    shares = [float(line.split()[-1].rstrip("%")) for line in text.splitlines()[4:7]]
    assert sum(shares) == pytest.approx(100)
    assert "a larger batch" in text
    assert FOUND.values["loop_ms"] == 0.5


def test_the_advice_follows_from_the_largest_part() -> None:
    reading = replace(FOUND, run=Cost(20.0, 3.0), read=Cost(18.0, 18.0))
    assert "data.load.workers" in "\n".join(reading.lines)
    device = replace(FOUND, run=Cost(1.51, 3.0))
    assert "dtrain profile" in "\n".join(device.lines)
    hidden = replace(FOUND, run=Cost(1.4, 3.0))
    assert "not visible" in "\n".join(hidden.lines)
    assert "8 steps in one call take 0.100 ms a step less" in "\n".join(replace(hidden, per_call=8).lines)


def test_cheaper_sums_of_gradients_are_named() -> None:
    found = replace(FOUND, cheaper_sums=Cost(1.2, 2.0), faster=2, dtype="bfloat16")
    text = "\n".join(found.lines)
    assert "with precision.reduce: compute 1.2 ms, 20.0% less than its compiled step alone" in text
    assert "faster in 2 of 3 rounds" in text
    assert "6.7% more than its" in "\n".join(replace(found, cheaper_sums=Cost(1.6, 2.0)).lines)
    assert "precision.reduce" not in "\n".join(FOUND.lines)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["jit", "shard_map"])
def test_cheaper_sums_of_gradients_are_another_program(engine: str) -> None:
    given = ["precision.compute=bfloat16", f"engine={engine}", "mesh={data: -1}"]
    recipe, devices = load(RECIPE, given, 2), jax.devices()[:2]
    example = recipe.data.open("train").example
    own, changed = assemblies(recipe, devices, example)
    assert changed
    assert str(own.train().jaxpr) != str(changed.train().jaxpr)
    assert assemblies(load(RECIPE, [*given, "precision.reduce=compute"], 2), devices, example)[1] is None
    assert assemblies(load(RECIPE, given, 1), devices[:1], example)[1] is None


@pytest.mark.nightly
def test_cheaper_sums_of_gradients_are_measured(dtrain: Dtrain) -> None:
    """On CPUs the compiler sums in float32 all the same; what is tested is when the setting is measured."""
    half, options = "precision.compute=bfloat16", ("--seconds", "0.1", "--rounds", "1", "--json")
    found = json.loads(dtrain("bench", "mlp-digits", half, "--devices", "2", *options).stdout)
    assert found["cheaper_sums"]["ms"] > 0
    for others in ([], ["--devices", "2", "precision.compute=float32"], ["--devices", "2", "precision.reduce=compute"]):
        assert json.loads(dtrain("bench", "mlp-digits", half, *others, *options).stdout)["cheaper_sums"] is None


@pytest.mark.slow
def test_a_recipe_is_measured_and_nothing_is_kept(dtrain: Dtrain, tmp_path: Path) -> None:
    options = ("--seconds", "0.1", "--rounds", "2")
    found = json.loads(dtrain("bench", "mlp-digits", *options, "--json").stdout)
    assert (found["name"], found["rounds"], found["batch"]) == ("mlp-digits", 2, 64)
    assert found["steps"] >= 12
    assert all(found[part][clock] > 0 for part in ("run", "step", "read", "put") for clock in ("ms", "cpu_ms"))
    assert not (tmp_path / "runs").exists()
    assert found["product_ms"] < found["step"]["ms"]  # nothing is faster than its products at full speed
    larger = json.loads(dtrain("bench", "mlp-digits", "batch=512", *options, "--json").stdout)
    assert larger["product_ms"] * larger["rate"] == pytest.approx(8 * found["product_ms"] * found["rate"])  # FLOPs
    assert larger["step"]["ms"] > found["step"]["ms"]


@pytest.mark.nightly
def test_slow_data_shows_as_time_to_read(dtrain: Dtrain, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import time\n"
        "import numpy as np\n"
        "class Rows:\n"
        "    classes = 2\n"
        "    def __init__(self, split): pass\n"
        "    def __len__(self): return 64\n"
        "    def __getitem__(self, index):\n"
        "        time.sleep(0.002)\n"
        "        return {'image': np.zeros((8, 8, 1), np.uint8), 'label': np.int32(index % 2)}\n"
    )
    (tmp_path / "slow.yaml").write_text(
        "model: {kind: mlp, sizes: [64, 2]}\ndata: {kind: custom, target: 'slow:Rows'}\n"
        "optimizer: {kind: sgd, lr: 0.1}\nbatch: 8\nsteps: 10\n"
    )
    found = json.loads(dtrain("bench", "slow.yaml", "--seconds", "0.1", "--rounds", "1", "--json").stdout)
    assert found["read"]["ms"] > 16
    assert found["loop_ms"] > 0.5 * found["run"]["ms"]


@pytest.mark.slow
def test_mistakes_are_answered(dtrain: Dtrain) -> None:
    assert "did you mean 'batch'" in dtrain("bench", "mlp-digits", "bach=3", code=2).stderr
    assert "did you mean 'mlp-digits'" in dtrain("bench", "mlp-digit5", code=2).stderr


@pytest.mark.nightly
@pytest.mark.parametrize("verb", ["bench", "profile"])
def test_ctrl_c_leaves_no_folder_behind_and_suggests_no_resume(verb: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dtrain", verb, "decoder-tiny", "--devices", "8"]
    environment = bare_environment() | {"TMPDIR": str(tmp_path)}
    running = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    until(lambda: list(tmp_path.glob(f"dtrain-{verb}-*/*/recipe.yaml")), "the inner run has not begun")
    running.send_signal(signal.SIGINT)
    _, shown = running.communicate(timeout=200)
    assert (running.returncode, shown.strip()) == (130, "interrupted")
    assert not list(tmp_path.glob("dtrain-*"))
