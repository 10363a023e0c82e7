"""What is wrong with a recipe, each problem with its place, and how a value is shown in a message."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from dtrain.recipe.yaml import Mark, Node, shown

MOST = 50
"""Problems that are shown; the others are counted."""
LONG = 64
"""Characters of a name beyond which no nearest spelling is searched for, which takes time of its square."""


@dataclass
class Problems:
    """What is wrong, each with its place."""

    first: list[str] = field(default_factory=list)
    count: int = 0

    def add(self, mark: Mark, path: str, message: str, hint: str | Callable[[], str] = "") -> None:
        """One more problem. A hint that takes time is a function, called only if the problem is shown."""
        self.count += 1
        if self.count <= MOST:
            hint = hint if isinstance(hint, str) else hint()
            where = f"{shown(path, 120)}: " if path else ""
            self.first.append(f"{mark}  {where}{shown(message, 800)}" + (f"; {hint}" if hint else ""))

    @property
    def lines(self) -> list[str]:
        """A line for each of the first problems, and how many more there are."""
        more = self.count - len(self.first)
        return self.first + ([f"and {more:,} more"] if more else [])


def listed(names: Iterable[str]) -> str:
    """Names in a message."""
    return ", ".join(names)


def described(node: Node) -> str:
    """A value as a message says it was found."""
    found = node.value
    if isinstance(found, dict):
        return f"a mapping with {listed([shown(key) for key in found][:4]) or 'no key'}"
    if isinstance(found, tuple):
        return f"a list of {len(found)}"
    if found is None:
        return "nothing"
    return str(found).lower() if isinstance(found, bool) else shown(repr(found))


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name that is spelt most alike, or an empty text."""
    import difflib

    near = difflib.get_close_matches(name, known, 1) if len(name) <= LONG else []
    return near[0] if near else ""
