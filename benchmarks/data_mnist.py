"""CPU time of the main process per batch: 128 shuffled MNIST-shaped images.

Compares the stream that a run reads from with plain NumPy indexing into the same arrays. The variants alternate;
medians are printed.

    python benchmarks/data_mnist.py     target: at most 2.5x
"""

import statistics
from collections.abc import Callable

import numpy as np
from timing import alternate, median_ratio

from dtrain.data.arrays import Arrays, image_example
from dtrain.data.batches import TrainBatches, stream
from dtrain.data.order import Order
from dtrain.data.source import Load

SEGMENT, ROUNDS, EXAMPLES, BATCH = 500, 15, 60_000, 128


def main() -> None:
    draw = np.random.default_rng(0)
    features = {
        "image": draw.integers(0, 256, (EXAMPLES, 28, 28, 1), np.uint8),
        "label": draw.integers(0, 10, EXAMPLES).astype(np.int32),
    }
    source = Arrays(features, image_example((28, 28, 1), 10), "noise")
    order = np.random.default_rng([0, 0]).permutation(EXAMPLES)

    def bare() -> None:
        for number in range(SEGMENT):
            start = number * BATCH % (EXAMPLES - BATCH)
            rows = order[start : start + BATCH]
            _ = {"image": features["image"][rows], "label": features["label"][rows]}

    def dtrain(load: Load) -> Callable[[], None]:
        batches = stream(TrainBatches(source, Order(EXAMPLES, 0), BATCH, np.arange(BATCH), 0, 10**6, False), load)

        def segment() -> None:
            for _ in range(SEGMENT):
                next(batches)

        return segment

    found = alternate({"NumPy": bare, "dtrain": dtrain(Load()), "dtrain, thread": dtrain(Load(prefetch=2))}, ROUNDS)
    for name, times in found.items():
        cpu = statistics.median(cpu for _, cpu in times) / SEGMENT
        print(f"{name:<15} {cpu * 1e6:6.1f} us/batch CPU   {median_ratio(found, name, 'NumPy', 1):.2f}x NumPy")


if __name__ == "__main__":
    main()
