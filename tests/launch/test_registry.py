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
from dtrain.core.run_dir import Folder
from dtrain.launch import registry
from dtrain.launch.job import LaunchJob, MachineState
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


def test_two_commands_do_not_start_one_launch_at_the_same_time(tmp_path: Path) -> None:
    with registry.alone(tmp_path, "far"):
        with pytest.raises(Locked, match="another `launch up` of far is starting it now"):
            registry.alone(tmp_path, "far").__enter__()
        with registry.alone(tmp_path, "near"):
            pass
    with registry.alone(tmp_path, "far"):
        pass


@pytest.mark.parametrize("error", [LeftBehind("still there"), KeyboardInterrupt()])
def test_a_run_that_may_still_be_alive_keeps_its_record(tmp_path: Path, error: BaseException) -> None:
    with pytest.raises(type(error)), registry.recorded(tmp_path, record("1"), None):
        raise error
    assert registry.record(tmp_path, "far").launch == "1"


def test_records_of_earlier_versions_are_read(tmp_path: Path) -> None:
    old = {"target": {"kind": "slurm"}, "name": "far", "recipe": "", "handle": {"id": "7"}, "since": 1.0, "ground": {}}
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / registry.NAME).write_text(json.dumps(registry.signed(old)))
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
    path.write_text(json.dumps(registry.signed(json.loads(path.read_text()) | change)))
    assert registry.records(tmp_path / "runs") == []
    assert registry.unused(tmp_path / "runs") == [(path, "cannot be read")]


def test_the_list_names_records_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / registry.NAME).write_text("[]")
    shown = CliRunner().invoke(app, ["launch", "list", "--runs-dir", str(tmp_path)])
    assert shown.exit_code == 0
    assert f"launch record {tmp_path}/bad/launch.json: cannot be read" in shown.output


HOSTILE = {
    "ssh": {"kind": "ssh", "hosts": ["a"], "proxy": "touch PWNED; true %h"},
    "python": {"kind": "local", "python": "./evil"},
    "module": {"kind": "local"},
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(HOSTILE))
def test_nothing_that_comes_with_a_folder_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """A repository with a launch record, a program and a module named dtrain, in which verbs are typed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dtrain.py").write_text("open('PWNED', 'w').close()")
    (tmp_path / "evil").write_text("#!/bin/sh\ntouch PWNED\n")
    (tmp_path / "evil").chmod(0o755)
    place = tmp_path / "runs" / "nice"
    place.mkdir(parents=True)
    values = {"name": "nice", "recipe": "x", "launch": "abc", "handle": {}, "target": HOSTILE[kind], "since": 1.0}
    values |= {"owner": "root@x", "dollars_hour": None, "version": 2}
    for signature in ({}, {registry.SIGNATURE: "0" * 64}, {registry.SIGNATURE: 3}, {registry.SIGNATURE: "\ud83d"}):
        (place / registry.NAME).write_text(json.dumps(values | signature))
        listed = CliRunner().invoke(app, ["launch", "list"])
        assert listed.exit_code == 0
        assert "was not written by you on this machine" in listed.output
        for verb in ("status", "logs", "stop", "down"):
            asked = CliRunner().invoke(app, ["launch", verb, "nice"])
            assert asked.exit_code == 2, asked.output
            assert "was not written by you on this machine" in asked.output
    (place / registry.NAME).unlink()
    os.mkfifo(place / registry.NAME)  # reading it would wait for a writer
    assert "cannot be read" in CliRunner().invoke(app, ["launch", "list"]).output
    assert registry.find(tmp_path / "runs", "nice") is None
    assert not (tmp_path / "PWNED").exists()


def test_the_key_of_records_is_secret_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    registry.recorded(tmp_path, record("1"), None).__enter__()
    key = tmp_path / "config" / "dtrain" / "launch.key"
    assert key.stat().st_mode & 0o777 == 0o600
    assert registry.find(tmp_path, "far")
    changed = json.loads((tmp_path / "far" / registry.NAME).read_text()) | {"target": HOSTILE["ssh"]}
    (tmp_path / "far" / registry.NAME).write_text(json.dumps(changed))
    assert registry.find(tmp_path, "far") is None
    registry.write(Folder(tmp_path / "far"), record("2"))
    assert registry.find(tmp_path, "far")
    key.unlink()
    assert registry.find(tmp_path, "far") is None


@pytest.mark.parametrize(
    ("row", "refused"),
    [
        (MachineState("a", "running", "in step"), True),
        (MachineState("a", "unreachable", "no answer", 3), True),
        (MachineState("a", "absent"), False),
        (MachineState("a", "ended", "exit code 0", 0), False),
        (MachineState("a", "lost", "its runner died without an exit code", 3), False),
    ],
)
def test_a_run_that_may_be_alive_elsewhere_keeps_its_record(
    monkeypatch: pytest.MonkeyPatch, row: MachineState, refused: bool
) -> None:
    monkeypatch.setattr(Slurm, "status", lambda *_: [row])
    with pytest.raises(Locked) if refused else nullcontext():
        refuse_while_alive(record("1"))
