"""What a file or folder of a user may be: each kind of data says how it would read it, for `dtrain new`."""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from dtrain.core.errors import DataError
from dtrain.data.conversations import FORMS
from dtrain.data.records import SUFFIXES, records

FEW = 1_000
"""Examples below which a larger part is held out, as too few would say little."""
LOOKED_AT = 200
"""Records, or pictures, that are looked at to see of what form they are."""


@dataclass(frozen=True)
class Guess:
    """How one kind of data would read a file or folder."""

    seen: str
    """What it has found, in a sentence: "180 pictures of 3 classes"."""
    section: Mapping[str, Any]
    """The recipe's `data` section, without what is the default."""
    option: str
    """What selects this reading on the command line of `dtrain new` where there are others."""
    comments: Mapping[str, str] = field(default_factory=dict)
    """What the recipe says beside keys of the section."""
    notes: tuple[str, ...] = ()
    """What else the user should know, a line each."""
    usual: bool = False
    """Whether it is the one to take unless the user says otherwise."""
    label: str = ""
    """The column or array that is predicted, where the user may choose one."""
    unfit: Mapping[str, str] = field(default_factory=dict)
    """Columns that cannot be predicted, with the reason."""


def first_records(path: Path) -> list[Mapping[str, Any]]:
    """The first records of a file of records, or of the first such file in a folder; none if there is none."""
    own = sorted(path.iterdir()) if path.is_dir() else [path]
    file = next((one for one in own if re.sub(r"\.gz$", "", one.name.lower()).endswith(SUFFIXES)), None)
    if file is None:
        return []
    found: list[Mapping[str, Any]] = []
    with suppress(DataError):  # what is wrong with the file is said when it is opened
        found.extend(values for _, values in islice(records(file), LOOKED_AT))
    return found


def names_in_all(found: list[Mapping[str, Any]]) -> set[str]:
    """The fields that all of the records have."""
    return set.intersection(*(set(one) for one in found)) if found else set()


def split_files(path: Path, suffixes: tuple[str, ...], below: bool = False) -> tuple[list[str], list[str]]:
    """The files of such suffixes that a name means, to train on and for testing: of a folder, by their names.

    `below`: those in folders of the folder, too.
    """
    if not path.is_dir():
        return ([str(path)] if _ends(path, suffixes) else []), []
    found = path.rglob("*") if below else path.iterdir()
    own = [one for one in sorted(found) if one.is_file() and _ends(one, suffixes)]
    testing = [one for one in own if re.match(r"(test|val|valid|validation|dev|eval)(?![a-z])", one.name.lower())]
    training = [one for one in own if one not in testing]
    return ([str(one) for one in training], [str(one) for one in testing]) if training else ([*map(str, own)], [])


PAIR = {"chosen", "rejected"}
"""Fields of a pair of answers."""
SHORTEST, LONGEST = 64, 1024
"""Least and most tokens of a row that `dtrain new` writes."""


def form_of(names: Collection[str]) -> tuple[str, ...]:
    """The fields of conversations that records with such fields have; none if they have no conversations."""
    return next((form for form in FORMS if set(form) <= {*names} and not {*names} >= PAIR), ())


def has_conversations(path: Path) -> bool:
    """Whether the records have messages, prompts with answers, or pairs of answers: more than a field `text`."""
    names = names_in_all(first_records(path))
    return names >= PAIR or form_of(names) not in ((), ("text",))


def chat_guesses(path: Path) -> Iterator[Guess]:
    """One if the records have conversations or texts."""
    found = first_records(path)
    if form := form_of(names_in_all(found)):
        yield _conversations(path, found, "chat", "texts" if form == ("text",) else "conversations")


def preference_guesses(path: Path) -> Iterator[Guess]:
    """DataError if the records have pairs of answers: what they tune is not in them."""
    if names_in_all(first_records(path)) >= PAIR:
        hint = "`dtrain recipes cp dpo-tiny my.yaml` copies a recipe for them, which begins with a tuned run"
        raise DataError(f"{path}: has pairs of answers, which tune a model that answers already", hint)
    return iter(())


def _conversations(path: Path, found: list[Mapping[str, Any]], kind: str, what: str) -> Guess:
    """How the records of a file or folder are read as conversations: the length of a row by the first of them."""
    files, testing = split_files(path, SUFFIXES)
    bytes_each = sorted(len(json.dumps(one, default=str, ensure_ascii=False).encode()) for one in found)
    most = bytes_each[int(0.95 * (len(bytes_each) - 1))]
    section: dict[str, Any] = {"files": files, "length": min(LONGEST, max(SHORTEST, 2 ** (most - 1).bit_length()))}
    section |= {"test_files": testing} if testing else {}
    section["template"] = "plain"
    section |= {"too_long": "cut"} if most > LONGEST else {}
    comments = {
        "length": f"bytes in a row: without `tokenizer` each byte is a token; most records have up to {most:,}",
        "too_long": "the end of longer ones is not used",
        "template": "how messages become text: plain, chatml, llama3, alpaca or a file",
    }
    several = f" in {len(files) + len(testing)} files" if len(files) + len(testing) > 1 else ""
    fields = ", ".join(sorted(names_in_all(found)))
    return Guess(f"{what}{several}, records with {fields}", section, f"--kind {kind}", comments)


def _ends(path: Path, suffixes: tuple[str, ...]) -> bool:
    return re.sub(r"\.gz$", "", path.name.lower()).endswith(suffixes)
