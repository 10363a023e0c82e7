"""Manifests against JobSet's own definition and its published types, and kubectl by a stand-in that notes its words."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dtrain.launch.gke import GKE
from dtrain.launch.job import Job
from tests.conftest import SHARED, Dtrain
from tests.launch.test_names import RECIPE, refused

KIT = SHARED / "kits" / "jobset"
JOB = Job("small", "steps: 10\n")
IMAGE = "europe-docker.pkg.dev/project/images/dtrain:1"
SHAPES = {
    "one-host": GKE(on="v5e-4", image=IMAGE, claim="runs"),
    "multi-host": GKE(on="v6e-16", image=IMAGE, bucket="my-bucket", spot=True),
    "multislice": GKE(on="v5p-128", slices=2, image=IMAGE, claim="runs", queue="research", environment=("HF_TOKEN",)),
    "gpu": GKE(on="h100-16", image=IMAGE, claim="runs", environment=("WANDB_API_KEY", "HF_TOKEN")),
}


def manifest(shape: str) -> dict[str, Any]:
    recipe, jobset = yaml.safe_load_all(SHAPES[shape].plan(JOB).files["manifest.yaml"])
    assert recipe["data"] == {"recipe.yaml": JOB.recipe}
    return jobset


@pytest.mark.parametrize("shape", SHAPES)
def test_manifests_are_what_jobset_defines(tmp_path: Path, shape: str) -> None:
    if not KIT.is_dir():
        pytest.skip("JobSet's definition is not beside this checkout")
    path = tmp_path / "manifest.yaml"
    path.write_text(yaml.safe_dump(manifest(shape)))
    done = subprocess.run(
        [sys.executable, KIT / "validate.py", KIT / "jobset_crd.yaml", path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "OK jobset.x-k8s.io/v1alpha2 JobSet small" in done.stdout


def test_its_queue_is_what_kueue_defines(tmp_path: Path) -> None:
    if not KIT.is_dir():
        pytest.skip("Kueue's definition is not beside this checkout")
    path = tmp_path / "kueue.yaml"
    path.write_text(SHAPES["multislice"].plan(JOB).files["kueue.yaml"])
    kinds = ",".join(str(KIT / f"kueue_{kind}.yaml") for kind in ("clusterqueues", "localqueues", "resourceflavors"))
    command = [sys.executable, str(KIT / "validate.py"), kinds, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("OK kueue.x-k8s.io/v1beta2") == 3
    flavor, cluster, local = yaml.safe_load_all(path.read_text())
    assert manifest("multislice")["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == local["metadata"]["name"]
    assert local["spec"]["clusterQueue"] == cluster["metadata"]["name"]
    pods = manifest("multislice")["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert pods["nodeSelector"] == flavor["spec"]["nodeLabels"]
    assert "kueue.yaml" not in SHAPES["gpu"].plan(JOB).files


@pytest.mark.parametrize("shape", SHAPES)
def test_no_field_is_unknown_to_the_published_types(shape: str) -> None:
    kinds = pytest.importorskip("kubeflow_trainer_api.models")
    given = manifest(shape)
    understood = kinds.JobsetV1alpha2JobSet.from_dict(given).to_dict()
    assert not list(lost(given, json.loads(json.dumps(understood)), "jobset"))


def lost(given: Any, understood: Any, path: str) -> Iterator[str]:
    """What stands in one and not in the other, which may say defaults besides."""
    if isinstance(given, dict) and isinstance(understood, dict):
        for key, value in given.items():
            yield from lost(value, understood.get(key), f"{path}.{key}")
    elif isinstance(given, list) and isinstance(understood, list) and len(given) == len(understood):
        for number, (one, other) in enumerate(zip(given, understood, strict=True)):
            yield from lost(one, other, f"{path}[{number}]")
    elif given != understood:
        yield f"{path}: {given!r}, understood {understood!r}"


def test_hosts_ranks_and_resources_follow_the_shape() -> None:
    found = {shape: SHAPES[shape].plan(JOB) for shape in SHAPES}
    assert {shape: (one.hosts, one.chips) for shape, one in found.items()} == {
        "one-host": (1, 4), "multi-host": (4, 16), "multislice": (32, 128), "gpu": (2, 16),
    }  # fmt: skip
    job = manifest("multislice")["spec"]["replicatedJobs"][0]
    assert (job["replicas"], job["template"]["spec"]["parallelism"]) == (2, 16)
    pod = job["template"]["spec"]["template"]["spec"]
    assert pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == "4x4x4"
    script = pod["containers"][0]["args"][0]
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    told = {"SLICE": "1", "JOB_COMPLETION_INDEX": "3", "PATH": "/usr/bin:/bin"}
    said = subprocess.run(
        ["bash", "-c", script.replace("exec python3", 'echo "$DTRAIN_PROCESS"; exit; exec python3')],
        env=told, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert said.stdout.strip() == "19/32@small-slice-0-0.small:8476"
    assert found["gpu"].dollars_hour == pytest.approx(16 * 11.06)
    assert found["multi-host"].dollars_hour == pytest.approx(16 * 2.70)
    assert "of the list" in found["multi-host"].notes[0]


@pytest.mark.parametrize(
    ("launch", "told"),
    [
        ("{kind: gke, on: v5e-17, image: a, claim: runs}", "launch.on"),
        ("{kind: gke, on: cpu-8, image: a, claim: runs}", "is not rented on GKE"),
        ("{kind: gke, on: v5e-4, image: a}", "claim or bucket, one of them"),
        ("{kind: gke, on: v5e-4, image: a, bucket: 'gs://x'}", "launch.bucket"),
        ('{kind: gke, on: v5e-4, image: "a\\n  b: c", claim: runs}', "launch.image"),
        ("{kind: gke, on: v5e-4, image: a, claim: runs, namespace: '--all'}", "launch.namespace"),
        ("{kind: gke, on: v5e-4, image: a, claim: runs, queue: 'a}, b: {c'}", "launch.queue"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, launch: str, told: str) -> None:
    assert told in refused(tmp_path, launch)


def stand_in(tmp_path: Path, answers: dict[str, str]) -> dict[str, str]:
    """A kubectl that notes its words and what it is given, and answers by its verb."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "answers.json").write_text(json.dumps(answers))
    program = tmp_path / "bin" / "kubectl"
    program.write_text(
        f"#!{sys.executable}\nimport json, sys\nfrom pathlib import Path\n"
        f"root = Path({str(tmp_path)!r})\n"
        "words = sys.argv[1:]\n"
        "with (root / 'words').open('a') as file: print(json.dumps(words), file=file)\n"
        "if '-f' in words and words[-1] == '-': (root / 'given').write_text(sys.stdin.read())\n"
        "verb = next(word for word in words if word in ('apply', 'get', 'patch', 'delete', 'logs'))\n"
        "sys.stdout.write(json.loads((root / 'answers.json').read_text()).get(verb, ''))\n"
    )
    program.chmod(0o755)
    return {"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}


@pytest.mark.slow
def test_kubectl_is_asked_in_words_and_never_in_a_line(
    dtrain: Dtrain, tmp_path: Path, golden: Callable[[str, str], None]
) -> None:
    section = f"{{kind: gke, on: v6e-16, image: {IMAGE}, bucket: my-bucket, spot: true, context: c, namespace: train}}"
    (tmp_path / "small.yaml").write_text(f"{RECIPE}launch: {section}\n")
    told = stand_in(tmp_path, {"apply": "jobset.jobset.x-k8s.io/small created\n"})
    up = dtrain("launch", "up", "small.yaml", "--yes", "-d", **told)
    assert "jobset.jobset.x-k8s.io/small created" in up.stderr
    given = list(yaml.safe_load_all((tmp_path / "given").read_text()))
    assert [one["kind"] for one in given] == ["ConfigMap", "JobSet"]
    running = {
        "spec": {},
        "status": {"restarts": 2, "replicatedJobsStatus": [{"name": "slice", "active": 1, "ready": 1}]},
    }
    (tmp_path / "answers.json").write_text(
        json.dumps({"get": json.dumps(running), "logs": "[pod/small-slice-0-1-x/train] hello\n"})
    )
    status = dtrain("launch", "status", "small", **told).stdout
    assert "jobset small  running   restarted 2 times" in status
    assert dtrain("launch", "up", "small.yaml", "--yes", code=6, **told).stderr.count("is there already") == 1
    failed = {"spec": {}, "status": {"conditions": [{"type": "Failed", "status": "True"}]}}
    assert dtrain("launch", "logs", "small", "--host", "1", **told).stdout == "[small-slice-0-1-x] hello\n"
    (tmp_path / "answers.json").write_text(json.dumps({"get": json.dumps(failed)}))
    dtrain("launch", "logs", "small", "-f", code=70, **told)
    dtrain("launch", "stop", "small", **told)
    dtrain("launch", "down", "small", "--yes", **told)
    words = [" ".join(json.loads(line)) for line in (tmp_path / "words").read_text().splitlines()]
    golden("launch_kubectl.txt", "\n".join(words) + "\n")
