"""Mutated and hostile recipes through `load` and `check`, in this process.

    python benchmarks/fuzz_recipes.py --seed 0 --count 3000

A case fails if it raises anything but an error for the user, takes more than LIMIT seconds, or if a recipe
that `check` accepts cannot be assembled. A sample of those is assembled, on fake CPU devices, with shapes only.
"""

import argparse
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dtrain.parallel.devices import fake_devices

fake_devices(8)

import jax  # noqa: E402

from dtrain.assembly.assemble import assemble  # noqa: E402
from dtrain.cli.recipes import shipped  # noqa: E402
from dtrain.core.errors import DtrainError  # noqa: E402
from dtrain.models.nn.param import count  # noqa: E402
from dtrain.recipe import yaml  # noqa: E402
from dtrain.recipe.examine import examine  # noqa: E402
from dtrain.recipe.recipe import Recipe  # noqa: E402

LIMIT, HANG = 2.0, 10  # the limit of CPU seconds for a recipe, and seconds after which it counts as a hang
ASSEMBLED = 30  # one of this many accepted recipes is assembled

NUMBERS = [0, -1, 1, 2, 3, 7, 64, 1000, 2**31 - 1, 2**31, 2**63, 10**90, 0.5, -0.0, 1e-300, 1e300, 1e-9, 0.9999999999]
NUMBERS += [float("inf"), float("nan"), 1e-40, 1e38]
TEXTS = ["", "\0", "a\0b", "\ud800", "x" * 5000, "\x1b[2J", "é" * 300, "../" * 500, "a\nb"]
WORDS = """x bytes ~nosuchuser/x /dev/zero /proc/self/mem / .. {dtrain}/**/* /**/*.none [ * :// gs://bucket/x true 1e5
adamw digits decoder rms jit pipe {} %s%n None __class__ -1"""
SECTIONS = "model data optimizer mesh engine precision evaluate checkpoint track guard launch"
KINDS = """mlp cnn vit decoder custom digits idx images text tokens synthetic sgd lion muon adafactor shard_map pmap
wsd linear constant ssh local slurm gke wandb"""


class Hang(BaseException):
    """A case that does not end in time."""


def some(draw: random.Random, depth: int = 0) -> Any:
    """A value of any kind."""
    choice = draw.random()
    if choice < 0.4:
        return draw.choice(NUMBERS)
    if choice < 0.65:
        return draw.choice([*TEXTS, *WORDS.split()])
    if choice < 0.75 or depth > 3:
        return draw.choice([None, True, False])
    if choice < 0.88:
        return [some(draw, depth + 1) for _ in range(draw.choice([0, 1, 2, 3, 3, 40]))]
    keys = [
        draw.choice([*SECTIONS.split(), "kind", "steps", "x", "", "\0", "lr", "sizes"])
        for _ in range(draw.randrange(4))
    ]
    return {key: some(draw, depth + 1) for key in keys}


def leaves(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every key and item."""
    inside = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [found for key, child in inside for found in ((*path, key), *leaves(child, (*path, key)))]


def mutated(tree: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """The recipe with some values replaced, removed, moved, nested or added."""
    gentle = draw.random() < 0.5
    for _ in range(draw.choice([1, 1, 1, 2, 3, 8])):
        paths = leaves(tree)
        if not paths:
            return tree
        *way, last = draw.choice(paths)
        part: Any = tree
        for key in way:
            part = part[key]
        change = draw.uniform(0.45, 0.6) if gentle else draw.random()
        if change < 0.45:
            part[last] = some(draw)
        elif change < 0.6 and isinstance(part[last], int | float):
            part[last] = draw.choice([part[last] * 2, part[last] * 4, part[last] // 2, part[last] * 10**6, 1, 8])
        elif change < 0.7:
            del part[last]
        elif change < 0.8:
            part[last] = draw.choice([[part[last]], {"kind": part[last]}, {"x": part[last]}])
        elif change < 0.9 and isinstance(part[last], str):
            part[last] = draw.choice(KINDS.split())
        elif not gentle and isinstance(part, dict):
            part[draw.choice([*SECTIONS.split(), *(str(path[-1]) for path in paths)])] = some(draw)
    return tree


def plain(node: Any) -> Any:
    """Convert a tree of nodes to lists and dicts."""
    inside = node.value
    if isinstance(inside, dict):
        return {key: plain(child) for key, child in inside.items()}
    return [plain(child) for child in inside] if isinstance(inside, tuple) else inside


def garbled(text: str, draw: random.Random) -> bytes:
    """The text with bytes replaced, removed and repeated."""
    raw = bytearray(text.encode("utf-8", "replace"))
    for _ in range(draw.choice([1, 3, 20])):
        at = draw.randrange(len(raw) or 1)
        raw[at : at + draw.randrange(4)] = draw.choice(
            [b"", b"\0", b"[", b"{", b"*a", b"&a", b"\xff", b"\t", b": ", b"!!x"]
        )
    return bytes(raw)


HOSTILE: list[Callable[[random.Random], str]] = [
    lambda draw: f"include: {draw.choice(['/dev/zero', 'pipe', '.', '/dev/tty', 'case.yaml', 'loop', '/proc/kmsg'])}\n",
    lambda _: "include: [" + "tree.yaml, " * 50 + "]\n",
    lambda _: "".join(f"key{i}: 1\n" for i in range(24_000)),
    lambda _: "x: [" + "1," * 120_000 + "]\n",
    lambda draw: "model: {kind: mlp, sizes: [" + f"{draw.choice(['1', 'x', '-1'])}," * 9_000 + "]}\n",
    lambda _: "a: " + "[" * 5000 + "]" * 5000 + "\n",
    lambda _: "? " * 5000 + "\n",
    lambda _: 'a: "' + "\\x41" * 60_000 + '"\n',
    lambda _: "k" * 200_000 + ": 1\n",
    lambda _: "a: |\n" + " \n" * 120_000,
    lambda _: "---\n" * 60_000,
    lambda _: "a: &a [1]\nb: [" + "*a," * 20_000 + "]\n",
    lambda _: "".join(f"optimizer{i % 7}{'z' * (i % 190)}: {{}}\n" for i in range(9_000)),
    lambda _: "#" * 300_000,
    lambda _: "%YAML 999999999999999999999.1\n---\na: 1\n",
    lambda _: 'a: "\\UFFFFFFFF"\n',
    lambda _: "a: " + "9" * 5000 + "\n",
]


def case(draw: random.Random, recipes: list[str]) -> tuple[bytes, list[str]]:
    """A recipe's text and its overrides."""
    text, choice = draw.choice(recipes), draw.random()
    if choice < 0.04:
        return draw.choice(HOSTILE)(draw).encode("utf-8", "surrogatepass"), []
    if choice < 0.12:
        return garbled(text, draw), []
    made = yaml.dump(mutated(plain(yaml.parse(text, "shipped")), draw)) if choice < 0.9 else text
    overrides = []
    for _ in range(draw.choice([0, 0, 0, 1, 2])):
        key = draw.choice(
            [*SECTIONS.split(), "model.layers", "optimizer.lr", "mesh.fsdp", "a.b.c", "x" * 300, "", "include"]
        )
        overrides.append(
            f"{key}={draw.choice([str(some(draw)), draw.choice([*TEXTS, *WORDS.split()]), draw.choice(KINDS.split())])}"
        )
    return made.encode("utf-8", "surrogatepass"), overrides


def assembled(recipe: Recipe) -> str:
    """Assemble the recipe as `run` does, without arrays; whether it was assembled or not tried."""
    devices = jax.devices()
    if recipe.model.kind == "custom" or recipe.mesh.least > len(devices) or count(recipe.model.params()) > 10**10:
        return "not tried"
    example = recipe.data.example()
    if example is None:
        return "not tried"
    fitting = (
        devices if len(devices) % recipe.mesh.least == 0 and not recipe.mesh.exact else devices[: recipe.mesh.least]
    )
    if recipe.batch % (len(fitting) * recipe.accumulate):
        fitting = devices[: recipe.mesh.least]
    assemble(recipe, fitting, example, recipe.steps or 2**31 - 1)
    return "assembled"


def attempt(path: Path, overrides: list[str], assemble_one_in: int, draw: random.Random) -> tuple[str, str]:
    """The outcome of a case, and the traceback of a failure."""
    signal.alarm(HANG)
    begun = time.process_time()
    try:
        found = examine(path, overrides, None, True)
        outcome = "accepted"
    except DtrainError as error:
        found, outcome = None, f"refused ({error.exit_code})"
    except (Exception, Hang):
        return "CRASH", traceback.format_exc()
    finally:
        signal.alarm(0)
    if (seconds := time.process_time() - begun) > LIMIT:
        return "SLOW", f"{seconds:.1f} s"
    if found is None or draw.randrange(assemble_one_in):
        return outcome, ""
    signal.alarm(60)
    try:
        return f"accepted, {assembled(found.recipe)}", ""
    except (Exception, Hang):
        return "NOT ASSEMBLED", traceback.format_exc()
    finally:
        signal.alarm(0)


def main() -> None:
    """Run the cases; exit with 1 if one failed, and keep its files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--assemble", type=int, default=ASSEMBLED)
    options = parser.parse_args()

    def hang(_number: int, _frame: object) -> None:
        raise Hang(f"no end after {HANG} s")

    signal.signal(signal.SIGALRM, hang)
    recipes = [path.read_text() for path in shipped().values()]
    folder = Path(tempfile.mkdtemp(prefix="fuzz-recipes-"))
    os.chdir(folder)
    os.mkfifo("pipe")
    Path("tree.yaml").write_text("include: [" + "leaf.yaml, " * 20 + "]\n")
    Path("leaf.yaml").write_text("{}\n")
    Path("loop").symlink_to("loop")
    outcomes, slowest, failures = Counter[str](), 0.0, 0
    for number in range(options.count):
        draw = random.Random(f"{options.seed}-{number}")
        text, overrides = case(draw, recipes)
        path = Path("case.yaml")
        path.write_bytes(text)
        begun = time.process_time()
        outcome, report = attempt(path, overrides, options.assemble, draw)
        outcomes[outcome] += 1
        if not outcome.startswith("accepted, "):
            slowest = max(slowest, time.process_time() - begun)
        if report:
            failures += 1
            failed = Path(f"failed-{number}.yaml")
            failed.write_bytes(text)
            print(f"{number}: {outcome}: {folder / failed} {overrides}\n{report}", flush=True)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    print(f"{options.count} cases, seed {options.seed}: {dict(outcomes)}; slowest {slowest:.2f} s; {memory:.0f} MiB")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
