"""Kills a run at random moments while it saves after every step; counts lost and corrupt checkpoints.

After each kill every checkpoint that counts as one is verified file by file. At the end the run's last state and its
metrics are compared, bit by bit, with those of an undisturbed run.

    python benchmarks/kill_campaign.py [KILLS]     six seconds per kill; target: none lost, none wrong, of 200
"""

import random
import sys
import tempfile
import time
from pathlib import Path

from dtrain.checkpoint import manifest
from dtrain.checkpoint.manifest import CorruptCheckpoint
from dtrain.core import heartbeat
from dtrain.core.run_dir import INCOMPLETE, Folder, saved_steps
from dtrain.runtime.verify import Trial, same_bits

RECIPE = """
model: {kind: mlp, sizes: [64, 512, 512, 10]}
data: digits
optimizer: {kind: adamw, lr: 1e-3, schedule: {kind: constant}}
batch: 64
steps: %d
evaluate: {every: 0}
checkpoint: {every: 1, keep: 3}
track: {every: 1}
guard: {purity: false}
"""
STEPS_A_KILL = 25


def _newest(place: Folder) -> int:
    return next(iter(saved_steps(place.checkpoints)), -1)


def _stepping(place: Folder, newest: int) -> bool:
    latest = heartbeat.read(place.heartbeat(0))
    return latest is not None and latest.section != "start" and latest.step > max(newest, 0)


def main() -> None:
    kills = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    chance, wrong, lost, during = random.Random(0), 0, 0, 0
    with tempfile.TemporaryDirectory(prefix="dtrain-kills-") as folder:
        path = Path(folder) / "campaign.yaml"
        path.write_text(RECIPE % (STEPS_A_KILL * (kills + 2)))
        trial, start = Trial(str(path), [], [], Path(folder) / "runs", print), time.monotonic()
        place, newest = trial.run_dir("killed"), -1
        for number in range(kills):
            running = trial.start("killed", [])
            early = number % 4 == 0  # during the first save of a start, else during a later one
            while running.poll() is None and not (_stepping(place, newest) if early else _newest(place) > newest):
                time.sleep(0.002)
            time.sleep(chance.uniform(0, 2.0 if early else 0.5))
            ended = running.poll()
            running.kill()
            running.wait()
            output = trial.output("killed").read_text()
            assert ended is None, f"the run ended by itself with {ended}: {output[-500:]}"
            during += any(place.checkpoints.glob(f"{INCOMPLETE}*"))
            steps = saved_steps(place.checkpoints)
            for step in steps:
                try:
                    manifest.check(place.checkpoints / str(step), 0, 1)
                except CorruptCheckpoint as error:
                    wrong += 1
                    print(f"kill {number}: checkpoint {step}: {error}", flush=True)
            lost += max(steps, default=-1) < newest
            newest = max(steps, default=-1)
        output = f"{kills} kills, {during} of them in a save: {lost} lost, {wrong} wrong; at step {newest}"
        print(f"{output}; {(time.monotonic() - start) / kills:.1f} s each", flush=True)
        for name in ("killed", "straight"):
            trial.run_to_end(name, [f"steps={newest + 5}"])
        print("the end:", same_bits(trial.run_dir("straight"), trial.run_dir("killed"), kills).shown)
        sys.exit(1 if wrong or lost else 0)


if __name__ == "__main__":
    main()
