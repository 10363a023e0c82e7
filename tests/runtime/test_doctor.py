import json
import re
from pathlib import Path

import pytest

from dtrain.runtime.doctor import TESTED, Check, text, version_numbers
from tests.conftest import Dtrain

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"


def test_the_tested_versions_are_those_of_the_constraints() -> None:
    pinned: dict[str, list[str]] = {}
    for line in CONSTRAINTS.read_text().splitlines():
        if found := re.match(r"([\w.-]+)==([^;\s]+)", line):
            pinned.setdefault(found[1], []).append(found[2])
    for name, (oldest, newest) in TESTED.items():
        if name != "python":
            assert (min(pinned[name], key=version_numbers), max(pinned[name], key=version_numbers)) == (
                oldest,
                newest,
            ), name


def test_columns_are_apart() -> None:
    lines = text([Check("a", "1"), Check("orbax-checkpoint", "0.12", "warning", "pip install")]).splitlines()
    assert [line.split() for line in lines] == [
        ["ok", "a", "1"], ["warning", "orbax-checkpoint", "0.12"], ["fix:", "pip", "install"],
    ]  # fmt: skip
    assert lines[0].index("1") == lines[1].index("0.12") == lines[2].index("fix")


@pytest.mark.slow
def test_speeds_and_tools_are_measured_and_missing_ones_have_a_way_to_get_them(dtrain: Dtrain, tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, script in {
        "terraform": "echo 'Terraform v1.9.0'", "timedatectl": "echo no", "sky": "exit 3",
        "nvidia-smi": "echo '580.1, NVIDIA H100, 1200 MHz, 1980 MHz'",
    }.items():  # fmt: skip
        (tools / name).write_text(f"#!/bin/sh\n{script}\n")
        (tools / name).chmod(0o755)
    path = str(tools)
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password x\n")
    done = dtrain("doctor", "--json", "--devices", "2", PATH=path, NETRC=str(tmp_path / "netrc"))
    found = {finding["what"]: finding for finding in json.loads(done.stdout)}
    assert found["terraform"]["found"] == "Terraform v1.9.0"
    assert (found["clock"]["verdict"], found["clock"]["fix"]) == ("warning", "timedatectl set-ntp true")
    assert found["nvidia driver"]["found"].startswith("580.1")
    assert found["W&B login"]["verdict"] == "ok"
    assert found["sky"]["found"] == "found"  # it does not print a version
    assert found["gcloud"] == {
        "what": "gcloud", "found": "needed for TPUs and GKE", "verdict": "optional", "fix": "https://cloud.google.com/sdk",
    }  # fmt: skip
    assert re.match(r"[\d.]+ TFLOP/s, float32 1024 x 1024$", found["matrix product"]["found"])
    assert "over 2 devices" in found["all-reduce"]["found"]
    assert "MB/s written and synced" in found["disk speed"]["found"]
    assert not list(tmp_path.glob(".dtrain-doctor*"))


def test_a_version_outside_of_the_tested_ones_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    from dtrain.runtime import doctor

    installed = {"jax": "0.9.0", "optax": "0.2.8", "python": "3.12.9", "numpy": "3.0"}
    monkeypatch.setattr(doctor, "versions", lambda: installed)
    found = {check.what: check for check in doctor._versions()}
    assert {name: found[name].verdict for name in installed} == {
        "jax": "warning", "optax": "ok", "python": "ok", "numpy": "warning",
    }  # fmt: skip
    assert found["jax"].found == "0.9.0, tested with 0.10.2 to 0.12.0.1"
