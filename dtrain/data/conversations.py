"""Conversations from records in the usual forms, each as a list of messages."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dtrain.core.errors import DataError
from dtrain.data.records import Record

Message = dict[str, Any]
"""`role` (system, user, assistant, tool) and `content`; other keys are kept for the template."""

ASSISTANT = "assistant"
ROLES = {"human": "user", "gpt": ASSISTANT, "bot": ASSISTANT, "model": ASSISTANT, "chatgpt": ASSISTANT}
"""Names of roles in files of other tools."""
FORMS = (
    ("messages",), ("conversations",), ("prompt", "response"), ("prompt", "completion"), ("instruction", "output"),
    ("question", "answer"), ("text",),
)  # fmt: skip
"""The fields that a record may have, in the order in which they are looked for."""
HINT = "fields of a record: messages; prompt and response; instruction, input and output; or text. data.fields renames"


@dataclass(frozen=True)
class Conversation:
    """One record: messages, or a plain text, which has no roles."""

    where: str
    messages: tuple[Message, ...] = ()
    text: str = ""

    @property
    def empty(self) -> bool:
        """Whether nothing is written in it."""
        return not self.text.strip() and not any(str(message.get("content") or "").strip() for message in self.messages)


def conversation(record: Record, fields: Mapping[str, str]) -> Conversation:
    """The conversation in a record. `fields`: the record's name of a field, by the usual name.

    DataError if a field is missing or has a wrong type, or if messages have no turn of the assistant.
    """
    where, found = record
    values = dict(found) | {usual: found[own] for usual, own in fields.items() if own in found}
    for own in fields.values():
        if own not in found:
            raise DataError(f"{where}: has no field {own!r} (data.fields); it has {', '.join(map(repr, found))}", HINT)
    form = next((form for form in FORMS if all(values.get(name) is not None for name in form)), None)
    if form is None:
        raise DataError(f"{where}: has none of the known fields; it has {', '.join(map(repr, found)) or 'none'}", HINT)
    if form == ("text",):
        return Conversation(where, text=_string(where, "text", values["text"]))
    if len(form) == 1:
        messages = _messages(where, form[0], values[form[0]])
    else:
        asked, answered = (_string(where, name, values[name]) for name in form)
        extra = _string(where, "input", values.get("input") or "") if form[0] == "instruction" else ""
        messages = [
            {"role": "user", "content": f"{asked}\n\n{extra}" if extra.strip() else asked},
            {"role": ASSISTANT, "content": answered},
        ]
        if isinstance(values.get("system"), str) and values["system"]:
            messages.insert(0, {"role": "system", "content": values["system"]})
    read = Conversation(where, tuple(messages))
    if not read.empty and not any(message["role"] == ASSISTANT for message in messages):
        raise DataError(f"{where}: has no turn of the assistant, so there is nothing to learn", "remove this record")
    return read


def _messages(where: str, name: str, listed: Any) -> list[Message]:
    if not isinstance(listed, list):
        raise DataError(f"{where}: {name} is {type(listed).__name__}, not a list of messages", HINT)
    messages = []
    for number, message in enumerate(listed, 1):
        if not isinstance(message, dict):
            raise DataError(f"{where}: message {number} is {type(message).__name__}, not an object", HINT)
        role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
        if not isinstance(role, str):
            raise DataError(f"{where}: message {number} has no role", "give each message role and content")
        if not isinstance(content, str | list) and not (content is None and message.get("tool_calls")):
            raise DataError(f"{where}: message {number} ({role}) has no content", "give each message role and content")
        rest = {key: value for key, value in message.items() if key not in ("from", "value") and value is not None}
        messages.append(rest | {"role": ROLES.get(role, role), "content": content if content is not None else ""})
    return messages


def _string(where: str, name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise DataError(f"{where}: {name} is {type(value).__name__}, not text", HINT)
    return value
