"""The variables that carry rank, process count and coordinator."""

import os
import subprocess

import pytest

from dtrain.core.errors import EnvironmentFault
from dtrain.core.process_info import (
    ProcessInfo,
    exports,
    launch_id,
    process_info,
    rendezvous_seconds,
    replaces_hosts,
)

WHOLE = {"DTRAIN_RANK": "1", "DTRAIN_WORLD_SIZE": "2", "DTRAIN_COORDINATOR": "10.0.0.1:8476"}


def given(monkeypatch: pytest.MonkeyPatch, values: dict[str, str]) -> None:
    for name in [name for name in os.environ if name.startswith("DTRAIN_")]:
        monkeypatch.delenv(name)
    for name, value in values.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("coordinator", ["10.0.0.1:8476", "small-slice-0-0.small:8476", "[fd00::1]:8476"])
def test_what_is_written_is_read_back(monkeypatch: pytest.MonkeyPatch, coordinator: str) -> None:
    info = ProcessInfo(3, 4, coordinator)
    given(monkeypatch, info.environment())
    assert process_info() == info


def test_a_process_alone_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, {})
    assert process_info() is None
    given(monkeypatch, ProcessInfo(0, 1, "a:8476").environment())
    assert process_info() is None


def test_the_shell_line_is_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    line = exports(rank="$SLURM_PROCID", world_size="$SLURM_NTASKS", coordinator="${FIRST}:8476")
    reported = {"PATH": "/usr/bin:/bin", "SLURM_PROCID": "2", "SLURM_NTASKS": "3", "FIRST": "node-1"}
    shown = subprocess.run(
        ["sh", "-c", f"{line}; env"], env=reported, capture_output=True, text=True, check=True
    ).stdout
    given(monkeypatch, dict(one.split("=", 1) for one in shown.splitlines() if one.startswith("DTRAIN_")))
    assert process_info() == ProcessInfo(2, 3, "node-1:8476")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"DTRAIN_RANK": ""}, "DTRAIN_WORLD_SIZE is set, but DTRAIN_RANK is not set"),
        ({"DTRAIN_WORLD_SIZE": "", "DTRAIN_COORDINATOR": ""}, "DTRAIN_WORLD_SIZE and DTRAIN_COORDINATOR are not set"),
        ({"DTRAIN_RANK": "2"}, "DTRAIN_RANK=2 is not less than DTRAIN_WORLD_SIZE=2"),
        ({"DTRAIN_RANK": "-1"}, "DTRAIN_RANK=-1 is not a whole number"),
        ({"DTRAIN_WORLD_SIZE": "two"}, "DTRAIN_WORLD_SIZE=two is not a whole number"),
        *(
            ({"DTRAIN_COORDINATOR": wrong}, f"DTRAIN_COORDINATOR={wrong} is not host:port")
            for wrong in ("10.0.0.1", ":8476", "a:0", "a:70000", "fd00::1:8476", "a b:1")
        ),
    ],
)
def test_what_is_incomplete_or_impossible_is_refused(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, str], message: str
) -> None:
    given(monkeypatch, WHOLE | change)
    with pytest.raises(EnvironmentFault) as refused:
        process_info()
    assert message in refused.value.message
    assert "DTRAIN_RANK=0 DTRAIN_WORLD_SIZE=2 DTRAIN_COORDINATOR=10.0.0.1:8476" in refused.value.hint


def test_the_other_variables_are_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, {})
    assert (launch_id(), replaces_hosts(), rendezvous_seconds(300.0)) == ("", False, 300.0)
    given(monkeypatch, {"DTRAIN_LAUNCH": "a1", "DTRAIN_REPLACES_HOSTS": "1", "DTRAIN_RENDEZVOUS_S": "5"})
    assert (launch_id(), replaces_hosts(), rendezvous_seconds(300.0)) == ("a1", True, 5.0)
    for name, value in (
        ("DTRAIN_REPLACES_HOSTS", "yes"),
        ("DTRAIN_RENDEZVOUS_S", "soon"),
        ("DTRAIN_RENDEZVOUS_S", "0"),
    ):
        given(monkeypatch, {name: value})
        with pytest.raises(EnvironmentFault, match=f"{name}={value}"):
            replaces_hosts()
            rendezvous_seconds(300.0)
