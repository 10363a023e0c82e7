"""Images per second from JPEG and PNG files to batches: dtrain, Pillow in a loop, grain and PyTorch's DataLoader.

Files of 500 x 375 pixels with the detail of photographs, resized to 224 x 224, batches of 64, in the page cache:

- `PIL` opens, converts and resizes in one thread: its rate times the cores is what this machine can do;
- `dtrain` decodes in threads of the main process, `dtrain, N workers` in a process for each core (`data.load.workers`);
  `draft` decodes to 64 x 64 with `data.draft`, beside `exact`, the same without;
- `grain` and `torch` decode with the same lines in as many worker processes.

    python benchmarks/data_images.py        target: 0.95 of PIL times the cores, by threads or workers
"""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from dtrain.data.batches import TrainBatches, stream
from dtrain.data.images import Images
from dtrain.data.order import Order
from dtrain.data.source import Load

FILES, BATCH, ROUNDS, SIZE = 512, 64, 3, (224, 224)
WARM = 2
"""Batches before the time starts; four more for each worker, whose processes start one after another."""
CORES = os.cpu_count() or 1


def write(folder: Path, suffix: str) -> None:
    """Noise at several scales: about as many bytes for each pixel as a photograph."""
    draw = np.random.default_rng(0)
    for label in ("a", "b"):
        (folder / label).mkdir(parents=True)
    for number in range(FILES):
        layers = []
        for scale in (2, 8, 32):
            noise = Image.fromarray(draw.integers(0, 256, (375 // scale, 500 // scale, 3), np.uint8))
            layers.append(np.asarray(noise.resize((500, 375)), np.float32))
        image = Image.fromarray((0.1 * layers[0] + 0.3 * layers[1] + 0.6 * layers[2]).astype(np.uint8))
        image.save(folder / "ab"[number % 2] / f"{number}.{suffix}")


def decoded(path: Path, size: tuple[int, int] = SIZE) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB").resize(size))


class Files:
    """One image at a time, as grain and PyTorch read them."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": decoded(self.paths[int(index)]), "label": np.int32(index % 2)}


def pillow(paths: list[Path]) -> Iterator[Any]:
    while True:
        for start in range(0, FILES, BATCH):
            yield np.stack([decoded(path) for path in paths[start : start + BATCH]])


def dtrain(folder: Path, workers: int, size: tuple[int, int] = SIZE, draft: bool = False) -> Iterator[Any]:
    data = Images(root=str(folder), size=size, test=0.0, draft=draft, cache=str(folder.parent / "cache"))
    source = data.open("train")
    host = TrainBatches(source, Order(len(source), 0), BATCH, np.arange(BATCH), 0, 10**6, False)
    return stream(host, Load(workers=workers, prefetch=None if workers else 0))


def grain(paths: list[Path]) -> Iterator[Any]:
    import grain as g

    dataset = g.MapDataset.source(Files(paths)).seed(0).shuffle().repeat().batch(BATCH).to_iter_dataset()  # pyright: ignore
    return iter(dataset.mp_prefetch(g.MultiprocessingOptions(num_workers=CORES)))


def torch(paths: list[Path]) -> Iterator[Any]:
    from torch.utils.data import DataLoader

    loader = DataLoader(
        Files(paths),  # type: ignore[arg-type]
        BATCH,
        shuffle=True,
        num_workers=CORES,
        persistent_workers=True,
    )
    while True:
        yield from loader


def rate(batches: Iterator[Any], seconds: float, warm: int) -> float:
    """Images per second of wall time, from one batch to another."""
    for _ in range(warm):
        next(batches)
    count, start = 0, time.perf_counter()
    while time.perf_counter() < start + seconds:
        next(batches)
        count += BATCH
    return count / (time.perf_counter() - start)


def main() -> int:
    from absl import flags

    flags.FLAGS.mark_as_parsed()  # for grain's worker processes
    reached = []
    with tempfile.TemporaryDirectory() as name:
        for suffix in ("jpg", "png"):
            folder = Path(name) / suffix
            write(folder, suffix)
            paths = sorted(folder.rglob(f"*.{suffix}"))
            readers = {
                "PIL": lambda paths=paths: pillow(paths),
                "dtrain": lambda folder=folder: dtrain(folder, 0),
                f"dtrain, {CORES} workers": lambda folder=folder: dtrain(folder, CORES),
                f"grain, {CORES} workers": lambda paths=paths: grain(paths),
                f"torch, {CORES} workers": lambda paths=paths: torch(paths),
                "64 x 64, exact": lambda folder=folder: dtrain(folder, 0, (64, 64)),
                "64 x 64, draft": lambda folder=folder: dtrain(folder, 0, (64, 64), draft=True),
            }
            found: dict[str, list[float]] = {reader: [] for reader in readers}
            for _ in range(ROUNDS):
                for reader, opened in readers.items():
                    try:
                        batches = opened()
                        workers = CORES if "workers" in reader else 0
                        found[reader].append(rate(batches, 4.0, WARM + 4 * workers))
                    except ImportError:
                        continue
                    close = getattr(batches, "close", None)
                    if close:
                        close()
            medians = {reader: statistics.median(rates) for reader, rates in found.items() if rates}
            most = CORES * medians["PIL"]
            for reader, value in medians.items():
                print(f"{suffix} {reader:<18} {value:7,.0f} images/s   {value / most:.2f} of PIL x {CORES} cores")
            reached.append(max(medians["dtrain"], medians[f"dtrain, {CORES} workers"]) >= 0.95 * most)
    return int(not all(reached))


if __name__ == "__main__":
    sys.exit(main())
