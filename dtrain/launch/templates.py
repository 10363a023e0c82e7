"""What is submitted, from the files of `launch/`, which can be read by hand and travel in the wheel."""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

PACKAGED = Path(__file__).parent / "templates"
CHECKOUT = Path(__file__).parents[2] / "launch"


def filled(name: str, values: Mapping[str, object]) -> str:
    """The template with each @WORD@ replaced; what is left or not used is our own mistake."""
    text = _read(name)
    words = set(re.findall(r"@([A-Z_]+)@", text))
    assert words == set(values), f"{name} has {sorted(words)}, given are {sorted(values)}"
    return re.sub(r"@([A-Z_]+)@", lambda found: str(values[found.group(1)]), text)


@cache
def _read(name: str) -> str:
    folder = PACKAGED if PACKAGED.is_dir() else CHECKOUT
    return (folder / name).read_text()
