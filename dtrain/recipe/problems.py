"""Problems of a recipe, each with its position, and how messages show a value."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from dtrain.recipe.yaml import Mark, Node, shown

MOST = 50
"""Number of problems that are shown; further ones are counted."""
LONG = 64
"""Longest name for which the nearest spelling is searched: the time grows with the square of its length."""


@dataclass
class Problems:
    """Problems in the order in which they were found."""

    first: list[str] = field(default_factory=list)
    count: int = 0
    key: str = ""
    """The dotted path of the first problem that has one: what `dtrain help` explains."""

    def add(self, mark: Mark, path: str, message: str, hint: str | Callable[[], str] = "") -> None:
        """Add a problem. A hint that takes time to compute is a function, called only if the problem is shown."""
        self.count += 1
        self.key = self.key or path
        if self.count <= MOST:
            hint = hint if isinstance(hint, str) else hint()
            where = f"{shown(path, 120)}: " if path else ""
            text = "\n".join(shown(line, 800) for line in message.split("\n"))
            after = f"\n  {hint}" if "\n" in text and hint else f"; {hint}" if hint else ""
            self.first.append(f"{mark}  {where}{text}{after}")

    @property
    def lines(self) -> list[str]:
        """A line for each problem that is shown, and the number of further ones."""
        more = self.count - len(self.first)
        return self.first + ([f"and {more:,} more"] if more else [])


def listed(names: Iterable[str]) -> str:
    """Names as a list in a message."""
    return ", ".join(names)


def described(node: Node) -> str:
    """A value as messages show it."""
    value = node.value
    if isinstance(value, dict):
        return f"a mapping with {listed([shown(key) for key in value][:4]) or 'no key'}"
    if isinstance(value, tuple):
        return f"a list of {len(value)}"
    if value is None:
        return "nothing"
    return str(value).lower() if isinstance(value, bool) else shown(repr(value))


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name with the nearest spelling; empty if none is near."""
    import difflib

    near = difflib.get_close_matches(name, known, 1) if len(name) <= LONG else []
    return near[0] if near else ""
