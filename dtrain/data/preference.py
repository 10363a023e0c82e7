"""Pairs of answers to one prompt, of which one is preferred: both are in one row, as two documents."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from dtrain.core.errors import DataError
from dtrain.data.chat import Reader, Templated
from dtrain.data.conversations import ASSISTANT, USER, Conversation
from dtrain.data.packed_rows import COUNTED, TARGET_BIT, Document, content
from dtrain.data.records import Record
from dtrain.data.source import Source, Split
from dtrain.data.stream import Part
from dtrain.data.templates import Rendered

HINT = "a record has prompt, chosen and rejected: texts, or lists of messages of which the last is the answer"


@dataclass(frozen=True, kw_only=True)
class Preference(Templated):
    """Pairs of answers for `objective: {kind: dpo}`. A record has `prompt`, `chosen` and `rejected`."""

    kind: Literal["preference"] = "preference"

    @property
    def pairs(self) -> bool:
        return True

    def open(self, split: Split) -> Source:
        rows = self.documents(split).rows_of(split, self.held_out(split)[1], self.length, 2)
        return replace(rows, texts=False)

    def parts(self, reader: Reader) -> Iterator[Part]:
        counts: dict[str, int] = dict.fromkeys(COUNTED, 0)
        documents: list[Document] = []
        pair: list[np.ndarray] = []
        for tokens in reader.encode_with_spans(self._texts(reader)):
            pair.append(tokens)
            if len(pair) == 2:
                learned = all((tokens[1:] >= TARGET_BIT).any() for tokens in pair)
                if sum(len(tokens) - 1 for tokens in pair) > self.length:
                    counts["too_long"] += 1
                elif learned:
                    documents += map(Document, pair)
                else:
                    counts["empty"] += 1
                pair = []
        return content(documents, counts, reader.account)

    def _texts(self, reader: Reader) -> Iterator[Rendered]:
        """The preferred answer of each record, then the other one; of a conversation only the last turn counts."""
        for record in reader.records():
            for name in ("chosen", "rejected"):
                read = _conversation(reader, record, name)
                rendered = reader.rendered(read, read.learned[-1:])
                yield Rendered(rendered.text, rendered.spans[-1:])


def _role_and_content(message: Any) -> tuple[Any, Any]:
    """What two messages must have in common to be the same."""
    return (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, message)


def _conversation(reader: Reader, record: Record, name: str) -> Conversation:
    """The prompt of a record with one of its answers."""
    where, values = record
    prompt, answer = values.get("prompt"), values.get(name)
    before: list[Any] = [{"role": USER, "content": prompt}] if isinstance(prompt, str) else prompt or []
    if isinstance(answer, str):
        answer = [{"role": ASSISTANT, "content": answer}]
    if not isinstance(answer, list) or not isinstance(before, list) or not (before or len(answer) > 1):
        raise DataError(f"{where}: has no prompt, or no {name}; it has {', '.join(map(repr, values))}", HINT)
    # the answer's messages may repeat those of the prompt, after a system prompt of their own
    prompt, opening = [_role_and_content(one) for one in before], [_role_and_content(one) for one in answer]
    repeats = prompt and prompt in (opening[: len(prompt)], opening[1 : len(prompt) + 1])
    messages = answer if repeats else [*before, *answer]
    rest = {key: value for key, value in values.items() if key not in ("prompt", "chosen", "rejected", "messages")}
    read = reader.conversation((where, {"messages": messages, **rest}), {})
    if read.messages[-1]["role"] != ASSISTANT:
        raise DataError(f"{where}: the last message of {name} is not the assistant's", HINT)
    return read
