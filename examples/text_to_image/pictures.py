"""Pictures with captions: python pictures.py FOLDER [COUNT] writes pictures.tar (WebDataset) and tokenizer.json there.

Each picture of 32 x 32 pixels has a shape above another: "a red circle above a blue square".
"""

import io
import json
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, models, pre_tokenizers

COLOURS = {
    "red": (215, 40, 40), "orange": (245, 145, 35), "yellow": (240, 215, 50), "green": (45, 160, 70),
    "blue": (45, 85, 215), "purple": (145, 60, 180), "black": (35, 35, 35),
}  # fmt: skip
SHAPES = ("circle", "square", "triangle", "cross")
WORDS = ("<pad>", "<unk>", "a", "above", *COLOURS, *SHAPES)
FINE = 8
"""Pictures are drawn so many times larger, and scaled down."""


def outline(shape: str) -> np.ndarray:
    """The corners (n, 2) of a shape, from -1 to 1."""
    if shape == "circle":
        angle = np.linspace(0, 2 * np.pi, 60)
        return np.stack([np.cos(angle), np.sin(angle)], 1)
    if shape == "square":
        return np.array([(-1, -1), (1, -1), (1, 1), (-1, 1)]) * 0.85
    if shape == "triangle":
        return np.array([(0, -1), (1, 0.8), (-1, 0.8)])
    quarter = np.array([(-0.3, -1), (0.3, -1), (0.3, -0.3)])  # of a cross
    return np.concatenate([quarter @ np.array([(c, s), (-s, c)]) for c, s in ((1, 0), (0, 1), (-1, 0), (0, -1))])


def drawn(rng: Any, parts: Any) -> bytes:
    """A PNG with the two parts, each (colour, shape), at random places, sizes and angles."""
    ground = (int(rng.integers(225, 256)),) * 3
    canvas = Image.new("RGB", (32 * FINE, 32 * FINE), ground)
    for half, (colour, shape) in enumerate(parts):
        angle, size = rng.uniform(-0.1, 0.1), rng.uniform(6, 7)
        centre = np.array([rng.uniform(11, 21), 8 + 16 * half + rng.uniform(-0.5, 0.5)])
        turn = np.array([(np.cos(angle), np.sin(angle)), (-np.sin(angle), np.cos(angle))])
        corners = (outline(shape) @ turn * size + centre) * FINE
        shade = np.clip(np.array(COLOURS[colour]) + rng.integers(-8, 9, 3), 0, 255)
        ImageDraw.Draw(canvas).polygon([tuple(corner) for corner in corners], fill=tuple(shade.tolist()))
    content = io.BytesIO()
    canvas.resize((32, 32), Image.Resampling.BOX).save(content, "PNG")
    return content.getvalue()


def write(folder: Path, count: int) -> None:
    """Write the pictures and the tokenizer of their captions."""
    folder.mkdir(parents=True, exist_ok=True)
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(folder / "tokenizer.json"))
    rng = np.random.default_rng(0)
    with tarfile.open(folder / "pictures.tar", "w") as tar:
        for number in range(count):
            parts = [(str(rng.choice(list(COLOURS))), str(rng.choice(SHAPES))) for _ in range(2)]
            names = ("top_colour", "top_shape", "bottom_colour", "bottom_shape")
            about = dict(zip(names, (word for part in parts for word in part), strict=True))
            about["text"] = "a {} {} above a {} {}".format(*about.values())
            for suffix, content in (("json", json.dumps(about).encode()), ("png", drawn(rng, parts))):
                member = tarfile.TarInfo(f"{number:06}.{suffix}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    print(f"{folder}: {count:,} pictures with captions, tokenizer.json of {len(WORDS)} words")


if __name__ == "__main__":
    write(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 6000)
