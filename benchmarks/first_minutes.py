"""What a newcomer waits for: start-up, the first step, reports of short and of very long runs, a page in a browser.

Each time is the median of several starts. Beside the start-up times stands that of a Python which only imports JAX and
finds its devices; beside the report of 1,000,000 rows, a loop that only parses them with `json`. For five runs of
different kinds, the named sections of time are added up and compared with the wall time of the whole process.
`track.norms` is compared with the same run without it, in pairs, at steps of a few milliseconds.

    python benchmarks/first_minutes.py      help 0.2 s, check 0.9 s, first step 2.0 s, report of 1M rows 2 s and 200 MB;
                                            decoder-tiny on 8 devices: 3.5 s to the first step, 7 s with nothing cached
"""

import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

DTRAIN = [sys.executable, "-m", "dtrain"]
STARTS = 7
ROWS = 1_000_000
RUNS = {
    "mlp-digits": ["mlp-digits"],
    "decoder-tiny, 60 steps": ["decoder-tiny", "steps=60", "evaluate.every=20"],
    "cnn-digits on 4 fake devices": ["cnn-digits", "epochs=5", "mesh.fsdp=2", "--devices", "4"],
    "a save after every 20 steps": ["mlp-digits", "checkpoint.every=20", "epochs=20"],
    "evaluated after every 10 steps": ["mlp-digits", "evaluate.every=10", "epochs=20"],
}
NORMS = ["decoder-tiny", "model.layers=2", "model.width=32", "model.hidden=64", "model.context=32", "data.length=32",
         "batch=8", "steps=1500", "track.every=50", "evaluate.every=0", "checkpoint.minutes=0"]  # fmt: skip
BROWSER = "--headless --no-sandbox --disable-gpu --disable-background-networking --disable-component-update"
PEAK = """import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, capture_output=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"""
"""Runs a command and prints the largest memory of its process, in KiB."""


def seconds(command: list[str], folder: Path) -> float:
    """Wall time of a process."""
    start = time.perf_counter()
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return time.perf_counter() - start


def median(command: list[str], folder: Path, starts: int = STARTS) -> float:
    """Median wall time of several starts, after one that fills the caches."""
    seconds(command, folder)
    return statistics.median(seconds(command, folder) for _ in range(starts))


def first_step(folder: Path, recipe: str, words: list[str], cold: bool = False) -> float:
    """Median seconds from the command to the line of the first step; with `cold`, each start has an empty cache of
    compiled programs."""

    def once(number: int) -> float:
        name = f"start-{recipe}-{number}"
        cache = folder / "caches" / (name if cold else "warm")
        start = time.perf_counter()
        command = [*DTRAIN, "run", recipe, *words, "track.every=1", "steps=60", f"name={name}"]
        place = os.environ | {"XDG_CACHE_HOME": str(cache)}
        pipes = {"stderr": subprocess.PIPE, "stdout": subprocess.DEVNULL}
        with subprocess.Popen(command, cwd=folder, env=place, **pipes) as run:
            assert run.stderr is not None
            found = next(time.perf_counter() - start for line in run.stderr if line.startswith(b"step 1/"))
            run.stderr.read()
        shutil.rmtree(folder / "runs" / name)
        return found

    if not cold:
        once(0)
    return statistics.median(once(number + 1) for number in range(3 if cold else STARTS))


def accounts(folder: Path) -> None:
    """The named sections of runs against the wall time of their processes."""
    for name, words in RUNS.items():
        place = re.sub(r"\W+", "-", name)
        wall = seconds([*DTRAIN, "run", *words, f"name={place}"], folder)
        values = json.loads(subprocess.check_output([*DTRAIN, "report", place, "--json"], cwd=folder))
        named = sum(value for part, value in values["parts"].items() if part != "unknown")
        print(f"{name:<32} named {named:6.2f} s of {wall:6.2f} s: {named / wall:.1%}", flush=True)


def long_run(folder: Path) -> None:
    """A report of 1,000,000 logged rows against parsing them, and its page in a browser."""
    place = folder / "runs" / "long"
    shutil.copytree(folder / "runs" / "mlp-digits", place)
    row = {"train/loss": 1.5, "train/accuracy": 0.5, "train/grad_norm": 0.25, "train/lr": 1e-3, "time/step_ms": 5.125,
           "time/data_ms": 0.0625, "rate/examples_per_s": 12800.0}  # fmt: skip
    with (place / "metrics.jsonl").open("w") as file:
        file.writelines(json.dumps({"step": n, **row, "train/loss": 3 / n**0.3}) + "\n" for n in range(1, ROWS + 1))
    size = (place / "metrics.jsonl").stat().st_size
    parse = "import json, sys\nfor line in open(sys.argv[1], 'rb'): json.loads(line)"
    plain = median([sys.executable, "-c", parse, str(place / "metrics.jsonl")], folder, 3)
    report = median([*DTRAIN, "report", "long"], folder, 3)
    command = [sys.executable, "-c", PEAK, *DTRAIN, "report", "long"]
    done = subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)
    print(f"report of {ROWS:,} rows ({size / 1e6:.0f} MB): {report:.2f} s, {int(done.stdout) / 1024:.0f} MB of memory; "
          f"json.loads of each row alone {plain:.2f} s: {report / plain:.2f}x", flush=True)  # fmt: skip
    subprocess.run([*DTRAIN, "report", "long", "--html", "long.html"], cwd=folder, check=True, capture_output=True)
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser:
        page = folder / "long.html"
        probe = "<script>document.title = 'ready ' + performance.now()</script></body>"
        page.write_text(page.read_text().replace("</body>", probe))
        command = [browser, *BROWSER.split(), f"--user-data-dir={folder / 'profile'}", "--dump-dom", page.as_uri()]
        titles = [subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(3)]
        ready = sorted(float(found[1]) for title in titles if (found := re.search(r"<title>ready ([\d.]+)", title)))
        drawn = ready[len(ready) // 2] / 1e3
        print(f"its page ({page.stat().st_size / 1e6:.1f} MB) is drawn {drawn:.2f} s after it is opened", flush=True)


def norms(folder: Path) -> None:
    """The median step with `track.norms` against that without, in pairs of runs."""
    ratios, steps = [], []
    for number in range(STARTS):
        found = {}
        for which in ("false", "true") if number % 2 else ("true", "false"):
            name = f"norms-{which}-{number}"
            seconds([*DTRAIN, "run", *NORMS, f"track.norms={which}", f"name={name}"], folder)
            values = json.loads(subprocess.check_output([*DTRAIN, "report", name, "--json"], cwd=folder))
            found[which] = values["step_ms"]
        ratios.append(found["true"] / found["false"])
        steps.append(found["false"])
    print(f"track.norms at steps of {statistics.median(steps):.2f} ms: {statistics.median(ratios):.3f}x")


def main() -> None:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        jax = median([sys.executable, "-c", "import jax; jax.devices()"], folder)
        print(f"import jax, find devices          {jax:.2f} s")
        for words in (["--help"], ["check", "mlp-digits"]):
            taken = median([*DTRAIN, *words], folder)
            print(f"dtrain {' '.join(words):<26} {taken:.2f} s, {taken / jax:.2f}x", flush=True)
        for recipe, words in {"mlp-digits": [], "decoder-tiny": ["mesh={data: 2, fsdp: 4}", "--devices", "8"]}.items():
            for cold in (False, True):
                taken = first_step(folder, recipe, words, cold)
                kind = "8 devices, " * bool(words) + ("nothing cached" if cold else "compiled before")
                print(f"dtrain run {recipe}, {kind}: {taken:.2f} s to step 1, {taken / jax:.2f}x", flush=True)
        accounts(folder)
        long_run(folder)
        norms(folder)


if __name__ == "__main__":
    main()
