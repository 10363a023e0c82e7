import multiprocessing
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtrain.core.errors import EnvironmentFault
from dtrain.data.arrays import Arrays
from dtrain.data.batches import EvalBatches, TrainBatches, stream
from dtrain.data.digits import Digits
from dtrain.data.order import SMALL, Order, permuted
from dtrain.data.source import Load
from dtrain.data.synthetic import Synthetic

SOURCE = Synthetic(image=(4, 4, 1), examples=50).open("train")


def batches(local: range, start: int = 0, steps: int = 20, keyed: bool = True) -> TrainBatches:
    return TrainBatches(SOURCE, Order(50, seed=3), 16, np.array(local), start, steps, keyed)


@pytest.mark.parametrize("processes", [1, 2, 4, 8])
def test_the_global_batch_is_the_same_for_every_process_count(processes: int) -> None:
    share = 16 // processes
    for step in (0, 3, 7):  # 3 reaches over the end of an epoch
        parts = [batches(range(p * share, (p + 1) * share))[step] for p in range(processes)]
        whole = batches(range(16))[step]
        for name in whole:
            assert np.array_equal(np.concatenate([part[name] for part in parts]), whole[name])


def test_every_example_is_drawn_once_an_epoch() -> None:
    order = Order(50, seed=3)
    drawn = order(np.arange(150)).reshape(3, 50)
    assert all(sorted(epoch) == list(range(50)) for epoch in drawn)
    assert not np.array_equal(drawn[0], drawn[1])
    assert np.array_equal(Order(50, seed=3)(np.arange(100, 150)), drawn[2])
    assert not np.array_equal(Order(50, seed=4)(np.arange(50)), drawn[0])


def test_batch_k_does_not_depend_on_where_the_run_began() -> None:
    for a, b in zip(list(batches(range(16)))[5:], batches(range(16), start=5), strict=True):
        assert all(np.array_equal(a[name], b[name]) for name in a)


@pytest.mark.slow
@pytest.mark.parametrize("load", [Load(prefetch=0), Load(prefetch=4), Load(prefetch=2, workers=2)], ids=str)
def test_reading_ahead_changes_nothing(load: Load) -> None:
    for a, b in zip(stream(batches(range(16), steps=6), load), batches(range(16), steps=6), strict=True):
        assert all(np.array_equal(a[name], b[name]) for name in b)


def test_examples_in_memory_are_sent_to_no_worker() -> None:
    source = Arrays({"image": np.zeros((50, 4, 4, 1), np.uint8)}, {}, "")
    object.__setattr__(source, "unpicklable", lambda: None)
    host = TrainBatches(source, Order(50, seed=3), 16, np.arange(16), 0, 2, keyed=False)
    assert len(list(stream(host, Load(workers=2)))) == 2


@dataclass(frozen=True)
class Deadly:
    """A source that kills its worker at one row, `lives` times."""

    folder: Path
    lives: int
    row: int = 7

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        if self.row in indices and multiprocessing.parent_process():
            for life in range(self.lives):
                try:
                    (self.folder / str(life)).touch(exist_ok=False)
                except FileExistsError:
                    continue
                os.kill(os.getpid(), signal.SIGKILL)
        return SOURCE.rows(indices)

    def __getattr__(self, name: str) -> Any:
        return getattr(SOURCE, name)

    def __len__(self) -> int:
        return len(SOURCE)


@pytest.mark.slow
def test_a_killed_worker_is_replaced_and_no_batch_is_lost(tmp_path: Path) -> None:
    warned: list[str] = []
    deadly = TrainBatches(Deadly(tmp_path, 1), Order(50, seed=3), 16, np.arange(16), 0, 6, keyed=True)
    found = list(stream(deadly, Load(prefetch=2, workers=1), warned.append))
    for a, b in zip(found, batches(range(16), steps=6), strict=True):
        assert all(np.array_equal(a[name], b[name]) for name in b)
    assert warned == ["a data worker died (killed by SIGKILL); new workers continue from the same batch"]


@pytest.mark.nightly
def test_workers_that_die_repeatedly_at_one_batch_end_the_run(tmp_path: Path) -> None:
    deadly = TrainBatches(Deadly(tmp_path, 9), Order(50, seed=3), 16, np.arange(16), 0, 6, keyed=True)
    with pytest.raises(EnvironmentFault, match="4 times at the same batch: killed by SIGKILL"):
        list(stream(deadly, Load(prefetch=2, workers=1), lambda _: None))


def test_the_last_evaluation_batch_is_padded_with_weight_zero() -> None:
    found = list(stream(EvalBatches(SOURCE, 16, np.arange(16)), Load()))
    assert [batch["weight"].sum() for batch in found] == [16, 16, 16, 2]
    assert {batch["image"].shape for batch in found} == {(16, 4, 4, 1)}
    labels = np.concatenate([batch["label"][batch["weight"] > 0] for batch in found])
    assert np.array_equal(labels, SOURCE.rows(np.arange(50))["label"])


def test_rows_are_numbered_over_the_whole_run() -> None:
    assert batches(range(8, 16), start=4)[2]["row"].tolist() == list(range(6 * 16 + 8, 6 * 16 + 16))
    assert "row" not in batches(range(16), keyed=False)[0]


@pytest.mark.slow
def test_digits_are_scikit_learns() -> None:
    sklearn = pytest.importorskip("sklearn.datasets")
    theirs = sklearn.load_digits()
    ours = [Digits().open(split) for split in ("train", "test")]
    assert [len(source) for source in ours] == [1437, 360]
    rows = [source.rows(np.arange(len(source))) for source in ours]
    image = np.concatenate([row["image"] for row in rows]).reshape(-1, 64)
    label = np.concatenate([row["label"] for row in rows])
    both = lambda x, y: np.unique(np.column_stack([x, y]), axis=0, return_counts=True)  # noqa: E731
    for a, b in zip(both(image, label), both(theirs.data.astype(int), theirs.target), strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("count", [2, 3, 1000, 4097])
def test_a_permutation_without_a_table_is_one(count: int) -> None:
    found = permuted(np.arange(count), count, np.uint64(5))
    assert sorted(found) == list(range(count))
    assert count < 5 or not np.array_equal(found, permuted(np.arange(count), count, np.uint64(6)))


def test_large_epochs_are_drawn_without_a_table() -> None:
    order = Order(SMALL * 1000, seed=1)
    found = order(np.arange(SMALL * 1000 - 5, SMALL * 1000 + 5))
    assert len(set(found)) == 10
    assert not order._permutations


def test_random_starts_are_even_and_differ_by_seed() -> None:
    drawn = Order(0, seed=1, random_starts=10)(np.arange(100_000))
    assert np.bincount(drawn).min() > 9_500
    assert not np.array_equal(drawn, Order(0, seed=2, random_starts=10)(np.arange(100_000)))
