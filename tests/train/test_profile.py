import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from dtrain.core.run_dir import Folder
from dtrain.core.user_code import PACKAGE
from dtrain.parallel.program_lines import lines_of
from dtrain.track.jsonl import read as read_rows
from dtrain.train.profile import HOST, Instruction, Op, covered, instructions_of, read, summarised
from tests.conftest import Dtrain, bare_environment
from tests.waiting import until

KNOWN = {
    "dot.1": Instruction("product", "net.py:7 dot_general"),
    "all-gather.2": Instruction("all-gather", ""),
    "copy.3": Instruction("copy", ""),
}


def test_the_length_of_overlapping_intervals_counts_once() -> None:
    assert covered([(3, 4), (0, 2), (1, 2.5), (0.5, 1)]) == pytest.approx(3.5)
    assert covered([]) == 0


def test_busy_idle_hidden_and_waiting_are_told_apart() -> None:
    ops = [
        Op("a", "dot.1", 0.0, 4.0), Op("a", "all-gather.2", 3.0, 6.0), Op("a", "copy.3", 7.0, 8.0),
        Op("b", "dot.1", 0.0, 4.0), Op("b", "all-gather.2", 4.0, 5.0),
    ]  # fmt: skip
    found = summarised(ops, KNOWN, 2, 10.0, waited=2.0)
    assert found.step_ms == 5000
    assert found.busy == pytest.approx((7 + 5) / 20)
    assert found.collectives == pytest.approx((3 + 1) / 20)
    assert found.exposed == pytest.approx((2 + 1) / 20)
    assert found.operations[0] == (pytest.approx(8 / 13), "product", "net.py:7 dot_general")
    text = "\n".join(found.lines())
    assert "devices busy 60%, idle 40%" in text
    assert "collectives 20.0%, of which 15.0% are not hidden" in text
    assert "-> input: 20% of the time is waiting for batches: data.load.workers" in text
    assert "-> collectives" in text


def test_what_is_not_known_is_not_stated() -> None:
    assert summarised([], KNOWN, 2, 1.0, waited=0.0).lines() == ["2 steps of 500.00 ms"]
    on_cpu = summarised([Op(HOST, "dot.1", 0, 1), Op(HOST, "all-gather.2", 1, 2)], KNOWN, 1, 2.0, waited=0.0)
    assert not any("collectives" in line for line in on_cpu.lines())


def test_a_real_trace_names_operations_and_their_lines(tmp_path: Path) -> None:
    @jax.jit
    def step(x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ x)

    x = jnp.ones((256, 256))
    compiled = step.lower(x).compile()
    known = instructions_of(compiled.as_text() or "")
    products = [one for one in known.values() if one.kind == "product"]
    assert any("test_profile.py" in one.place for one in products)
    jax.block_until_ready(compiled(x))
    jax.profiler.start_trace(str(tmp_path))
    for _ in range(3):
        x = compiled(x)
    jax.block_until_ready(x)
    jax.profiler.stop_trace()
    ops = read(tmp_path, known)
    assert sum(known[op.name].kind == "product" for op in ops) >= 3
    assert all(0 <= op.end - op.start < 10 for op in ops)


@pytest.mark.slow
def test_a_recipe_is_profiled_and_nothing_else_is_kept(dtrain: Dtrain, tmp_path: Path) -> None:
    done = dtrain("profile", "cnn-digits", "--steps", "3", "--out", "trace", seconds=250)
    assert "profile of steps 6 to 8: 3 steps of " in done.stdout
    assert re.search(r"%  .* (cnn|convolution|layers)\.py:\d+ ", done.stdout), (
        done.stdout
    )  # which depends on the machine
    assert list((tmp_path / "trace").rglob("*.xplane.pb"))
    assert list((tmp_path / "trace").rglob("perfetto_trace.json.gz"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace"]
    assert "unknown key" in dtrain("profile", "cnn-digits", "batchh=3", code=2).stderr


@pytest.mark.slow
def test_the_steps_that_a_recipe_names_are_traced_and_numbers_stay(dtrain: Dtrain, tmp_path: Path) -> None:
    short = ("run", "mlp-digits", "steps=60", "track.every=5")
    done = dtrain(*short, "profile={start: 20, steps: 4}", "name=traced")
    assert "profile of steps 20 to 23: 4 steps of " in done.stderr
    dtrain(*short, "name=plain")
    traced, plain = (Folder(tmp_path / "runs" / name) for name in ("traced", "plain"))
    assert json.loads((traced.profile / "summary.json").read_text())["first"] == 20
    losses = [[row.get("train/loss") for row in read_rows(place.metrics)] for place in (traced, plain)]
    assert losses[0] == losses[1]


@pytest.mark.nightly
def test_a_live_run_is_profiled_on_request(dtrain: Dtrain, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dtrain", "run", "mlp-digits", "epochs=100000", "name=live"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    running = subprocess.Popen(command, cwd=tmp_path, env=bare_environment(), **quiet)  # pyright: ignore[reportCallIssue]
    try:
        place = Folder(tmp_path / "runs" / "live")
        until(place.metrics.exists)
        done = dtrain("profile", "live", "--steps", "7", seconds=250)
        assert ": 7 steps of " in done.stdout
        assert not place.profile_request.exists()
    finally:
        running.terminate()
        running.wait(timeout=200)


def test_the_script_that_starts_dtrain_is_no_line_of_a_model(tmp_path: Path) -> None:
    """Frame 1 is called from frame 2, in the script that pip writes: it has no suffix."""
    update = f"{PACKAGE}/optim/update.py"
    text = (
        f'FileNames\n1 "{update}"\n2 "{tmp_path}/bin/dtrain"\n3 "{tmp_path}/net.py"\n\n'
        "FileLocations\n1 {file_name_id=1 function_name_id=1 line=7 }\n2 {file_name_id=2 function_name_id=1 line=10 }\n"
        "3 {file_name_id=3 function_name_id=1 line=5 }\n\n"
        "StackFrames\n1 {file_location_id=2 parent_frame_id=1}\n2 {file_location_id=1 parent_frame_id=2}\n"
        "3 {file_location_id=3 parent_frame_id=2}\n\n%main"
    )
    assert lines_of(text) == {1: "dtrain:10", 2: "update.py:7", 3: "net.py:5"}
