"""Texts in, texts out: prompts and conversations are tokenised, continued until they end, and decoded."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from dtrain.core.account import Account
from dtrain.core.counts import counted
from dtrain.core.errors import RecipeError
from dtrain.data.conversations import Message
from dtrain.data.prompts import Prompt, PromptReader
from dtrain.data.template_messages import MessageWriter
from dtrain.data.templates import Template
from dtrain.data.tokenizer import BYTES, Tokenizer
from dtrain.data.tokenizer_folder import GENERATION
from dtrain.inference.generate import ENDED, Generator, Sampling

ROWS = 16
"""Prompts that are continued together."""
SHOWN = 8
"""Most prompts that a message names."""
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""What tokens decode to while the last character lacks some of its bytes."""


@dataclass(frozen=True)
class TextGenerator:
    """A trained decoder with its tokenizer and chat template."""

    model: Generator
    stop: tuple[str, ...] = ()
    """Where one of these appears in what is generated, the text ends before it."""
    account: Account = field(default_factory=Account)
    """What of prompts was not used."""

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the training data."""
        return self.model.tokenizer

    @cached_property
    def template(self) -> Template:
        """The chat template of the training data. RecipeError if it has none."""
        data: Any = self.model.recipe.data.main
        if data.conversational:
            return data.chat_template()
        if self.tokenizer.template is None:
            message = f"the run has no chat template: its data is of kind {data.kind}"
            raise RecipeError(message, "leave --chat out, and give the text to continue")
        return Template(self.tokenizer.template, self.tokenizer.special, self.tokenizer.tools_template)

    @cached_property
    def writer(self) -> MessageWriter:
        """Writes conversations with the template, and counts what that leaves out."""
        data: Any = self.model.recipe.data.main
        return MessageWriter(self.template, data.ignore if data.conversational else (), self.account)

    def prompts(self, path: Path) -> list[Prompt]:
        """The prompts in a file. DataError as `PromptReader.read`."""
        data: Any = self.model.recipe.data.main
        calls = self.has_template and self.template.writes("tool_calls")
        reader = PromptReader(calls=calls, account=self.account)
        if data.conversational:
            reader = replace(reader, fields=data.renamed, ignore=data.ignore, roles=data.roles)
        return reader.read(path)

    @property
    def has_template(self) -> bool:
        """Whether there is a chat template."""
        return self.chats or self.tokenizer.template is not None

    @property
    def chats(self) -> bool:
        """Whether it was trained on conversations with a template."""
        data: Any = self.model.recipe.data.main
        return data.conversational and (data.template is not None or self.tokenizer.template is not None)

    @cached_property
    def ends(self) -> tuple[tuple[int, ...], ...]:
        """The sequences of tokens that end a text: those of the chat template and of the tokenizer."""
        data = self.model.recipe.data.main
        texts = [self.template.ending()] if self.chats else []
        texts += [self.tokenizer.special.get("eos_token", "")] if data.ends_texts or self.tokenizer.key != BYTES else []
        texts += [data.end_text] if self.tokenizer.key != BYTES else []
        found = [tuple(self.tokens(text)) for text in texts if text]
        return tuple(dict.fromkeys([*found, *((token,) for token in self._configured())]))

    def _configured(self) -> list[int]:
        """The end tokens in generation_config.json beside the tokenizer."""
        path = self.tokenizer.path and self.tokenizer.path.with_name(GENERATION)
        if path is None or not path.is_file():
            return []
        try:
            found = json.loads(path.read_text()).get("eos_token_id")
        except (OSError, ValueError, AttributeError):
            return []
        return [token for token in (found if isinstance(found, list) else [found]) if isinstance(token, int)]

    def tokens(self, text: str) -> list[int]:
        """The tokens of a text, in which the text of a special token is that token."""
        return next(iter(self.tokenizer.encode_with_spans([(text, ())])))[0].tolist()

    def prompt(self, text: str) -> list[int]:
        """The tokens of a text to continue: after the tokens with which the training texts begin."""
        if self.model.recipe.data.main.conversational:
            return self.tokens(self.tokenizer.begin + text)
        return self.tokenizer.encode(text.encode()).tolist()

    def chat(
        self, messages: Sequence[Message], where: str = "the conversation", context: Mapping[str, Any] = {}
    ) -> list[int]:
        """The tokens after which the assistant answers. `context`: `tools` and `documents`. DataError, with `where`, if
        the template does not write what matters."""
        return self.tokens(self.writer.prompt(messages, where, context))

    def stream(self, prompt: Sequence[int], count: int, sampling: Sampling) -> Iterator[str]:
        """The pieces of the text that follows a prompt, as they are drawn; without its end tokens.

        Raises as `Generator.continued`, before the first piece.
        """
        return self._pieces(self.model.continued([prompt], count, sampling, self.ends, steadily=True))

    def _pieces(self, tokens: Iterator[np.ndarray]) -> Iterator[str]:
        drawn: list[int] = []
        shown = ""
        longest = max(map(len, self.ends), default=1)
        for token in tokens:
            drawn.append(int(token[0]))
            text = self.tokenizer.decode(drawn if longest == 1 else drawn[: 1 - longest])  # the rest may become an end
            if any(drawn[-len(end) :] == list(end) for end in self.ends) or self._stops(text):
                break
            text = text[: len(text) - self._begun(text)]
            if not text.endswith(INCOMPLETE) and len(text) > len(shown):
                yield text[len(shown) :]
                shown = text
        yield self.text(drawn)[len(shown) :]

    def completed(self, prompts: Sequence[Sequence[int]], count: int, sampling: Sampling) -> Iterator[str]:
        """The text that follows each prompt, in order; prompts of similar lengths are continued together."""
        order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
        texts: dict[int, str] = {}
        for first in range(0, len(order), ROWS):
            numbers = order[first : first + ROWS]
            # a constant number of rows: one compiled program serves them all
            padded = [prompts[number] for number in numbers] + [prompts[numbers[0]]] * (
                min(ROWS, len(order)) - len(numbers)
            )
            rows: list[list[int]] = [[] for _ in padded]
            for tokens in self.model.continued(padded, count, sampling, self.ends):
                for row, token in zip(rows, tokens.tolist(), strict=True):
                    row += [token] if token != ENDED else []
                if self.stop and all(self._stops(self.tokenizer.decode(row)) for row in rows):
                    break
            texts |= {number: self.text(row) for number, row in zip(numbers, rows, strict=False)}
        yield from (texts[number] for number in range(len(prompts)))

    def refuse_long(self, prompts: Sequence[Sequence[int]], where: Sequence[str]) -> None:
        """RecipeError that names the prompts which do not fit the model's context, by where each comes from."""
        most = self.model.model.context - 1
        long = [(place, len(prompt)) for place, prompt in zip(where, prompts, strict=True) if len(prompt) > most]
        if long:
            shown = "\n  ".join(f"{place}: {size:,} tokens" for place, size in long[:SHOWN])
            more = f"\n  and {len(long) - SHOWN:,} more" if len(long) > SHOWN else ""
            count = counted(len(long), "prompt is", "prompts are")
            message = f"{count} longer than the model's context allows, {most:,} tokens"
            raise RecipeError(f"{message}:\n  {shown}{more}", "shorten them, or leave them out")

    def text(self, drawn: Sequence[int]) -> str:
        """The text of drawn tokens, without the end tokens at its end and what follows a stop text."""
        end = next((end for end in self.ends if list(drawn[-len(end) :]) == list(end)), ())
        text = self.tokenizer.decode(list(drawn[: len(drawn) - len(end)]))
        return text[: min((text.index(one) for one in self.stop if one in text), default=len(text))]

    def _stops(self, text: str) -> bool:
        return any(one in text for one in self.stop)

    def _begun(self, text: str) -> int:
        """How many characters at the end of a text may become a stop text."""
        sizes = (size for one in self.stop for size in range(1, len(one)) if text.endswith(one[:size]))
        return max(sizes, default=0)
