"""The source lines of the operations of a compiled program, read from its text."""

import re
from typing import Any

from dtrain.core.user_code import PACKAGE


def lines_of(text: str) -> dict[int, str]:
    """The source line, as file:line, of each stack frame, from the tables at the head of the text.

    Of nested frames, the innermost in a model or in the user's own code is given: a line in code that all models share
    identifies nothing.
    """

    def rows(pattern: str) -> list[Any]:
        return re.findall(pattern, text[: text.find("\n%")], re.MULTILINE)

    files = dict(rows(r'^(\d+) "([^"]*/[^"]*)"$'))
    at = {n: (files.get(file, "?"), line) for n, file, line in rows(r"^(\d+) \{file_name_id=(\d+) .*? line=(\d+)")}
    frames = {n: (place, parent) for n, place, parent in rows(r"^(\d+) \{file_location_id=(\d+) parent_frame_id=(\d+)")}
    lines = {}
    for number in frames:
        chain, frame = [], number
        while frame in frames:
            place, parent = frames[frame]
            chain.append(at.get(place, ("?", "?")))
            frame = str(int(parent) - 1)  # parent_frame_id is the frame's number plus 1
        path, line = next((spot for spot in chain if _of_a_model(spot[0])), chain[0])
        lines[int(number)] = f"{path.rpartition('/')[2]}:{line}"
    return lines


def _of_a_model(path: str) -> bool:
    """Whether a file defines one model: one of dtrain's, or one outside of dtrain and of installed packages."""
    if path.startswith(f"{PACKAGE}/"):
        return bool(re.search(r"/models/(?!nn/|custom\.py|adapter\.py)", path))
    return path.startswith("/") and path.endswith(".py") and not re.search(r"/site-packages/|/lib/python3", path)
