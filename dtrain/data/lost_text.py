"""Text that a tokenizer does not keep: characters that become its unknown token, or nothing at all."""

import unicodedata
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import suppress
from itertools import islice

from dtrain.core.errors import DataError
from dtrain.data.files import resolve_files
from dtrain.data.paths import is_remote
from dtrain.data.records import record_files, records
from dtrain.data.source import Data
from dtrain.data.tokenise import Tokenised
from dtrain.data.tokenizer import BYTES, Tokenizer, open_tokenizer

BYTES_READ, RECORDS_READ = 2**16, 200
"""How much of the first file is looked at."""
UNKNOWN = ("[UNK]", "<unk>")
"""Usual names of the token for what a tokenizer does not know, where its files do not say which it is."""
BLANKS = {"spaces": " ", "line breaks": "\n"}
"""What has no shape of its own, by its name in messages."""
NAMED = 8
"""Most characters that are named."""


def lost_text(data: Data, copied: bool) -> Iterator[str]:
    """A line for each tokenizer of the data that does not keep all characters of the first texts.

    `copied`: whether files in object storage may be read, which copies them. What cannot be read is left out.
    """
    for one in data.tokenises():
        if one.tokenizer == BYTES or (not copied and any(map(is_remote, one.files))):
            continue
        with suppress(DataError, OSError, ValueError):
            if line := _lost(one.tokenizer, _first_text(one)):
                yield line


def _lost(name: str, text: str) -> str:
    """What the tokenizer does not keep of a text; empty if it keeps all, but for case, compatible forms, and how many
    spaces there are in a row."""
    tokenizer = open_tokenizer(name)
    decoded = tokenizer.decode(tokenizer.encode(text.encode()).tolist())
    unknown = tokenizer.special.get("unk_token") or next((one for one in UNKNOWN if _has(tokenizer, one)), "")
    kept = set(_plain(decoded.replace(unknown, "") if isinstance(unknown, str) and unknown else decoded))
    counts = Counter(one for one in text if one.isprintable() and not one.isspace())
    lost = {one: count for one, count in counts.most_common() if not kept.issuperset(_plain(one))}
    if isinstance(unknown, str) and unknown and (times := decoded.count(unknown)):
        share = times / max(len(tokenizer.encode(text.encode())), 1)
        return f"the tokenizer {name} does not know {100 * share:.2g}% of the tokens of the first texts: {unknown}"
    blank = [what for what, one in BLANKS.items() if one in text.strip() and one not in decoded.strip()]
    counts.update(one for one in text if one in BLANKS.values())
    lost |= {BLANKS[what]: counts[BLANKS[what]] for what in blank}
    if blank and len(lost) == len(blank):
        share = sum(lost.values()) / counts.total()
        return (
            f"the tokenizer {name} loses {' and '.join(blank)}, {100 * share:.2g}% of the characters of the first texts"
        )
    if not lost:
        return ""
    shown = ", ".join(map(repr, list(lost)[:NAMED])) + (f" and {len(lost) - NAMED} more" if len(lost) > NAMED else "")
    share = sum(lost.values()) / counts.total()
    return f"the tokenizer {name} loses {100 * share:.2g}% of the characters of the first texts: {shown}"


def _has(tokenizer: Tokenizer, token: str) -> bool:
    try:
        return tokenizer.token_id(token) >= 0
    except DataError:
        return False


def _plain(text: str) -> str:
    return unicodedata.normalize("NFKD", text).casefold()


def _first_text(one: Tokenised) -> str:
    """The first texts of the first file, one after the other."""
    if not one.records:
        path = resolve_files(one.files, "text", cache=one.cache)[0]
        with path.open("rb") as file:
            return file.read(BYTES_READ).decode(errors="ignore")
    path = record_files(one.files, one.cache)[0]
    found = islice(records(path, fields=one.fields), RECORDS_READ)
    return " ".join(text for _, values in found for text in _texts(values, one.fields))[:BYTES_READ]


def _texts(value: object, fields: Collection[str] | None) -> Iterator[str]:
    """The texts in a record: of these fields, or all."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one, None)
    elif isinstance(value, dict):
        for name, one in value.items():
            if fields is None or name in fields:
                yield from _texts(one, None)
