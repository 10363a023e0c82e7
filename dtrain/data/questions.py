"""Questions with their answers, for scores: read from files of records."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dtrain.core.account import KnownNames
from dtrain.core.errors import DataError
from dtrain.data.conversations import CONTEXT, IGNORED, REFUSED, Message, context_of, with_system
from dtrain.data.record import Record
from dtrain.data.records import record_files, records

ANSWERS = ("answer", "response", "completion", "output")
KNOWN = KnownNames(
    ("messages", "prompt", "question", "instruction", "input", "system", "choices", *CONTEXT, *ANSWERS),
    IGNORED,
    {name: "leave it out, or write it into the prompt" for name in REFUSED if name != "input"},
)
HINT = "a question has prompt (or messages) and answer; or prompt, choices, and answer: the right choice or its number"


@dataclass(frozen=True)
class Question:
    """A prompt with its answer, which is one of the choices if there are any."""

    where: str
    messages: tuple[Message, ...]
    answer: str
    choices: tuple[str, ...] = ()
    context: Mapping[str, Any] = field(default_factory=dict)
    """`tools` and `documents` for the chat template."""


def read_questions(names: tuple[str, ...]) -> list[Question]:
    """The questions in files of records.

    DataError, with the line, for one that lacks a field, or if there are none in the files.
    """
    questions = [_question(record) for path in record_files(names) for record in records(path)]
    if not questions:
        raise DataError(f"{names[0]} has no question", HINT)
    return questions


def _question(record: Record) -> Question:
    where, values = record
    KNOWN.sort(where, values)
    messages, prompt = values.get("messages"), values.get("prompt", values.get("question", values.get("instruction")))
    if messages is None and isinstance(prompt, str):
        messages = [{"role": "user", "content": "\n\n".join(filter(None, (prompt, values.get("input"))))}]
    if not isinstance(messages, list) or not all(
        isinstance(m, dict) and "role" in m and "content" in m for m in messages
    ):
        raise DataError(f"{where}: has no prompt; it has {', '.join(map(repr, values))}", HINT)
    answer = next((values[name] for name in ANSWERS if values.get(name) is not None), None)
    if answer is None and messages and messages[-1]["role"] == "assistant":
        answer, messages = messages[-1]["content"], messages[:-1]
    choices = tuple(map(str, values.get("choices") or ()))
    if choices and isinstance(answer, int) and 0 <= answer < len(choices):
        answer = choices[answer]
    if not isinstance(answer, str) or (choices and answer not in choices):
        raise DataError(f"{where}: answer is {answer!r}, not {'one of the choices' if choices else 'text'}", HINT)
    messages = with_system(where, messages, values.get("system"))
    return Question(where, tuple(messages), answer, choices, context_of(where, values))
