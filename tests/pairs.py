"""A part of a product of parameters in which every pair of values still occurs."""

from collections.abc import Hashable, Iterable
from itertools import combinations
from typing import Any

Case = tuple[Hashable, ...]


def covering(cases: Iterable[Case], values: int = 2, also: Iterable[Case] = ()) -> set[Any]:
    """Some of the cases, with every combination of so many values of different parameters that occurs in all of them.

    `values` of 1: every value occurs; of 2: every pair. `also` are among the chosen. Greedy: each time the case with
    the most new combinations, the first one of equals.
    """

    def combined(case: Case) -> set[Any]:
        return set(combinations(enumerate(case), values))

    rest, chosen = list(cases), set(also)
    missing = {one for case in rest for one in combined(case)} - {one for case in chosen for one in combined(case)}
    while missing:
        best = max(rest, key=lambda case: len(combined(case) & missing))
        chosen.add(best)
        missing -= combined(best)
    return chosen
