"""The agent's answers about a host, and the files of a run that it keeps there."""

import shutil
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from dtrain.core.run_dir import Folder
from dtrain.launch import agent
from dtrain.launch.fanout import Answer, Machine
from dtrain.launch.runner import kill
from dtrain.launch.targets.hosts import row_of
from dtrain.launch.wire import HostJob, Reply, Request


def job(folder: Path, rank: int = 0, port: int = 8476) -> HostJob:
    return HostJob(
        name="far", folder=f"{folder}/host", runs=f"{folder}/runs", rank=rank, world_size=2, coordinator=f"a:{port}"
    )


def test_a_host_lists_its_problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_name: object) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(socket, "getaddrinfo", unknown)
        monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=5e8))
        assert agent.preflight(Request(verb="preflight", job=job(tmp_path, port=port), token="t")).problems == (
            f"only 0.5 GB free in {tmp_path}/runs, 1 GB needed",
            f"port {port} is in use",
            f"it cannot resolve its own host name {socket.gethostname()}: add the name to /etc/hosts",
        )
    (tmp_path / "file").touch()
    (problem, *_) = agent.preflight(Request(verb="preflight", job=job(tmp_path / "file"))).problems
    assert problem == f"cannot write to {tmp_path}/file/runs: Not a directory"


def test_marker_files_show_which_hosts_share_the_folder_and_are_removed(tmp_path: Path) -> None:
    for rank in (0, 1):
        assert agent.preflight(Request(verb="preflight", job=job(tmp_path, rank), token="t")).ready
    agent.preflight(Request(verb="preflight", job=job(tmp_path), token="other"))
    assert agent.folder_markers(Request(verb="folder_markers", job=job(tmp_path), token="t")).items == (0, 1)
    assert agent.folder_markers(Request(verb="folder_markers", job=job(tmp_path), token="t")).items == ()


def test_nothing_is_written_before_a_host_is_set_up(tmp_path: Path) -> None:
    request = Request(verb="preflight", job=job(tmp_path), token="t", ready=f"{tmp_path}/ready")
    assert not agent.preflight(request).ready
    assert not list(tmp_path.iterdir())
    (tmp_path / "ready").touch()
    assert agent.preflight(request).ready


def test_a_stop_request_is_written_into_an_existing_run_folder(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "runs" / "far")
    request = Request(verb="stop", job=job(tmp_path))
    assert agent.stop(request).items == ()
    assert not folder.path.exists()
    folder.path.mkdir(parents=True)
    agent.stop(request)
    assert (folder.path / "stop").exists()


def test_down_removes_everything_of_a_run_on_the_host(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "far"
    folder.mkdir(parents=True)
    request = Request(verb="status", job=job(tmp_path))
    assert not agent.status(request).recorded
    (folder / "launch.json").write_text("{}")
    assert agent.status(request).recorded
    kill(Request(verb="kill", job=job(tmp_path, rank=1)))
    assert agent.status(request).recorded
    kill(Request(verb="kill", job=job(tmp_path)))
    assert not agent.status(request).recorded


@pytest.mark.parametrize(
    ("reply", "state", "code"),
    [
        (Reply(alive=True, text="starting"), "running", None),
        (Reply(code=75, state="stopped"), "stopped", 0),  # by SIGTERM
        (Reply(code=0, state="stopped"), "stopped", 0),  # by the stop request
        (Reply(code=0, state="finished"), "ended", 0),
        (Reply(code=8, state="failed"), "ended", 8),
        (Reply(), "lost", 3),
        (Reply(problem="no answer in 30 s"), "unreachable", 3),
    ],
)
def test_states(reply: Reply, state: str, code: int | None) -> None:
    row = row_of(Answer(Machine(0, "a"), reply))
    assert (row.state, row.code) == (state, code)
