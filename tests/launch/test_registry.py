"""Launch records, written before anything is created."""

import json
import os
from contextlib import nullcontext
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dtrain.cli import app
from dtrain.cli.launch_lookup import refuse_while_alive
from dtrain.core.errors import EnvironmentFault, LeftBehind, Locked
from dtrain.launch import registry
from dtrain.launch.job import LaunchJob, Row
from dtrain.launch.targets.slurm import Slurm


def record(launch: str) -> LaunchJob:
    return registry.record_of(LaunchJob("far", "steps: 1", launch, {"id": launch}, {"kind": "slurm"}))


def test_a_failed_launch_restores_the_record_before_it(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault), registry.recorded(tmp_path, record("1"), None):
        assert registry.record(tmp_path, "far").handle == {"id": "1"}
        raise EnvironmentFault("no capacity")
    assert not (tmp_path / "far").exists()
    first = record("1")
    with registry.recorded(tmp_path, first, None):
        pass
    with pytest.raises(EnvironmentFault), registry.recorded(tmp_path, record("2"), first):
        raise EnvironmentFault("no capacity")
    assert registry.record(tmp_path, "far") == first


@pytest.mark.parametrize("error", [LeftBehind("still there"), KeyboardInterrupt()])
def test_a_run_that_may_still_be_alive_keeps_its_record(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)), registry.recorded(tmp_path, record("1"), None):
        raise error
    assert registry.record(tmp_path, "far").launch == "1"


def test_records_of_earlier_versions_are_read(tmp_path: Path) -> None:
    old = {"target": {"kind": "slurm"}, "name": "far", "recipe": "", "handle": {"id": "7"}, "since": 1.0, "ground": {}}
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / registry.NAME).write_text(json.dumps(old))
    found = registry.record(tmp_path, "far")
    assert (found.handle, found.launch, found.owner) == ({"id": "7"}, "", "")


@pytest.mark.parametrize(
    "change",
    [
        {"since": "x"},
        {"target": None},
        {"target": "x"},
        {"version": 9},
        {"handle": {"id": 3}},
        {"recipe": None},
        {"name": []},
    ],
)
def test_a_malformed_record_is_named_and_breaks_no_list(tmp_path: Path, change: dict[str, object]) -> None:
    registry.recorded(tmp_path / "runs", record("1"), None).__enter__()
    path = tmp_path / "runs" / "far" / registry.NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert registry.records(tmp_path / "runs") == []
    assert registry.unreadable(tmp_path / "runs") == [path]


def test_the_list_names_records_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / registry.NAME).write_text("[]")
    shown = CliRunner().invoke(app, ["launch", "list", "--runs-dir", str(tmp_path)])
    assert shown.exit_code == 0
    assert f"launch record cannot be read: {tmp_path}/bad/launch.json" in shown.output


def test_the_record_of_another_user_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry.recorded(tmp_path, record("1"), None).__enter__()
    path = tmp_path / "far" / registry.NAME
    if os.getuid() == 0:
        os.chown(path, 12345, 12345)
    else:
        monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert registry.find(tmp_path, "far") is None


@pytest.mark.parametrize(
    ("row", "refused"),
    [
        (Row("a", "running", "in step"), True),
        (Row("a", "unreachable", "no answer", 3), True),
        (Row("a", "absent"), False),
        (Row("a", "ended", "exit code 0", 0), False),
        (Row("a", "lost", "its runner died without an exit code", 3), False),
    ],
)
def test_a_run_that_may_be_alive_elsewhere_keeps_its_record(
    monkeypatch: pytest.MonkeyPatch, row: Row, refused: bool
) -> None:
    monkeypatch.setattr(Slurm, "status", lambda *_: [row])
    with pytest.raises(Locked) if refused else nullcontext():
        refuse_while_alive(record("1"))
