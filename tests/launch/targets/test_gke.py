"""Manifests against JobSet's own definition and its published types, and a fake kubectl that records its arguments."""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from dtrain.core.errors import EnvironmentFault, LeftBehind, Locked, RecipeError
from dtrain.core.process_info import ProcessInfo
from dtrain.launch.job import LaunchJob
from dtrain.launch.targets.gke import GKE
from dtrain.launch.targets.gke import seconds as node_seconds
from tests.conftest import SHARED, Dtrain
from tests.launch.test_names import RECIPE, refused

KIT = SHARED / "kits" / "jobset"
JOB = LaunchJob("small", "steps: 10\n", "0a1b2c3d")
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
    assert recipe["metadata"]["labels"] == {"dtrain-launch": JOB.launch}
    return jobset


def pod(shape: str) -> dict[str, Any]:
    return manifest(shape)["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_manifests_are_valid_by_jobsets_definition(tmp_path: Path, shape: str) -> None:
    if not KIT.is_dir():
        pytest.skip("JobSet's definition is not in the shared folder next to this checkout")
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


def test_the_queue_is_valid_by_kueues_definition(tmp_path: Path) -> None:
    if not KIT.is_dir():
        pytest.skip("Kueue's definition is not in the shared folder next to this checkout")
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


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_no_field_is_unknown_to_the_published_types(shape: str) -> None:
    kinds = pytest.importorskip("kubeflow_trainer_api.models")
    given = manifest(shape)
    understood = kinds.JobsetV1alpha2JobSet.from_dict(given).to_dict()
    assert not list(lost(given, json.loads(json.dumps(understood)), "jobset"))


def lost(given: Any, understood: Any, path: str) -> Iterator[str]:
    """Paths of values that are missing in the second tree, which may have defaults in addition."""
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
    values = {"SLICE": "1", "JOB_COMPLETION_INDEX": "3", "PATH": "/usr/bin:/bin"}
    output = subprocess.run(
        ["bash", "-c", script.replace("exec python3", "env | grep ^DTRAIN_ | sort; exit; exec python3")],
        env=values, capture_output=True, text=True, check=True,
    )  # fmt: skip
    given = dict(line.split("=", 1) for line in output.stdout.splitlines())
    assert given == ProcessInfo(19, 32, "small-slice-0-0.small:8476").environment()
    assert found["gpu"].dollars_hour == pytest.approx(16 * 11.06)
    assert found["multi-host"].dollars_hour == pytest.approx(16 * 2.70)
    assert "less than the list price" in found["multi-host"].notes[0]


@pytest.mark.parametrize(
    ("launch", "values"),
    [
        ("{kind: gke, on: v5e-17, image: a, claim: runs}", "launch.on"),
        ("{kind: gke, on: cpu-8, image: a, claim: runs}", "is not available on GKE"),
        ("{kind: gke, on: v5e-4, image: a}", "set either claim or bucket"),
        ("{kind: gke, on: v5e-4, image: a, bucket: 'gs://x'}", "launch.bucket"),
        ('{kind: gke, on: v5e-4, image: "a\\n  b: c", claim: runs}', "launch.image"),
        ("{kind: gke, on: v5e-4, image: a, claim: runs, namespace: '--all'}", "launch.namespace"),
        ("{kind: gke, on: v5e-4, image: a, claim: runs, queue: 'a}, b: {c'}", "launch.queue"),
    ],
)
def test_invalid_sections_are_refused(tmp_path: Path, launch: str, values: str) -> None:
    assert values in refused(tmp_path, launch)


def test_a_pod_has_the_launch_id_secrets_by_name_and_shared_memory() -> None:
    (container,) = pod("gpu")["spec"]["containers"]
    own, replaces, *secrets = container["env"][1:]
    assert replaces == {"name": "DTRAIN_REPLACES_HOSTS", "value": "1"}  # what is lost ends the others with 75
    assert own == {"name": "DTRAIN_LAUNCH", "value": JOB.launch}
    keys = {one["name"]: one["valueFrom"]["secretKeyRef"] for one in secrets}
    assert keys == {name: {"name": "dtrain", "key": name} for name in ("WANDB_API_KEY", "HF_TOKEN")}
    volumes = {one["name"]: one for one in pod("gpu")["spec"]["volumes"]}
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory"}
    assert {one["mountPath"]: one["name"] for one in container["volumeMounts"]}["/dev/shm"] == "shm"


def test_a_bucket_is_mounted_without_metadata_cache_and_limits_as_the_pods_account() -> None:
    attributes = pod("multi-host")["spec"]["volumes"][-1]["csi"]["volumeAttributes"]
    assert attributes == {"bucketName": "my-bucket", "hostNetworkPodKSA": "true", "metadataCacheTTLSeconds": "0"}
    annotations = pod("multi-host")["metadata"]["annotations"]
    assert {key.partition("/")[2]: value for key, value in annotations.items()} == {
        "volumes": "true", "cpu-limit": "0", "memory-limit": "0", "ephemeral-storage-limit": "0",
    }  # fmt: skip
    assert not pod("gpu")["metadata"]["annotations"]


def test_up_shows_the_source_of_values_and_down_that_pods_may_save() -> None:
    assert FULL.sends_environment is False
    assert "variables: HF_TOKEN, with the values in secret dtrain" in FULL.describe()
    assert not [line for line in replace(FULL, environment=()).describe() if "variables" in line]
    assert FULL.removes(JOB) == [
        "jobset small and its pods, which get SIGTERM and at most 60 s to save",
        "configmap small",
    ]


@pytest.mark.parametrize(
    ("target", "room"),
    [
        (SHAPES["one-host"], 47),  # 63 less -slice-0-0-abcde
        (SHAPES["multislice"], 46),
        (GKE(on="v5p-2048", slices=11, image=IMAGE, claim="runs"), 44),
    ],
)
def test_a_name_is_as_long_as_its_pods_allow(target: GKE, room: int) -> None:
    assert target.plan(LaunchJob("a" * room, "steps: 10\n"))
    for name in ("a" * (room + 1), "1st"):
        with pytest.raises(RecipeError, match=f"has {len(name)} characters; on GKE at most {room}, beginning with"):
            target.plan(LaunchJob(name, "steps: 10\n"))


ENDED = {"type": "Completed", "status": "True", "lastTransitionTime": "2026-11-22T13:00:00Z"}
MADE = {"name": "small", "labels": {"dtrain-launch": JOB.launch}, "creationTimestamp": "2026-11-22T11:00:00Z"}
RESUMED = {"type": "Suspended", "status": "False", "lastTransitionTime": "2026-11-22T12:30:00Z"}


@pytest.mark.parametrize(
    ("suspend", "conditions", "seconds"),
    [(False, [ENDED], 7200), (False, [RESUMED, ENDED], 1800), (True, [], None)],
)
def test_time_is_counted_from_when_the_pods_could_start(
    suspend: bool, conditions: list[dict[str, str]], seconds: float | None
) -> None:
    assert (
        node_seconds({"metadata": MADE, "spec": {"suspend": suspend}, "status": {"conditions": conditions}}) == seconds
    )


CANARY = "canary-5e6f7a8b9c0d"
GOOD: dict[str, Any] = {
    "config current-context": "here\n",
    "get jobset": "",
    "get serviceaccount": "serviceaccount/trainer\n",
    "get persistentvolumeclaim": "persistentvolumeclaim/runs\n",
    "get localqueue": "localqueue.kueue.x-k8s.io/research\n",
    "get secret": "HF_TOKEN OTHER ",
    "auth can-i": "",
    "apply": "jobset.jobset.x-k8s.io/small created\n",
    "storage buckets": json.dumps({"hierarchicalNamespace": {"enabled": True}}),
    "storage cp": "",
    "storage ls": [1, "ERROR: (gcloud.storage.ls) One or more URLs matched no objects."],
    "storage rm": "",
    "artifacts docker": "sha256:0\n",
}
"""The output of each program, by its first arguments; a list is an exit code and standard error."""

STAND_IN = f"""#!{sys.executable}
import json, sys
from pathlib import Path
root, words = Path(__file__).parents[1], sys.argv[1:]
with (root / "words").open("a") as file:
    print(json.dumps([Path(__file__).name, *words]), file=file)
if "-" in words:
    (root / "given").write_text(sys.stdin.read())
if words[:2] == ["get", "secret"] and not any("{{{{$key}}}} {{{{end}}}}" in word for word in words):
    sys.exit(print("{CANARY}"))  # any other query would show the value
found = json.loads((root / "answers.json").read_text())
answer = next((found[key] for key in (" ".join(words[:2]), words[0]) if key in found), [9, "not expected"])
if isinstance(answer, str):
    print(answer, end="")
else:
    print(answer[1], file=sys.stderr)
    sys.exit(answer[0])
"""


def stand_in(tmp_path: Path, answers: dict[str, Any]) -> dict[str, str]:
    """Fake kubectl, gcloud and docker that record their arguments, and reply by the first two."""
    (tmp_path / "bin").mkdir(exist_ok=True)
    (tmp_path / "answers.json").write_text(json.dumps(GOOD | answers))
    for name in ("kubectl", "gcloud", "docker"):
        (tmp_path / "bin" / name).write_text(STAND_IN)
        (tmp_path / "bin" / name).chmod(0o755)
    return {"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}


def noted(tmp_path: Path) -> list[str]:
    """The commands so far, in order except concurrent ones; values that differ between launches are replaced."""
    lines = [" ".join(json.loads(line)) for line in (tmp_path / "words").read_text().splitlines()]
    lines = [re.sub(r"dtrain-launch=[0-9a-f]{8}", "dtrain-launch=ID", line) for line in lines]
    return [re.sub(r"dtrain-check-[0-9a-f]{8}", "dtrain-check-ID", line) for line in lines]


FULL = GKE(
    on="v5e-4", image=IMAGE, bucket="my-bucket", queue="research", account="trainer", namespace="train",
    environment=("HF_TOKEN",), context="there",
)  # fmt: skip
CLAIM = replace(FULL, bucket=None, claim="runs")
FORBIDDEN = 'Error from server (Forbidden): secrets "dtrain" is forbidden: User "ada" cannot get resource'


def checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: GKE, answers: dict[str, Any]) -> list[str]:
    monkeypatch.setenv("PATH", stand_in(tmp_path, answers)["PATH"])
    return target.check(JOB)


def test_each_resource_is_looked_up_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes = checked(tmp_path, monkeypatch, FULL, {})
    assert notes == [
        "not checked: whether service account trainer may write to gs://my-bucket; this machine's account may"
    ]
    first, *others = noted(tmp_path)
    options = "--context there --namespace train"
    assert first == f"kubectl get jobset small --ignore-not-found -o json {options}"
    assert sorted(others) == [
        f"gcloud artifacts docker images describe {IMAGE} --format=value(image_summary.digest)",
        "gcloud storage buckets describe gs://my-bucket --raw --format=json",
        "gcloud storage cp - gs://my-bucket/dtrain-check-ID",
        "gcloud storage ls gs://my-bucket/small/stop",
        "gcloud storage rm gs://my-bucket/dtrain-check-ID",
        f"kubectl apply -f - --dry-run=server {options}",
        f"kubectl auth can-i delete jobsets.jobset.x-k8s.io --quiet {options}",
        f"kubectl get localqueue research --ignore-not-found -o name {options}",
        "kubectl get secret dtrain --ignore-not-found -o go-template={{range $key, $value := .data}}{{$key}} {{end}} "
        f"{options}",
        f"kubectl get serviceaccount trainer --ignore-not-found -o name {options}",
    ]


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({"get serviceaccount": ""}, "namespace train has no serviceaccount trainer"),
        ({"get persistentvolumeclaim": ""}, "namespace train has no persistentvolumeclaim runs"),
        ({"get localqueue": ""}, "namespace train has no localqueue research"),
        ({"get localqueue": [1, 'error: the server doesn\'t have a resource type "localqueue"']}, "localqueue"),
        ({"get secret": ""}, "namespace train has no secret dtrain"),
        ({"get secret": "OTHER WANDB_API_KEY "}, "secret dtrain in namespace train has no HF_TOKEN"),
        ({"auth can-i": [1, ""]}, "you may not delete JobSets in namespace train"),
        ({"apply": [1, "Error from server (Forbidden): jobsets is forbidden"]}, "jobsets is forbidden"),
        ({"apply": [1, 'admission webhook "vjobset" denied the request']}, "denied the request"),
        ({"artifacts docker": [1, "ERROR: (gcloud) Image not found.\n\nA valid"]}, f"image {IMAGE} does not exist"),
    ],
)
def test_missing_or_forbidden_resources_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: dict[str, Any], message: str
) -> None:
    with pytest.raises(EnvironmentFault, match=re.escape(message)):
        checked(tmp_path, monkeypatch, CLAIM, answers)
    assert not [line for line in noted(tmp_path) if "apply" in line and "--dry-run=server" not in line]


@pytest.mark.parametrize(
    ("answers", "note"),
    [
        ({"get secret": [1, FORBIDDEN]}, "not checked: secret dtrain, which this account may not read"),
        ({"artifacts docker": [1, "ERROR: You do not currently have an active account"]}, "not checked: image"),
    ],
)
def test_resources_that_this_account_may_not_read_are_not_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: dict[str, Any], note: str
) -> None:
    assert any(line.startswith(note) for line in checked(tmp_path, monkeypatch, CLAIM, answers))


def test_all_problems_are_reported_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EnvironmentFault) as raised:
        checked(tmp_path, monkeypatch, FULL, {"get secret": "", "get serviceaccount": "", "auth can-i": [1, ""]})
    assert raised.value.message.splitlines()[0] == "3 problems:"
    assert len(raised.value.message.splitlines()) == 4


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        ("E1122 12:06 memcache.go:265] Unhandled\nThe connection to the server a:8080 was refused", "get-credentials"),
        ('error: the server doesn\'t have a resource type "jobset"', "install JobSet"),
    ],
)
def test_a_cluster_that_cannot_be_used_is_one_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: str, hint: str
) -> None:
    with pytest.raises(EnvironmentFault) as raised:
        checked(tmp_path, monkeypatch, FULL, {"get jobset": [1, error]})
    assert raised.value.message.endswith(error.splitlines()[-1])
    assert "memcache" not in raised.value.message
    assert hint in raised.value.hint
    assert len(noted(tmp_path)) == 1


def test_a_running_jobset_is_not_replaced_and_an_ended_one_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running = {"metadata": MADE, "spec": {}, "status": {}}
    with pytest.raises(Locked):
        checked(tmp_path, monkeypatch, CLAIM, {"get jobset": json.dumps(running)})
    ended = running | {"status": {"conditions": [ENDED]}}
    assert checked(tmp_path, monkeypatch, CLAIM, {"get jobset": json.dumps(ended)}) == []
    recipe, jobset = yaml.safe_load_all((tmp_path / "given").read_text())
    assert (
        recipe["metadata"]["name"] == jobset["metadata"]["name"] == f"dtrain-{JOB.launch}"
    )  # not the name of the ended one


@pytest.mark.parametrize(("end", "code"), [([ENDED], 0), ([ENDED | {"type": "Failed"}], 70), ([], None)])
def test_every_row_of_an_ended_jobset_has_its_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: list[dict[str, str]], code: int | None
) -> None:
    status = {"conditions": end, "replicatedJobsStatus": [{"name": "slice", "succeeded": 1}]}
    answer = json.dumps({"metadata": MADE, "spec": {}, "status": status})
    monkeypatch.setenv("PATH", stand_in(tmp_path, {"get jobset": answer})["PATH"])
    assert [(row.name, row.code) for row in CLAIM.status(JOB)] == [("jobset small", code), ("slice", code)]


def test_another_launch_of_the_same_name_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = {"metadata": MADE | {"labels": {"dtrain-launch": "ffffffff"}}, "spec": {}, "status": {}}
    monkeypatch.setenv("PATH", stand_in(tmp_path, {"get jobset": json.dumps(other), "delete jobset": ""})["PATH"])
    assert [row.state for row in CLAIM.status(JOB)] == ["absent"]
    for verb in (CLAIM.stop, CLAIM.down):
        with pytest.raises(EnvironmentFault, match="JobSet small belongs to another launch") as raised:
            verb(JOB, print)
        assert "recipe file in place of the name" in raised.value.hint
    assert not [line for line in noted(tmp_path) if "delete" in line]
    handle = CLAIM.find(replace(JOB, launch=""))
    assert handle == {"jobset": "small", "launch": "ffffffff"}
    assert [row.state for row in CLAIM.status(replace(JOB, launch="", handle=handle))] == ["running"]


@pytest.mark.parametrize("verb", ["stop", "down"])
def test_an_absent_jobset_is_not_reported_as_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", stand_in(tmp_path, {"delete configmap": "configmap/small deleted\n"})["PATH"])
    getattr(CLAIM, verb)(JOB, print)
    output = capsys.readouterr().out.splitlines()
    assert output[0] == "jobset small is absent from namespace train: there was nothing to delete"
    assert output[1:] == (["configmap/small deleted"] if verb == "down" else [])


def test_the_jobset_of_this_launch_alone_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"get jobset": json.dumps({"metadata": MADE, "spec": {}}), "delete jobset": "", "delete configmap": ""}
    monkeypatch.setenv("PATH", stand_in(tmp_path, answers)["PATH"])
    CLAIM.stop(replace(JOB, launch="", handle={"launch": JOB.launch}), print)
    assert noted(tmp_path)[-1].startswith("kubectl delete jobset -l dtrain-launch=ID --ignore-not-found --cascade")
    CLAIM.down(JOB, print)
    assert [line.partition(" --")[0] for line in noted(tmp_path)[-2:]] == [
        "kubectl delete jobset -l dtrain-launch=ID", "kubectl delete configmap -l dtrain-launch=ID",
    ]  # fmt: skip


def test_a_jobset_that_dtrain_did_not_create_is_neither_replaced_nor_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = {"metadata": MADE | {"labels": {}}, "spec": {}, "status": {"conditions": [ENDED]}}
    monkeypatch.setenv("PATH", stand_in(tmp_path, {"get jobset": json.dumps(other)})["PATH"])
    by_recipe = replace(JOB, launch="")
    calls: list[Callable[[], Any]] = [
        lambda: CLAIM.check(JOB), lambda: CLAIM.up(JOB, print), lambda: CLAIM.find(by_recipe),
        lambda: CLAIM.stop(by_recipe, print), lambda: CLAIM.down(by_recipe, print),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(EnvironmentFault, match="was not created by dtrain: it has no label dtrain-launch"):
            call()
    assert {line.partition(" small")[0] for line in noted(tmp_path)} == {"kubectl get jobset"}


def test_a_launch_keeps_its_kubectl_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = replace(CLAIM, context=None)
    monkeypatch.setenv("PATH", stand_in(tmp_path, {"get jobset": json.dumps({"metadata": MADE, "spec": {}})})["PATH"])
    handle = target.start_handle(JOB)
    assert handle == {"jobset": "small", "context": "here", "launch": JOB.launch}
    stand_in(tmp_path, {"config current-context": "elsewhere\n"})
    target.status(replace(JOB, handle=handle))
    assert "--context here " in noted(tmp_path)[-1]
    stand_in(tmp_path, {"get jobset": json.dumps({"metadata": MADE, "spec": {}}), "config current-context": "b\n"})
    with pytest.raises(Locked):  # no record would name it
        target.start_handle(replace(JOB, handle=handle))


def test_a_failed_apply_keeps_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", stand_in(tmp_path, {"apply": [1, "Unable to connect to the server"]})["PATH"])
    with pytest.raises(LeftBehind) as raised:
        CLAIM.up(JOB, print)
    assert raised.value.hint == "dtrain launch down small"


NO_DELETE = "ERROR: (gcloud.storage.rm) ada does not have permission: ada does not have storage.objects.delete access."


def test_up_removes_the_stop_request_of_an_earlier_launch_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", stand_in(tmp_path, {})["PATH"])
    FULL.up(JOB, print)
    assert [line.partition(" --")[0] for line in noted(tmp_path)] == [
        "kubectl get jobset small", "gcloud storage rm gs://my-bucket/small/stop", "kubectl apply -f -",
    ]  # fmt: skip


def test_a_stop_request_that_cannot_be_removed_is_refused_before_anything_is_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EnvironmentFault, match="gs://my-bucket/small/stop is a stop request"):
        checked(tmp_path, monkeypatch, FULL, {"storage ls": "", "storage rm": [1, NO_DELETE]})
    with pytest.raises(EnvironmentFault, match="gs://my-bucket/small/stop is a stop request"):
        FULL.up(JOB, print)
    assert not [line for line in noted(tmp_path) if "apply" in line and "--dry-run=server" not in line]


def test_up_reports_where_it_cannot_look_for_a_stop_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_account = [1, "ERROR: (gcloud.storage) You do not currently have an active account selected."]
    monkeypatch.setenv("PATH", stand_in(tmp_path, {"storage ls": no_account, "storage rm": no_account})["PATH"])
    output: list[str] = []
    FULL.up(JOB, output.append)
    assert output[0].startswith("not checked: whether gs://my-bucket/small/stop is absent")
    assert output[1] == "jobset.jobset.x-k8s.io/small created"


@pytest.mark.slow
def test_a_launch_by_kubectl_from_up_to_down(
    in_process: Dtrain, tmp_path: Path, golden: Callable[[str, str], None]
) -> None:
    section = (
        f"{{kind: gke, on: v6e-16, image: {IMAGE}, bucket: my-bucket, spot: true, context: c, namespace: train, "
        "account: trainer, environment: [HF_TOKEN], hours: 2}"
    )
    (tmp_path / "small.yaml").write_text(f"{RECIPE}launch: {section}\n")
    values = stand_in(tmp_path, {}) | {"HF_TOKEN": CANARY}
    up = in_process("launch", "up", "small.yaml", "--yes", "-d", **values)
    assert "jobset.jobset.x-k8s.io/small created" in up.stderr
    for line in (
        "4 hosts, 16 chips, 43.20 dollars an hour, at most 2 hours of `dtrain run`, about 86.40 dollars",
        "a spot node gives its pods 15 s to save, not the 60 s of launch.grace",
        "hosts: 4 spot nodes, 1 x v6e-16",
        "cluster: c, namespace train, service account trainer",
        f"program: image {IMAGE}",
        "run folders: gs://my-bucket",
        "variables: HF_TOKEN, with the values in secret dtrain",
        "not checked: whether service account trainer may write to gs://my-bucket",
    ):
        assert line in up.stderr
    given = list(yaml.safe_load_all((tmp_path / "given").read_text()))
    assert [one["kind"] for one in given] == ["ConfigMap", "JobSet"]
    launch = json.loads((tmp_path / "runs" / "small" / "launch.json").read_text())["launch"]
    assert {one["metadata"]["labels"]["dtrain-launch"] for one in given} == {launch}
    made = MADE | {"labels": {"dtrain-launch": launch}}
    jobs = [{"name": "slice", "active": 1, "ready": 1}]
    running = {"metadata": made, "spec": {}, "status": {"restarts": 2, "replicatedJobsStatus": jobs}}
    stand_in(tmp_path, {"get jobset": json.dumps(running), "logs": "[pod/small-slice-0-1-x/train] hello\n"})
    status = in_process("launch", "status", "small", **values).stdout
    assert "jobset small  running   restarted 2 times" in status
    assert in_process("launch", "up", "small.yaml", "--yes", code=6, **values).stderr.count("exists already") == 1
    assert "$" in in_process("launch", "list", **values).stdout
    failed = {"metadata": made, "spec": {}, "status": {"conditions": [ENDED | {"type": "Failed"}]}}
    assert in_process("launch", "logs", "small", "--host", "1", **values).stdout == "[small-slice-0-1-x] hello\n"
    stand_in(tmp_path, {"get jobset": json.dumps(failed), "logs": "", "delete jobset": "", "delete configmap": ""})
    in_process("launch", "logs", "small", "-f", code=70, **values)
    in_process("launch", "stop", "small", **values)
    in_process("launch", "down", "small", "--yes", **values)
    first, *others = noted(tmp_path)
    golden("launch_kubectl.txt", "\n".join([first, *sorted(others[:9]), *others[9:]]) + "\n")
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path.parent.name != "bin"]
    assert not [path for path in written if CANARY.encode() in path.read_bytes()]
    assert CANARY not in up.stderr + up.stdout
