"""A part of a product that still has every pair."""

from itertools import combinations, product

import pytest

from tests.pairs import covering


@pytest.mark.parametrize("values", [1, 2, 3])
def test_every_combination_of_values_occurs_in_few_cases(values: int) -> None:
    cases = list(product("abcd", "xyz", (1, 2)))
    chosen = covering(cases, values, also=[("d", "z", 2)])
    assert chosen <= set(cases)
    assert ("d", "z", 2) in chosen
    assert len(chosen) <= {1: 6, 2: 14, 3: 24}[values]
    for places in combinations(range(3), values):
        assert {tuple(case[at] for at in places) for case in chosen} == {
            tuple(case[at] for at in places) for case in cases
        }
