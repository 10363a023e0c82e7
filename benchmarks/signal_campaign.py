"""SIGINT or SIGTERM at random moments of a run, from exec to exit; each run is then resumed to its end.

A round is good if the exit code is 75 (or 0 for a finished run, or 130 after a second signal), run.json has the same
code and a matching state, the lock is free, and the resumed run ends with the bits of an undisturbed one. Every second
round starts with an empty cache of compiled programs, so that signals also arrive while compiling; in every fifth round
a second signal follows. Signals to a Python that has not reached dtrain's first line are counted separately.

    python benchmarks/signal_campaign.py [--rounds 200] [--processes 1] [--seed 0]     five CPU seconds per round
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from dtrain.checkpoint import manifest
from dtrain.core import heartbeat
from dtrain.core.run_dir import Folder

RECIPE = """
model: {kind: mlp, sizes: [64, 32, 10]}
data: digits
optimizer: {kind: adamw, lr: 1e-3, schedule: {kind: constant}}
batch: 64
steps: 200
evaluate: {every: 100}
checkpoint: {every: 80}
track: {every: 20}
"""
STEPS = 200
STATES = {0: "finished", 75: "stopped", 130: "aborted"}


@dataclass
class Campaign:
    """One recipe in one scratch folder."""

    scratch: Path
    processes: int

    def place(self, name: str) -> Folder:
        return Folder(self.scratch / "runs" / name)

    def start(self, name: str, cache: str) -> subprocess.Popen[bytes]:
        where = ["--devices", "2", "--processes", str(self.processes)] if self.processes > 1 else []
        command = [sys.executable, "-m", "dtrain", "run", "campaign.yaml", f"name={name}", *where]
        environment = os.environ | {"XDG_CACHE_HOME": str(self.scratch / cache)}
        with (self.scratch / "output").open("wb") as output:
            return subprocess.Popen(command, cwd=self.scratch, env=environment, stdout=output, stderr=output)

    def finish(self, name: str) -> tuple[str, float]:
        """Run it to its end; the checksum of the last state, and the seconds that it took."""
        start = time.monotonic()
        code = self.start(name, "warm").wait()
        if code:
            return f"exit code {code}: {self.output()}", 0.0
        found = manifest.check(self.place(name).checkpoints / str(STEPS), 0, 1).checksum
        return "-".join(f"{word:08x}" for word in found), time.monotonic() - start

    def output(self) -> str:
        return (self.scratch / "output").read_text(errors="replace")[-600:]

    def disturb(self, name: str, cache: str, delay: float, numbers: list[tuple[float, int]]) -> tuple[int, str]:
        """Start it and send the signals; the exit code, and the section of the run at the first signal."""
        running, place, section = self.start(name, cache), self.place(name), ""
        time.sleep(delay)
        for pause, number in numbers:
            time.sleep(pause)
            latest = heartbeat.read(place.heartbeat(0))
            section = section or (latest.section if latest else "imports")
            if running.poll() is not None:
                break
            running.send_signal(number)
        try:
            return running.wait(timeout=180), section
        except subprocess.TimeoutExpired:
            running.kill()
            return running.wait(), f"{section}, never exited"

    def wrong(self, name: str, code: int, signals: int) -> str:
        """The problem with how it ended; empty if there is none."""
        place = self.place(name)
        record = place.read_record()
        if code not in STATES or (code == 130 and signals < 2):
            return f"exit code {code}"
        if record and (record["state"], record["exit_code"]) != (STATES[code], code):
            return f"run.json has {record['state']}, {record['exit_code']}; the exit code is {code}"
        if not record and code == 0:
            return "exit code 0 without run.json"
        return "the lock was not released" if place.lease.exists() and code != 130 else ""


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("--rounds", 200), ("--processes", 1), ("--seed", 0)):
        parser.add_argument(name, type=int, default=default)
    options = parser.parse_args()
    chance, table, bad, early = random.Random(options.seed), Counter(), 0, 0
    with tempfile.TemporaryDirectory(prefix="dtrain-signals-") as folder:
        campaign = Campaign(Path(folder), options.processes)
        (campaign.scratch / "campaign.yaml").write_text(RECIPE)
        campaign.finish("compiles")
        straight, life = campaign.finish("straight")
        print(f"undisturbed: {straight} in {life:.1f} s", flush=True)
        number = 0
        while number < options.rounds:
            name, cache = f"round-{number}", "warm" if number % 2 else f"cold-{number}"
            delay = chance.uniform(0, life * (1.0 if number % 2 else 1.5))
            sent = [(0.0, chance.choice((signal.SIGINT, signal.SIGTERM)))]
            sent += [(chance.uniform(0, 0.5), chance.choice((signal.SIGINT, signal.SIGTERM)))] * (number % 5 == 4)
            code, section = campaign.disturb(name, cache, delay, sent)
            first = campaign.output()
            if not campaign.place(name).record.exists() and code < 0 and "dtrain" not in first:
                early += 1  # the interpreter was still starting
                shutil.rmtree(campaign.place(name).path, ignore_errors=True)
                continue
            why = campaign.wrong(name, code, len(sent))
            done, took = campaign.finish(name)
            why = why or ("" if done == straight else f"the end differs: {done}")
            life = (life + took) / 2 if took else life
            number, bad = number + 1, bad + bool(why)
            table[section, code] += 1
            if why:
                print(
                    f"round {number}: {json.dumps(sent)} after {delay:.2f} s in {section}: {why}; {first}", flush=True
                )
            for left in (campaign.place(name).path, campaign.scratch / f"cold-{number - 1}"):
                shutil.rmtree(left, ignore_errors=True)
        for (section, code), count in sorted(table.items()):
            print(f"  {section:<10} exit code {code:>3}  {count:>4}")
        print(f"{options.rounds - bad} of {options.rounds} good; {early} more before dtrain's first line")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
