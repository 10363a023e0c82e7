"""Each example after it was applied and something happened: plan, apply and destroy still do what README.md says.

`python -m tests.terraform.test_broken_states` prints all checks as a table.
"""

import hashlib
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.terraform.stand_in import Answer, asked, copied, needs_terraform, terraform

COMMON = {"project": "my-project", "bucket": "my-runs", "owner": "ada", "hours": 24}
SSH = {"user": "ada", "wheel": "../../../files/dtrain-0.1.0-py3-none-any.whl", "lock": "../../../files/lock.txt"}
EXAMPLES: dict[str, dict[str, Any]] = {
    "tpu": COMMON | SSH,
    "tpu-instances": COMMON | SSH,
    "gpu": COMMON | SSH,
    "gke-tpu": COMMON | {"operators": {"office": "203.0.113.0/24"}, "tag": "1"},
}
MACHINES = {
    "tpu": "google_tpu_v2_vm",
    "tpu-instances": "google_compute_instance_group_manager",
    "gpu": "google_compute_instance",
    "gke-tpu": "google_container_node_pool",
}
"""The resource type that has the hosts."""

KEPT = {"google_storage_bucket", "google_project_service"}
"""What destroy leaves: the bucket of the runs, and services that another stack may need."""

pytestmark = [needs_terraform, pytest.mark.nightly]


@dataclass(frozen=True)
class Stack:
    """An example in a folder of its own: configuration, values, files, state, and the cloud that it is in."""

    example: str
    root: Path

    @property
    def here(self) -> Path:
        return self.root / "terraform" / "examples" / self.example

    @property
    def cloud(self) -> Path:
        return self.root / "cloud.json"

    def copy(self, root: Path) -> "Stack":
        shutil.copytree(self.root, root, symlinks=True)
        return Stack(self.example, root)

    def set(self, **variables: Any) -> None:
        given = self.here / "given.auto.tfvars.json"
        values = json.loads(given.read_text()) if given.exists() else EXAMPLES[self.example]
        given.write_text(json.dumps(values | variables))

    def ask(self, verb: str) -> Answer:
        return asked(self.here, self.cloud, verb, *(["-auto-approve"] if verb != "plan" else []))

    def live(self) -> list[dict[str, Any]]:
        """What exists."""
        return list(json.loads(self.cloud.read_text())["live"].values())

    def hosts(self) -> list[dict[str, Any]]:
        """The hosts that exist, in the order of their start."""
        return sorted((host for one in self.live() for host in one["hosts"]), key=lambda host: host["boot"])

    def keep(self, count: int) -> None:
        """Some hosts go on, the cloud deletes the others; a group and a pool exist without hosts, too."""
        kept = [host["name"] for host in self.hosts()[:count]]
        data = json.loads(self.cloud.read_text())
        for name, one in list(data["live"].items()):
            one["hosts"] = [host for host in one["hosts"] if host["name"] in kept]
            if one["type"] in ("google_tpu_v2_vm", "google_compute_instance") and not one["hosts"]:
                del data["live"][name]
        self.cloud.write_text(json.dumps(data))

    def launch(self) -> dict[str, Any]:
        return json.loads(terraform(self.here, "output", "-json", "launch", provider=False))


def applied(example: str, root: Path) -> Stack:
    """A stack after the first apply, with all of its hosts; on GKE the autoscaler has started a slice."""
    stack = Stack(example, root)
    (root / "files").mkdir(parents=True)
    for name in ("dtrain-0.1.0-py3-none-any.whl", "lock.txt"):
        (root / "files" / name).write_text(f"the first {name}")
    copied(root, Path("examples") / example)
    (stack.here / "backend_override.tf").write_text('terraform {\n  backend "local" {}\n}\n')
    terraform(stack.here, "init", "-no-color", "-reconfigure")
    stack.set()
    answer = stack.ask("apply")
    assert answer.code == 0, answer.errors
    if example == "gke-tpu":
        data = json.loads(stack.cloud.read_text())
        (pool,) = (one for one in data["live"].values() if one["values"].get("autoscaling"))
        pool["hosts"] = [node(number, pool["values"]) for number in range(4)]
        stack.cloud.write_text(json.dumps(data))
    return stack


def node(number: int, values: dict[str, Any]) -> dict[str, Any]:
    """A host that the autoscaler starts, after all that Terraform created."""
    return {"boot": 10_000 + number, "name": f"node-{number}", "address": f"10.1.0.{number}", "with": values}


def one_host_fewer(stack: Stack) -> None:
    stack.keep(len(stack.hosts()) - 1)


def no_host(stack: Stack) -> None:
    stack.keep(0)


def other_wheel(stack: Stack) -> None:
    """On GKE the image has the wheel, and pods name the image."""
    if stack.example == "gke-tpu":
        stack.set(tag="2")
    else:
        (stack.root / "files" / "dtrain-0.1.0-py3-none-any.whl").write_text("another wheel")


def other_lock(stack: Stack) -> None:
    """On GKE the image has the packages, too."""
    if stack.example == "gke-tpu":
        stack.set(tag="3")
    else:
        (stack.root / "files" / "lock.txt").write_text("another lock file")


def other_hours(stack: Stack) -> None:
    stack.set(hours=48)


STATES: dict[str, Callable[[Stack], None]] = {
    one.__name__: one for one in (one_host_fewer, no_host, other_wheel, other_lock, other_hours)
}
LOST = ("one_host_fewer", "no_host")


def check_plan(stack: Stack, state: str) -> None:
    """It plans; changed content replaces each machine, and on GKE a changed image changes no resource."""
    before = [one["values"]["id"] for one in stack.live() if one["type"] == MACHINES[stack.example] and one["hosts"]]
    answer = stack.ask("plan")
    if accepted(answer) and state not in LOST:
        planned = {
            address: what for address, what in answer.actions.items() if f".{MACHINES[stack.example]}." in address
        }
        if in_the_image(stack, state):
            assert answer.actions == {}, answer.actions
        else:
            assert list(planned.values()) == ["replace"] * len(before), answer.actions


def check_apply(stack: Stack, state: str) -> None:
    """The hosts have what was given, or are as they were and a message says why; the output lists those that exist."""
    before = stack.hosts()
    answer = stack.ask("apply")
    after = stack.hosts()
    if not accepted(answer):
        assert after == before, "refused, after a change"
        return
    if in_the_image(stack, state):
        assert after == before, "the image is no part of a host"
        assert stack.launch()["image"].endswith({"other_wheel": ":2", "other_lock": ":3"}[state])
    elif state not in LOST:
        assert {one["boot"] for one in before} & {one["boot"] for one in after} == set(), "a host was not replaced"
    if stack.example == "gke-tpu":
        (pool,) = (one["values"] for one in stack.live() if one["values"].get("autoscaling"))
        assert pool["node_config"][0]["max_run_duration"] == ("172800s" if state == "other_hours" else "86400s")
        return
    assert len(after) == len(before) or state in LOST, f"{len(after)} hosts"
    assert listed(stack) == len(after), stack.launch()["hosts"]
    for one in after:
        assert stored(stack) <= installed(stack, one), f"{one['name']} has something else"
        if state == "other_hours":
            assert re.search(r"\b(172800|2880|48)\b", json.dumps(one["with"])), f"{one['name']} has the old limit"


def check_destroy(stack: Stack, state: str) -> None:
    """Nothing is left but what is kept on purpose."""
    answer = stack.ask("destroy")
    assert answer.code == 0, answer.errors
    left = [one["type"] for one in stack.live()]
    assert set(left) == KEPT, left
    assert json.loads((stack.here / "terraform.tfstate").read_text())["resources"] == [], "the state is not empty"


CHECKS: dict[str, Callable[[Stack, str], None]] = {"plan": check_plan, "apply": check_apply, "destroy": check_destroy}


def accepted(answer: Answer) -> bool:
    """Whether it succeeded; only a message of the configuration itself is another good answer."""
    assert answer.code == 0 or answer.refused, answer.errors
    return answer.code == 0


def in_the_image(stack: Stack, state: str) -> bool:
    return stack.example == "gke-tpu" and state in ("other_wheel", "other_lock")


def listed(stack: Stack) -> int:
    """The number of hosts in the output, all of which exist."""
    names = [one.partition("@")[2] for one in stack.launch()["hosts"]]
    known = {name for one in stack.hosts() for name in (one["name"], one["address"])}
    assert set(names) <= known, names
    return len(set(names))


def stored(stack: Stack) -> set[str]:
    """The hashes of the wheel and the lock file on this computer."""
    return {hashlib.sha256(path.read_bytes()).hexdigest() for path in (stack.root / "files").iterdir()}


def installed(stack: Stack, one: dict[str, Any]) -> set[str]:
    """The hashes of the objects that a host installed when it booted."""
    objects = {
        f"gs://{there['values']['bucket']}/{there['values']['name']}": there["sha256"]
        for there in stack.live()
        if there["type"] == "google_storage_bucket_object"
    }
    return {objects[path] for path in re.findall(r"gs://[\w./+-]+", json.dumps(one["with"])) if path in objects}


@pytest.fixture(scope="module")
def stacks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Stack]:
    """The applied examples; a test changes a copy."""
    done: dict[str, Stack] = {}

    def one(example: str) -> Stack:
        if example not in done:
            done[example] = applied(example, tmp_path_factory.mktemp(example))
        return done[example]

    return one


@pytest.mark.parametrize("verb", CHECKS)
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("example", EXAMPLES)
def test_in_a_broken_state(stacks: Callable[[str], Stack], tmp_path: Path, example: str, state: str, verb: str) -> None:
    stack = stacks(example).copy(tmp_path / "stack")
    STATES[state](stack)
    CHECKS[verb](stack, state)


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_second_plan_is_empty(stacks: Callable[[str], Stack], example: str) -> None:
    """So each change in the other tests is one that the test made."""
    answer = stacks(example).ask("plan")
    assert (answer.code, answer.errors, answer.actions) == (0, [], {})


@pytest.mark.parametrize("example", [example for example in EXAMPLES if "wheel" in EXAMPLES[example]])
def test_another_computer_can_destroy(stacks: Callable[[str], Stack], tmp_path: Path, example: str) -> None:
    """It has the state, and neither the wheel nor the lock file."""
    stack = stacks(example).copy(tmp_path / "stack")
    shutil.rmtree(stack.root / "files")
    check_destroy(stack, "")


@pytest.mark.parametrize("hosts", [0, 3])
def test_a_group_whose_size_the_cloud_lowered(stacks: Callable[[str], Stack], tmp_path: Path, hosts: int) -> None:
    """Compute Engine may lower the size of a group when it deletes hosts: apply starts others, and lists them all."""
    stack = stacks("tpu-instances").copy(tmp_path / "stack")
    stack.keep(hosts)
    data = json.loads(stack.cloud.read_text())
    (group,) = (one for one in data["live"].values() if one["type"] == MACHINES["tpu-instances"])
    group["size"] = group["values"]["target_size"] = hosts
    stack.cloud.write_text(json.dumps(data))
    gone = stack.copy(tmp_path / "gone")
    check_apply(stack, "no_host")
    check_destroy(gone, "no_host")


def test_hosts_that_do_not_fit_the_topology_are_refused(stacks: Callable[[str], Stack], tmp_path: Path) -> None:
    """4x4 is 16 chips: 4 hosts with 4."""
    stack = stacks("tpu-instances").copy(tmp_path / "stack")
    stack.set(hosts=8)
    assert stack.ask("plan").refused


def main() -> int:
    """Print a table of all checks; the number of those that failed."""
    failed = 0
    for example in sys.argv[1:] or EXAMPLES:
        with tempfile.TemporaryDirectory() as folder:
            first = applied(example, Path(folder) / "first")
            for state, happen in STATES.items():
                for verb, check in CHECKS.items():
                    stack = first.copy(Path(folder) / state / verb)
                    happen(stack)
                    said = "ok"
                    try:
                        check(stack, state)
                    except AssertionError as error:
                        failed += 1
                        said = f"FAILED {str(error).strip().splitlines()[0][:200]}"
                    print(f"{example:14} {state:15} {verb:8} {said}", flush=True)
    print(f"{failed} failed")
    return failed


if __name__ == "__main__":
    sys.exit(bool(main()))
