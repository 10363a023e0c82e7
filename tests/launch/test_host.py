"""A host that keeps itself: where it stands, when it begins, what an end means, and when it must leave."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dtrain.errors import EnvironmentFault
from dtrain.launch import google, roll
from dtrain.launch.host import Host
from dtrain.launch.seat import Seat, seat_of
from tests.conftest import bare_environment
from tests.launch.cloud import Cloud, serving
from tests.launch.test_names import RECIPE

TOLD: dict[str, Any] = {
    "name": "far", "launch": "now", "project": "my-project", "hosts": 2, "slices": 1, "port": 8476, "processes": 1,
    "arguments": [], "environment": [], "restarts": 2, "hours": None, "group": "", "give_back": [],
}  # fmt: skip


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    """A cloud whose metadata server answers this process as host 0."""
    (tmp_path / "mnt" / "far" / "launch").mkdir(parents=True)
    with serving(tmp_path) as found:
        for name, value in (found.environment(tmp_path) | {"GCE_METADATA_HOST": f"127.0.0.1:{found.port}/0"}).items():
            monkeypatch.setenv(name, value)
        yield found


def host(tmp_path: Path, rank: int = 0, hosts: int = 2, **more: Any) -> Host:
    place = tmp_path / "mnt" / "far" / "launch"
    place.mkdir(parents=True, exist_ok=True)
    return Host(TOLD | {"hosts": hosts} | more, place, Seat(rank, hosts, f"w-{rank}", "us-central1-a", "w-0:8476"))


def mark(found: Host, rank: int, state: str = "waiting", code: int | None = None, **more: Any) -> None:
    given: dict[str, Any] = {"launch": "now", "host": f"w-{rank}", "at": time.time(), "what": "all"} | more
    roll.Mark(rank=rank, state=state, code=code, **given).write(found.place)


def last(found: Host) -> roll.Mark:
    return roll.read(found.place, "now")[found.seat.rank]


@pytest.mark.parametrize(
    ("endpoints", "first"),
    [("10.0.0.2,10.0.0.3", "10.0.0.2:8476"), ("a:1:10.0.0.2,b:2:10.0.0.3", "10.0.0.2:8476")],
)
def test_a_worker_of_a_slice_knows_its_rank(cloud: Cloud, endpoints: str, first: str) -> None:
    cloud.metadata |= {
        "0/instance/attributes/agent-worker-number": "1",
        "0/instance/attributes/worker-network-endpoints": endpoints,
        "0/instance/hostname": "w-1.us-central1-a.c.my-project.internal",
        "0/instance/zone": "projects/1/zones/us-central1-a",
    }
    seat = seat_of(TOLD)
    assert seat == Seat(1, 2, "w-1", "us-central1-a", first)
    assert seat.environment() == {"DTRAIN_PROCESS": f"1/2@{first}"}


def test_a_worker_of_several_slices_counts_those_before_it(cloud: Cloud) -> None:
    cloud.metadata |= {
        "0/instance/attributes/agent-worker-number": "1",
        "0/instance/attributes/worker-network-endpoints": "10.0.1.2,10.0.1.3",
        "0/instance/attributes/tpu-env": "MEGASCALE_SLICE_ID: '1'\nMEGASCALE_COORDINATOR_ADDRESS: '10.0.0.2:8080'",
    }
    seat = seat_of(TOLD | {"hosts": 4, "slices": 2})
    assert (seat.rank, seat.first) == (3, "10.0.0.2:8476")
    cloud.metadata["0/instance/attributes/tpu-env"] = ""
    with pytest.raises(EnvironmentFault, match="which slice this is"):
        seat_of(TOLD | {"hosts": 4, "slices": 2})


def test_an_instance_of_a_group_ranks_by_its_name(cloud: Cloud) -> None:
    cloud.resources["projects/my-project/zones/us-central1-a/instanceGroupManagers/far"] = {
        "state": "RUNNING", "targetSize": 2,
    }  # fmt: skip
    cloud.metadata |= {"0/instance/zone": "projects/1/zones/us-central1-a", "0/instance/hostname": "far-1.c.internal"}
    seat = seat_of(TOLD | {"group": "far"})
    assert (seat.rank, seat.first) == (1, "far-0:8476")


def test_outside_the_cloud_there_is_no_seat(cloud: Cloud) -> None:
    with pytest.raises(EnvironmentFault, match="which worker"):
        seat_of(TOLD)
    assert google.metadata("instance/preempted") is None


def test_secrets_are_read_or_said_to_be_missing(cloud: Cloud) -> None:
    cloud.secrets["HF_TOKEN"] = "hf-4711"
    assert google.secret("my-project", "HF_TOKEN") == "hf-4711"
    with pytest.raises(EnvironmentFault, match="404, Secret \\[WANDB_API_KEY\\] not found"):
        google.secret("my-project", "WANDB_API_KEY")


def test_it_begins_when_all_are_heard_and_not_by_old_signs(tmp_path: Path) -> None:
    found = host(tmp_path, hosts=3)
    mark(found, 1)
    mark(found, 2, at=time.time() - 2 * roll.FRESH)
    found.asked = True  # so that it does not wait
    assert found._gathered() == 75
    found.asked = False
    mark(found, 2)
    assert found._gathered() is None


def test_what_ended_it_elsewhere_ends_it_here(tmp_path: Path) -> None:
    found = host(tmp_path)
    mark(found, 1, "ended", 7)
    assert found.keep() == 7
    assert last(found).what == "exit code 7, step -1 saved: ended on w-1: all"
    assert host(tmp_path).keep() == 0  # and so it does when the machine starts again


def test_a_stop_before_it_began_is_the_end(tmp_path: Path) -> None:
    found = host(tmp_path)
    (found.place / "stop-now").touch()
    (found.place / "stop-before").touch()
    assert found.keep() == 0
    assert (last(found).code, found.over) == (75, True)


@pytest.mark.parametrize("code", [0, 2, 7, 8])
def test_some_ends_are_for_good(tmp_path: Path, code: int) -> None:
    found = host(tmp_path)
    mark(found, 1, "running")
    assert found._ended(code) == code
    assert last(found).code == code


def test_a_preemption_is_no_death_and_a_death_counts_until_something_is_saved(tmp_path: Path) -> None:
    found = host(tmp_path)
    assert found._ended(75) == 75
    assert (last(found).state, last(found).deaths) == ("leaving", 0)
    for deaths in (1, 2):
        assert found._ended(137) == 137
        assert last(found).deaths == deaths
    (found.run.checkpoints / "10").mkdir(parents=True)
    assert found._ended(137) == 137
    assert last(found).deaths == 1
    found.reached = 10
    assert found._ended(137) == 137
    assert found._ended(137) == 8
    assert last(found).what == "exit code 8, step 10 saved: 3 starts died and saved nothing new"


def test_a_death_while_it_was_told_to_leave_is_none(tmp_path: Path) -> None:
    found = host(tmp_path)
    found.leave()
    assert found._ended(143) == 75
    assert last(found).deaths == 0


def test_notices_of_the_machine_have_it_leave(tmp_path: Path, cloud: Cloud) -> None:
    found = host(tmp_path, hours=1e-9)

    cloud.metadata["0/instance/preempted"] = "TRUE"
    assert found._reason() == "the machine is being preempted"
    assert not found.stopped


def test_hours_are_counted_over_all_boots_by_the_first_host(tmp_path: Path, cloud: Cloud) -> None:
    found = host(tmp_path, hours=1e6)
    assert found._reason() == ""
    hours = json.loads((found.place / "hours.json").read_text())
    (found.place / "hours.json").write_text(json.dumps(hours | {"another-boot": 1e6}))
    assert "of 1000000.0 hours are spent" in found._reason()
    assert host(tmp_path, rank=1, hours=1e6)._reason() == ""


def test_machines_are_given_back_once_all_have_ended(tmp_path: Path, cloud: Cloud) -> None:
    path = "v2/projects/my-project/locations/ZONE/queuedResources/far"
    cloud.resources["projects/my-project/locations/us-central1-a/queuedResources/far"] = {}
    found = host(tmp_path, give_back=[["DELETE", "tpu", path]])
    found._ended(0)
    mark(found, 1, "ended", 0)
    host(tmp_path, rank=1, give_back=[["DELETE", "tpu", path]]).give_back()
    assert cloud.calls == []
    found.give_back()
    assert [call[:2] for call in cloud.calls] == [("DELETE", "/" + path.replace("ZONE", "us-central1-a"))]


def test_alone_it_runs_to_the_end_and_ships_what_it_said(tmp_path: Path, cloud: Cloud) -> None:
    cloud.secrets["HF_TOKEN"] = "hf-4711"
    cloud.metadata |= {
        "0/instance/attributes/agent-worker-number": "0",
        "0/instance/attributes/worker-network-endpoints": "10.0.0.2",
    }
    place = tmp_path / "mnt" / "far" / "launch"
    (place / "recipe.yaml").write_text(f"name: far{RECIPE}")
    (place / "job.json").write_text(json.dumps(TOLD | {"hosts": 1, "environment": ["HF_TOKEN"]}))
    told = bare_environment() | cloud.environment(tmp_path) | {"GCE_METADATA_HOST": f"127.0.0.1:{cloud.port}/0"}
    command = [sys.executable, "-m", "dtrain.launch.host", str(place / "job.json")]
    done = subprocess.run(command, env=told, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "far: finished at step 10 of 10" in done.stdout
    assert done.stdout == "".join(path.read_text() for path in sorted((place / "log").glob("now-00000-*.txt")))
    ended = roll.read(place, "now")[0]
    assert (ended.state, ended.code, ended.saved) == ("ended", 0, 10)
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"hf-4711" not in written
    missing = json.loads((place / "job.json").read_text()) | {"environment": ["WANDB_API_KEY"], "launch": "again"}
    (place / "job.json").write_text(json.dumps(missing))
    failed = subprocess.run(command, env=told, capture_output=True, text=True, check=False)
    assert failed.returncode == 3
    assert "Secret [WANDB_API_KEY] not found" in roll.read(place, "again")[0].what


def test_who_is_leaving_or_silent_is_waited_for_and_the_run_is_not_to_blame(tmp_path: Path) -> None:
    found = host(tmp_path)
    mark(found, 1, roll.LEAVING)
    assert not roll.read(found.place, "now")[1].there()
    for code in (8, 9):  # the others waited for it in vain
        assert found._ended(code) == 75
    assert (last(found).what, last(found).deaths) == ("host 1 is gone, step -1 saved", 0)
    mark(found, 1, "running")
    assert found._ended(8) == 8


def test_hours_end_the_waiting_too(tmp_path: Path) -> None:
    found = host(tmp_path, hours=1e-9)
    assert found.keep() == 0
    assert "of 0.0 hours are spent" in last(found).what


def test_a_cloud_that_does_not_answer_at_once_is_asked_again(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(google, "PAUSES", (0.01, 0.01))
    cloud.secrets["HF_TOKEN"] = "hf-4711"
    cloud.fails = 2
    assert google.secret("my-project", "HF_TOKEN") == "hf-4711"
    cloud.fails = 3
    with pytest.raises(EnvironmentFault, match="503, not now"):
        google.secret("my-project", "HF_TOKEN")


def test_what_cannot_be_said_does_not_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = host(tmp_path)
    found.run.record.write_text("{")  # half written, as another host may see it

    def command(*_: Any, **given: Any) -> Any:
        return real([sys.executable, "-c", "import time; print('on', flush=True); time.sleep(3)"], **given)

    real = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", command)
    assert found._ran({}) == 0
    assert [path.read_text() for path in (found.place / "log").iterdir()] == ["on\n"]
