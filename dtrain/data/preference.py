"""Pairs of answers to one prompt, of which one is preferred: both are in one row, as two documents."""

from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from dtrain.core.errors import DataError
from dtrain.core.types import Answers
from dtrain.data.chat import Reader, Templated
from dtrain.data.conversations import ASSISTANT, USER, Conversation, messages_as_json, usual_role
from dtrain.data.guess import Guess, preference_guesses
from dtrain.data.packed_rows import COUNTED, TARGET_BIT, Document, content
from dtrain.data.record import Record
from dtrain.data.source import Source, Split
from dtrain.data.stream import Part
from dtrain.data.templates import Rendered

PROMPTS = ("prompt", "question", "instruction", "conversations")
"""Fields that a prompt may have; `input` belongs to an instruction."""
LONG = 20
"""Characters from which on a prompt with which an answer begins is no accident."""
HINT = "a record has prompt, chosen and rejected: texts, or lists of messages of which the last is the answer"


@dataclass(frozen=True, kw_only=True)
class Preference(Templated):
    """Pairs of answers for the objectives dpo, orpo and simpo. A record has `prompt`, `chosen` and `rejected`."""

    kind: Literal["preference"] = "preference"

    @classmethod
    def guesses(cls, path: Path) -> Iterator[Guess]:
        return preference_guesses(path)

    @property
    def answers(self) -> Answers:
        return "pairs"

    def open(self, split: Split) -> Source:
        rows = self.documents(split).rows_of(split, self.held_out(split)[1], self.length, 2)
        return replace(rows, named=("preferred", "rejected"))

    def parts(self, reader: Reader) -> Iterator[Part]:
        counts: dict[str, int] = dict.fromkeys(COUNTED, 0)
        encoded = reader.encode_with_spans(self._texts(reader, counts))
        return content(two_in_a_row(encoded, self.length, counts), counts, reader.account)

    def _texts(self, reader: Reader, counts: dict[str, int]) -> Iterator[Rendered]:
        """The preferred answer of each record, then the other one; of a conversation only the last turn counts."""
        for record in reader.records():
            chosen, rejected = (
                conversation_with(reader, record, name, {"chosen", "rejected"}, HINT) for name in ("chosen", "rejected")
            )
            if list(map(turn, chosen.messages[:-1])) != list(map(turn, rejected.messages[:-1])):
                hint = "both are the same conversation up to their last turn, system prompt included"
                raise DataError(f"{record[0]}: chosen and rejected answer different conversations", hint)
            if turn(chosen.messages[-1]) == turn(rejected.messages[-1]) or not turn(rejected.messages[-1])[1]:
                counts["empty"] += 1  # nothing to prefer
                continue
            for read in (chosen, rejected):
                rendered = reader.rendered(read, read.learned[-1:])
                yield Rendered(rendered.text, rendered.spans[-1:])


def two_in_a_row(
    encoded: Iterator[np.ndarray], length: int, counts: dict[str, int], number: Callable[[], int] = lambda: 0
) -> list[Document]:
    """Each two documents that a row of this length holds and that have something to learn; `counts` gets the others.

    `number`: what the cache keeps of both, called once for each two of `encoded`.
    """
    documents: list[Document] = []
    for one in encoded:
        pair, own = (one, next(encoded)), number()
        if sum(len(tokens) - 1 for tokens in pair) > length:
            counts["too_long"] += 1
        elif all((tokens[1:] >= TARGET_BIT).any() for tokens in pair):
            documents += [Document(tokens, own) for tokens in pair]
        else:
            counts["empty"] += 1
    return documents


def turn(message: Any) -> tuple[Any, ...]:
    """What two messages must have in common to be the same: who says what, and which functions it calls."""
    if not isinstance(message, dict):
        return (None, message)
    role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
    content = content.strip() if isinstance(content, str) else content
    return (usual_role(role) if isinstance(role, str) else role, content or message.get("tool_calls") or "")


def conversation_with(reader: Reader, record: Record, name: str, about: Set[str], hint: str) -> Conversation:
    """The prompt of a record with the answer of this name. `about`: the fields of answers, and of what is said of them;
    `hint`: what a record has."""
    where, values = record
    asked = next((key for key in PROMPTS if values.get(key)), "prompt")
    prompt, answer = (messages_as_json(values.get(key)) for key in (asked, name))
    extra = values.get("input") if asked == "instruction" else None
    if isinstance(prompt, str) and isinstance(extra, str) and extra.strip():
        prompt = f"{prompt}\n\n{extra}"
    if isinstance(answer, dict) and {"role", "from"} & answer.keys():
        answer = [answer]
    if isinstance(prompt, str) and isinstance(answer, str) and len(prompt) >= LONG and answer.startswith(prompt):
        raise DataError(f"{where}: {name} begins with the whole prompt", "leave the prompt out of the answers")
    before: list[Any] = [{"role": USER, "content": prompt}] if isinstance(prompt, str) else prompt or []
    if isinstance(answer, str):
        answer = [{"role": ASSISTANT, "content": answer}]
    if not isinstance(answer, list):
        found = "is missing" if answer is None else f"is {type(answer).__name__}, not text or a list of messages"
        raise DataError(f"{where}: {name} {found}; it has {', '.join(map(repr, values))}", hint)
    if not isinstance(before, list) or not (before or len(answer) > 1):
        raise DataError(f"{where}: has no prompt; it has {', '.join(map(repr, values))}", hint)
    # the answer's messages may repeat those of the prompt, after a system prompt of their own
    own, opening = [turn(one) for one in before], [turn(one) for one in answer]
    repeats = own and own in (opening[: len(own)], opening[1 : len(own) + 1])
    messages = answer if repeats else [*before, *answer]
    used = {asked, *about, "messages", *(["input"] if asked == "instruction" else [])}
    rest = {key: value for key, value in values.items() if key not in used}
    read = reader.conversation((where, {"messages": messages, **rest}), {})
    if read.messages[-1]["role"] != ASSISTANT:
        raise DataError(f"{where}: the last message of {name} is not the assistant's", hint)
    return read
