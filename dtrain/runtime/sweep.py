"""A sweep: one run for each combination of values, several at a time, each a process of its own. It can be resumed."""

import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dtrain.core.errors import EnvironmentFault, RecipeError, Stopped, cause
from dtrain.core.files import overwrite, read_json
from dtrain.core.parent import CALLER
from dtrain.core.run_dir import NAME
from dtrain.core.run_list import SWEEP
from dtrain.core.types import JsonObject
from dtrain.recipe.compose import nearest_name

RANGE = re.compile(r"([a-z]+:)?([-+.\de]+)\.\.([-+.\de]+)", re.IGNORECASE)
LOOK, MOST = 0.1, 10_000
"""Seconds between two looks at the processes, and the largest number of runs."""


@dataclass(frozen=True)
class Range:
    """Values between two bounds, of which a random search draws: uniformly, or uniformly in the logarithm."""

    low: float
    high: float
    kind: str = ""

    def __str__(self) -> str:
        return f"{self.kind}{self.low!r}..{self.high!r}"

    def draw(self, source: random.Random) -> str:
        if self.kind == "int:":
            return str(source.randint(int(self.low), int(self.high)))
        if self.kind == "log:":
            return f"{math.exp(source.uniform(math.log(self.low), math.log(self.high))):.3g}"
        return f"{source.uniform(self.low, self.high):.4g}"


Axis = tuple[str, ...] | Range


@dataclass(frozen=True)
class Trial:
    """One run of a sweep."""

    name: str
    values: Mapping[str, str]

    @property
    def overrides(self) -> list[str]:
        """Its values as `key=value` arguments."""
        return [f"{key}={value}" for key, value in self.values.items()]


@dataclass(frozen=True)
class Sweep:
    """What a sweep varies, and what all its runs share."""

    recipe: str
    axes: Mapping[str, Axis]
    fixed: tuple[str, ...]
    count: int | None = None
    """Number of random combinations; None for all of them."""
    seed: int = 0

    def trials(self) -> list[Trial]:
        """The runs, the same for the same sweep. RecipeError if there are none, too many, or a range in a grid."""
        if not self.axes:
            raise RecipeError("no key has several values", "for example optimizer.lr=1e-4,3e-4,1e-3")
        lists = {key: axis for key, axis in self.axes.items() if not isinstance(axis, Range)}
        if self.count is None and len(lists) < len(self.axes):
            ranges = ", ".join(key for key in self.axes if key not in lists)
            raise RecipeError(f"{ranges}: a range has no end of values", "say how many runs to draw: --trials 20")
        size = math.prod(map(len, lists.values()))
        if self.count is None and size > MOST:
            raise RecipeError(f"{size:,} combinations", "draw some of them: --trials 50")
        combinations = self._drawn() if self.count is not None else itertools.product(*lists.values())
        chosen = [dict(zip(self.axes, values, strict=True)) for values in combinations]
        names = [_name(values) for values in chosen]
        return [
            Trial(name if names.count(name) == 1 else f"{name[:57]}-{number}", values)
            for number, (name, values) in enumerate(zip(names, chosen, strict=True), 1)
        ]

    def _drawn(self) -> Iterator[tuple[str, ...]]:
        """Random combinations, each once; fewer than `count` if there are no more."""
        seen: set[tuple[str, ...]] = set()
        for number in range(20 * (self.count or 0)):
            source = random.Random(f"{self.seed}/{number}")
            values = tuple(a.draw(source) if isinstance(a, Range) else source.choice(a) for a in self.axes.values())
            if values not in seen:
                seen.add(values)
                yield values
            if len(seen) == self.count:
                return

    def plain(self) -> JsonObject:
        axes = {
            key: f"{a.kind}{a.low!r}..{a.high!r}" if isinstance(a, Range) else list(a) for key, a in self.axes.items()
        }
        return {"recipe": self.recipe, "axes": axes, "fixed": list(self.fixed), "trials": self.count, "seed": self.seed}


def parse(recipe: str, words: Sequence[str], count: int | None, seed: int) -> Sweep:
    """A sweep from `key=a,b,c` and `key=1..2` arguments; others are the same in all runs."""
    axes: dict[str, Axis] = {}
    fixed = []
    for word in words:
        key, _, value = word.partition("=")
        if key == "name":
            raise RecipeError(f"{word}: a sweep names its runs by their values", f"--name {value} names their folder")
        values, found = _split(value), RANGE.fullmatch(value.strip())
        if found:
            axes[key] = _range(key, found)
        elif len(values) > 1:
            axes[key] = tuple(values)
            _refuse_repeated(key, values)
        else:
            fixed.append(word)
    return Sweep(recipe, axes, tuple(fixed), count, seed)


def _refuse_repeated(key: str, values: Sequence[str]) -> None:
    """Raise RecipeError if two values are the same, which would train the same run twice: 1e-3 and 0.001."""

    seen: dict[float | str, str] = {}
    for value in values:
        try:
            meant: float | str = float(value)
        except ValueError:
            meant = value
        if meant in seen:
            same = f"{value} twice" if seen[meant] == value else f"{seen[meant]} and {value}, which are the same"
            raise RecipeError(f"{key}={','.join(values)} has {same}", "leave one out")
        seen[meant] = value


def _range(key: str, found: "re.Match[str]") -> Range:
    hint, kind = "for example 0.1..0.9, log:1e-5..1e-2 or int:2..8", (found[1] or "").lower()
    try:
        low, high = float(found[2]), float(found[3])
    except ValueError:
        raise RecipeError(f"{key}={found[0]}: the bounds are not numbers", hint) from None
    problems = {
        f"{kind} is not a kind of range": kind not in ("", "log:", "int:"),
        "the first bound must be the lower one": not low < high,
        "a range of logarithms must begin above 0": kind == "log:" and low <= 0,
        "the bounds must be whole numbers": kind == "int:" and bool(low % 1 or high % 1),
    }
    if problem := next((text for text, wrong in problems.items() if wrong), ""):
        raise RecipeError(f"{key}={found[0]}: {problem}", hint)
    return Range(low, high, kind)


def _split(value: str) -> list[str]:
    """The parts between the commas that are in no brackets and no quotes."""
    parts, depth, quote = [""], 0, ""
    for letter in value:
        depth += (letter in "[{(") - (letter in "]})") if not quote else 0
        quote = "" if letter == quote else quote or (letter if letter in "'\"" else "")
        if letter == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def _name(values: Mapping[str, str]) -> str:
    """A name for a run that says its values: lr-3e-4-seed-1."""
    text = "-".join(f"{key.rpartition('.')[2]}-{value}" for key, value in values.items())
    name = nearest_name(text)[:60].rstrip("-")
    assert NAME.fullmatch(name), name
    return name


def keep(sweep: Sweep, folder: Path) -> None:
    """Write sweep.json. RecipeError if the folder has another sweep, EnvironmentFault if it cannot be written."""
    path = folder / SWEEP
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if path.exists():
            old = read_json(path)
            if old != sweep.plain():
                known = old if isinstance(old, dict) else {}
                changed = [key for key, value in sweep.plain().items() if known.get(key) != value]
                hint = "give this sweep another name: --name, or repeat the command that began the old one"
                raise RecipeError(f"{folder} holds another sweep: it differs in {', '.join(changed)}", hint)
        overwrite(path, json.dumps(sweep.plain(), indent=2) + "\n")
    except (OSError, ValueError) as error:
        raise EnvironmentFault(f"cannot write {path}: {cause(error)}", "choose another folder: --runs-dir") from error


def devices_of(job: int, jobs: int, gpus: Sequence[str]) -> dict[str, str]:
    """The environment variable that gives a process its part of this machine's GPUs; empty without GPUs."""
    share = gpus[job * len(gpus) // jobs : (job + 1) * len(gpus) // jobs]
    return {"CUDA_VISIBLE_DEVICES": ",".join(share)} if share else {}


def gpus() -> list[str]:
    """The GPUs that may be used, as CUDA names them."""
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in visible.split(",") if name]
    if not shutil.which("nvidia-smi"):
        return []
    done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False)
    return [str(number) for number, line in enumerate(done.stdout.splitlines()) if line.startswith("GPU ")]


def run_all(
    sweep: Sweep,
    trials: Sequence[Trial],
    folder: Path,
    *,
    jobs: int,
    options: Sequence[str],
    started: Callable[[Trial], None],
    ended: Callable[[Trial, int, str], None],
) -> dict[str, int]:
    """Start every run, `jobs` at a time. Returns their exit codes by name.

    `started(trial)` is called before each, `ended(trial, code, output)` after it. On Ctrl-C all runs save and stop, and
    Stopped is raised.
    """
    waiting, running, codes, available = list(trials), {}, {}, gpus()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                job = next(number for number in range(jobs) if number not in running)
                trial = waiting.pop(0)
                group = {"WANDB_RUN_GROUP": os.environ.get("WANDB_RUN_GROUP", folder.name)}
                environment = os.environ | group | devices_of(job, jobs, available) | {CALLER: str(os.getpid())}
                started(trial)
                running[job] = trial, _start(sweep, trial, folder, options, environment)
            for job, (trial, process) in list(running.items()):
                if process.poll() is not None:
                    del running[job]
                    codes[trial.name] = process.returncode
                    ended(trial, process.returncode, _output(folder, trial).read_text(errors="replace"))
            time.sleep(LOOK)
    except KeyboardInterrupt:
        for _, process in running.values():
            process.send_signal(signal.SIGINT)
        for _, process in running.values():
            process.wait()
        done = f"{len(codes)} of {len(trials)} runs are done"
        raise Stopped(f"{done}; the others are saved or not started", "the same command resumes the sweep") from None
    return codes


def _start(
    sweep: Sweep, trial: Trial, folder: Path, options: Sequence[str], environment: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "dtrain", "run", sweep.recipe, *sweep.fixed, *trial.overrides]
    command += [f"name={trial.name}", "--runs-dir", str(folder), *options]
    with _output(folder, trial).open("w") as output:  # not a pipe, which would block when full
        return subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=output, env=environment, start_new_session=True
        )  # its own session: Ctrl-C reaches it through this process, once


def _output(folder: Path, trial: Trial) -> Path:
    return folder / f"{trial.name}.out"
