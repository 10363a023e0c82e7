"""The types of the values in run.json."""

import pytest

from dtrain.core.run_dir import wrong_value

DATA = {"kind": "digits", "train": 10, "test": 2, "epochs": 1.5}


def test_a_record_of_a_run_is_valid() -> None:
    assert not wrong_value({"state": "finished", "step": 3, "data": DATA})
    assert not wrong_value({"state": "running", "step": 0, "data": None})


@pytest.mark.parametrize("data", [{"test": {"": ""}}, {}, DATA | {"test": "2"}, DATA | {"epochs": None}, [], "x"])
def test_counts_of_data_that_are_no_numbers_are_named(data: object) -> None:
    assert wrong_value({"state": "finished", "step": 3, "data": data}).startswith("data is ")
