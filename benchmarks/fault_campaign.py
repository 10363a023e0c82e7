"""Rounds of random faults on one run, in two or four processes; then its bits are compared with an undisturbed run.

Each round trains some steps with one of: kill (a worker, -9), terminate (a worker, SIGTERM), freeze (a worker),
flip (one bit of the newest checkpoint), full (no space left at a commit), resize (2 x 2 devices to 4 x 1 or back).

    python benchmarks/fault_campaign.py [ROUNDS] [SEED]     half a minute per round; target: the same bits
"""

import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from dtrain.core.run_dir import saved_steps
from dtrain.runtime.verify import Trial, same_bits

RECIPE = """
model: {kind: mlp, sizes: [64, 128, 10]}
data: digits
optimizer: {kind: adamw, lr: 1e-3, schedule: {kind: constant}}
batch: 64
steps: 1
mesh: {data: 2, fsdp: 2}
evaluate: {every: 12}
checkpoint: {every: 4, keep: 3}
track: {every: 1}
guard: {purity: false, patience: 5}
"""
STEPS = 12
FAULTS = ("kill", "terminate", "freeze", "flip", "full", "resize")


def main() -> None:
    rounds, seed = (int(word) for word in [*sys.argv[1:], *("10", "0")[len(sys.argv) - 1 :]])
    chance, processes = random.Random(seed), 2
    with tempfile.TemporaryDirectory(prefix="dtrain-faults-") as folder:
        path = Path(folder) / "campaign.yaml"
        path.write_text(RECIPE)
        trial = Trial(str(path), [], [], Path(folder) / "runs", print)
        for number in range(1, rounds + 1):
            what = FAULTS[number - 1] if number <= len(FAULTS) else chance.choice(FAULTS)
            step, rank = (number - 1) * STEPS + chance.randrange(2, STEPS), chance.randrange(processes)
            processes = 6 - processes if what == "resize" else processes
            if what == "flip":
                _flip(trial, chance)
            asked = {"kill": f"kill@step:{step}", "terminate": f"term@step:{step}", "freeze": f"freeze@step:{step}"}
            fault = f"{asked[what]}/{rank}" if what in asked else "full@save:commit" if what == "full" else ""
            codes = _until_done(trial, number * STEPS, processes, fault, Path(folder) / f"notes-{number}")
            output = f"{what} {f'at step {step}, process {rank}' if what in asked else ''}"
            print(f"round {number}: {output:<34} {processes} processes, exit codes {codes}", flush=True)
        whole = ["--devices", "4", "--processes", "2", f"steps={rounds * STEPS}"]
        trial.run_to_end("straight", whole)
        found = same_bits(trial, rounds)
        print("the end:", found.shown)
        sys.exit(0 if found.kept else 1)


def _until_done(trial: Trial, steps: int, processes: int, fault: str, notes: Path) -> list[int]:
    """Start the run until it has done that many steps; the exit code of each start."""
    notes.mkdir()
    values = os.environ | {"DTRAIN_FAULT": fault, "DTRAIN_FAULT_NOTES": str(notes)}
    command = [sys.executable, "-m", "dtrain", "run", trial.recipe, f"steps={steps}", "name=killed"]
    command += ["--runs-dir", str(trial.folder), "--devices", "4", "--processes", str(processes)]
    codes = []
    while not codes or codes[-1]:
        done = subprocess.run(command, env=values, capture_output=True, text=True, check=False)
        codes.append(done.returncode)
        assert len(codes) < 5, done.stderr[-3000:]
    return codes


def _flip(trial: Trial, chance: random.Random) -> None:
    saved = trial.place("killed").checkpoints
    newest = saved / str(saved_steps(saved)[0])
    path = chance.choice([path for path in newest.rglob("d/*") if path.stat().st_size])
    raw = bytearray(path.read_bytes())
    bit = chance.randrange(8 * len(raw))
    raw[bit // 8] ^= 1 << bit % 8
    path.write_bytes(raw)


if __name__ == "__main__":
    main()
