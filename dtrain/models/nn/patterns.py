"""Choose parameters by patterns of their dotted paths: `*` stands for any characters, dots included."""

import re
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from dtrain.core.errors import RecipeError

SHOWN = 8
"""Paths that a message lists."""


def matched(patterns: Iterable[str], paths: Sequence[str], where: str) -> dict[str, str]:
    """The pattern that each path matches, by path; paths that match none are left out.

    RecipeError if a pattern matches no path, or if a path matches two patterns. `where` names the patterns' key.
    """
    chosen: dict[str, str] = {}
    for pattern in patterns:
        found = [path for path in paths if fnmatchcase(path, pattern)]
        if not found:
            near = get_close_matches(pattern, paths, 1, 0.3)
            some = ", ".join(paths[:SHOWN]) + (", ..." if len(paths) > SHOWN else "")
            hint = f"did you mean {near[0]}? `*` stands for any characters" if near else f"the parameters are {some}"
            raise RecipeError(f"{where}: {pattern!r} matches no parameter", hint)
        for path in found:
            if path in chosen:
                raise RecipeError(
                    f"{where}: parameter {path} matches {chosen[path]!r} and {pattern!r}", "make one of them narrower"
                )
            chosen[path] = pattern
    return chosen


def replaced(name: str, pattern: str, other: str, where: str) -> str:
    """`other` with each `*` replaced by what the same `*` of the pattern stands for in the name.

    RecipeError if they have different numbers of stars. `where` names the patterns' key.
    """
    if other.count("*") != pattern.count("*"):
        message = f"{where}: {pattern!r} has {pattern.count('*')} stars and {other!r} {other.count('*')}"
        raise RecipeError(message, "give both the same number")
    found = re.fullmatch("(.*)".join(map(re.escape, pattern.split("*"))), name)
    if found is None:
        raise RecipeError(f"{where}: {pattern!r} has more than stars", "use `*` alone for what differs")
    parts = iter(found.groups())
    return "".join(next(parts) if character == "*" else character for character in other)
