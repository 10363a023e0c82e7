"""Tokens per second of CPU time from a file of tokens to NumPy batches of `token` and `target`, in one process.

A file of 100 million uint16 tokens in the page cache, rows at random positions, int32 in the batches:

- `dtrain` is what `dtrain run` reads: order and rows of a `tokens` source; `documents` adds its document numbers and
  positions, with a separator every 500 tokens on average;
- `views` is the loop of small training programs: slices of a memory map, stacked and converted;
- `grain` reads, shuffles and batches element by element; `torch` is a DataLoader without workers, if it is installed.

    python benchmarks/data_tokens.py        target: 400 million a second at 512 x 1024, ahead of all others
"""

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dtrain.data.batches import TrainBatches
from dtrain.data.order import Order
from dtrain.data.tokens import Tokens

TOKENS, ROUNDS, SECONDS = 100_000_000, 7, 0.5
SHAPES = ((12, 64), (64, 2048), (512, 1024))
Batches = Callable[[int, int], Iterator[Any]]


def dtrain(path: Path, separator: int | None = None) -> Batches:
    data = Tokens(files=(str(path),), length=1, separator=separator, cache=str(path.parent / "cache"))

    def batches(rows: int, length: int) -> Iterator[Any]:
        from dataclasses import replace

        source = replace(data, length=length).open("train")
        order = Order(len(source), 0, source.random_starts)
        host = TrainBatches(source, order, rows, local=np.arange(rows), start=0, steps=sys.maxsize >> 32, keyed=False)
        yield from (host[index] for index in range(len(host)))

    return batches


def views(path: Path) -> Batches:
    tokens, draw = np.memmap(path, np.uint16, "r"), np.random.default_rng(0)

    def batches(rows: int, length: int) -> Iterator[Any]:
        while True:
            starts = draw.integers(0, len(tokens) - length - 1, rows)
            token = np.stack([tokens[start : start + length] for start in starts]).astype(np.int32)
            target = np.stack([tokens[start + 1 : start + 1 + length] for start in starts]).astype(np.int32)
            yield {"token": token, "target": target}

    return batches


class Rows:
    """Consecutive rows, one at a time, as grain and PyTorch read them."""

    def __init__(self, path: Path, length: int) -> None:
        self.tokens, self.length = np.memmap(path, np.uint16, "r"), length

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        start = int(index) * self.length
        row = self.tokens[start : start + self.length + 1].astype(np.int32)
        return {"token": row[:-1], "target": row[1:]}


def grain(path: Path) -> Batches:
    import grain as g

    def batches(rows: int, length: int) -> Iterator[Any]:
        dataset = g.MapDataset.source(Rows(path, length)).seed(0).shuffle().repeat().batch(rows)
        yield from dataset.to_iter_dataset(g.ReadOptions(num_threads=0, prefetch_buffer_size=0))

    return batches


def torch(path: Path) -> Batches:
    from torch.utils.data import DataLoader

    def batches(rows: int, length: int) -> Iterator[Any]:
        while True:
            yield from DataLoader(Rows(path, length), rows, shuffle=True, drop_last=True)  # type: ignore[arg-type]

    return batches


def rate(batches: Iterator[Any], size: int) -> float:
    """Tokens per CPU second; the last three batches are kept, as by a loop that copies them to devices."""
    kept: list[Any] = []
    count, cpu, end = 0, time.process_time(), time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        kept = [*kept[-2:], next(batches)]
        count += 1
    return count * size / (time.process_time() - cpu)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.bin"
        drawn = np.random.default_rng(0).integers(1, 50_000, TOKENS).astype(np.uint16)
        drawn[np.random.default_rng(1).integers(0, TOKENS, TOKENS // 500)] = 0
        path.write_bytes(drawn.tobytes())
        readers = {"dtrain": dtrain(path), "documents": dtrain(path, 0), "views": views(path), "grain": grain(path)}
        try:
            import torch as _

            readers["torch"] = torch(path)
        except ImportError:
            print("torch is not installed: left out")
        for rows, length in SHAPES:
            opened = {name: reader(rows, length) for name, reader in readers.items()}
            for batches in opened.values():
                rate(batches, 1)
            found = {name: [] for name in opened}
            for _ in range(ROUNDS):
                for name, batches in opened.items():
                    found[name].append(rate(batches, rows * length) / 1e6)
            medians = {name: statistics.median(rates) for name, rates in found.items()}
            shown = "  ".join(f"{name} {value:,.0f}" for name, value in medians.items())
            print(f"batches of {rows} x {length}, million tokens per CPU second: {shown}")
    best = max(value for name, value in medians.items() if name not in ("dtrain", "documents"))
    return int(medians["dtrain"] < max(400, best))


if __name__ == "__main__":
    sys.exit(main())
