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
from tests.conftest import Dtrain, bare_environment
from tests.launch.cloud import Cloud, serving
from tests.launch.processes import mentioning
from tests.launch.test_ssh import RECIPE, following, read_until

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
LONG = ("steps=200",)
PROJECT = {"project": "my-project", "zones": ("us-central1-a", "europe-west4-b"), "bucket": "my-bucket"}
needs_gcloud = pytest.mark.skipif(not shutil.which("gcloud"), reason="gcloud is not installed here")


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[Cloud]:
    """A cloud whose bucket is a folder; the wheel lies where the command runs."""
    (tmp_path / "mnt" / "my-bucket").mkdir(parents=True)
    (tmp_path / "dtrain-0.1.0-py3-none-any.whl").touch()
    with serving(tmp_path / "mnt") as found:
        yield found


def recipe(tmp_path: Path, kind: str) -> Path:
    tiny = Path(__file__).parents[2] / "recipes" / "decoder-tiny.yaml"
    (tmp_path / "far.yaml").write_text(RECIPE.format(tiny=tiny) + LAUNCH.format(kind=kind))
    return tmp_path / "far.yaml"


TARGETS = [
    TpuVm(on="v5e-16", image="images/dtrain:1", watcher=False, **PROJECT),
    TpuVm(on="v6e-8", wheel="a.whl", reserved=True, network="net", subnetwork="sub", **PROJECT),
    Queued(on="v5e-64", wheel="a.whl", spot=True, wait=60, account="a@my-project.iam.gserviceaccount.com", **PROJECT),
    Queued(on="v5p-128", slices=2, wheel="a.whl", guaranteed=True, **PROJECT),
    Group(on="v6e-16", wheel="a.whl", spot=True, network="net", subnetwork="sub", **PROJECT),
    Group(on="h100-16", image="images/dtrain:1", watcher=False, reservation="mine", **PROJECT),
]
NAMES = ("vm", "vm-reserved", "queued-spot", "queued-slices", "group-spot", "group-gpu")


@needs_gcloud
@pytest.mark.slow
def test_gcloud_accepts_every_command(tmp_path: Path) -> None:
    job = Job("far", "", {"launch": "0"})
    commands = []
    for one in TARGETS:
        commands += [*one.plan(job).commands, one.looking(job, "us-central1-a"), *one.dismissing(job)]
        commands += [*one.deleting(job, "us-central1-a"), one.place(job).clearing()]
    listed = tmp_path / "commands.json"
    said_once = sorted({" ".join(one) for one in commands})
    listed.write_text(json.dumps([{"command_string": one} for one in said_once]))
    lint = ["gcloud", "meta", "lint-gcloud-commands", f"--commands-file={listed}"]
    told = os.environ | {"CLOUDSDK_CONFIG": str(tmp_path), "CLOUDSDK_CORE_DISABLE_PROMPTS": "1"}
    said = subprocess.run(lint, capture_output=True, text=True, check=False, env=told).stdout
    answers = json.loads(said[said.index("[") :])
    assert len(answers) == len(said_once)
    assert [one for one in answers if not one["success"]] == []


@needs_gcloud
@pytest.mark.slow
@pytest.mark.parametrize(("number", "name"), list(enumerate(NAMES)))
def test_golden_what_is_asked_of_the_cloud(
    dtrain: Dtrain, tmp_path: Path, cloud: Cloud, golden: Callable[[str, str], None], number: int, name: str
) -> None:
    from dtrain.recipe.load import plain_part

    section = {key: value for key, value in plain_part(TARGETS[number]).items() if key != "wheel"}
    if TARGETS[number].wheel:
        section["wheel"] = "dtrain-0.1.0-py3-none-any.whl"
    path = recipe(tmp_path, "tpu-vm")
    path.write_text(RECIPE.format(tiny=Path(__file__).parents[2] / "recipes" / "decoder-tiny.yaml"))
    told = cloud.environment(tmp_path / "config")
    dtrain("launch", "up", path, f"launch={json.dumps(section)}", "--yes", "--detach", **told)
    dtrain("launch", "down", "far", "--yes", **told)
    assert cloud.resources == {}
    assert list((tmp_path / "mnt" / "my-bucket" / "far").glob("launch/*")) == []
    golden(f"launch-{name}.json", _calls(cloud))


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
    return list(manifest.read(folder / name / "checkpoints" / "200").checksum)


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
    watch = following(tmp_path, "watch", "far", "--pause", "0.2")
    logs = following(tmp_path, "logs", "far", "-f")
    read_until(logs, r"t1v-w-0\] step 10/")

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
    assert said.count("-- ended: exit code 0, step 200 saved") == 2
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
