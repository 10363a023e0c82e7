"""Damages one thing in a run folder: bytes, lengths, types, names, links, FIFOs, folders, times."""

import json
import os
import random
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

NAMES = ("recipe.yaml", "run.json", "metrics.jsonl", "log.txt", "lease.json", ".lock", "beat-0.json", "ended.json")
"""Files of the folder itself, whether they exist or not."""
VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1e300, float("nan"), float("inf"), 10**40, "", "x", "\x1b[2J", [], [1], {}, {"a": {}},
)  # fmt: skip
TEXTS = ("", "{", "[]", "1", "null", '"x"', "[" * 50_000, '{"a":' * 50_000, "\x00" * 99, "- a\n- b\n", "a: {b: [", "é")


def damage(place: Path, chance: random.Random) -> str:
    """Apply one kind of damage; a description of it."""
    kind = chance.choice(KINDS)
    return f"{kind.__name__.strip('_')} ({kind(place, chance)})"


def _file(place: Path, chance: random.Random) -> Path:
    """One of the folder's files: top-level files, all files and JSON files are equally likely groups."""
    files = [path for path in sorted(place.rglob("*")) if path.is_file()]
    top = [path for path in files if path.parent == place]
    return chance.choice(chance.choice([top, files, [path for path in files if path.suffix == ".json"]]))


def _target(place: Path, chance: random.Random) -> Path:
    """A file, or a path that a file or folder of a run may have."""
    step = chance.choice(sorted((place / "checkpoints").iterdir()))
    names = [place / name for name in NAMES]
    others = [place / "checkpoints", place / "plans", step, step / "MANIFEST.json", step / "state"]
    others += [place / "checkpoints" / name for name in (".incomplete-12", ".unfinished", "12", "99")]
    return chance.choice([chance.choice(names), chance.choice(others), _file(place, chance)])


def _gone(path: Path) -> Path:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    return path


def flipped(place: Path, chance: random.Random) -> str:
    path = _file(place, chance)
    raw = bytearray(path.read_bytes() or b"x")
    for _ in range(chance.choice([1, 1, 3, 50])):
        raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
    path.write_bytes(raw)
    return path.name


def truncated(place: Path, chance: random.Random) -> str:
    path = _file(place, chance)
    os.truncate(path, chance.choice([0, chance.randint(0, path.stat().st_size)]))
    return path.name


def lengthened(place: Path, chance: random.Random) -> str:
    path = _file(place, chance)
    with path.open("ab") as file:
        file.write(chance.choice([b"x", b"\n", b"{}\n", b"\x00" * 4096, chance.randbytes(100)]))
    return path.name


def deleted(place: Path, chance: random.Random) -> str:
    path = _target(place, chance)
    _gone(path)
    return path.name


def replaced_by_folder(place: Path, chance: random.Random) -> str:
    path = _gone(_target(place, chance))
    path.mkdir()
    if chance.random() < 0.5:
        (path / "inside").write_text("x")
    return path.name


def replaced_by_file(place: Path, chance: random.Random) -> str:
    path = _gone(_target(place, chance))
    path.write_text(chance.choice(TEXTS))
    return path.name


def replaced_by_fifo(place: Path, chance: random.Random) -> str:
    path = _gone(_target(place, chance))
    os.mkfifo(path)
    return path.name


def replaced_by_socket(place: Path, chance: random.Random) -> str:
    path = _gone(_target(place, chance))
    with socket.socket(socket.AF_UNIX) as one:
        before = Path.cwd()
        os.chdir(path.parent)  # the path of a socket has at most 107 characters
        one.bind(path.name)
        os.chdir(before)
    return path.name


def replaced_by_link(place: Path, chance: random.Random) -> str:
    other, path = _target(place, chance), _gone(_target(place, chance))
    to = chance.choice([path.name, "nowhere", "/dev/zero", "/dev/full", "..", str(other), str(place)])
    path.symlink_to(to)
    return f"{path.name} -> {to}"


def other_value(place: Path, chance: random.Random) -> str:
    """Replace a value in a JSON file by one of another type."""
    files = [path for path in sorted(place.rglob("*")) if path.is_file() and path.suffix in (".json", ".jsonl")]
    path = chance.choice([place / "run.json", chance.choice(files)])
    lines = [path.read_text()] if path.suffix == ".json" else path.read_text().splitlines()
    number = chance.randrange(len(lines))
    tree = node = json.loads(lines[number])
    while True:
        key = chance.choice(list(node) if isinstance(node, dict) else range(len(node)))
        if isinstance(node[key], dict | list) and node[key] and chance.random() < 0.7:
            node = node[key]
            continue
        break
    node[key] = chance.choice(VALUES)
    lines[number] = json.dumps(tree)
    path.write_text("\n".join(lines) + "\n")
    return f"{path.name}: {key} = {node[key]!r:.40}"


def renamed_step(place: Path, chance: random.Random) -> str:
    steps = place / "checkpoints"
    path = chance.choice(sorted(steps.iterdir()))
    name = chance.choice(["12", "99", "0099", "1", "0", "00", "٣", "9" * 40, f"{path.name}.orbax-checkpoint-tmp", "-4"])
    how = chance.choice([Path.rename, shutil.copytree])
    how(path, steps / name)
    return f"{how.__name__} {path.name} {name}"


def swapped(place: Path, chance: random.Random) -> str:
    """Exchange the contents of two files."""
    one, two = _file(place, chance), _file(place, chance)
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    return f"{one.name}, {two.name}"


def leased(place: Path, chance: random.Random) -> str:
    values = {"token": "x", "since": time.time(), "host": socket.gethostname(), "pid": 2**22 + 1, "born": "1"}
    values[chance.choice(list(values))] = chance.choice(VALUES)
    path = place / "lease.json"
    path.write_text(json.dumps(values))
    at = time.time() + chance.choice([0, -1000, 1e9])
    os.utime(path, (at, at))
    return json.dumps(values)[:80]


def times(place: Path, chance: random.Random) -> str:
    path = _file(place, chance)
    at = chance.choice([0, 2**33, time.time() + 1e6])
    os.utime(path, (at, at))
    return path.name


def planned(place: Path, chance: random.Random) -> str:
    path = place / "plans" / "x.json"
    path.parent.mkdir()
    path.write_text(chance.choice(TEXTS))
    return path.read_text()[:20]


KINDS: tuple[Callable[[Path, random.Random], str], ...] = (
    flipped, flipped, truncated, lengthened, deleted, replaced_by_folder, replaced_by_file, replaced_by_fifo,
    replaced_by_socket, replaced_by_link, replaced_by_link, other_value, other_value, other_value, renamed_step,
    swapped, leased, times, planned,
)  # fmt: skip
