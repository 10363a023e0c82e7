"""The range of a predicted step, from published runs."""

import pytest

from dtrain.core.chips import CHIPS
from dtrain.plan.published import CHECKS, interval


@pytest.mark.parametrize("name", CHECKS)
def test_an_interval_is_of_that_chip(name: str) -> None:
    chip = next(chip for chip in CHIPS if chip.name == name)
    found = interval(chip, 2.0)
    assert found
    checks = CHECKS[name]
    assert (found.least, found.most, found.runs) == (2 * checks.least, 2 * checks.most, checks.runs)
    assert 0.5 < checks.least <= checks.most < 2
    assert checks.runs > 1


def test_a_chip_without_published_runs_has_none() -> None:
    assert interval(next(chip for chip in CHIPS if chip.name == "v4"), 2.0) is None
    assert interval(None, 2.0) is None
