"""`dtrain verify --on`: a run on a launch target is killed, and how it recovers is measured."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from dtrain.core.errors import EnvironmentFault
from dtrain.core.heartbeat import Heartbeat
from dtrain.launch.job import LaunchJob, MachineState, Say
from dtrain.launch.targets.hosts import Local
from dtrain.runtime import drill
from dtrain.runtime.drill import Launches, Recovery
from tests.conftest import PACED, Dtrain
from tests.launch.processes import mentioning

SLOW = {"DTRAIN_FAULT": ",".join([PACED["DTRAIN_FAULT"]] * 4)}


@pytest.mark.slow
def test_a_process_and_a_machine_are_killed_and_the_run_ends_with_the_same_bits(dtrain: Dtrain, tmp_path: Path) -> None:
    kills = ["--kills", "2", "--seed", "5", "--yes", "--json"]
    words = ["mlp-digits", "epochs=null", "steps=120", "checkpoint.every=25", f"launch.folder={tmp_path}/host"]
    done = dtrain("verify", *words, "--on", "local", *kills, **SLOW)
    found = json.loads(done.stdout)
    assert (found["kept"], found["target"], found["steps"]) == (True, "local, 1 host", 120)
    assert found["findings"][0]["shown"].startswith("the same bits; ")
    process, host = found["recoveries"]
    assert (process["what"], process["by"]) == ("a process on here killed", "its supervisor")
    assert (host["what"], host["by"]) == ("host here killed", "`dtrain launch up`")
    for one in (process, host):
        assert one["repeated"] - one["step"] % 25 in (0, 25)  # saved every 25 steps; 25 more if during a save
        assert 0 < one["seconds"] <= one["caught_up"]
    assert found["lost"]["down_killed_s"] > 0
    assert 0 < found["goodput"] < found["undisturbed"] < 1
    assert not mentioning(f"{tmp_path}/host")
    assert not list(tmp_path.glob("runs/*/launch.json"))
    assert len(list(tmp_path.glob("runs/mlp-digits-drill-*/checkpoints/120"))) == 2


@dataclass(frozen=True, kw_only=True)
class Scripted(Local):
    """A target whose run has these heartbeats and exit codes, one after the other."""

    shown: ClassVar[list[tuple[Heartbeat | None, int | None]]] = []
    killed: ClassVar[list[tuple[int, bool]]] = []

    def up(self, job: LaunchJob, say: Say) -> dict[str, str]:
        say(f"up {job.name}")
        return {}

    def watch(self, job: LaunchJob) -> Iterator[list[MachineState]]:
        while True:
            beat, code = self.shown.pop(0) if len(self.shown) > 1 else self.shown[0]
            yield [MachineState("here", "running" if code is None else "ended", "", code, heartbeat=beat)]

    def fail(self, job: LaunchJob, host: int, *, whole: bool) -> str:
        self.killed.append((host, whole))
        return "dt-1"

    def logs(self, job: LaunchJob, host: int | None, follow: bool) -> Iterator[tuple[str, str]]:
        yield "here", "disk full"


def launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown: Sequence[object]) -> Launches:
    monkeypatch.setattr(drill, "POLL", 0.0)
    monkeypatch.setattr(Scripted, "shown", list(shown))
    monkeypatch.setattr(Scripted, "killed", [])
    return Launches(Scripted(), tmp_path, 4, lambda _: None)


def beat(step: int, since: float, first: int = 0) -> Heartbeat:
    return Heartbeat(step=step, since=since, first=first)


RESTARTED = [(beat(0, 2.0), None), (beat(40, 2.0, 40), None), (beat(41, 2.0, 40), None), (beat(53, 2.0, 40), None)]


@pytest.mark.parametrize("whole", [False, True])
def test_steps_since_the_restored_one_are_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    # it trains on until the kill arrives: the last heartbeat of the old process counts
    before = [(None, None), (beat(49, 1.0), None), (beat(50, 1.0), None), (beat(52, 1.0), None)]
    found = drill._recovery(launches(tmp_path, monkeypatch, before + RESTARTED), JOB, 50, 3, whole=whole)  # pyright: ignore[reportPrivateUsage]
    assert isinstance(found, Recovery)
    assert Scripted.killed == [(3, whole)]
    assert (found.step, found.repeated, found.what.partition(" ")[0]) == (52, 12, "host" if whole else "a")
    assert f"step 52, {'host' if whole else 'a process on'} dt-1 killed: trains again after " in str(found)


JOB = LaunchJob("small", "steps: 60", target={"kind": "local"})


def test_a_run_that_ends_before_its_kill_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = launches(tmp_path, monkeypatch, [(beat(10, 1.0), None), (beat(60, 1.0), 0)])
    assert drill._recovery(ended, JOB, 50, 0, whole=False) is None  # pyright: ignore[reportPrivateUsage]
    assert Scripted.killed == []


def test_a_run_that_fails_after_its_kill_is_an_error_with_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drill, "SETTLED", 0.0)
    with pytest.raises(EnvironmentFault, match="small failed: here: ended") as caught:
        list(launches(tmp_path, monkeypatch, [(beat(10, 1.0), 8)]).beats(JOB))
    assert "here: disk full" in (caught.value.hint or "")


def test_what_cannot_be_watched_is_told_as_commands(in_process: Dtrain, tmp_path: Path) -> None:
    (tmp_path / "far.yaml").write_text(
        "name: far\nmodel: {kind: mlp, sizes: [64, 32, 10]}\ndata: digits\nbatch: 64\nsteps: 600\n"
        "optimizer: {kind: adamw, lr: 1e-3}\n"
        "launch: {kind: gke, on: v6e-16, image: us/dtrain:1, bucket: my-runs, namespace: ml, hours: 2}\n"
    )
    refused = in_process("verify", "far.yaml", "--on", "gke", code=3)
    assert "dtrain cannot watch how a run recovers on gke; by hand:" in refused.stderr
    assert re.search(r"kubectl delete pod POD --grace-period=0 --force --namespace ml ", refused.stderr)
    assert "jobset.sigs.k8s.io/jobset-name=far-drill-" in refused.stderr
    assert "launch.devices=..." in in_process("verify", "far.yaml", "--on", "local", "--devices", "4", code=2).stderr
    unknown = in_process("verify", "far.yaml", "--on", "lokal", code=2)
    assert "local" in unknown.stderr
    assert "standard input is not a terminal" in in_process("verify", "far.yaml", "--on", "local", code=2).stderr
