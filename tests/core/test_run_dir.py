"""Every damaged file of a run folder causes a message: no traceback, no hang, no wrong value."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dtrain.core import heartbeat
from dtrain.core.errors import EnvironmentFault
from dtrain.core.files import overwrite, read_json
from dtrain.core.run_dir import Folder, saved_steps

RECORD = {"name": "a", "state": "stopped", "step": 4, "seconds": {"step": 1.0}, "lost": {}, "started": 1.0}


@pytest.fixture
def place(tmp_path: Path) -> Folder:
    found = Folder(tmp_path / "a")
    found.prepare()
    found.write_record(dict(RECORD))
    return found


@pytest.mark.parametrize("text", ["", "{", "[]", "1", "[" * 100_000, '{"a": 1}', "\x00", '{"state": "stopped"}'])
def test_an_invalid_record_is_refused_with_a_hint(place: Folder, text: str) -> None:
    place.record.write_text(text)
    with pytest.raises(EnvironmentFault) as caught:
        place.read_record()
    assert "move run.json away" in caught.value.hint


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("state", "gone"), ("state", 3), ("step", "4"), ("step", -1), ("step", 4.5), ("step", True), ("step", 10**40),
        ("seconds", []), ("seconds", {"step": "1"}), ("seconds", {"step": float("nan")}), ("lost", 1),
        ("started", "x"), ("started", float("inf")), ("started", 10**400), ("tracker_ids", {"wandb": 1}),
        ("versions", {"jax": None}), ("name", None), ("topology", 1), ("rising", {"top1": "yes"}),
    ],
)  # fmt: skip
def test_values_of_other_types_are_refused_by_name(place: Folder, key: str, value: object) -> None:
    place.record.write_text(json.dumps(RECORD | {key: value}))
    with pytest.raises(EnvironmentFault, match=rf"run\.json: {key} is "):
        place.read_record()


def test_keys_of_earlier_versions_are_read(place: Folder) -> None:
    lost = {"done again": 1.5, "down, killed": 2.0}
    place.record.write_text(
        json.dumps(RECORD | {"lost": lost, "went_back": 1, "rising": {"top1": True}, "step_s_kept": 2.5})
    )
    found = place.read_record()
    assert found["lost"] == {"recomputed_s": 1.5, "down_killed_s": 2.0}
    assert found["rollbacks"] == 1
    assert (found["higher_is_better"], found["step_s_saved"]) == ({"top1": True}, 2.5)
    assert not {"went_back", "rising", "step_s_kept"} & found.keys()


def test_a_manually_changed_value_is_detected(place: Folder) -> None:
    assert place.read_record() == RECORD
    place.record.write_text(place.record.read_text().replace('"step": 4', '"step": 5'))
    with pytest.raises(EnvironmentFault, match="was changed after dtrain wrote it"):
        place.read_record()


def folder(path: Path) -> None:
    path.mkdir()


def fifo(path: Path) -> None:
    os.mkfifo(path)


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def dangling(path: Path) -> None:
    path.symlink_to("nowhere")


@pytest.mark.parametrize("make", [folder, fifo, loop, dangling])
@pytest.mark.parametrize(
    "name", ["recipe.yaml", "run.json", "metrics.jsonl", "log.txt", "lease.json", ".lock", "beat-0.json"]
)
def test_something_else_under_a_files_name_is_refused_before_anything_runs(
    tmp_path: Path, name: str, make: Callable[[Path], None]
) -> None:
    place = Folder(tmp_path)
    make(tmp_path / name)
    with pytest.raises(EnvironmentFault, match=name):
        place.prepare()
    assert not list(tmp_path.glob(".probe-*"))


@pytest.mark.parametrize("make", [fifo, loop, dangling, Path.touch])
def test_something_else_in_place_of_the_checkpoints_is_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "checkpoints")
    with pytest.raises(EnvironmentFault, match="checkpoints"):
        Folder(tmp_path).prepare()


def test_reading_does_not_wait_for_a_fifo(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "beat-0.json")
    assert heartbeat.read(tmp_path / "beat-0.json") is None
    with pytest.raises(OSError, match="a FIFO, not a file"):
        read_json(tmp_path / "beat-0.json")
    with pytest.raises(OSError, match=r"not a file|No such device"):
        heartbeat.HeartbeatWriter(tmp_path / "beat-0.json", 1.0)


@pytest.mark.parametrize(
    "content",
    [{"number": "x"}, {"at": "y"}, {"at": float("nan")}, {"section": 1}, {"step": None}, {"other": 1}, [], "x"],
)
def test_a_heartbeat_with_values_of_other_types_is_none(tmp_path: Path, content: Any) -> None:
    (tmp_path / "beat-0.json").write_text(json.dumps(content))
    assert heartbeat.read(tmp_path / "beat-0.json") is None


def test_a_heartbeat_file_that_was_longer_is_read(tmp_path: Path) -> None:
    (tmp_path / "beat-0.json").write_text("x" * 1000)
    writer = heartbeat.HeartbeatWriter(tmp_path / "beat-0.json", 1.0)
    latest = heartbeat.read(tmp_path / "beat-0.json")
    writer.close()
    assert latest
    assert latest.section == "start"


def test_heartbeats_distinguish_a_waiting_process_from_the_one_it_waits_for(tmp_path: Path) -> None:
    heartbeats = []
    for rank, sections in enumerate((["step", "data", "step"], ["step"])):
        writer = heartbeat.HeartbeatWriter(tmp_path / f"beat-{rank}.json", 1.0)
        for section in ["save", "step"] * 3 * rank:  # process 1 saves, which writes more heartbeats
            writer(section)
        time.sleep(2 * heartbeat.APART)
        writer.step = 14
        for section in sections:  # without a pause: the end of a written section is written at once
            writer(section)
        heartbeats.append(heartbeat.read(tmp_path / f"beat-{rank}.json"))
        writer.close()
    waiting, late = heartbeats
    assert waiting
    assert late
    assert (waiting.step, waiting.section, waiting.turn) == (14, "step", 2)
    assert (late.step, late.section, late.turn) == (14, "step", 0)
    assert late.number > waiting.number


def test_a_write_that_fails_leaves_no_part_behind(tmp_path: Path) -> None:
    (tmp_path / "run.json").mkdir()
    with pytest.raises(OSError, match=r"run\.json"):
        overwrite(tmp_path / "run.json", "text")
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_only_plain_numbers_are_steps(tmp_path: Path) -> None:
    for name in ("0", "7", "12", "0099", "007", "٣", "-1", "1e3", ".bad-5-x"):
        (tmp_path / name).mkdir()
    assert saved_steps(tmp_path) == [12, 7, 0]
