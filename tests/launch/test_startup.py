"""What machines start with: as text, by a linter, and by a real systemd."""

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dtrain.launch.job import Job
from dtrain.launch.templates import CHECKOUT
from dtrain.launch.tpu import Queued, TpuVm

MACHINE = Path(__file__).with_name("machine.sh")
GIVEN = {"on": "v5e-16", "project": "my-project", "zones": ("us-central1-a",), "bucket": "my-bucket"}
BY_WHEEL = Queued(wheel="dist/dtrain-0.1.0-py3-none-any.whl", **GIVEN)
BY_IMAGE = TpuVm(image="us-docker.pkg.dev/my-project/images/dtrain:1", watcher=False, **GIVEN)
JOB = Job("far", "", {"launch": "0"})
PYTHON = """#!/bin/bash
case "$*" in
  "-c import ensurepip") exit 0 ;;
  "-m venv /opt/dtrain") mkdir -p /opt/dtrain/bin; cp /tmp/machine/bin/pip "$0" /opt/dtrain/bin; cd /opt/dtrain/bin
    mv python3.13 python ;;
  *) echo "python $*" >> /tmp/machine/said; n=$(grep -c ^python /tmp/machine/said)
    case $n in 1) exit 75 ;; 2) kill -9 $$ ;; 3) exit 70 ;; 4) exit 1 ;; *) exit 8 ;; esac ;;
esac
"""


def test_golden_what_machines_start_with(golden: Callable[[str, str], None]) -> None:
    golden("launch_startup.sh", BY_WHEEL.files(JOB)["startup.sh"])
    watch = BY_WHEEL.files(JOB)["watch.sh"]
    assert "\nExecStart=$python -m dtrain launch watch far --runs-dir /mnt/dtrain\n" in watch
    assert 'wheel="dtrain-0.1.0-py3-none-any.whl" extra=""\n' in watch
    assert (
        'image="us-docker.pkg.dev/my-project/images/dtrain:1" wheel="" extra="tpu"\n'
        in BY_IMAGE.files(JOB)["startup.sh"]
    )


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed here")
def test_scripts_pass_a_linter(tmp_path: Path) -> None:
    (tmp_path / "slurm.sh").write_text((CHECKOUT / "slurm.sbatch").read_text().replace("@", "x"))
    (tmp_path / "startup.sh").write_text(BY_WHEEL.files(JOB)["startup.sh"])
    # SC2157: whether something filled in is empty
    scripts = [tmp_path / "slurm.sh", tmp_path / "startup.sh", MACHINE]
    lint = ["shellcheck", "--shell=bash", "--severity=warning", "--exclude=SC2157", *map(str, scripts)]
    done = subprocess.run(lint, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
def test_a_machine_starts_the_unit_which_restarts_by_exit_code(tmp_path: Path) -> None:
    if os.geteuid() or not shutil.which("unshare") or not Path("/lib/systemd/systemd").exists():
        pytest.skip("a machine of our own needs root, unshare and systemd")
    (tmp_path / "bucket" / "far" / "launch").mkdir(parents=True)
    (tmp_path / "startup.sh").write_text(BY_WHEEL.files(JOB)["startup.sh"])
    (tmp_path / "bin").mkdir()
    told = '#!/bin/bash\necho "${0##*/} $*" >> /tmp/machine/said\n'
    for name in ("gcsfuse", "systemctl", "pip", "apt-get", "curl"):
        (tmp_path / "bin" / name).write_text(told)
    (tmp_path / "bin" / "mountpoint").write_text("#!/bin/bash\nexit 1\n")
    (tmp_path / "bin" / "shutdown").write_text(told)
    (tmp_path / "bin" / "python3.13").write_text(PYTHON)
    for file in (tmp_path / "bin").iterdir():
        file.chmod(0o755)
    spaces = ["unshare", "--fork", "--kill-child", "--pid", "--mount", "--mount-proc", "--uts", "--ipc"]
    with (tmp_path / "out").open("w") as out:
        machine = subprocess.Popen([*spaces, "bash", MACHINE, tmp_path], stdout=out, stderr=out, start_new_session=True)
    try:
        said = _said(tmp_path, machine)
    finally:
        os.killpg(machine.pid, signal.SIGKILL)
        machine.wait()
    job = "python -m dtrain.launch.host /mnt/dtrain/far/launch/job.json"
    assert said[0] == "gcsfuse --implicit-dirs --metadata-cache-ttl-secs 0 -o allow_other my-bucket /mnt/dtrain"
    here = "/mnt/dtrain/far/launch"
    wheel = "dtrain-0.1.0-py3-none-any.whl[tpu]"
    assert said[1] == f"pip install --quiet -c {here}/constraints.txt {here}/{wheel}"
    assert said[2:4] == ["systemctl daemon-reload", "systemctl start --no-block dtrain"]
    assert said[4:] == ["shutdown -c", job] * 5 + ["shutdown -h +10 dtrain is over"]  # after 75, a kill, 70 and 1
    verified = ["systemd-analyze", "verify", str(tmp_path / "dtrain.service")]
    words = subprocess.run(verified, capture_output=True, text=True, check=False).stderr
    assert [line for line in words.splitlines() if "dtrain.service:" in line and "Command /opt" not in line] == []


def _said(folder: Path, machine: "subprocess.Popen[bytes]") -> list[str]:
    """What was called until the unit gave up, and a while longer."""
    end = time.monotonic() + 60
    while True:
        said = (folder / "said").read_text().splitlines() if (folder / "said").exists() else []
        if len(said) >= 14:
            time.sleep(8)
            return (folder / "said").read_text().splitlines()
        problem = (folder / "out").read_text()
        if machine.poll() is not None and any(
            word in problem for word in ("Operation not permitted", "unshare failed")
        ):
            pytest.skip(f"no namespaces here: {problem.splitlines()[-1:]}")
        assert machine.poll() is None, problem
        assert time.monotonic() < end, problem
        time.sleep(0.3)
