"""SkyPilot: submitted tasks, checked by the real package if it is installed, and a fake `sky` program."""

import dataclasses
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from dtrain.core.chips import CHIPS, PER_HOST
from dtrain.core.errors import EnvironmentFault, LeftBehind, Locked, RecipeError
from dtrain.launch.job import LaunchJob
from dtrain.launch.targets import sky
from dtrain.launch.targets.sky import Sky
from dtrain.launch.targets.sky_task import Offer
from dtrain.recipe.yaml import parse
from tests.conftest import Dtrain
from tests.launch.targets import sky_program
from tests.launch.test_names import RECIPE, refused

JOB = LaunchJob("small", "name: small\nsteps: 10\n", launch="ab12cd34")
IMAGE = "europe-docker.pkg.dev/project/images/dtrain:1"
CANARY = "canary-0a1b2c3d4e5f6071"
SHAPES = {
    "tpu": Sky(
        on="v5e-64", infra=("gcp/us-central1", "gcp/europe-west4"), spot=True, bucket="gs://my-runs", hours=24,
        fallbacks=(Offer(on="v6e-64", spot=True), Offer(on="v5e-64")), wheel="/dist/dtrain-1-py3-none-any.whl",
        lock="/dist/lock.txt", environment=("HF_TOKEN", "WANDB_API_KEY"), labels={"team": "vision"}, priority=10,
    ),
    "gpu": Sky(
        on="h100-16", infra=("gcp", "aws"), choice="any_of", strategy="eager_next_region", image=IMAGE,
        bucket="s3://my-runs", max_hourly_cost=100, budget=5000, network_tier="best",
    ),
    "cpu": Sky(
        infra=("slurm/cluster/main",), nodes=3, cpus=16, memory=64, python="/opt/dtrain/bin/python",
        runs="/shared/runs",
    ),
}  # fmt: skip


def task(target: Sky) -> dict[str, Any]:
    return yaml.safe_load(target.plan(JOB).files["task.yaml"])


@pytest.mark.parametrize("shape", SHAPES)
def test_a_task_matches_its_golden_file(shape: str, golden: Callable[[str, str], None]) -> None:
    golden(f"launch_sky_{shape}.yaml", SHAPES[shape].plan(JOB).files["task.yaml"])


def test_hosts_chips_and_prices_follow_the_request() -> None:
    plans = {shape: target.plan(JOB) for shape, target in SHAPES.items()}
    assert {shape: (one.hosts, one.chips) for shape, one in plans.items()} == {
        "tpu": (16, 64), "gpu": (2, 16), "cpu": (3, 0),
    }  # fmt: skip
    assert plans["tpu"].dollars_hour == pytest.approx(64 * 2.70)  # of the more expensive fallback
    assert (plans["gpu"].dollars_hour, plans["gpu"].hours) == (200, 25)
    assert (plans["cpu"].dollars_hour, plans["cpu"].hours) == (None, None)
    assert any("v6e-64 is not predicted" in note for note in plans["tpu"].notes)
    sizes = {"v5e-8": 1, "v5e-16": 4, "v6e-1": 1, "v6e-8": 1, "v4-8": 1, "v4-16": 2, "v5p-128": 16}
    assert {on: Offer(on=on).hosts for on in sizes} == sizes
    assert Sky(on="v5e-64", image=IMAGE, bucket="gs://my-runs", budget=768).limit() == pytest.approx(10)


GCP = Offer(on="h100-8").price


@pytest.mark.parametrize(
    ("section", "rate"),
    [
        ({"on": "h100-8"}, GCP),
        ({"on": "h100-8", "infra": ("gcp/us-central1", "k8s/here")}, GCP),
        ({"on": "h100-8", "infra": ("aws",)}, None),
        ({"on": "h100-8", "infra": ("gcp", "aws")}, None),
        ({"on": "h100-8", "fallbacks": (Offer(on="h200-8", infra=("lambda",)),)}, None),
        ({"on": "h100-8", "infra": ("k8s/here",)}, None),
        ({"on": "h100-16", "infra": ("aws",), "max_hourly_cost": 50}, 100),
        ({"cpus": 4}, None),
    ],
)
def test_a_price_is_shown_only_if_it_limits_every_choice(section: Any, rate: float | None) -> None:
    target = Sky(image=IMAGE, bucket="gs://my-runs", hours=2, **section)
    plan = target.plan(JOB)
    assert (target.rate, plan.dollars_hour, plan.hours) == (rate, rate, 2)
    assert any("not all prices are known" in note for note in plan.notes) == (rate is None and plan.rented)
    assert any("cheapest region" in note for note in plan.notes) == (rate == GCP)


def rentable() -> Iterator[str]:
    """Every slice, and every number of GPUs on one and two machines, that the table of chips has."""
    for chip in CHIPS:
        assert chip.cloud
        if chip.dims and chip.cloud.accelerator:
            yield from (f"{chip.name}-{count * chip.units_per_chip}" for count in chip.slices)
        elif not chip.dims:
            yield from (f"{chip.name}-{count}" for count in (*chip.cloud.sold, 2 * PER_HOST))


def test_every_chip_has_a_name_or_is_refused_with_an_alternative() -> None:
    found = {on: Offer(on=on).choices()[0] for on in rentable()}
    assert found["v5e-64"]["accelerators"] == "tpu-v5litepod-64"
    assert found["v5p-128"]["accelerators"] == "tpu-v5p-128"
    assert found["v5p-128"]["accelerator_args"] == {"tpu_vm": True, "runtime_version": "v2-alpha-tpuv5"}
    assert found["v6e-256"]["accelerator_args"]["runtime_version"] == "v2-alpha-tpuv6e"
    assert (found["a100-8"]["accelerators"], found["a100-40g-8"]["accelerators"]) == ("A100-80GB:8", "A100:8")
    assert found["h100-16"]["accelerators"] == "H100:8"
    assert {chip.name for chip in CHIPS} - {on.rpartition("-")[0] for on in found} == {"tpu7x"}
    with pytest.raises(RecipeError, match="SkyPilot has no tpu7x-32") as caught:
        Offer(on="tpu7x-32")
    assert "launch.kind: gke" in caught.value.hint


def sky_python() -> str:
    """The Python of a real SkyPilot."""
    if found := os.environ.get("DTRAIN_TEST_SKY_PYTHON"):
        return found
    program = shutil.which("sky")
    first = Path(program).read_text(errors="replace").partition("\n")[0] if program else ""
    if not first.startswith("#!") or "python" not in first:
        pytest.skip("no SkyPilot here: set DTRAIN_TEST_SKY_PYTHON to a Python that has it")
    return first.removeprefix("#!").strip()


RESOLVE = """
import json, sys, yaml, sky
found = {}
for name, text in json.load(sys.stdin).items():
    task = sky.Task.from_yaml_config(yaml.safe_load(text))
    found[name] = {"nodes": task.num_nodes, "storage": sorted(task.storage_mounts),
        "secrets": [one.name for one in task._managed_secret_refs], "resources": [
        {"cloud": str(one.cloud), "accelerators": one.accelerators, "spot": one.use_spot, "recovery": one.job_recovery,
         "software": (one.accelerator_args or {}).get("runtime_version"), "image": one.image_id,
         "infra": one.infra.to_str(), "cost": one.max_hourly_cost} for one in task.resources]}
json.dump(found, sys.stdout)
"""


@pytest.mark.slow
def test_skypilot_accepts_every_task(tmp_path: Path) -> None:
    bucket = {"image": IMAGE, "bucket": "gs://my-runs"}
    targets = SHAPES | {on: Sky(on=on, **bucket) for on in rentable()}
    for name in ("dtrain-1-py3-none-any.whl", "lock.txt"):
        (tmp_path / name).touch()  # it looks for the files
    texts = {name: one.plan(JOB).files["task.yaml"].replace("/dist/", f"{tmp_path}/") for name, one in targets.items()}
    environment = {"HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1", "PATH": os.environ["PATH"]}
    done = subprocess.run(
        [sky_python(), "-c", RESOLVE], input=json.dumps(texts), env=environment, cwd=tmp_path, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout[done.stdout.index("{") :])
    again = {"strategy": "FAILOVER", "recover_on_exit_codes": [75], "max_restarts_on_errors": 0}
    for on in rentable():
        (one,) = found[on]["resources"]
        name, _, count = Offer(on=on).choices()[0]["accelerators"].partition(":")
        assert one["accelerators"] == {name: int(count or 1)}, on
        assert one["software"] == Offer(on=on).choices()[0].get("accelerator_args", {}).get("runtime_version"), on
        assert (one["cloud"], one["recovery"], one["spot"]) == ("GCP", again, False), on
        assert found[on]["nodes"] == Offer(on=on).sky_nodes
        assert found[on]["storage"] == ["/mnt/dtrain"]
    tpu, gpu, cpu = (found[shape] for shape in ("tpu", "gpu", "cpu"))
    assert [(one["infra"], *one["accelerators"], one["spot"]) for one in tpu["resources"]] == [
        ("gcp/us-central1", "tpu-v5litepod-64", True), ("gcp/europe-west4", "tpu-v5litepod-64", True),
        ("gcp", "tpu-v6e-64", True), ("gcp", "tpu-v5litepod-64", False),
    ]  # fmt: skip
    assert tpu["secrets"] == ["HF_TOKEN", "WANDB_API_KEY"]
    assert sorted((one["cloud"], one["cost"], one["recovery"]["strategy"]) for one in gpu["resources"]) == [
        ("AWS", 100, "EAGER_NEXT_REGION"), ("GCP", 100, "EAGER_NEXT_REGION"),
    ]  # fmt: skip
    assert (cpu["nodes"], cpu["storage"], cpu["resources"][0]["cloud"]) == (3, [], "Slurm")


@pytest.mark.slow
@pytest.mark.parametrize(("uv", "code"), [("exit 0", 0), ("exit 2", 2), ("exec sleep 600", 124)])
def test_an_installation_that_fails_or_hangs_fails_the_set_up(tmp_path: Path, uv: str, code: int) -> None:
    script = task(SHAPES["tpu"])["setup"]
    assert script.count("timeout -k 60 1800 ") == 1
    program = tmp_path / ".local" / "bin" / "uv"
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/bash\necho "$@" >> ~/calls\n[ "$1" = venv ] || {uv}\n')
    program.chmod(0o755)
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    script = script.replace("timeout -k 60 1800 ", "timeout -k 60 1 " if code == 124 else "timeout -k 60 600 ")
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    python = f"--python {tmp_path}/.dtrain/venv/bin/python"
    calls = [
        f"venv --python 3.12 {tmp_path}/.dtrain/venv",
        f"pip install {python} --require-hashes -r {tmp_path}/.dtrain/lock.txt",
        f"pip install {python} --no-deps {tmp_path}/.dtrain/dtrain-1-py3-none-any.whl",
        f"pip check {python}",
    ]
    assert (tmp_path / "calls").read_text().splitlines() == (calls if code == 0 else calls[:2])


@pytest.mark.parametrize(
    ("hosts", "rank", "cloud", "vendor"),
    [(1, 0, "GCP", "google"), (4, 0, "AWS", "aws"), (4, 3, "Slurm", ""), (2, 1, "", "")],
)
def test_a_host_gets_its_rank_and_the_coordinator(
    tmp_path: Path, hosts: int, rank: int, cloud: str, vendor: str
) -> None:
    program = tmp_path / "dtrain"
    program.write_text('#!/bin/bash\nenv | grep ^DTRAIN_ | sort\necho "$@"\ncat "$2"\nexit 75\n')
    program.chmod(0o755)
    target = dataclasses.replace(SHAPES["gpu"], restarts=7)
    script = tmp_path / "run.sh"
    script.write_text(task(target)["run"])
    addresses = "\n".join(f"10.0.0.{number}" for number in range(1, hosts + 1))
    environment = {
        "PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path), "TMPDIR": str(tmp_path),
        "SKYPILOT_NODE_RANK": str(rank), "SKYPILOT_NUM_NODES": str(hosts), "SKYPILOT_NODE_IPS": addresses,
    }  # fmt: skip
    if cloud:
        info = {"cluster_name": "small-12", "cloud": cloud, "region": "us-central1", "zone": None}
        environment["SKYPILOT_CLUSTER_INFO"] = json.dumps(info)
    done = subprocess.run(["bash", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 75, done.stderr
    *lines, command, name, steps = done.stdout.splitlines()
    several = ["DTRAIN_COORDINATOR=10.0.0.1:8476", f"DTRAIN_RANK={rank}", f"DTRAIN_WORLD_SIZE={hosts}"]
    expected = ["DTRAIN_LAUNCH=ab12cd34", "DTRAIN_REPLACES_HOSTS=1", *(several if hosts > 1 else [])]
    assert sorted(lines) == sorted([*expected, *([f"DTRAIN_METADATA={vendor}"] if vendor else [])])
    assert command.startswith("run ")
    assert command.endswith("/recipe.yaml --runs-dir /mnt/dtrain --restarts 7 --hours 25")
    assert (name, steps) == ("name: small", "steps: 10")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("on: v5e-17", "launch.on"),
        ("on: tpu7x-32", "SkyPilot has no tpu7x-32"),
        ("on: 'v5p:4x4x8'", "SkyPilot needs a number"),
        ("on: cpu-8", "cannot be rented"),
        ("on: v5e-8, infra: aws", "TPU slices only on gcp"),
        ("on: v5e-8, infra: k8s/here", "TPU slices only on gcp"),
        ("on: h100-3", "no machine type has 3 of them"),
        ("on: h200-4", "no machine type has 4 of them"),
        ("on: h100-8, infra: gpc", "launch.infra.0: expected where SkyPilot looks"),
        ("on: h100-8, infra: 'gcp/a b'", "launch.infra"),
        ("on: h100-8, infra: [k8s/here, gcp], spot: true", "only clouds have spot capacity"),
        ("on: h100-8, nodes: 2", "launch.nodes"),
        ("on: v5e-8, cpus: 4", "launch.cpus"),
        ("on: h100-8, fallbacks: [{on: h100-16}]", "the same number of nodes"),
        ("on: v5e-8, fallbacks: [{on: h100-8}]", "cannot be mixed"),
        ("on: v5e-8, fallbacks: [{on: v5e-9}]", "launch.fallbacks.0.on"),
        ("on: v5e-8, fallbacks: [{on: v5e-8, zone: a}]", "launch.fallbacks.0.zone: unknown key"),
        ("on: v5e-8, runs: /shared", "set either bucket or runs"),
        ("on: v5e-8, bucket: null", "set either bucket or runs"),
        ("on: h100-8, bucket: null, runs: /shared", "do not share a folder"),
        ("on: v5e-8, bucket: my-runs", "launch.bucket: expected a bucket, as gs://"),
        ("on: v5e-8, bucket: 'gs://my-runs/$(id)'", "launch.bucket"),
        ("on: v5e-8, image: null", "exactly one of image, wheel and python"),
        ("on: v5e-8, python: /opt/bin/python", "exactly one of image, wheel and python"),
        ("on: v5e-8, image: null, wheel: a.whl", "set both wheel and lock"),
        ("infra: slurm, image: null, wheel: a.whl, lock: b", "share a home folder"),
        ("on: v5e-8, image: 'a b'", "launch.image"),
        ("on: h100-8, infra: aws, budget: 100", "set max_hourly_cost"),
        ("cpus: 4, budget: 100", "set max_hourly_cost"),
        ("on: v5e-8, budget: 0", "launch.budget"),
        ("on: v5e-8, max_hourly_cost: -1", "launch.max_hourly_cost"),
        ("on: v5e-8, hours: 0", "launch.hours"),
        ("on: v5e-8, priority: 2000", "launch.priority"),
        ("on: v5e-8, strategy: nope", "launch.strategy"),
        ("on: v5e-8, choice: cheapest", "launch.choice"),
        ("on: v5e-8, labels: {a: 'b c'}", "launch.labels"),
        ("on: v5e-8, labels: {'A B': c}", "launch.labels"),
        ("on: v5e-8, network_tier: fast", "launch.network_tier"),
        ("on: v5e-8, environment: [A=b]", "launch.environment"),
        ("on: v5e-8, server: 'https://a b'", "launch.server"),
        ("on: v5e-8, slices: 2", "launch.slices: unknown key"),
    ],
)
def test_invalid_sections_are_refused(tmp_path: Path, more: str, message: str) -> None:
    given = {"image": "an/image:1", "bucket": "gs://my-runs"} | parse(f"{{{more}}}", "section").plain()
    section = {"kind": "sky"} | {key: value for key, value in given.items() if value is not None}
    assert message in refused(tmp_path, json.dumps(section))


def test_a_name_that_skypilot_refuses_is_refused_before() -> None:
    with pytest.raises(RecipeError, match="begin with a letter"):
        SHAPES["gpu"].plan(LaunchJob("1st", "steps: 10\n"))


@dataclass
class Program:
    """The fake program on PATH, its recorded calls, and its answers."""

    folder: Path

    def answer(self, **answers: Any) -> None:
        """By verb: one answer, or a tuple of them in order."""
        text = json.dumps({verb: list(one) if isinstance(one, tuple) else [one] for verb, one in answers.items()})
        (self.folder / "answers.json").write_text(text)

    def calls(self) -> list[str]:
        lines = (self.folder / "calls").read_text().splitlines() if (self.folder / "calls").exists() else []
        return [" ".join(json.loads(line)["words"]) for line in lines]

    def environments(self) -> list[dict[str, str]]:
        return [json.loads(line)["environment"] for line in (self.folder / "calls").read_text().splitlines()]

    def asked(self, verb: str) -> list[str]:
        return [call for call in self.calls() if f" {verb}" in call]


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Program:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sky", "gcloud", "aws"):
        path = folder / name
        path.write_text(f"#!{sys.executable} -S\n{Path(sky_program.__file__).read_text()}")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setattr(sky, "POLL", 0.0)
    return Program(folder)


def row(status: str, number: int = 12, name: str = "small", **more: Any) -> dict[str, Any]:
    return {"job_id": number, "job_name": name, "status": status, "recovery_count": 0, "user_name": "ada"} | more


LAUNCHED = "\x1b[0mUseful Commands\nManaged Job ID: 12\n"
NOTHING = {"code": 1, "stderr": "sky.exceptions.ClusterNotUpError: No in-progress managed jobs."}
NO_SERVER = """\
sky.exceptions.ApiServerConnectionError: Could not connect to SkyPilot API server at http://127.0.0.1:9. \
Please ensure that the server is running. Try: curl http://127.0.0.1:9/api/health
"""
CAUSE = "\nThe above exception was the direct cause of the following exception:\n\n"
UNREACHABLE = {"code": 1, "stderr": f"{NO_SERVER}{CAUSE}{NO_SERVER}"}
NO_OFFER = """[sky.exceptions.ResourcesUnavailableError] Catalog does not contain any instances satisfying: \
1x Slurm(cpus=64+, region=here, zone=main).
To fix: relax or change the resource requirements.

Hint: sky gpus list to list available accelerators.
"""
QUEUED = "Launching (pending: Resources; partition: main)"
RESTARTED = """\
\x1b[2m\u251c\u2500\u2500 \x1b[0m\x1b[2mWaiting for task resources on 1 node.\x1b[0m
\x1b[36m(small, pid=30431)\x1b[0m stopped: saved at step 27 of 60
ERROR: Job 1 failed with return code list: [75]
\x1b[32m\u2713 Managed job finished: 12 (status: RUNNING).\x1b[0m
"""
"""Answers of SkyPilot 0.14.1 over SLURM; the last is all that --follow prints of a run that left with 75."""
GPU = SHAPES["gpu"]


def submitted(tmp_path: Path) -> LaunchJob:
    return dataclasses.replace(JOB, folder=tmp_path / "runs" / "small", handle={"id": "12"})


def test_up_submits_and_records_the_job_number(tmp_path: Path, program: Program) -> None:
    program.answer(queue=NOTHING, launch=LAUNCHED)
    lines: list[str] = []
    job = dataclasses.replace(submitted(tmp_path), handle={})
    target = dataclasses.replace(GPU, server="https://sky.example.com")
    assert target.up(job, lines.append) == {"id": "12"}
    assert lines == ["managed job 12"]
    path = tmp_path / "runs" / "small" / "launch" / "task.yaml"
    assert path.read_text() == (program.folder / "submitted.yaml").read_text() == target.plan(job).files["task.yaml"]
    assert program.calls() == [
        "sky jobs queue -v -a -u -o json",
        "aws s3 rm s3://my-runs/small/stop",
        f"sky jobs launch -y -d -n small {path}",
    ]
    sent = {"SKYPILOT_API_SERVER_ENDPOINT": "https://sky.example.com", "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    assert program.environments()[0] == program.environments()[2] == sent


@pytest.mark.parametrize(
    ("found", "state", "code", "what"),
    [
        (row("PENDING"), "waiting", None, "pending"),
        (row("STARTING"), "waiting", None, "starting"),
        (row("RUNNING", infra="GCP (us-central1-a)"), "running", None, "running, GCP (us-central1-a)"),
        (row("RECOVERING", recovery_count=2), "waiting", None, "recovering, restarts: 2"),
        (row("CANCELLING"), "running", None, "cancelling"),
        (row("SUCCEEDED", recovery_count=1), "ended", 0, "succeeded, restarts: 1"),
        (
            row("FAILED", failure_reason="Job exited with exit code 3 (user program failure)."),
            "ended",
            3,
            "exit code 3",
        ),
        (row("FAILED", failure_reason="Job exited with exit codes [137, 7, 137] (user)."), "ended", 7, "exit codes"),
        (row("FAILED", failure_reason="Job failed (FAILED) (user program failure)."), "ended", 70, "failed"),
        (row("FAILED_SETUP"), "ended", 3, "failed_setup"),
        (row("FAILED_PRECHECKS", failure_reason=NO_OFFER), "ended", 3, "failed_prechecks, [sky.exceptions.Resources"),
        (row("PENDING", infra="-", details="Job is in backoff"), "waiting", None, "pending, Job is in backoff"),
        (row("STARTING", infra="Slurm (here)", details=QUEUED), "waiting", None, f"starting, Slurm (here), {QUEUED}"),
        (row("FAILED_NO_RESOURCE", failure_reason="no capacity"), "ended", 3, "failed_no_resource, no capacity"),
        (row("CANCELLED"), "ended", 130, "cancelled"),
    ],
)
def test_states_are_those_of_other_targets(
    tmp_path: Path, program: Program, found: dict[str, Any], state: str, code: int | None, what: str
) -> None:
    program.answer(queue=[row("RUNNING", 13), row("RUNNING", 11), found, row("FAILED", 14, "other")])
    (line,) = GPU.status(submitted(tmp_path))
    assert (line.name, line.state, line.code) == ("job 12 of ada", state, code)
    assert what in line.what
    assert "\n" not in line.what


def test_no_jobs_mean_absent_and_an_unreachable_server_does_not(tmp_path: Path, program: Program) -> None:
    job = submitted(tmp_path)
    for answer in (NOTHING, [], [row("RUNNING", 12, "other")]):
        program.answer(queue=answer)
        assert [line.state for line in GPU.status(job)] == ["absent"]
        assert GPU.find(JOB) is None
    program.answer(queue=UNREACHABLE)
    for ask in (GPU.status, GPU.find, GPU.removes, lambda job: GPU.down(job, print), lambda job: GPU.stop(job, print)):
        with pytest.raises(EnvironmentFault, match="Could not connect") as caught:
            ask(job)
        assert "launch.server" in caught.value.hint
        assert caught.value.message.count("Could not connect") == 1
    assert not program.asked("cancel")


def test_startup_messages_of_a_server_are_ignored(tmp_path: Path, program: Program) -> None:
    started = (
        "\x1b[2mStarting a local server.\x1b[0m\n[0m[32m done\n" + json.dumps([row("RUNNING")], indent=2) + "\nbye\n"
    )
    program.answer(queue=started)
    assert GPU.status(submitted(tmp_path))[0].state == "running"
    program.answer(queue="Starting a local server.\n[]\n")
    assert GPU.status(submitted(tmp_path))[0].state == "absent"
    program.answer(queue="no answer\n")
    with pytest.raises(EnvironmentFault, match="no JSON"):
        GPU.status(submitted(tmp_path))


def test_another_machine_finds_the_run_and_does_not_start_it_twice(tmp_path: Path, program: Program) -> None:
    program.answer(queue=[row("SUCCEEDED", 9), row("RUNNING", 12), row("RUNNING", 15, "other")])
    assert GPU.find(JOB) == {"id": "12"}
    with pytest.raises(Locked, match="job 12 of ada is running"):
        GPU.up(dataclasses.replace(JOB, folder=tmp_path / "small"), print)
    assert not program.asked("launch")
    assert not (tmp_path / "small").exists()
    assert GPU.removes(submitted(tmp_path)) == ["job 12 of ada with its machines"]


@pytest.mark.parametrize(
    "launch",
    [
        {"code": 1, "stderr": "connection lost"},
        "submitted, but the number was not printed",
        UNREACHABLE,
    ],
)
def test_a_failed_launch_may_continue_on_the_server(tmp_path: Path, program: Program, launch: Any) -> None:
    program.answer(queue=NOTHING, launch=launch)
    with pytest.raises(LeftBehind) as caught:
        GPU.up(dataclasses.replace(submitted(tmp_path), handle={}), print)
    assert "sky jobs queue" in caught.value.hint
    assert "sky api status" in caught.value.hint
    assert ("launch.server" in caught.value.hint) == (launch is UNREACHABLE)
    assert program.calls()[-1].startswith("sky jobs launch")


def test_a_launch_that_times_out_may_continue_on_the_server(
    tmp_path: Path, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    program.answer(queue=NOTHING, launch=LAUNCHED)
    monkeypatch.setattr(sky, "LAUNCHING", 0.0)
    with pytest.raises(LeftBehind, match="did not answer") as caught:
        GPU.up(dataclasses.replace(submitted(tmp_path), handle={}), print)
    assert "sky api status" in caught.value.hint


def test_a_launch_that_did_not_start_leaves_nothing(
    tmp_path: Path, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    program.answer(queue=NOTHING)
    monkeypatch.setattr(Sky, "_remove_stop_request", lambda *_: (program.folder / "sky").unlink())
    with pytest.raises(EnvironmentFault, match="sky is not installed here") as caught:
        GPU.up(dataclasses.replace(submitted(tmp_path), handle={}), print)
    assert not isinstance(caught.value, LeftBehind)


def test_stop_requests_a_save_of_a_live_run_and_cancels_nothing(tmp_path: Path, program: Program) -> None:
    target = dataclasses.replace(GPU, bucket="gs://my-runs")
    program.answer(queue=([row("RUNNING")], [row("RUNNING")], [row("WINDING_DOWN")], [row("SUCCEEDED")]))
    lines: list[str] = []
    target.stop(submitted(tmp_path), lines.append)
    assert program.asked("cp") == ["gcloud storage cp - gs://my-runs/small/stop"]
    assert (program.folder / "buckets/my-runs/small/stop").exists()
    assert not program.asked("cancel")
    assert lines == ["job 12 of ada: succeeded"]
    program.answer(queue=NOTHING, launch=LAUNCHED)
    target.up(dataclasses.replace(submitted(tmp_path), handle={}), print)
    assert not (program.folder / "buckets/my-runs/small/stop").exists()


@pytest.mark.parametrize("state", ["PENDING", "SUBMITTED", "STARTING", "RECOVERING"])
def test_stop_cancels_what_has_not_started(tmp_path: Path, program: Program, state: str) -> None:
    program.answer(queue=([row(state)], [row("CANCELLING")], [row("CANCELLING")], [row("CANCELLED")]))
    GPU.stop(submitted(tmp_path), print)
    assert program.asked("cancel") == ["sky jobs cancel -y 12"]
    assert not program.asked("cp")


def test_a_run_that_is_preempted_while_it_stops_is_cancelled_once(tmp_path: Path, program: Program) -> None:
    recovering = [row("RECOVERING")]
    program.answer(queue=([row("RUNNING")], recovering, recovering, [row("CANCELLING")], [row("CANCELLED")]))
    GPU.stop(submitted(tmp_path), print)
    assert program.asked("cp") == ["aws s3 cp - s3://my-runs/small/stop"]
    assert program.asked("cancel") == ["sky jobs cancel -y 12"]


def test_a_run_that_does_not_end_is_reported_as_running(
    tmp_path: Path, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sky, "STOPPING", -1.0)
    program.answer(queue=[row("RUNNING")])
    with pytest.raises(LeftBehind, match="still running") as caught:
        GPU.stop(submitted(tmp_path), print)
    assert "launch down small" in caught.value.hint


def test_a_shared_folder_is_used_if_it_is_visible_here(tmp_path: Path, program: Program) -> None:
    target = dataclasses.replace(SHAPES["cpu"], runs=str(tmp_path / "shared"))
    program.answer(queue=([row("RUNNING")], [row("RUNNING")], [row("SUCCEEDED")]))
    with pytest.raises(EnvironmentFault, match="does not exist on this machine"):
        target.stop(submitted(tmp_path), print)
    stop = tmp_path / "shared" / "small" / "stop"
    stop.parent.mkdir(parents=True)
    target.stop(submitted(tmp_path), print)
    assert stop.exists()
    program.answer(queue=NOTHING, launch=LAUNCHED)
    target.up(dataclasses.replace(submitted(tmp_path), handle={}), print)
    assert not stop.exists()


def test_down_cancels_by_number_waits_and_lists_what_remains(tmp_path: Path, program: Program) -> None:
    program.answer(queue=([row("RUNNING"), row("RUNNING", 13)], [row("CANCELLING")], [row("CANCELLED")]))
    lines: list[str] = []
    GPU.down(submitted(tmp_path), lines.append)
    assert program.asked("cancel") == ["sky jobs cancel -y 12"]
    assert lines[0] == "job 12 of ada: cancelled"
    assert "s3://my-runs stays" in lines[1]
    assert "jobs controller" in lines[1]
    program.answer(queue=[row("SUCCEEDED")])
    GPU.down(submitted(tmp_path), lines.append)
    assert len(program.asked("cancel")) == 1


@pytest.mark.parametrize("handle", [{"id": "12"}, {"after": "11"}, {}])
@pytest.mark.parametrize("queue", [NOTHING, [], [row("RUNNING", name="other")]])
def test_a_job_that_is_not_listed_is_not_reported_as_ended(
    program: Program, handle: dict[str, str], queue: Any
) -> None:
    program.answer(queue=queue)
    job, target = dataclasses.replace(JOB, handle=handle), dataclasses.replace(GPU, server="https://sky.example.com")
    for ask in (target.removes, lambda job: target.stop(job, print), lambda job: target.down(job, print)):
        with pytest.raises(EnvironmentFault, match=r"https://sky\.example\.com does not list job") as caught:
            ask(job)
        for way in ("sky jobs queue -r", "sky api status", "launch.server", "runs/small/launch.json"):
            assert way in caught.value.hint
    assert not program.asked("cancel")


def test_a_job_that_is_no_longer_listed_is_not_reported_as_ended(tmp_path: Path, program: Program) -> None:
    program.answer(queue=([row("RUNNING")], NOTHING))
    with pytest.raises(EnvironmentFault, match="does not list job 12"):
        GPU.down(submitted(tmp_path), print)


def test_without_a_number_an_earlier_job_is_not_taken_for_this_one(program: Program) -> None:
    program.answer(queue=[row("FAILED", 9), row("SUCCEEDED", 11), row("RUNNING", 12, "other")])
    job = dataclasses.replace(JOB, handle=GPU.start_handle(JOB))
    assert job.handle == {"after": "11"}
    assert GPU.status(job)[0].state == "absent"
    with pytest.raises(EnvironmentFault, match="does not list job small"):
        GPU.down(job, print)
    queues = ([row("SUCCEEDED", 11), row("PENDING", 13)], [row("CANCELLED", 13), row("RUNNING", 14)])
    program.answer(queue=queues)
    GPU.down(job, print)
    assert program.asked("cancel") == ["sky jobs cancel -y 13"]
    program.answer(queue=NOTHING)
    assert GPU.start_handle(JOB) == {"after": "0"}
    assert GPU.start_handle(dataclasses.replace(JOB, handle={"id": "9"})) == {"after": "9"}


@pytest.mark.slow
def test_without_a_number_no_job_of_another_user_is_ended(program: Program) -> None:
    program.answer(queue=[row("RUNNING", 13, user_name="bob")])
    found = dataclasses.replace(JOB, handle=GPU.find(JOB) or {})
    assert found.handle == {"id": "13", "user": "bob"}
    for job in (dataclasses.replace(JOB, handle={"after": "11"}), found):
        assert GPU.status(job)[0].name == "job 13 of bob"
        for ask in (GPU.removes, lambda job: GPU.stop(job, print), lambda job: GPU.down(job, print)):
            with pytest.raises(EnvironmentFault, match="job 13 of bob has that name") as caught:
                ask(job)
            assert "sky jobs cancel 13" in caught.value.hint
    assert not program.asked("cancel")
    program.answer(queue=[row("RUNNING", 13, user_name="bob"), row("PENDING", 12)])
    assert GPU.find(JOB) == {"id": "12"}
    program.answer(queue=([row("RUNNING", 13, user_name="bob"), row("PENDING", 12)], [row("CANCELLED", 12)]))
    GPU.down(JOB, print)
    assert program.asked("cancel") == ["sky jobs cancel -y 12"]


def test_logs_are_by_machine_and_by_rank(tmp_path: Path, program: Program) -> None:
    text = (
        "\x1b[2mJob is waiting\x1b[0m\n\x1b[36m(head, rank=0, pid=7)\x1b[0m step 1\n"
        "(worker1, rank=1, pid=8, ip=10.0.0.2) step 1 (of 2)\n"
    )
    program.answer(queue=[row("RUNNING")], logs=text)
    job = submitted(tmp_path)
    assert list(GPU.logs(job, None, follow=True)) == [
        ("sky", "Job is waiting"), ("head", "step 1"), ("worker1", "step 1 (of 2)"),
    ]  # fmt: skip
    assert list(GPU.logs(job, 1, follow=False)) == [("worker1", "step 1 (of 2)")]
    assert program.asked("logs") == ["sky jobs logs 12 --tail 0 --follow", "sky jobs logs 12 --tail 0 --no-follow"]
    program.answer(queue=[row("SUCCEEDED")], logs="(small, pid=7) step 1\n")
    assert list(GPU.logs(job, 0, follow=False)) == [("small", "step 1")]
    program.answer(queue=[row("RUNNING")], logs=UNREACHABLE)
    with pytest.raises(EnvironmentFault, match="sky jobs logs failed"):
        list(GPU.logs(job, None, follow=True))
    program.answer(queue=NOTHING)
    with pytest.raises(EnvironmentFault, match="does not list"):
        GPU.logs(job, None, follow=True)


def test_logs_are_followed_through_a_restart(tmp_path: Path, program: Program) -> None:
    restarted = {"code": 101, "stderr": RESTARTED}
    end = {"code": 100, "stderr": "(small, pid=9) loss is nan\n"}
    program.answer(queue=[row("RUNNING")], logs=(restarted, end))
    lines = list(GPU.logs(submitted(tmp_path), 0, follow=True))
    assert lines == [("small", "stopped: saved at step 27 of 60"), ("small", "loss is nan")]
    assert program.asked("logs") == ["sky jobs logs 12 --tail 0 --follow"] * 2


def test_logs_of_a_job_that_waits_are_its_state(tmp_path: Path, program: Program) -> None:
    """`sky jobs logs --no-follow` waits for a run, and prints nothing until there is one."""
    program.answer(queue=[row("STARTING", details=QUEUED)], logs="(small, pid=7) step 1\n")
    state = ("sky", f"job 12 of ada: starting, {QUEUED}")
    assert list(GPU.logs(submitted(tmp_path), None, follow=False)) == [state]
    assert not program.asked("logs")
    assert list(GPU.logs(submitted(tmp_path), None, follow=True)) == [state, ("small", "step 1")]


@pytest.mark.parametrize(
    "version", ["skypilot, version 0.13.2", "skypilot, version 0.15.0", "skypilot, version 0.14.0"]
)
def test_another_version_of_the_program_is_refused(program: Program, version: str) -> None:
    program.answer(version=version)
    with pytest.raises(EnvironmentFault, match="was tested with") as caught:
        GPU.check(JOB)
    assert "0.14.1" in caught.value.hint
    program.answer(version="skypilot, version 0.14.1\n")
    GPU.check(JOB)


def test_a_missing_program_is_named_with_its_install_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    for ask in (GPU.check, GPU.status, lambda job: list(GPU.logs(job, None, follow=True))):
        with pytest.raises(EnvironmentFault, match="sky is not installed here") as caught:
            ask(submitted(tmp_path))
        assert "uv tool install" in caught.value.hint


@pytest.mark.nightly
def test_all_verbs_with_a_secret_that_is_never_written(
    in_process: Dtrain, tmp_path: Path, program: Program, golden: Callable[[str, str], None]
) -> None:
    section = (
        "{kind: sky, on: v6e-16, spot: true, hours: 12, image: i:1, bucket: 'gs://my-runs', environment: HF_TOKEN}"
    )
    (tmp_path / "small.yaml").write_text(f"{RECIPE}launch: {section}\n")
    path = {"PATH": f"{program.folder}:/usr/bin:/bin"}
    secret = path | {"HF_TOKEN": CANARY}
    version = "skypilot, version 0.14.1\n"
    program.answer(version=version, queue=NOTHING, launch=LAUNCHED)
    assert "not set here: HF_TOKEN" in in_process("launch", "up", "small.yaml", "--yes", "-d", code=3, **path).stderr
    up = in_process("launch", "up", "small.yaml", "--yes", "-d", "--no-plan", **secret)
    assert "managed job 12" in up.stderr
    assert (
        "4 hosts, 16 chips, 43.20 dollars an hour, at most 12 hours of `dtrain run`, about 518.40 dollars" in up.stderr
    )
    program.answer(version=version, queue=[row("RUNNING")], logs="(head, rank=0, pid=7) hello\n")
    assert "job 12 of ada  running" in in_process("launch", "status", "small", **path).stdout
    assert in_process("launch", "logs", "small", **path).stdout == "[head] hello\n"
    again = in_process("launch", "up", "small.yaml", "--yes", "-d", "--no-plan", code=6, **secret)
    assert "job 12 of ada is running" in again.stderr
    (tmp_path / "elsewhere").mkdir()
    found = in_process("launch", "status", "small.yaml", "--runs-dir", "elsewhere", **path)
    assert "job 12 of ada" in found.stdout
    program.answer(queue=([row("RUNNING")], [row("SUCCEEDED")]))
    in_process("launch", "stop", "small", **path)
    program.answer(queue=([row("RUNNING")], [row("RUNNING")], [row("CANCELLED")]))
    down = in_process("launch", "down", "small", "--yes", **path)
    assert "gs://my-runs stays" in down.stderr
    written = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert len(written) > 5
    assert not [file for file in written if CANARY in file.read_text(errors="replace")]
    assert CANARY not in up.stdout + up.stderr + again.stderr
    calls = [call for call in program.calls() if "buckets describe" not in call]  # made by a thread
    golden("launch_sky_calls.txt", "\n".join(calls).replace(str(tmp_path), "HERE") + "\n")
