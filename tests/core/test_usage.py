"""The usage of a launch, as stored in the run folder."""

from pathlib import Path

import pytest

from dtrain.core.errors import EnvironmentFault
from dtrain.core.run_dir import Folder
from dtrain.core.usage import Usage, read_usage, write_usage


def wasted(committed: list[int]) -> list[int]:
    """For each start, the number of consecutive earlier starts that saved nothing; from the newest step at each."""
    usage, counts = Usage(), list[int]()
    for step in committed:
        usage = usage.next_start(step)
        counts.append(usage.wasted)
    return counts


@pytest.mark.parametrize(
    ("committed", "counts"),
    [
        ([-1, -1, -1, -1], [0, 1, 2, 3]),  # nothing was ever saved
        ([40, 40, 40], [0, 1, 2]),  # saved by an earlier launch
        ([-1, -1, 10, 10, 20, 20], [0, 1, 0, 1, 0, 1]),
        ([100, 90, 95, 95], [0, 1, 0, 1]),  # 100 was damaged and renamed: 95 is new
    ],
)
def test_starts_that_save_nothing_new_are_counted_since_the_newest_checkpoint(
    committed: list[int], counts: list[int]
) -> None:
    assert wasted(committed) == counts


def test_a_launch_is_counted_separately_from_other_launches_and_from_unlaunched_runs(tmp_path: Path) -> None:
    place, typed, first, second = Folder(tmp_path), Usage(2, 1, -1, 5.0), Usage(1, 0, 3, 0.5), Usage(4, 2, 8, 70.0)
    write_usage(place, "", typed)
    write_usage(place, "a1", first)
    assert (read_usage(place, ""), read_usage(place, "a1")) == (typed, first)
    write_usage(place, "b2", second)
    assert [read_usage(place, launch) for launch in ("", "a1", "b2")] == [typed, Usage(), second]


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{", '{"a": 1}', '{"a": {"starts": 1}}',
     '{"a": {"starts": "x", "wasted": 0, "newest": -1, "seconds": 0.0}}',
     '{"a": {"starts": 1, "wasted": 0.5, "newest": -1, "seconds": 0.0}}',
     '{"a": {"starts": 1, "wasted": 0, "newest": -1, "seconds": 1e999}}'],
)  # fmt: skip
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    place = Folder(tmp_path)
    place.usage.write_text(text)
    with pytest.raises(EnvironmentFault, match=r"usage\.json") as refused:
        read_usage(place, "a")
    assert "move" in refused.value.hint
