"""Whether the tests of every change catch faults of one line in the core: a sign, a missing psum, a dropped check.

Each fault is planted in a copy of the working tree, and those tests of `make ci` run that are in the folders named with
it, until one fails. A fault that no test catches is a gap in the tests.

python benchmarks/planted_faults.py [NUMBER ...]     a minute each; target: all caught
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
CHANGE = "not nightly and not gpu and not tpu_compiler and not gpu_compiler"
ENGINES, RUNS = "tests/parallel tests/models", "tests/assembly tests/train tests/checkpoint"

# file, the text, what is planted in its place, where tests are
FAULTS = [
    ("parallel/pmap.py", "return jax.lax.psum(accumulate(own, params, batch, microbatches, layout.declared), AXIS)",
     "return accumulate(own, params, batch, microbatches, layout.declared)", ENGINES),
    ("parallel/pipeline.py", "(i, (i + 1) % stages)", "(i, (i + 2) % stages)", ENGINES),
    ("parallel/pipeline.py", "jnp.where(me == stages - 1,", "jnp.where(me == 0,", ENGINES),
    ("parallel/ring.py", "(2 * parts - 1 - part) * (size // 2) + half", "(2 * parts - 2 - part) * (size // 2) + half",
     ENGINES),
    ("parallel/ring.py", "partial_results[1], _attend(late, first", "partial_results[1], _attend(late, last", ENGINES),
    ("parallel/gather.py", "return jax.lax.psum(x, axes) if axes else x", "return x", ENGINES),
    ("parallel/manual.py", "return jax.lax.pmax(x, axes) if axes else x", "return x", ENGINES),
    ("parallel/engine.py", "return jax.tree.map(jnp.add, sums, values), None", "return values, None", ENGINES),
    ("assembly/step.py", "lambda g: g / weight.astype(g.dtype)", "lambda g: g", f"{ENGINES} tests/train"),
    ("assembly/step.py", "State(state.step + 1, params, optimizer)", "State(state.step + 2, params, optimizer)", RUNS),
    ("assembly/step.py", "jax.lax.cond(finite, updated, unchanged)", "jax.lax.cond(finite, updated, updated)", RUNS),
    ("checkpoint/manifest.py", 'raise CorruptCheckpoint(f"{changed[0]} was changed after it was written")', "pass",
     RUNS),
    ("checkpoint/store.py", "if failed:\n            raise failed", "if failed:\n            pass", RUNS),
    ("checkpoint/manifest.py", "[rank::processes]", "[rank :: processes + 1]", RUNS),
    ("data/order.py", "return self._permuted(int(epochs[0]), positions)", "return self._permuted(0, positions)",
     "tests/data tests/train"),
    ("data/order.py", "np.uint64(self.seed) + hash64(rows.astype(np.uint64))", "hash64(rows.astype(np.uint64))",
     "tests/data tests/train"),
    ("optim/moments.py", "count = jnp.asarray(optax.safe_increment(state.count))", "count = state.count + 2",
     "tests/optim"),
    ("optim/update.py", "(step + 1) / (schedule.warmup + 1)", "step / (schedule.warmup + 1)",
     "tests/optim tests/train"),
    ("optim/update.py", "-rate(step).astype(u.dtype) * u", "rate(step).astype(u.dtype) * u", "tests/optim tests/train"),
    ("recipe/crosscheck.py", "_best, _lora, _objective, _notify)", "_best, _lora, _notify)",
     "tests/recipe tests/models tests/cli"),
    ("recipe/crosscheck.py", "unit = groups * (math.lcm(stages, accumulate) if stages > 1 else accumulate)",
     "unit = groups", "tests/recipe"),
    ("parallel/rules.py", "if self.sizes[axis] > 1)", "if self.sizes[axis] > 2)", ENGINES),
]  # fmt: skip


def caught(tree: Path, folders: str) -> str:
    """The first test that fails; empty if none does."""
    environment = os.environ | {"PYTHONPATH": str(tree)}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", "-m", CHANGE]
    done = subprocess.run(
        [*command, *folders.split()], cwd=tree, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode == 0:
        return ""
    # the summary that `-rs` leaves out: the header of the first failure, and the file of its last frame
    name = re.search(r"^_+ (?:ERROR collecting )?(\S+?)(?:\[.*)? _+$", done.stdout, re.MULTILINE)
    return name[1] if name else done.stdout[-300:]


def main() -> None:
    wanted = {int(word) for word in sys.argv[1:]} or set(range(1, len(FAULTS) + 1))
    missed = 0
    with tempfile.TemporaryDirectory(prefix="dtrain-faults-") as folder:
        tree = Path(folder, "dtrain")
        files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
        for name in files:
            if (ROOT / name).is_file():
                (tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, tree / name)
        for number, (name, text, planted, folders) in enumerate(FAULTS, 1):
            if number not in wanted:
                continue
            path, start = tree / "dtrain" / name, time.monotonic()
            whole = path.read_text()
            assert whole.count(text) == 1, f"{name} has {whole.count(text)} times {text!r}"
            path.write_text(whole.replace(text, planted))
            found = caught(tree, folders)
            path.write_text(whole)
            missed += not found
            shown = f"{name}: {' '.join(text.split())[:60]} -> {' '.join(planted.split())[:50]}"
            print(f"{number:>2} {shown}: {found or 'NOT CAUGHT'} ({time.monotonic() - start:.0f} s)", flush=True)
    print(f"{missed} of {len(wanted)} not caught")
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
