"""Damages one thing in a copy of a small run folder, at random, and uses the folder: run, report, generate.

Each use must end with the correct state, or with a message and its exit code: never with a traceback, a hang, more than
two seconds of CPU time in a verb that only reads, or values other than those that were saved.

    python benchmarks/fuzz_run_folder.py [--seed 0] [--count 150]     a second per round; target: no failure
"""

import argparse
import collections
import hashlib
import os
import random
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fuzz_damage
from rich.console import Console as Rich

from dtrain.parallel.devices import fake_devices

RECIPE = """
model: {kind: decoder, vocab: 256, context: 16, layers: 1, width: 16, heads: 2}
data: {kind: text, files: [%s], length: 16}
optimizer: {kind: adamw, lr: 1e-3, schedule: {kind: constant}}
batch: 8
steps: 8
evaluate: {every: 4}
checkpoint: {every: 2, keep: 3}
track: {every: 2}
guard: {purity: false}
"""
LONGER = 12
HANGS, SLOW = 60.0, 2.0
"""Seconds after which a use counts as hung, and the limit of CPU seconds for a verb that only reads."""
EXPECTED = {0, 2, 3, 4, 5, 6}


class _HangError(BaseException):
    """A hang; a BaseException, so that no `except Exception` catches it."""


class Trial:
    """The undamaged folder, and the expected result of each use of it."""

    def __init__(self, root: Path) -> None:
        self.root, self.recipe = root, root / "small.yaml"
        (root / "text.txt").write_bytes(random.Random(0).randbytes(20_000))
        self.recipe.write_text(RECIPE % (root / "text.txt"))
        self.place = self.run(root / "runs", [])
        self.params = {step: self.params_of(step) for step in (4, 6, 8)}
        shutil.copytree(root / "runs", root / "longer")
        self.run(root / "longer", [f"steps={LONGER}"])
        self.checksum = self.checksum_of(root / "longer" / "small")

    def run(self, runs: Path, overrides: list[str]) -> Path:
        """Train; the run folder."""
        from dtrain.recipe.load import load
        from dtrain.track.console import Console
        from dtrain.train.run import run

        quiet = Rich(file=Path(os.devnull).open("w"))  # noqa: SIM115
        run(load(self.recipe, overrides), runs, Console(rich=quiet))
        return runs / "small"

    def checksum_of(self, place: Path) -> list[int]:
        """The checksum of the state after the longer run."""
        from dtrain.checkpoint import manifest

        return list(manifest.check(place / "checkpoints" / str(LONGER), 0, 1).checksum)

    def params_of(self, step: int) -> str:
        """The digest of the parameters at that step."""
        copy = self.root / "copy" / "small"
        shutil.copytree(self.place, copy)
        for path in (copy / "checkpoints").iterdir():
            if path.name != str(step):
                shutil.rmtree(path)
        found = self.generate(copy)
        shutil.rmtree(copy)
        return found[1]

    def generate(self, place: Path) -> tuple[int, str]:
        """The step that is used, and the digest of its parameters."""
        import jax
        import numpy as np

        from dtrain.core.run_dir import Folder
        from dtrain.inference.generate import generator

        found, digest = generator(Folder(place), [], lambda _: None), hashlib.sha256()
        for leaf in jax.tree.leaves(found.params):
            digest.update(np.asarray(leaf).tobytes())
        return found.step, digest.hexdigest()

    def use_run(self, place: Path) -> str:
        """Resume and continue: the last state must equal that of the undisturbed run."""
        self.run(place.parent, [f"steps={LONGER}"])
        return "" if self.checksum_of(place) == self.checksum else "the last state differs"

    def use_finished(self, place: Path) -> str:
        """Run the same recipe again."""
        self.run(place.parent, [])
        return ""

    def use_report(self, place: Path) -> str:
        """A report must have text."""
        from dtrain.core.run_dir import Folder
        from dtrain.track.summary import summarise

        return "" if summarise(Folder(place)).text() else "an empty report"

    def use_generate(self, place: Path) -> str:
        """The parameters must be those that were saved at that step."""
        step, digest = self.generate(place)
        return "" if self.params.get(step) == digest else f"the parameters of step {step} differ"


def outcome(use: Callable[[Path], str], place: Path) -> tuple[int, str, float]:
    """The exit code, the problem if any, and CPU seconds."""
    from dtrain.core.errors import DtrainError, user_error

    def hang(*_: Any) -> None:
        raise _HangError

    signal.signal(signal.SIGALRM, hang)
    signal.setitimer(signal.ITIMER_REAL, HANGS)
    start = time.process_time()
    try:
        code, wrong = 0, use(place)
    except _HangError:
        code, wrong = 9, f"hung: {''.join(traceback.format_exc(limit=-3))}"
    except (Exception, SystemExit) as error:  # handled as on the command line
        known = user_error(error)
        code = known.exit_code if known else DtrainError.exit_code
        wrong = "" if known else traceback.format_exc(limit=-4)
        if known and ("\n" in known.message and code == 3):
            wrong = f"more than one line: {known.message}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return code, wrong or ("" if code in EXPECTED else f"exit code {code}"), time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=150)
    given = parser.parse_args()
    fake_devices(1)
    import logging

    logging.getLogger("absl").setLevel(logging.ERROR)
    codes, failures, slowest = collections.Counter[tuple[str, int]](), 0, 0.0
    with tempfile.TemporaryDirectory(prefix="dtrain-fuzz-") as folder:
        import jax

        jax.config.update("jax_compilation_cache_dir", f"{folder}/cache")
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        trial = Trial(Path(folder))
        uses = {"run": trial.use_run, "finished": trial.use_finished, "report": trial.use_report}
        uses |= {"generate": trial.use_generate}
        for number in range(given.count):
            chance = random.Random(f"{given.seed}/{number}")
            place = Path(folder) / "trial" / "small"
            shutil.copytree(trial.place, place, symlinks=True)
            what = fuzz_damage.damage(place, chance)
            verb = chance.choice(list(uses))
            code, wrong, seconds = outcome(uses[verb], place)
            reads = verb in ("report", "generate")
            wrong = wrong or (f"{seconds:.1f} s" if reads and seconds > SLOW else "")
            slowest = max(slowest, seconds if reads else 0.0)
            codes[verb, code] += 1
            if wrong:
                failures += 1
                print(f"FAILED round {number}: {verb} after {what}: {wrong}", flush=True)
            shutil.rmtree(place.parent)
    for (verb, code), times in sorted(codes.items()):
        print(f"{verb:<9} exit code {code}: {times}")
    print(f"{failures} failures in {given.count} rounds of seed {given.seed}; slowest read {slowest:.2f} s")
    raise SystemExit(failures > 0)


if __name__ == "__main__":
    main()
