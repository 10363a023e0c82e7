"""Kills one of four processes of a run at random moments; it resumes from copies in memory and saves no checkpoint.

Measures the seconds from each kill until a step is trained again, and compares the bits of the last state and the
metrics with those of an undisturbed run.

With `checkpoints` the run has no copies, and saves a checkpoint as often: what the copies are compared with.

    python benchmarks/recovery_campaign.py [KILLS [checkpoints]]     thirteen seconds per kill; target: under 3 s
"""

import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from dtrain.core import heartbeat
from dtrain.runtime.verify import Trial, same_bits

RECIPE = """
model: {kind: mlp, sizes: [64, 128, 128, 10]}
data: digits
optimizer: {kind: adamw, lr: 1e-3, schedule: {kind: constant}}
batch: 64
steps: %d
evaluate: {every: 0}
checkpoint: {%s}
track: {every: 10}
"""
STEPS_A_KILL, WAIT = 160, 8.0
"""Least steps between kills, and seconds in which the next processes get ready."""
STEPS = 200
"""Steps of the run for each kill: more than pass in that time."""
PROCESSES = 4


def working(supervisor: int) -> list[int]:
    """The processes that train: of the supervisor's children those that used the processor most."""
    listed = subprocess.run(["pgrep", "-P", str(supervisor)], capture_output=True, text=True, check=True).stdout.split()
    used = {}
    for pid in map(int, listed):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        used[pid] = int(fields[11]) + int(fields[12])
    return sorted(used, key=lambda pid: -used[pid])[:PROCESSES]


def main() -> None:
    kills = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    chance, times = random.Random(0), list[float]()
    os.environ["DTRAIN_FAULT"] = "pace@step"  # steps of a few milliseconds would leave no time to kill
    with tempfile.TemporaryDirectory(prefix="dtrain-recovery-", dir="/dev/shm") as folder:
        path = Path(folder) / "campaign.yaml"
        copies = f"every: 0, minutes: 0, memory: {{every: 10, folder: {folder}/memory}}"
        kept = "every: 10, minutes: 0" if "checkpoints" in sys.argv else copies
        path.write_text(RECIPE % (STEPS * (kills + 1), kept))
        where = ["--processes", str(PROCESSES), "--devices", str(PROCESSES)]
        trial = Trial(str(path), [], where, Path(folder) / "runs", print)
        run = trial.run_dir("killed")
        running = trial.start("killed", where)

        def latest() -> heartbeat.Heartbeat:
            assert running.poll() is None, trial.output("killed").read_text()[-2000:]
            time.sleep(0.005)
            return heartbeat.read(run.heartbeat(0)) or heartbeat.Heartbeat()

        for number in range(kills):
            while latest().step < STEPS_A_KILL * (number + 1):
                pass
            time.sleep(WAIT + chance.random())
            before, began = latest(), time.monotonic()
            os.kill(chance.choice(working(running.pid)), signal.SIGKILL)
            # the step before is computed when one is dispatched
            while (found := latest()).since <= before.since or found.step <= found.first + 1:
                pass
            times.append(time.monotonic() - began)
            print(f"kill {number}: at step {before.step}, again after {times[-1]:.2f} s from {found.first}", flush=True)
        running.wait()
        shutil.rmtree(Path(folder) / "memory", ignore_errors=True)
        del os.environ["DTRAIN_FAULT"]  # undisturbed, and as fast as it can
        trial.run_to_end("straight")
        print(f"{kills} kills: {statistics.median(times):.2f} s in the median, {max(times):.2f} s at most", flush=True)
        print("the end:", same_bits(trial.run_dir("straight"), run, kills).shown)


if __name__ == "__main__":
    main()
