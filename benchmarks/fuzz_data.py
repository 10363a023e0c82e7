"""Damages data files at random and reads them: files from a faulty disk or from an untrusted archive.

    python benchmarks/fuzz_data.py [--count 400] [--seed 0]

Reading a file must give examples, DataError or EnvironmentFault within LIMIT seconds. A damaged cache must give the
same examples as before. Exits with 1 and names the cases that failed; the same seed gives the same cases.
"""

import argparse
import gzip
import io
import json
import os
import random
import signal
import struct
import sys
import tempfile
import time
import traceback
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from dtrain.core.errors import DataError, EnvironmentFault
from dtrain.data import known
from dtrain.data.idx import FILES, IDX
from dtrain.data.images import Images
from dtrain.data.source import Data, Source
from dtrain.data.text import Text
from dtrain.data.tokens import Tokens

LIMIT = 2.0
TEXT = b"to be, or not to be, that is the question: whether 'tis nobler in the mind to suffer\n" * 40
Files = dict[str, bytes]


def images(draw: random.Random) -> tuple[Data, Files]:
    formats = {"png": "PNG", "jpg": "JPEG", "bmp": "BMP", "gif": "GIF", "webp": "WEBP", "ppm": "PPM"}
    suffix = draw.choice(list(formats))
    return Images(root="set", size=(8, 8), test=0.0, cache="cache"), {
        f"set/a/x.{suffix}": _picture(formats[suffix], draw)
    }


def archive(draw: random.Random) -> tuple[Data, Files]:
    method = draw.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", method) as file:
        for name in ("a/x.png", "b/y.png"):
            file.writestr(zipfile.ZipInfo(name), _picture("PNG", draw), method)
    return Images(root="set.zip", size=(8, 8), test=0.0, cache="cache"), {"set.zip": made.getvalue()}


def _picture(kind: str, draw: random.Random) -> bytes:
    made = io.BytesIO()
    pixels = np.frombuffer(draw.randbytes(24 * 20 * 3), np.uint8).reshape(24, 20, 3)
    Image.fromarray(pixels).save(made, kind)
    return made.getvalue()


def idx(draw: random.Random) -> tuple[Data, Files]:
    packed, files = draw.random() < 0.5, {}
    for name, shape in zip(FILES["train"], ((12, 5, 4), (12,)), strict=True):
        head = bytes([0, 0, 8, len(shape)]) + struct.pack(f">{len(shape)}I", *shape)
        content = head + bytes(draw.randrange(10) for _ in range(int(np.prod(shape))))
        files[f"mnist/{name}{'.gz' * packed}"] = gzip.compress(content, mtime=0) if packed else content
    return IDX(root="mnist", download=False), files


def tokens(draw: random.Random) -> tuple[Data, Files]:
    dtype = draw.choice(["uint16", "int64", ">u4"])
    array, made = np.arange(2000).astype(dtype), io.BytesIO()
    np.save(made, array)
    head = np.array([20240520, 1, 2000, *[0] * 253], np.int32).tobytes()
    raw = array.astype(np.uint16).tobytes()
    name, content = draw.choice([("t.npy", made.getvalue()), ("t.bin", head + raw), ("t.bin", raw)])
    return Tokens(files=(name,), length=16, separator=draw.choice([None, 0]), cache="cache"), {name: content}


def tokenizer(draw: random.Random) -> tuple[Data, Files]:
    words = {word: number for number, word in enumerate(["[UNK]", *sorted(set(TEXT.decode().split()))])}
    letters = {chr(byte): number for number, byte in enumerate(sorted(set(TEXT)))}
    model = draw.choice(
        [
            {"type": "WordLevel", "vocab": words, "unk_token": "[UNK]"},
            {"type": "BPE", "vocab": letters | {"to": 60}, "merges": ["t o"], "unk_token": None},
            {"type": "Unigram", "vocab": [[letter, -1.0] for letter in letters], "unk_id": 0},
            {
                "type": "WordPiece",
                "vocab": words,
                "unk_token": "[UNK]",
                "continuing_subword_prefix": "##",
                "max_input_chars_per_word": 100,
            },
        ]
    )
    content = json.dumps(
        {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}, "model": model}
    )
    return Text(files=("a.txt",), length=8, tokenizer="t.json", cache="cache"), {
        "a.txt": TEXT,
        "t.json": content.encode(),
    }


def text(draw: random.Random) -> tuple[Data, Files]:
    return Text(files=("a.txt",), length=8, pack=draw.random() < 0.5, cache="cache"), {"a.txt": TEXT}


KINDS: list[Callable[[random.Random], tuple[Data, Files]]] = [images, archive, idx, tokens, tokenizer, text]


def damaged(content: bytes, draw: random.Random) -> bytes:
    """One to three of: a flipped bit; bytes removed, zeroed, duplicated, randomised or set to 255; truncation."""
    found = bytearray(content)
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(min(len(found), draw.choice([32, 256, 10**9])) or 1)
        size = draw.choice([1, 2, 4, 8, 64, 1000])
        match draw.randrange(7):
            case 0:
                found[at : at + 1] = bytes(byte ^ (1 << draw.randrange(8)) for byte in found[at : at + 1])
            case 1:
                del found[at : at + size]
            case 2:
                found[at : at + size] = bytes(len(found[at : at + size]))
            case 3:
                found[at:at] = found[at : at + size]
            case 4:
                found[at : at + size] = draw.randbytes(size)
            case 5:
                found[at : at + size] = b"\xff" * len(found[at : at + size])
            case _:
                del found[at:]
    return bytes(found)


def rows(data: Data) -> dict[str, bytes]:
    """The examples of the training split, at most 64."""
    source: Source = data.open("train")
    return {name: value.tobytes() for name, value in source.rows(np.arange(min(len(source), 64))).items()}


def attempt(draw: random.Random) -> str:
    """The outcome of reading one damaged file, in an empty folder."""
    data, files = draw.choice(KINDS)(draw)
    for name, content in files.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(content)
    before = rows(data)
    caches = [path for path in sorted(Path("cache").rglob("*")) if path.is_file()] if Path("cache").exists() else []
    of_cache = bool(caches) and draw.random() < 0.4
    path = (
        draw.choice(caches) if of_cache else Path(draw.choice([name for name in files if name != "a.txt"] or ["a.txt"]))
    )
    path.write_bytes(damaged(path.read_bytes(), draw))
    try:
        after = rows(data)
    except (DataError, EnvironmentFault) as error:
        if of_cache:
            raise AssertionError(f"a damaged {path} is refused: {error}") from error
        return "refused"
    if of_cache and before != after:
        raise AssertionError(f"a damaged {path} gives other examples")
    return "the same examples" if before == after else "other examples"


def timed_out(*_: object) -> None:
    raise TimeoutError(f"over {LIMIT} s")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--count", type=int, default=400)
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()
    warnings.simplefilter("ignore")  # from Pillow, about damaged images
    known.FRESH_NS = 0  # use records of digests even though all files are new
    signal.signal(signal.SIGALRM, timed_out)
    results, failed, slowest = Counter[str](), 0, 0.0
    for number in range(given.count):
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            began = time.monotonic()
            signal.setitimer(signal.ITIMER_REAL, LIMIT)
            try:
                results[attempt(random.Random(f"{given.seed}:{number}"))] += 1
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                failed += 1
                print(f"case {number}: {type(error).__name__}: {error}", file=sys.stderr)
                traceback.print_exc()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                slowest = max(slowest, time.monotonic() - began)
                os.chdir("/")
    shown = ", ".join(
        f"{count} gave {name}" if name != "refused" else f"{count} refused" for name, count in results.items()
    )
    print(f"{given.count} damaged files, seed {given.seed}: {shown}; {failed} failed; slowest {slowest:.2f} s")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
