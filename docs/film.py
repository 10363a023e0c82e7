"""Record commands in a terminal as an animated SVG, without any script in it: `make film` writes docs/images/film.svg.

Each command is a scene: it is typed, and its lines appear in the time that they took, with long waits shortened. The
picture is drawn by CSS alone; who prefers no motion sees the first scene at rest.
"""

import html
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

OUT = Path(__file__).parent / "images" / "film.svg"
RECIPE = """\
model: {kind: mlp, hidden: [128]}
data: digits
optimizer: {kind: adamw, lr: 3e-3, schedule: {kind: cosine, warmup: 0.05}}
batch: 64
epochs: 20
evaluate: {every: 150}
track: {every: 150}
"""
SCENES = (
    ("cat digits.yaml", "dtrain run digits.yaml"),
    (
        "dtrain run digits.yaml optimizer.lrr=1e-3",
        "dtrain check digits.yaml batch=63 mesh.data=8 --devices 8",
        "dtrain help optimizer.lr",
    ),
    ("dtrain run digits.yaml name=split --devices 8 mesh='{data: 2, fsdp: 4}'", "dtrain ls"),
)
WIDTH, LINE, LETTER = 112, 19, 8.43
"""Letters of a line, height of a line and width of a letter in pixels, at a font of 14 pixels."""
TYPED, LONGEST, READ = 0.035, 0.6, 3.5
"""Seconds for a letter that is typed, the longest wait between two lines, and the time to read a scene."""
STYLE = """
text { font: 14px ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace; fill: #d6dae0; white-space: pre }
.typed { fill: #ffffff; font-weight: bold } .error { fill: #ff8a80 } .hint { fill: #7fd1e0 } .result { fill: #8fd694 }
"""


@dataclass(frozen=True)
class Shown:
    """A text of the film, with the time at which it appears, in seconds, and the row."""

    text: str
    at: float
    row: int
    kind: str = ""
    column: int = 0


def recorded(command: str, folder: Path, environment: dict[str, str]) -> list[tuple[float, str]]:
    """The lines that a command prints, each with the seconds since the line before it."""
    lines, last = [], time.monotonic()
    with subprocess.Popen(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        for line in process.stdout or ():
            now = time.monotonic()
            lines.append((now - last, line.rstrip()))
            last = now
    return lines


def scene(commands: Sequence[str], folder: Path, environment: dict[str, str]) -> tuple[list[Shown], float]:
    """The texts of a scene, and how long it takes."""
    found: list[Shown] = []
    at, row = 0.3, 0
    for command in commands:
        found.append(Shown("$", at, row, "result"))
        column = 2
        for word in re.findall(r"\S+\s*", command):  # a word at a time, which is short to write and easy to read
            at += TYPED * len(word)
            found.append(Shown(word.rstrip(), at, row, "typed", column))
            column += len(word)
        row += 1
        at += 0.3
        for wait, line in recorded(command, folder, environment):
            at += min(wait, LONGEST)
            for part in wrapped(re.sub(r"\S*/bin/dtrain", "dtrain", line)):
                found.append(Shown(part, at, row, kind(part)))
                row += 1
        at, row = at + 0.8, row + 1
    return found, at + READ


def wrapped(line: str) -> list[str]:
    """A line in parts that fit, broken between words."""
    parts = [""]
    for word in re.findall(r"\s*\S+", line) or [""]:
        if len(parts[-1]) + len(word) > WIDTH and parts[-1]:
            parts.append("  ")
        parts[-1] += word
    return parts


def kind(line: str) -> str:
    """The class of a line."""
    words = {"error": ("error:",), "hint": ("hint:", "more:", "next:"), "result": ()}
    named = next((name for name, starts in words.items() if line.startswith(starts)), "")
    return named or ("result" if ": finished with" in line else "")


def drawn(scenes: Sequence[tuple[list[Shown], float]]) -> str:
    """The scenes one after the other, again and again, as SVG."""
    total = sum(length for _, length in scenes)
    rows = 1 + max(shown.row for found, _ in scenes for shown in found)
    width, height = round(WIDTH * LETTER + 32), rows * LINE + 52
    texts, frames, start = [], [], 0.0
    for number, (found, length) in enumerate(scenes):
        end = 100 * (start + length) / total
        for index, shown in enumerate(found):
            name = f"t{number}-{index}"
            begin = 100 * (start + shown.at) / total
            frames.append(
                f"@keyframes {name} {{ 0% {{opacity: 0}} {begin:.2f}% {{opacity: 1}} {end:.2f}% {{opacity: 0}} }}"
            )
            place = f'x="{16 + shown.column * LETTER:.1f}" y="{50 + shown.row * LINE}"'
            style = f"animation: {name} {total:.1f}s step-end infinite"
            scene_class = f"{shown.kind} scene{number}".strip()
            texts.append(f'<text {place} class="{scene_class}" style="{style}">{html.escape(shown.text)}</text>')
        start += length
    still = "@media (prefers-reduced-motion: reduce) { text { animation: none !important } "
    still += " ".join(f".scene{number} {{ opacity: 0 }}" for number in range(1, len(scenes))) + " }"
    dots = "".join(
        f'<circle cx="{20 + 18 * n}" cy="18" r="5.5" fill="{c}"/>'
        for n, c in enumerate(("#ff5f57", "#febc2e", "#28c840"))
    )
    about = (
        "A terminal: dtrain trains, explains a typing mistake, and trains on eight fake devices with the same losses"
    )
    newline = "\n"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        f' role="img" aria-label="{about}">\n'
        f"<style>{STYLE}{newline.join(frames)}\n{still}</style>\n"
        f'<rect width="{width}" height="{height}" rx="9" fill="#1b1f24"/>{dots}\n{newline.join(texts)}\n</svg>\n'
    )


def film(scenes: Sequence[Sequence[str]], out: Path) -> None:
    """Run the commands in an empty folder and write the film."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "digits.yaml").write_text(RECIPE)
        environment = {**os.environ, "PATH": path, "COLUMNS": str(WIDTH), "JAX_PLATFORMS": "cpu"}
        out.write_text(drawn([scene(commands, folder, environment) for commands in scenes]))


if __name__ == "__main__":
    film(SCENES, OUT)
