"""What machines say of themselves, and what is read from it."""

import pytest

from dtrain.launch.fanout import Answer, Machine
from dtrain.launch.preflight import in_the_way, skewed

FINE = {"problems": [], "resolves": True, "host": "w", "free": 1e12, "time": 100.0, "versions": {"jax": "0.10.2"}}


def looked(*changes: dict[str, object]) -> list[Answer]:
    return [Answer(Machine(rank, f"host{rank}"), FINE | change) for rank, change in enumerate(changes)]


def met(*seen: list[int]) -> list[Answer]:
    return [Answer(Machine(rank, f"host{rank}"), {"seen": one}) for rank, one in enumerate(seen)]


def test_nothing_is_in_the_way_of_machines_that_agree() -> None:
    assert not in_the_way(looked({}, {}), met([0, 1], [0, 1]), "runs")
    assert not skewed(looked({}, {}))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"resolves": False}, "host1: it does not know its own name, w: add it to /etc/hosts"),
        ({"versions": {"jax": "0.12.0"}}, "host1 has jax 0.12.0, host0 has 0.10.2"),
        ({"free": 5e8}, "host1: 0.5 GB free in runs"),
        ({"problems": ["port 8476 is taken"]}, "host1: port 8476 is taken"),
    ],
)
def test_what_is_wrong_with_one_is_told_with_its_name(change: dict[str, object], told: str) -> None:
    assert in_the_way(looked({}, change), met([0, 1], [0, 1]), "runs") == [told]


def test_folders_that_are_not_one_are_found() -> None:
    (told,) = in_the_way(looked({}, {}), met([0, 1], [1]), "runs")
    assert told == "host1 does not see the runs of the others: it must be one shared folder"


def test_a_clock_that_is_off_is_told() -> None:
    (told,) = skewed(looked({}, {"time": 160.0}, {}))
    assert told == "the clock of host1 is +60 s off; its log will read oddly"
