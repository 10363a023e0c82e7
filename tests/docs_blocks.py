"""The code blocks of a page, and how close what a command prints is to what the page shows."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)

LANGUAGES = {
    "bash": "run by a test, in an empty folder",
    "console": "`$ ` and a command, and what it prints: run after the blocks of bash before it, and compared",
    "python": "run by a test",
    "yaml": "a recipe or sections of one, which a test checks",
    "sh": "commands for machines, clouds or files that a reader has: a test checks their verbs and options",
}
"""What a block of each language is. There is no other: what a page shows is what a test has seen."""

TIMING = ("time ", "speed ", "eta ")
"""What begins so differs from machine to machine."""
UNITS = ("ms", "s", "steps/s", "examples/s", "ex/s", "TFLOP/s")
NUMBERS = re.compile(r"\d[\d.,]*")
NUMBER = re.compile(r"^([(\[]?)(-?[\d,]*\d(?:\.\d+)?(?:e[-+]?\d+)?)([%k]?)([),;:\]]*)$")


def blocks(path: Path, *languages: str) -> list[tuple[str, str]]:
    """(language, text) of the blocks of these languages, of all without one, in their order."""
    found = [(language, text) for language, text in BLOCK.findall(path.read_text())]
    return [(language, text) for language, text in found if not languages or language in languages]


def session(path: Path) -> list[tuple[str, list[str]]]:
    """(command, lines that it shows) of each `console` command; of a block of `bash` the whole, which shows nothing. A
    block of YAML whose first line names a file is written to it; a block of Python is a program."""
    found: list[tuple[str, list[str]]] = []
    for language, text in blocks(path, "bash", "console", "yaml", "python"):
        if language == "bash":
            found.append((text, []))
        if language == "yaml" and (named := re.match(r"# (\S+\.yaml)\n", text)):
            found.append((f"cat > {named[1]} <<'YAML'\n{text}YAML", []))
        if language == "python":
            found.append((f"python - <<'PY'\n{text}PY", []))
        if language != "console":
            continue
        for line in text.replace("\\\n", " ").splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            else:
                found[-1][1].append(line)
    return found


def has_session(path: Path) -> bool:
    """Whether the page has commands to run; one of Python alone is a program."""
    return bool(blocks(path, "bash", "console"))


def unlike(shown: list[str], printed: str, timed: bool = False) -> list[str]:
    """The first shown line that was not printed, or not after the one before it. `...` stands for any lines. Numbers
    may differ by 5%, times and speeds at will, and so does every number of what is `timed`, a benchmark."""
    if timed:
        shown, printed = ([NUMBERS.sub("0", line) for line in shown], NUMBERS.sub("0", printed))
    lines, at = printed.splitlines(), 0
    for line in (line for line in shown if line.strip() not in ("", "...")):
        found = next((i for i in range(at, len(lines)) if _alike(line, lines[i])), None)
        if found is None:
            return [line]
        at = found + 1
    return []


def _alike(shown: str, printed: str) -> bool:
    if shown.strip().startswith(TIMING):
        return shown.split(maxsplit=1)[0] == (printed.split() or [""])[0]
    one, other = shown.split(), printed.split()
    return len(one) == len(other) and all(map(_same, one, other, ["", *one], [*one[1:], ""]))


def _same(shown: str, printed: str, before: str, after: str) -> bool:
    if shown == printed:
        return True
    one, other = NUMBER.match(shown), NUMBER.match(printed)
    if not one or not other or (one[1], one[3], one[4]) != (other[1], other[3], other[4]):
        return bool(re.fullmatch(r"\d+:\d\d|[0-9a-f]{8}-[0-9a-f]{8}", shown)) and len(shown) == len(printed)
    if before == "(data" or after.rstrip("),;:") in UNITS:
        return True
    a, b = (float(match[2].replace(",", "")) for match in (one, other))
    return abs(a - b) <= max(0.05 * abs(a), 1e-5)
