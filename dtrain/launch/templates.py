"""What is submitted, from the files of `launch/`, which can be read by hand and travel in the wheel."""

import re
from collections.abc import Mapping
from pathlib import Path

PACKAGED = Path(__file__).parent / "templates"
CHECKOUT = Path(__file__).parents[2] / "launch"


def filled(name: str, values: Mapping[str, object]) -> str:
    """The template with each @WORD@ replaced; what is left or not used is our own mistake."""
    text = ((PACKAGED if PACKAGED.is_dir() else CHECKOUT) / name).read_text()
    words = set(re.findall(r"@([A-Z_]+)@", text))
    assert words == set(values), f"{name} has {sorted(words)}, given are {sorted(values)}"
    return re.sub(r"@([A-Z_]+)@", lambda found: str(values[found.group(1)]), text)
