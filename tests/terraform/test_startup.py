"""The startup script of a host: shellcheck, and its behaviour with fake commands that record their arguments."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.terraform.stand_in import ROOT, needs_terraform

NODE = "projects/my-project/locations/us-east5-b/nodes/n"
SYSTEMD = Path(__file__).with_name("systemd.py")
COMMANDS = ("curl", "apt-get", "gcsfuse", "mountpoint", "tar", "uv", "systemctl", "systemd-run", "sleep")
Script = Callable[..., Path]

pytestmark = needs_terraform


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Script:
    """The script for a TPU node, or for an instance; terraform renders it without a provider."""

    def render(**variables: object) -> Path:
        folder = tmp_path_factory.mktemp("host")
        shutil.copytree(
            ROOT / "host", folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("tests", ".terraform*")
        )
        given = {
            "bucket": "my-runs",
            "wheel": "gs://my-runs/launch/a/dtrain-0.1.0.whl",
            "lock": "gs://my-runs/lock.txt",
        }
        (folder / "given.auto.tfvars.json").write_text(json.dumps(given | variables))
        environment = os.environ | {"TF_CLI_CONFIG_FILE": "/dev/null"}
        for verb in (["init"], ["apply", "-auto-approve"]):
            subprocess.run(
                ["terraform", *verb, "-no-color"], cwd=folder, env=environment, check=True, capture_output=True
            )
        output = ["terraform", "output", "-raw", "script"]
        text = subprocess.run(output, cwd=folder, env=environment, check=True, capture_output=True, text=True).stdout
        (folder / "startup.sh").write_text(text)
        return folder / "startup.sh"

    return render


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed here")
@pytest.mark.parametrize("variables", [{}, {"tpu": NODE, "hours": 24}], ids=["instance", "tpu"])
def test_it_is_clean(script: Script, variables: dict[str, object]) -> None:
    done = subprocess.run(["shellcheck", script(**variables)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


class Machine:
    """A fake machine: all its paths are in one folder, and its commands record their arguments."""

    def __init__(self, script: Path, root: Path) -> None:
        self.root, self.bin = root, root / "bin"
        self.bin.mkdir(parents=True)
        for name in COMMANDS:
            self.command(name, "")
        self.command("mountpoint", "exit 1")
        self.command("systemctl", "exit 3")
        self.command(
            "curl", 'while [ $# -gt 0 ]; do [ "$1" = -o ] && touch "$2"; shift; done; echo \'{"access_token":"T"}\''
        )
        text = script.read_text()
        for path in ("/mnt/dtrain", "/opt/", "/var/lib/dtrain"):
            text = text.replace(path, f"{root}{path}")
        self.script = root / "startup.sh"
        self.script.write_text(text.replace("-C /usr/local/bin", f"-C {root}"))
        python = root / "opt/dtrain/bin/python"
        python.parent.mkdir(parents=True)
        python.symlink_to("/bin/true")

    def command(self, name: str, body: str) -> None:
        path = self.bin / name
        path.write_text(f'#!/bin/bash\necho "{name} $*" >> {self.root}/log\n{body}\n')
        path.chmod(0o755)

    def systemd(self, **units: str) -> None:
        """From now on units exist, which have a state: timer="active"."""
        for name in ("systemctl", "systemd-run"):
            self.command(name, f'exec {sys.executable} {SYSTEMD} {self.root}/units {name} "$@"')
        (self.root / "units").mkdir()
        for kind, state in units.items():
            (self.root / "units" / f"dtrain-delete-node.{kind}").write_text(state)

    @property
    def units(self) -> dict[str, str]:
        """The state of each unit that is loaded, by its kind."""
        return {path.suffix[1:]: path.read_text() for path in (self.root / "units").iterdir()}

    def boot(self) -> int:
        """Run the script; its exit code."""
        (self.root / "log").write_text("")
        environment = {"PATH": f"{self.bin}:{os.environ['PATH']}"}
        return subprocess.run(["bash", self.script], env=environment, capture_output=True, check=False).returncode

    @property
    def log(self) -> list[str]:
        return (self.root / "log").read_text().replace(str(self.root), "").splitlines()

    @property
    def ready(self) -> Path:
        return self.root / "var/lib/dtrain/ready"


def index(log: list[str], start: str) -> int:
    return next(place for place, line in enumerate(log) if line.startswith(start))


@pytest.mark.slow
def test_the_timer_is_set_first_and_the_ready_file_written_last(script: Script, tmp_path: Path) -> None:
    machine = Machine(script(tpu=NODE, hours=2), tmp_path / "root")
    assert machine.boot() == 0
    log = machine.log
    assert machine.ready.read_text() == "gs://my-runs/launch/a/dtrain-0.1.0.whl\n"
    order = ["systemd-run", "gcsfuse", "uv venv", "uv pip install -q --python /opt/dtrain/bin/python --require-hashes"]
    places = [index(log, start) for start in [*order, "uv pip check"]]
    assert places == sorted(places)
    seconds = int(log[places[0]].partition("--on-active=")[2].split()[0])
    assert 7000 < seconds <= 7200
    assert "--metadata-cache-ttl-secs 0" in log[places[1]]
    assert log[places[1]].endswith("my-runs /mnt/dtrain")


@pytest.mark.nightly
def test_a_reboot_does_not_extend_the_limit(script: Script, tmp_path: Path) -> None:
    machine = Machine(script(tpu=NODE, hours=2), tmp_path / "root")
    deadline = tmp_path / "root/var/lib/dtrain/deadline"
    assert machine.boot() == 0
    deadline.write_text(f"{int(deadline.read_text()) - 7200}\n")
    assert machine.boot() == 0
    assert "--on-active=1 " in machine.log[index(machine.log, "systemd-run")]


@pytest.mark.nightly
def test_the_timer_deletes_the_node_with_the_token_on_stdin(script: Script, tmp_path: Path) -> None:
    machine = Machine(script(tpu=NODE, hours=2), tmp_path / "root")
    assert machine.boot() == 0
    machine.command("curl", f'echo \'{{"access_token":"T"}}\'; [ -t 0 ] || cat >> {tmp_path}/stdin')
    (tmp_path / "root/log").write_text("")
    environment = {"PATH": f"{machine.bin}:{os.environ['PATH']}"}
    command = [tmp_path / "root/var/lib/dtrain/delete-node"]
    subprocess.run(command, env=environment, check=True, capture_output=True, stdin=subprocess.DEVNULL)
    assert machine.log[-1] == f"curl -fsSL -K - -X DELETE https://tpu.googleapis.com/v2/{NODE}"
    assert (tmp_path / "stdin").read_text() == 'header = "Authorization: Bearer T"\n'


@pytest.mark.nightly
def test_the_timer_asks_until_the_node_is_gone(script: Script, tmp_path: Path) -> None:
    """An answer 200 says that a deletion began, not that it succeeds."""
    machine = Machine(script(tpu=NODE, hours=2), tmp_path / "root")
    assert machine.boot() == 0
    words = machine.log[index(machine.log, "systemd-run")].split()
    assert [word for word in words if word.startswith("Restart=")] == ["Restart=always"]
    assert [word for word in words if word.startswith("RestartSec=")] == ["RestartSec=60"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "units",
    [
        {},
        {"timer": "active"},
        {"timer": "active", "service": "active"},
        {"service": "active"},
        {"service": "activating"},
        {"service": "failed"},
    ],
    ids=["first", "waiting", "asking", "asking-again", "between-requests", "failed"],
)
def test_a_run_of_the_script_keeps_the_timer(script: Script, tmp_path: Path, units: dict[str, str]) -> None:
    """Also after the deadline, when no timer waits any more and the service repeats its request."""
    machine = Machine(script(tpu=NODE, hours=2), tmp_path / "root")
    machine.systemd(**units)
    assert machine.boot() == 0
    assert machine.ready.exists()
    assert {"active", "activating"} & set(machine.units.values())


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["gcsfuse", "uv"])
def test_a_host_that_cannot_be_set_up_is_not_ready(script: Script, tmp_path: Path, broken: str) -> None:
    machine = Machine(script(), tmp_path / "root")
    assert machine.boot() == 0
    assert not any(line.startswith("systemd-run") for line in machine.log)
    machine.command(broken, "exit 1")
    assert machine.boot() != 0
    assert not machine.ready.exists()
