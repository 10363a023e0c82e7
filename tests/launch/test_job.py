"""Hardware that is billed by the hour: its price, its limits, and when a limit is required."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from dtrain.launch.job import LaunchJob
from dtrain.launch.targets.gke import GKE
from tests.conftest import Dtrain
from tests.launch.test_names import RECIPE, refused

CLUSTER = {"kind": "gke", "on": "v5e-16", "image": "an/image:1", "claim": "runs"}


def rented(on: str, **bounds: float) -> GKE:
    return GKE(on=on, image="an/image:1", claim="runs", **bounds)  # type: ignore[arg-type]


def test_hours_and_dollars_bound_the_time_whichever_is_less() -> None:
    assert rented("v5e-16").limit() is None
    assert rented("v5e-16").rate == pytest.approx(16 * 1.20)
    assert rented("v5e-16", budget=192.0).limit() == pytest.approx(10)
    assert rented("v5e-16", budget=192.0, hours=4.0).limit() == 4
    assert rented("v5e-16", budget=192.0, hours=40.0).limit() == pytest.approx(10)
    assert "--hours" in rented("v5e-16", budget=192.0).run_options()
    assert "--hours" not in rented("v5e-16").run_options()
    job = LaunchJob("a", "")
    assert "--allow-changes" not in rented("v5e-16").run_options(job)
    assert "--allow-changes" in rented("v5e-16").run_options(dataclasses.replace(job, allow_changes=True))


def test_gpus_are_paid_by_whole_machines() -> None:
    assert rented("h200-2").rate == pytest.approx(8 * 10.60)
    assert rented("h100-16").hosts == 2


@pytest.mark.parametrize(
    ("more", "message"),
    [({"on": "v5e-15"}, "there is no slice"), ({"budgett": 3}, "did you mean 'budget'")],
)
def test_unavailable_hardware_is_refused(tmp_path: Path, more: dict[str, object], message: str) -> None:
    assert message in refused(tmp_path, json.dumps(CLUSTER | more))


def test_up_requires_a_limit_for_what_is_billed_by_the_hour(in_process: Dtrain, tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(f"{RECIPE}launch: {json.dumps(CLUSTER)}\n")
    missing = in_process("launch", "up", path, "--yes", code=2)
    assert "19.20 dollars an hour without a limit" in missing.stderr
    assert "launch.hours=24 or launch.budget=500" in missing.stderr
    shown = in_process("launch", "plan", path, "launch.budget=192")
    assert "19.20 dollars an hour, at most 10 hours of `dtrain run`, about 192.00 dollars" in shown.stderr
    assert "--hours 10" in shown.stdout
    assert re.search(r"predicted: [\d.]+ of [\d.]+ GiB a device, [\d.]+ ms a step", shown.stderr)
    assert "ends the run" not in shown.stderr
    short = in_process("launch", "plan", path, "launch.hours=1e-6", "steps=100000").stderr
    assert re.search(r"hours ends the run at about \d+%, step [\d,]+ of 100,000: it saves there", short)
    values = json.loads(in_process("launch", "plan", path, "--json").stdout)
    assert values["prediction"]["fits"] and values["prediction"]["step_seconds"] > 0
    assert json.loads(in_process("launch", "plan", path, "--json", "--no-plan").stdout)["prediction"] is None
    assert "Write launch.budget=..." in in_process("launch", "up", path, "--budget", "5", code=2).stderr
    large = "model={kind: mlp, sizes: [64, 400000, 400000, 10]}"
    refused = in_process("launch", "plan", path, large, code=2)
    assert "the run does not fit on v5e-16" in refused.stderr
    assert "16 chips" in refused.stderr  # the plan is shown all the same


def test_a_section_is_taken_from_a_file(in_process: Dtrain, tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(RECIPE)
    (tmp_path / "pod.json").write_text(json.dumps(CLUSTER))
    assert "16 chips" in in_process("launch", "plan", "small.yaml", "launch=@pod.json").stderr
    (tmp_path / "pod.json").write_text(json.dumps(CLUSTER | {"on": "v5e-17"}))
    wrong = in_process("launch", "plan", "small.yaml", "launch=@pod.json", code=2)
    assert "pod.json:1" in wrong.stderr and "launch.on" in wrong.stderr
    assert "nowhere.json" in in_process("launch", "plan", "small.yaml", "launch=@nowhere.json", code=2).stderr


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        ("{kind: local, devices: 3}", "on 3 devices: mesh: data 2: 2 != 3 devices"),
        ("{kind: slurm, nodes: 2, devices: 1}", "launch: 1 device cannot be divided over 2 processes"),
        ("{kind: slurm, nodes: 2, gpus: 8}", "on 16 devices: mesh: data 2: 2 != 16 devices"),
    ],
)
def test_what_cannot_be_laid_out_is_refused_before_it_waits_in_a_queue(
    in_process: Dtrain, tmp_path: Path, launch: str, message: str
) -> None:
    (tmp_path / "small.yaml").write_text(RECIPE)
    for verb in (["plan"], ["up", "--yes"]):
        words = ("launch", verb[0], "small.yaml", f"launch={launch}", "mesh={data: 2}", *verb[1:])
        assert message in in_process(*words, code=2).stderr
    assert not (tmp_path / "runs").exists()
