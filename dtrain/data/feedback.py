"""Answers that were judged one by one, good or bad: each is in one row with the answer to another prompt."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from dtrain.core.errors import DataError
from dtrain.core.types import Answers
from dtrain.data.chat import Reader, Templated
from dtrain.data.conversations import Conversation
from dtrain.data.packed_rows import COUNTED, content
from dtrain.data.preference import conversation_with, turn, two_in_a_row
from dtrain.data.source import Source, Split
from dtrain.data.stream import Part
from dtrain.data.templates import Rendered

COMPLETIONS = ("completion", "response", "answer", "messages")
"""Fields that an answer may have; `messages` have the prompt, too."""
LABEL, CHOSEN, REJECTED = "label", "chosen", "rejected"
DOCUMENTS = ("good", "good, with another answer", "bad", "bad, with another answer")
"""The documents of a row: an answer and, after it, its prompt with the answer to another one; by their numbers."""
Judged = tuple[Conversation, bool]
"""A prompt with an answer, and whether the answer is good."""
HINT = "a record has prompt, completion and label (true or false), or prompt, chosen and rejected"


@dataclass(frozen=True, kw_only=True)
class Feedback(Templated):
    """Answers with a judgement, for the objective kto: records have `prompt`, `completion` and `label`, true or false.

    One with `chosen` and `rejected` counts as two. A row has an answer, and after it its prompt with the answer to
    the next one, from which the objective estimates how far the model is from its base.
    """

    kind: Literal["feedback"] = "feedback"

    @property
    def answers(self) -> Answers:
        return "judged"

    def open(self, split: Split) -> Source:
        rows = self.documents(split).rows_of(split, self.held_out(split)[1], self.length, 2, numbered=True)
        return replace(rows, named=DOCUMENTS)

    def parts(self, reader: Reader) -> Iterator[Part]:
        counts: dict[str, int] = dict.fromkeys(COUNTED, 0)
        judged = deque[bool]()
        encoded = reader.encode_with_spans(self._texts(reader, judged, counts))
        good, bad = DOCUMENTS.index("good"), DOCUMENTS.index("bad")
        documents = two_in_a_row(encoded, self.length, counts, lambda: good if judged.popleft() else bad)
        return content(documents, counts, reader.account)

    def _texts(self, reader: Reader, judged: deque[bool], counts: dict[str, int]) -> Iterator[Rendered]:
        """Each answer, then its prompt with the answer to the next one that differs, or, for the last, to the first.
        `judged` gets whether the answer is good, `counts` how many are marked as not to be learned."""
        first, second, waiting = list[Judged](), list[Judged](), list[Judged]()
        for found in self._judged(reader):
            answers = [(read, good) for read, good in found if len(read.messages) - 1 in read.learned]
            counts["empty"] += len(found) - len(answers)
            if not answers:
                continue
            if waiting and _prompt(answers) != _prompt(waiting):
                second = second or answers
                yield from _both(reader, waiting, answers, judged)
                waiting = []
            first = first or answers
            waiting += answers
        if waiting:
            if not second:
                message = f"{waiting[0][0].where}: all records of its file have the same prompt"
                raise DataError(message, "each file needs answers to several prompts, also each of data.test_files")
            yield from _both(reader, waiting, second if _prompt(waiting) == _prompt(first) else first, judged)

    def _judged(self, reader: Reader) -> Iterator[list[Judged]]:
        """The answers of each record, and whether they are good."""
        for record in reader.records():
            where, values = record
            given = [name for name in (*COMPLETIONS, LABEL, CHOSEN, REJECTED) if values.get(name) is not None]
            if len(given) > 2:
                raise DataError(f"{where}: has {', '.join(given)}", HINT)
            if values.get(CHOSEN) is not None and values.get(REJECTED) is not None:
                pair = (
                    conversation_with(reader, record, name, {CHOSEN, REJECTED}, HINT) for name in (CHOSEN, REJECTED)
                )
                yield [*zip(pair, (True, False), strict=True)]
                continue
            good = values.get(LABEL)
            if not isinstance(good, bool) and good not in (0, 1):
                found = "is missing" if good is None else f"is {good!r}"
                raise DataError(f"{where}: {LABEL} {found}; it must be true or false", HINT)
            name = next((name for name in COMPLETIONS if values.get(name)), COMPLETIONS[0])
            yield [(conversation_with(reader, record, name, {*COMPLETIONS, LABEL}, HINT), bool(good))]


def _prompt(answers: Sequence[Judged]) -> list[Any]:
    return [turn(one) for one in answers[0][0].messages[:-1]]


def _both(
    reader: Reader, answers: Sequence[Judged], others: Sequence[Judged], judged: deque[bool]
) -> Iterator[Rendered]:
    """Each answer, and its prompt with another one."""
    for number, (read, good) in enumerate(answers):
        judged.append(good)
        other = others[number % len(others)][0].messages[-1]
        for answer in (read.messages[-1], other):
            own = replace(read, messages=(*read.messages[:-1], answer))
            rendered = reader.rendered(own, [len(own.messages) - 1])
            yield Rendered(rendered.text, rendered.spans[-1:])
