"""SIGINT, SIGTERM, SIGHUP or no more memory at random moments of a run, from exec to exit; each run is then resumed.

Eight kinds of run take turns. A round is good if the exit code is 75 (or 0 for a finished run, 130 after a second
signal, 3 for one without memory), run.json has the same code and a matching state, nothing printed a traceback, the
lock is free, and the resumed run ends with the bits of an undisturbed one. Every second round of a kind starts with an
empty cache of compiled programs, so that signals also arrive while compiling; in every fifth round a second signal
follows, and in every seventh the process may not map more memory than it has (RLIMIT_AS); there XLA or LLVM may abort
the process, which the table shows as -6. Signals to a Python that has
not reached dtrain's first line are counted separately.

    python benchmarks/signal_campaign.py [--rounds 200] [--kind NAME] [--seed 0]     ten CPU seconds per round
"""

import argparse
import json
import os
import random
import re
import resource
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
NATIVE = re.compile("LLVM ERROR|Check failed|std::bad_alloc")
STATES = {0: "finished", 3: "failed", 75: "stopped", 130: "aborted"}
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
TWO = ["--devices", "2"]
KINDS: dict[str, tuple[str, list[str]]] = {
    "one device": ("campaign.yaml", []),
    "8 steps a call": ("campaign.yaml", ["engine.steps_per_call=8"]),
    "data workers": ("campaign.yaml", ["data.load.workers=1"]),
    "shard_map": ("campaign.yaml", [*TWO, "engine=shard_map", "mesh={fsdp: 2}"]),
    "two processes": ("campaign.yaml", [*TWO, "--processes", "2"]),
    "pmap in two": ("campaign.yaml", [*TWO, "--processes", "2", "engine=pmap"]),
    "decoder": ("decoder-tiny", ["steps=40", "checkpoint.every=16", "evaluate.every=20", "track.every=5"]),
    "vit": ("vit-digits", ["epochs=null", "steps=60", "checkpoint.every=25", "evaluate.every=30", "track.every=5"]),
}
"""Recipe and options of each kind of run."""


@dataclass
class Campaign:
    """One kind of run in one scratch folder."""

    scratch: Path
    kind: str
    straight: str = ""
    """What an undisturbed run ends with."""
    life: float = 0.0
    """Seconds that one takes."""
    rounds: int = 0

    def place(self, name: str) -> Folder:
        return Folder(self.scratch / "runs" / name)

    def start(self, name: str, cache: str) -> subprocess.Popen[bytes]:
        recipe, options = KINDS[self.kind]
        command = [sys.executable, "-m", "dtrain", "run", recipe, f"name={name}", *options]
        environment = os.environ | {"XDG_CACHE_HOME": str(self.scratch / cache)}
        with (self.scratch / "output").open("wb") as output:
            return subprocess.Popen(command, cwd=self.scratch, env=environment, stdout=output, stderr=output)

    def finish(self, name: str) -> tuple[str, float]:
        """Run it to its end; the checksum of the last state, and the seconds that it took."""
        start = time.monotonic()
        code = self.start(name, "warm").wait()
        if code:
            return f"exit code {code}: {self.output()}", 0.0
        last = max(
            self.place(name).checkpoints.iterdir(), key=lambda path: int(path.name) if path.name.isdigit() else -1
        )
        found = manifest.check(last, 0, 1).checksum
        return "-".join(f"{word:08x}" for word in found), time.monotonic() - start

    def output(self) -> str:
        return (self.scratch / "output").read_text(errors="replace")[-600:]

    def disturb(self, name: str, cache: str, delay: float, numbers: list[tuple[float, int]]) -> tuple[int, str]:
        """Start it and send the signals, 0 for no more memory; the exit code, and the section of the run then."""
        running, place, section = self.start(name, cache), self.place(name), ""
        time.sleep(delay)
        for pause, number in numbers:
            time.sleep(pause)
            latest = heartbeat.read(place.heartbeat(0))
            section = section or (latest.section if latest else "imports")
            if running.poll() is not None:
                break
            if number:
                running.send_signal(number)
            else:
                size = int(Path(f"/proc/{running.pid}/statm").read_text().split()[0]) * resource.getpagesize()
                resource.prlimit(running.pid, resource.RLIMIT_AS, (size, size))
        try:
            return running.wait(timeout=180), section
        except subprocess.TimeoutExpired:
            running.kill()
            return running.wait(), f"{section}, never exited"

    def wrong(self, name: str, code: int, sent: list[tuple[float, int]]) -> str:
        """The problem with how it ended; empty if there is none."""
        place = self.place(name)
        record = place.read_record()
        if sent[0][1] == 0 and code == -signal.SIGABRT and NATIVE.search(self.output()):
            return ""  # XLA and LLVM end the process themselves where they get no memory: docs/reliability.md says so
        if code not in STATES or (code == 130 and len(sent) < 2) or (code == 3) != (sent[0][1] == 0 and code != 0):
            return f"exit code {code}"
        if "Traceback" in self.output():
            return "a traceback"
        if record and (record["state"], record["exit_code"]) != (STATES[code], code):
            return f"run.json has {record['state']}, {record['exit_code']}; the exit code is {code}"
        if not record and code == 0:
            return "exit code 0 without run.json"
        return "the lock was not released" if place.lease.exists() and code != 130 else ""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--kind", choices=KINDS, action="append")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    chance, table, bad, early = random.Random(options.seed), Counter(), 0, 0
    with tempfile.TemporaryDirectory(prefix="dtrain-signals-") as folder:
        campaigns = []
        for kind in options.kind or KINDS:
            campaign = Campaign(Path(folder, kind.replace(" ", "-")), kind)
            campaign.scratch.mkdir()
            (campaign.scratch / "campaign.yaml").write_text(RECIPE)
            campaign.finish("compiles")
            campaign.straight, campaign.life = campaign.finish("straight")
            print(f"{kind}, undisturbed: {campaign.straight} in {campaign.life:.1f} s", flush=True)
            campaigns.append(campaign)
        number = 0
        while number < options.rounds:
            campaign = campaigns[number % len(campaigns)]
            turn, name = campaign.rounds, f"round-{number}"
            cache = "warm" if turn % 2 else f"cold-{number}"
            delay = chance.uniform(0, campaign.life * (1.0 if turn % 2 else 1.5))
            sent = [(0.0, int(chance.choice(SIGNALS)))]
            sent += [(chance.uniform(0, 0.5), int(chance.choice(SIGNALS)))] * (number % 5 == 4)
            if number % 7 == 6 and "--processes" not in KINDS[campaign.kind][1]:
                sent = [(0.0, 0)]
            code, section = campaign.disturb(name, cache, delay, sent)
            first, place = campaign.output(), campaign.place(name)
            if not place.record.exists() and "dtrain" not in first and (code < 0 or sent[0][1] == 0):
                early += 1  # the interpreter was still starting
                shutil.rmtree(place.path, ignore_errors=True)
                continue
            why = campaign.wrong(name, code, sent)
            done, took = campaign.finish(name)
            why = why or ("" if done == campaign.straight else f"the end differs: {done}")
            campaign.life = (campaign.life + took) / 2 if took else campaign.life
            number, bad = number + 1, bad + bool(why)
            campaign.rounds += 1
            table[campaign.kind, "memory" if sent[0][1] == 0 else section, code] += 1
            if why:
                told = f"round {number - 1}, {campaign.kind}: {json.dumps(sent)} after {delay:.2f} s in {section}"
                print(f"{told}: {why}; {first}", flush=True)
            for left in (place.path, campaign.scratch / f"cold-{number - 1}"):
                shutil.rmtree(left, ignore_errors=True)
        for (kind, section, code), count in sorted(table.items()):
            print(f"  {kind:<15} {section:<12} exit code {code:>3}  {count:>4}")
        print(f"{options.rounds - bad} of {options.rounds} good; {early} more before dtrain's first line")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
