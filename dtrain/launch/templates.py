"""Templates of submitted files: the folder `launch/` of the repository, which is packaged in the wheel."""

import re
from collections.abc import Mapping
from pathlib import Path

PACKAGED = Path(__file__).parent / "templates"
CHECKOUT = Path(__file__).parents[2] / "launch"


def fill_template(name: str, values: Mapping[str, object]) -> str:
    """The template with each @WORD@ replaced. The words in the template and the keys of `values` must be the same."""
    text = ((PACKAGED if PACKAGED.is_dir() else CHECKOUT) / name).read_text()
    words = set(re.findall(r"@([A-Z_]+)@", text))
    assert words == set(values), f"{name} has the words {sorted(words)}, the values are for {sorted(values)}"
    return re.sub(r"@([A-Z_]+)@", lambda match: str(values[match.group(1)]), text)
