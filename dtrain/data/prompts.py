"""What a model shall continue or answer, from files: texts, or conversations up to a turn of the assistant."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dtrain.core.account import Account
from dtrain.core.errors import DataError
from dtrain.core.types import JsonObject
from dtrain.data.conversations import ASSISTANT, FORMS, WEIGHTS, Message, conversation, messages_as_json
from dtrain.data.packed_rows import IGNORED, UNKNOWN
from dtrain.data.record import Record
from dtrain.data.records import is_record_file, record_files, records

HINT = (
    "a record has prompt or text, or a conversation: messages, with tools if there are some; instruction and input; "
    "or question"
)
LEARNING = ("chosen", "rejected", "label", "labels", "train", "trainable", *WEIGHTS)
"""Fields of records for training that say how answers are learned, which changes no prompt."""


@dataclass(frozen=True)
class Prompt:
    """A text to continue, or the messages to answer."""

    where: str
    text: str = ""
    messages: tuple[Message, ...] = ()
    context: Mapping[str, Any] = field(default_factory=dict)
    """`tools` and `documents` of the conversation."""
    expected: Any = None
    """What the assistant answers in the record, if it does."""

    def shown(self) -> JsonObject:
        """The prompt with what is known of its answer, as JSON."""
        asked: JsonObject = (
            {"messages": list(self.messages), **self.context} if self.messages else {"prompt": self.text}
        )
        return asked if self.expected in (None, "") else asked | {"expected": self.expected}


@dataclass(frozen=True)
class PromptReader:
    """Reads prompts from files."""

    fields: Mapping[str, str] = field(default_factory=dict)
    """The records' names of fields, by the usual names; a record without one has the usual name."""
    ignore: Collection[str] = ()
    """Fields that are left out although they matter."""
    roles: Mapping[str, str] = field(default_factory=dict)
    """The usual names of roles, by the records'."""
    calls: bool = True
    """Whether the chat template writes calls of functions."""
    account: Account = field(default_factory=Account)
    """Counts of the fields of records that are not used."""

    def read(self, path: Path) -> list[Prompt]:
        """The prompts in a file: its records, or the lines of a text without the empty ones.

        DataError, with the line, for a record that is no prompt, or if the file has none.
        """
        if is_record_file(path):
            found = [self._prompt(record) for file in record_files((str(path),)) for record in records(file)]
        else:
            found = _lines(path)
        if not found:
            raise DataError(f"{path} has no prompt", "write one to a line")
        return found

    def _prompt(self, record: Record) -> Prompt:
        where, values = record
        fields = {usual: own for usual, own in self.fields.items() if own in values}
        usual = values | {name: values[own] for name, own in fields.items()}
        form = next((form for form in FORMS if all(usual.get(name) is not None for name in form)), None)
        form = form or next((form for form in FORMS if usual.get(form[0]) is not None), None)
        if form is None:
            raise DataError(f"{where}: has no prompt; it has {', '.join(map(repr, values)) or 'none'}", HINT)
        asked = messages_as_json(usual[form[0]])
        missing = {} if usual.get(form[-1]) is not None else {form[-1]: "" if isinstance(asked, str) else []}
        ignore = (*self.ignore, *LEARNING)
        read = conversation(
            (where, values | missing), fields, ignore=ignore, roles=self.roles, calls=self.calls, answered=False
        )
        self.account.add(IGNORED, [name for name in read.ignored if name not in LEARNING])
        self.account.add(UNKNOWN, read.unknown)
        if isinstance(asked, str) and form[0] in ("prompt", "text") and not (usual.get("system") or read.context):
            return Prompt(where, text=asked, expected=usual.get(form[-1]) if len(form) > 1 else None)
        messages, expected = read.messages, None
        if messages and messages[-1]["role"] == ASSISTANT:
            messages, answer = messages[:-1], messages[-1]
            expected = answer["content"] or answer.get("tool_calls")
        if not messages:
            raise DataError(f"{where}: has no message to answer", HINT)
        return Prompt(where, messages=messages, context=read.context, expected=expected)


def _lines(path: Path) -> list[Prompt]:
    if path.suffix.lower() in (".csv", ".tsv"):
        raise DataError(f"{path}: a table is no file of prompts", "write JSON lines (.jsonl), or one prompt to a line")
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    return [Prompt(f"{path}:{number}", text=line) for number, line in enumerate(lines, 1) if line.strip()]
