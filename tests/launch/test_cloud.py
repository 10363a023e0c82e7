"""TPU VMs and queued resources: a real gcloud, pointed at a cloud of our own."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dtrain.checkpoint import manifest
from dtrain.launch.group import Group
from dtrain.launch.job import Job
from dtrain.launch.tpu import Queued, TpuVm
from dtrain.recipe.load import plain_part
from tests.conftest import Dtrain, bare_environment
from tests.launch.cloud import Cloud, serving
from tests.launch.processes import mentioning
from tests.launch.test_ssh import RECIPE, following

LAUNCH = """
launch:
  kind: {kind}
  on: v4-16
  project: my-project
  zones: [us-central1-a, europe-west4-b]
  bucket: my-bucket
  wheel: dtrain-0.1.0-py3-none-any.whl
  devices: 4
"""
TINY = Path(__file__).parents[2] / "recipes" / "decoder-tiny.yaml"
LONG = ("steps=120",)
PROJECT: dict[str, Any] = {"project": "my-project", "zones": ("us-central1-a", "europe-west4-b"), "bucket": "my-bucket"}
needs_gcloud = pytest.mark.skipif(not shutil.which("gcloud"), reason="gcloud is not installed here")


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[Cloud]:
    """A cloud whose bucket is a folder; the wheel lies where the command runs."""
    (tmp_path / "mnt" / "my-bucket").mkdir(parents=True)
    (tmp_path / "dtrain-0.1.0-py3-none-any.whl").touch()
    with serving(tmp_path / "mnt") as found:
        yield found


@pytest.fixture(autouse=True)
def _nothing_left(tmp_path: Path) -> Iterator[None]:
    yield
    for pid in mentioning(f"{tmp_path}/mnt"):
        os.kill(pid, signal.SIGKILL)


def recipe(tmp_path: Path, kind: str) -> Path:
    (tmp_path / "far.yaml").write_text(RECIPE.format(tiny=TINY) + LAUNCH.format(kind=kind))
    return tmp_path / "far.yaml"


SPOT: dict[str, Any] = {"spot": True, "wheel": "a.whl", "network": "net", "subnetwork": "sub"}
TARGETS = {
    "vm": TpuVm(on="v5e-16", image="images/dtrain:1", watcher=False, hours=12, **PROJECT),
    "vm-reserved": TpuVm(on="v6e-8", wheel="a.whl", reserved=True, **PROJECT),
    "queued-spot": Queued(
        on="v5e-64", wait=60, budget=500, account="a@my-project.iam.gserviceaccount.com", **SPOT, **PROJECT
    ),
    "queued-slices": Queued(on="v5p-128", slices=2, wheel="a.whl", guaranteed=True, **PROJECT),
    "group-spot": Group(on="v6e-16", **SPOT, **PROJECT),
    "group-gpu": Group(on="h100-16", image="images/dtrain:1", watcher=False, reservation="mine", **PROJECT),
}
JOB = Job("far", "", {"launch": "0"})


@needs_gcloud
@pytest.mark.slow
def test_gcloud_accepts_every_command(tmp_path: Path) -> None:
    commands = []
    for one in TARGETS.values():
        commands += [*one.plan(JOB).commands, one.looking(JOB, "us-central1-a"), *one.dismissing(JOB)]
        commands += [*one.deleting(JOB, "us-central1-a"), one.place(JOB).clearing()]
    listed = tmp_path / "commands.json"
    said_once = sorted({" ".join(one) for one in commands})
    listed.write_text(json.dumps([{"command_string": one} for one in said_once]))
    lint = ["gcloud", "meta", "lint-gcloud-commands", f"--commands-file={listed}"]
    told = os.environ | {"CLOUDSDK_CONFIG": str(tmp_path), "CLOUDSDK_CORE_DISABLE_PROMPTS": "1"}
    said = subprocess.run(lint, capture_output=True, text=True, check=False, env=told).stdout
    answers = json.loads(said[said.index("[") :])
    assert len(answers) == len(said_once)
    assert [one for one in answers if not one["success"]] == []


@pytest.mark.parametrize("name", TARGETS)
def test_golden_commands(golden: Callable[[str, str], None], name: str) -> None:
    plan = TARGETS[name].plan(JOB)
    taken = [*TARGETS[name].deleting(JOB, "us-central1-a"), *TARGETS[name].dismissing(JOB)]
    lines = [" ".join(command) for command in (*plan.commands, TARGETS[name].looking(JOB, "us-central1-a"), *taken)]
    price = f"{plan.hosts} hosts, {plan.chips} chips, {plan.dollars_hour} dollars an hour"
    text = "\n\n".join([*lines, *plan.notes, price]) + "\n"
    golden(f"launch_{name}.txt", text.replace(f"{Path.cwd()}/", ""))


@needs_gcloud
@pytest.mark.slow
@pytest.mark.parametrize("name", ["queued-spot", "group-spot"])
def test_golden_what_is_asked_of_the_cloud(
    dtrain: Dtrain, tmp_path: Path, cloud: Cloud, golden: Callable[[str, str], None], name: str
) -> None:
    section = plain_part(TARGETS[name]) | {"wheel": "dtrain-0.1.0-py3-none-any.whl"}
    (tmp_path / "far.yaml").write_text(RECIPE.format(tiny=TINY))
    told = cloud.environment(tmp_path / "config")
    dtrain("launch", "up", "far.yaml", f"launch={json.dumps(section)}", "--no-plan", "--yes", "--detach", **told)
    dtrain("launch", "down", "far", "--yes", **told)
    assert cloud.resources == {}
    assert list((tmp_path / "mnt" / "my-bucket" / "far").glob("launch/*")) == []
    golden(f"launch_{name}.json", _calls(cloud))


def _calls(cloud: Cloud) -> str:
    """What changed something, with scripts by their first lines."""
    told = []
    for method, path, body in cloud.calls:
        text = json.dumps(_short(body), indent=2, sort_keys=True) if body else ""
        told.append(f"{method} {path}\n{text}".strip())
    return re.sub(r"127\.0\.0\.1:\d+", "HERE", "\n".join(told)) + "\n"


def _short(found: Any) -> Any:
    if isinstance(found, dict):
        return {key: _short(one) for key, one in found.items()}
    if isinstance(found, list):
        return [_short(one) for one in found]
    return found.splitlines()[1] if isinstance(found, str) and found.startswith("#!") else found


class Unit:
    """A host of the stand-in: what systemd does with the unit of launch/startup.sh."""

    def __init__(self, cloud: Cloud, folder: Path, rank: int) -> None:
        self.rank, self.codes, self.process = rank, list[int](), None
        cloud.metadata |= {
            f"{rank}/instance/zone": "projects/1/zones/us-central1-a",
            f"{rank}/instance/hostname": f"t1v-w-{rank}.us-central1-a.c.my-project.internal",
            f"{rank}/instance/attributes/agent-worker-number": str(rank),
            f"{rank}/instance/attributes/worker-network-endpoints": "a:b:127.0.0.1,c:d:127.0.0.1",
        }
        host = {"GCE_METADATA_HOST": f"127.0.0.1:{cloud.port}/{rank}"}
        self.environment = bare_environment() | cloud.environment(folder) | host
        self.job, self.gone = folder / "mnt" / "my-bucket" / "far" / "launch" / "job.json", False
        self.said = (folder / f"host-{rank}.txt").open("a")
        self.thread = threading.Thread(target=self._keep, daemon=True)
        self.thread.start()

    def _keep(self) -> None:
        while not self.gone and (not self.codes or self.codes[-1] not in {0, *range(2, 9)}):
            self.process: Any = subprocess.Popen(
                [sys.executable, "-m", "dtrain.launch.host", self.job], env=self.environment, start_new_session=True,
                stdout=self.said, stderr=self.said,
            )  # fmt: skip
            self.codes.append(self.process.wait())
        self.said.close()

    def take(self) -> None:
        """As the cloud takes a machine: asked to end, and at the end of its time killed."""
        self.gone = True
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.thread.join(10)


def _until(done: Callable[[], object], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.2)


def _checksum(folder: Path, name: str) -> list[int]:
    return list(manifest.read(folder / name / "checkpoints" / "120").checksum)


@needs_gcloud
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_preempted_made_again_and_given_back_when_done_with_the_same_bits(
    dtrain: Dtrain, tmp_path: Path, cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket, told = tmp_path / "mnt" / "my-bucket", cloud.environment(tmp_path / "config")
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    cloud.secrets["CANARY_TOKEN"] = "canary-4711"
    path = recipe(tmp_path, "queued")
    dtrain(
        "launch",
        "up",
        path,
        "launch.spot=true",
        "launch.environment=[CANARY_TOKEN]",
        *LONG,
        "--yes",
        "--detach",
        **told,
    )
    job = json.loads((bucket / "far" / "launch" / "job.json").read_text())
    (bucket / "far" / "launch" / "job.json").write_text(json.dumps(job | {"port": 8496}))
    hosts = [Unit(cloud, tmp_path, rank) for rank in (0, 1)]
    watch, logs = (following(tmp_path, *words) for words in (("watch", "far", "--pause", "0.2"), ("logs", "far", "-f")))
    metrics = bucket / "far" / "metrics.jsonl"
    _until(lambda: metrics.exists() and '{"step": 10,' in metrics.read_text())
    cloud.metadata["1/instance/preempted"] = "TRUE"
    _until(lambda: 75 in hosts[1].codes)
    for host in hosts:
        host.take()
    cloud.metadata["1/instance/preempted"] = "FALSE"
    cloud.force("far", "SUSPENDED")
    _until(lambda: len([path for path in cloud.created() if "queuedResources" in path]) == 2)
    again = [Unit(cloud, tmp_path, rank) for rank in (0, 1)]

    _until(lambda: [host.codes[-1:] for host in again] == [[0], [0]], 200)
    assert watch.communicate(timeout=60)[0].startswith("SUSPENDED in us-central1-a\nasking for")
    assert watch.returncode == 0
    said = logs.communicate(timeout=60)[0]
    assert "the machine is being preempted: it is asked to save and leave" in (tmp_path / "host-1.txt").read_text()
    assert "resumed from step" in said
    assert said.count("-- ended: exit code 0, step 120 saved") == 2
    assert ("DELETE", "/v2/projects/my-project/locations/us-central1-a/queuedResources/far") in [
        call[:2] for call in cloud.calls
    ]
    assert cloud.resources == {}
    assert not mentioning(f"{tmp_path}/mnt")
    dtrain("run", path, *LONG, "name=straight", "--devices", "4", "--processes", "2", "--runs-dir", tmp_path / "runs")
    assert _checksum(bucket, "far") == _checksum(tmp_path / "runs", "straight")
    written = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    assert b"canary-4711" not in written
    assert b"CANARY_TOKEN" in written
    assert "canary-4711" not in str(cloud.calls)


@needs_gcloud
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_zones_are_asked_in_order_and_what_was_half_made_is_taken_back(
    dtrain: Dtrain, tmp_path: Path, cloud: Cloud
) -> None:
    path, told = recipe(tmp_path, "queued"), cloud.environment(tmp_path / "config")
    quota = (429, "Quota limit 'TPUV4sPodPerProjectPerZoneForTPUAPI' has been exceeded. Limit: 0")
    cloud.refuse = {"*/us-central1-a/queuedResources": quota, "*/instances": (403, "Required permission denied")}
    half = dtrain("launch", "up", path, "--yes", code=3, **told)
    assert re.search(r"us-central1-a: gcloud compute tpus queued-resources failed .1.: ERROR.*Quota limit", half.stderr)
    assert "Required permission denied" in half.stderr
    assert "asking for v4-16 (8 v4 chips, 2x2x2) in europe-west4-b" in half.stderr
    assert cloud.resources == {}
    cloud.refuse = {"*/queuedResources": quota}
    none = dtrain("launch", "up", path, "--yes", code=3, **told)
    assert "no zone has them:" in none.stderr
    assert "hint: ask for more quota, for less, or in another zone; nothing was left behind" in none.stderr
    assert not (tmp_path / "runs").exists()
    cloud.refuse = {"*/us-central1-a/queuedResources": quota}
    dtrain("launch", "up", path, "--yes", "--detach", "launch.watcher=false", **told)
    again = dtrain("launch", "up", path, "--yes", "launch.watcher=false", code=6, **told)
    assert "far is there already, ACTIVE in europe-west4-b" in again.stderr
    cloud.force("far", "SUSPENDED")
    assert dtrain("launch", "status", "far", **told).stdout.split() == ["v4-16", "suspended", "in", "europe-west4-b"]
    stopped = dtrain("launch", "stop", "far", **told)
    assert "no machine runs it" in stopped.stderr
    assert cloud.resources == {}


@needs_gcloud
@pytest.mark.slow
def test_without_gcloud_credentials_bucket_or_wheel_nothing_is_made(
    dtrain: Dtrain, tmp_path: Path, cloud: Cloud
) -> None:
    path, told = recipe(tmp_path, "queued"), cloud.environment(tmp_path / "config")
    wheel = dtrain("launch", "up", path, "--yes", "launch.wheel=none.whl", code=3, **told)
    assert "there is no none.whl" in wheel.stderr
    bucket = dtrain("launch", "up", path, "--yes", "launch.bucket=another", code=3, **told)
    assert "gs://another not found" in bucket.stderr
    missing = dtrain("launch", "up", path, "--yes", code=3, PATH="/nowhere")
    assert "gcloud is not installed here" in missing.stderr
    nobody = dtrain("launch", "up", path, "--yes", code=3, **(told | {"CLOUDSDK_AUTH_ACCESS_TOKEN": ""}))
    assert "hint: gcloud auth login" in nobody.stderr
    named = dtrain("launch", "plan", path, "name=0far", code=2)
    assert "begin with a letter" in named.stderr
    assert cloud.calls == []


@needs_gcloud
@pytest.mark.slow
def test_who_took_the_machines_away_is_believed_and_failures_are_counted(
    dtrain: Dtrain, tmp_path: Path, cloud: Cloud
) -> None:
    path, told = recipe(tmp_path, "queued"), cloud.environment(tmp_path / "config")
    dtrain("launch", "up", path, "--yes", "--detach", "launch.watcher=false", "launch.restarts=0", **told)
    cloud.force("far", "FAILED")
    failed = dtrain("launch", "watch", "far", "--pause", "0.1", code=8, **told)
    assert "FAILED in us-central1-a" in failed.stderr
    assert "the machines failed 1 times, and nothing new was saved" in failed.stderr
    assert cloud.resources == {}
    taken = dtrain("launch", "watch", "far", "--pause", "0.1", code=3, **told)
    assert "somebody took the machines away" in taken.stderr
    local = dtrain("launch", "up", path, "name=here", "launch=local", "steps=6", "--yes")
    assert "is started" in local.stderr
    assert "nothing to watch" in dtrain("launch", "watch", "here", code=2).stderr


@pytest.mark.slow
def test_what_is_rented_is_foretold_and_what_cannot_run_there_is_not_rented(dtrain: Dtrain, tmp_path: Path) -> None:
    path = recipe(tmp_path, "queued")
    seen = dtrain("launch", "up", path, "launch.devices=null", "--on", "v5e-16", "--spot", code=2)
    assert re.search(
        r"foretold: 0\.\d\d of 15\.75 GiB a device, 0\.\d ms a step, 0\.0 hours and 0 dollars", seen.stderr
    )
    assert "nobody can be asked here" in seen.stderr
    assert "spot capacity" in seen.stderr
    wrong = dtrain("launch", "up", path, "launch.devices=null", "mesh.data=3", "batch=15", "--yes", code=2)
    assert "on v4-16: " in wrong.stderr
    assert "8 devices" in wrong.stderr
    large = dtrain("launch", "up", path, "launch.devices=null", "model.context=100000", "data.length=100000", code=2)
    assert "it does not fit on v4-16" in large.stderr
    assert "nobody can be asked" in dtrain("launch", "up", path, "--no-plan", "mesh.data=3", "batch=15", code=2).stderr
