"""The times and counts in run.json over restarts."""

import time
from pathlib import Path

import jax
import pytest

from dtrain.core import heartbeat
from dtrain.core.process_info import ProcessInfo
from dtrain.core.run_dir import Folder
from dtrain.recipe.load import load
from dtrain.runtime.process_group import ProcessGroup
from dtrain.train.record import Record, lost, run_record, trained_before


def record(tmp_path: Path, before: float, again: float) -> Record:
    values = {"lost": {"recomputed_s": again}, "step": 0, "step_s_saved": before}
    return Record(values, Folder(tmp_path), lead=False, before={"step": before})


def test_only_steps_up_to_the_committed_one_count(tmp_path: Path) -> None:
    log = record(tmp_path, before=3.0, again=0.0)
    log.clock.add("step", 2.0)
    assert log.saving(12) == 5.0
    log.clock.add("step", 1.0)  # while that save was written
    log.committed(12)
    assert (log.values["step"], log.values["step_s_saved"]) == (12, 5.0)


def test_a_checkpoint_committed_after_run_json_was_written_counts(tmp_path: Path) -> None:
    log = record(tmp_path, before=3.0, again=5.0)
    log.resumed(16, step_s=4.5)
    assert log.values["step_s_saved"] == 4.5
    assert log.values["lost"]["recomputed_s"] == 3.5


def test_where_the_newest_checkpoint_was_damaged_its_steps_are_done_again(tmp_path: Path) -> None:
    log = record(tmp_path, before=3.0, again=1.0)
    log.resumed(4, step_s=1.0)
    assert log.values["step_s_saved"] == 1.0
    assert log.values["lost"]["recomputed_s"] == 3.0


def test_a_start_that_was_refused_before_the_first_step_is_no_part_of_the_run() -> None:
    refused = {"state": "failed", "exit_code": 2, "step": 0, "written": 1.0, "seconds": {"start": 2.0}}
    assert trained_before(refused) == {}
    for other in ({"exit_code": 70}, {"state": "running"}, {"step": 3}, {"seconds": {"step": 0.5}}):
        assert trained_before(refused | other) == refused | other


@pytest.mark.parametrize("jump", [-86400.0, 86400.0])
def test_a_clock_jump_counts_no_lost_time(jump: float) -> None:
    now = time.time()
    old = {"state": "running", "written": now + jump, "seconds": {"step": 2.0}, "step_s_saved": 2.0}
    found = lost(old, heartbeat.Heartbeat(at=now + jump), now)
    assert all(seconds >= 0 for seconds in found.values())
    if jump > 0:
        assert not found


@pytest.mark.parametrize("jump", [-86400.0, 86400.0])
def test_a_clock_jump_causes_no_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: float) -> None:
    real, group = time.time, ProcessGroup(tmp_path, Folder(tmp_path))
    group.infos, group.before = [ProcessInfo(0, 1, "")], {0: None}
    sign = heartbeat.HeartbeatWriter(group.run_dir.heartbeat(0), patience=60)
    assert group._hung() is None
    monkeypatch.setattr(time, "time", lambda: real() + jump)
    assert group._hung() is None
    sign("save")
    assert group._hung() is None
    sign.close()


def test_the_names_of_classes_are_kept(tmp_path: Path) -> None:
    log = record(tmp_path, before=0.0, again=0.0)
    log.about(jax.devices(), {}, 10, {}, ("cat", "dog"))
    assert log.values["classes"] == ["cat", "dog"]


def test_the_id_of_a_tracker_survives_a_start_that_was_refused(tmp_path: Path) -> None:
    recipe = load("mlp-digits")
    (tmp_path / "run.json").write_text(
        '{"state": "failed", "exit_code": 4, "step": 0, "seconds": {"start": 2.0}, "tracker_ids": {"w": "7"}}'
    )
    with run_record(Folder(tmp_path), recipe, lead=True) as log:
        assert log.ids == {"w": "7"}
        assert log.values["starts"] == 1
        assert log.values["lost"] == {}
