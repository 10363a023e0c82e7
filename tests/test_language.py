"""The project speaks plain technical English: words of a private vocabulary do not come back."""

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
IDENTIFIERS = re.compile(
    "told|said|foretold|foretell|seat|beat|crew|board|keeper|ground|pace|talk|mend|born|dealt|owed|spoiled"
)
PROSE = (
    "address of the world|asked of|born|crew|dealt|foretells?|foretold|go on|goes on|gone over|keeper|"
    "mend|mended|mends|nobody can be asked|owed|passed over|seat|signs? of life|spoiled|stands whole|told|unmended"
)
"""Words and phrases that a search engine would not find in the sense that they had here."""
KEYS = {
    "core/lease.py": {"born"},
    "checkpoint/manifest.py": {"owed"},
}
"""Keys of files on disk, whose format stays."""
PATTERN = re.compile(rf"\b(?:{PROSE})\b", re.IGNORECASE)
SOURCES = sorted((ROOT / "dtrain").rglob("*.py"))
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]
for folder in ("docs", "recipes", "launch"):
    PAGES += sorted(
        path for path in (ROOT / folder).rglob("*") if path.suffix not in (".png", ".svg", ".pyc") and path.is_file()
    )


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def names(path: Path) -> Iterator[tuple[int, str]]:
    """Each identifier, in parts: `_talk_seconds` has `talk` and `seconds`."""
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.NAME:
            yield from ((token.start[0], part) for part in token.string.lower().split("_"))


def test_identifiers_are_the_words_of_the_field() -> None:
    found = [
        f"{relative(path)}:{line}: {word}"
        for path in SOURCES
        for line, word in names(path)
        if IDENTIFIERS.fullmatch(word)
    ]
    assert not found


def test_prose_and_messages_are_plain() -> None:
    found = [
        f"{relative(path)}:{number}: {word}"
        for path in [*SOURCES, *PAGES]
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for word in PATTERN.findall(line)
        if word not in KEYS.get(relative(path).removeprefix("dtrain/"), set())
    ]
    assert not found
