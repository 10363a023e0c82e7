"""Rows of tokens from conversations: tokenised and packed once, with the loss on the assistant's tokens alone."""

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import ClassVar, Literal, Self

import numpy as np

from dtrain.core.account import Account
from dtrain.core.errors import DataError
from dtrain.core.types import Fraction, Positive
from dtrain.data.batch import Example
from dtrain.data.conversations import (
    ASSISTANT,
    BESIDE,
    Conversation,
    conversation,
)
from dtrain.data.data_check import TEXT_BYTES, TOKENISED_BYTES, DataCheck
from dtrain.data.digest_cache import NO_CACHE, cached_by_file, file_digest
from dtrain.data.files import address_packages
from dtrain.data.guess import Guess, chat_guesses
from dtrain.data.packed_rows import (
    ANSWER,
    COUNTED,
    IGNORED,
    TARGET_BIT,
    TEXT,
    TURN,
    UNKNOWN,
    Document,
    Documents,
    content,
    joined,
    targets_in,
)
from dtrain.data.paths import CACHE, expand_path
from dtrain.data.record import Limits, Record
from dtrain.data.records import packages_of as record_packages
from dtrain.data.records import record_files, records
from dtrain.data.source import Load, Source, Split, Unaugmented
from dtrain.data.stream import InMemory, Part
from dtrain.data.template_messages import MessageWriter
from dtrain.data.templates import NAMED, Rendered, Template
from dtrain.data.tokenise import FileGroup, Tokenised, TokenisedFiles, grouped_files
from dtrain.data.tokenizer import BYTES, Tokenizer, open_tokenizer, packages_of
from dtrain.data.windows import row_example

AT_ONCE = 1024
"""Conversations that are tokenised together."""


@dataclass(frozen=True, kw_only=True)
class Templated(Unaugmented, ABC):
    """What data of messages have in common: files of records, a tokenizer and its chat template."""

    keeps: ClassVar[str] = "tokens"
    files: tuple[str, ...]
    """Files, globs, folders or addresses (gs://, s3://) of records: JSON, Parquet, Arrow, WebDataset, ArrayRecord."""
    length: Positive
    """Tokens per row."""
    tokenizer: str = "bytes"
    """"bytes", or the path of a tokenizer.json or of a folder that contains one."""
    template: str | None = None
    """The chat template: chatml, llama3, alpaca, plain, or a file; default: the tokenizer's own."""
    test: Fraction = 0.1
    """Fraction of the records that is held out for testing, drawn at random, the same in every run."""
    test_files: tuple[str, ...] = ()
    """Files for testing; if set, no record of `files` is held out."""
    cache: str = CACHE
    """Folder for cached tokens, digests of files, and copies of files in object storage."""
    ignore: tuple[str, ...] = ()
    """Fields of records, or of their messages, to train without, although they usually matter: [tools, images]."""
    roles: dict[str, str] = field(default_factory=dict)
    """Names of roles in the records that are not the usual ones: {narrator: system, bob: assistant}."""
    limits: Limits = field(default_factory=Limits)
    load: Load = field(default_factory=Load)

    @property
    def tokenized(self) -> bool:
        return True

    @property
    def conversational(self) -> bool:
        return True

    @property
    def has_template(self) -> bool:
        return self._template() is not None

    @property
    def ends_texts(self) -> bool:
        return True

    @property
    def renamed(self) -> Mapping[str, str]:
        """The records' names of fields, by the usual names."""
        return {}

    def own_template(self) -> str | None:
        return self.chat_template().source if self.template else None

    @property
    def packages(self) -> tuple[str, ...]:
        rendered = self.template is not None or self.tokenizer != BYTES
        names = (*self.files, *self.test_files)
        own = (*packages_of(self.tokenizer), *(("jinja2",) if rendered else ()))
        return (*own, *record_packages(names), *address_packages(names))

    def example(self) -> Example:
        return row_example(self.length, packed=True)

    @property
    def has_examples(self) -> bool:
        return bool(self.files)

    def without_cache(self) -> Self:
        return replace(self, cache=NO_CACHE)

    @abstractmethod
    def open(self, split: Split) -> Source:
        """See `Data.open`."""

    def inspect(self, check: DataCheck) -> None:
        files = check.files(self.files, self.test_files, "records")
        works, most = check.tokenizer(self), TEXT_BYTES if self.tokenizer == BYTES else TOKENISED_BYTES
        if not check.too_large(f"the records of {len(files)} files", files, most) and files and works:
            check.open(self, "data.files")

    def open_tokenizer(self) -> Tokenizer:
        """The tokenizer; DataError if it does not exist."""
        return open_tokenizer(self.tokenizer)

    def tokenises(self) -> Iterator[Tokenised]:
        """See `Data.tokenises`."""
        yield Tokenised(self.tokenizer, self.files, self.cache)

    def chat_template(self) -> Template:
        """The chat template; DataError if there is none."""
        tokenizer = self.open_tokenizer()
        if self.template is None:
            source = tokenizer.template
            if source is None:
                message = f"the tokenizer {self.tokenizer} has no chat template"
                other = "name the model's tokenizer in data.tokenizer, or " if self.tokenizer == BYTES else ""
                raise DataError(message, f"{other}set data.template to chatml, llama3, alpaca, plain, or to a file")
            return Template(source, tokenizer.special, tokenizer.tools_template)
        if self.template in NAMED:
            source = NAMED[self.template]
        else:
            path = expand_path(self.template)
            try:
                source = path.read_text(encoding="utf-8-sig")
            except (OSError, UnicodeDecodeError) as error:
                hint = f"data.template names one of {', '.join(NAMED)}, or a file"
                raise DataError(f"{path}: the chat template cannot be read: {error}", hint) from error
        return Template(source, tokenizer.special)

    def held_out(self, split: Split) -> tuple[tuple[str, ...], float]:
        """The files of a split, and the fraction of their records that is held out."""
        if not self.test_files:
            return self.files, self.test
        return (self.test_files, 1.0) if split == "test" else (self.files, 0.0)

    @abstractmethod
    def parts(self, reader: "Reader") -> Iterator[Part]:
        """The content of the cache for the records of some files."""

    @property
    def about(self) -> Sequence[object]:
        """What that content depends on besides files, tokenizer, template and length."""
        return ()

    def documents(self, split: Split) -> Documents:
        """All records of a split's files as documents, from the cache if it has them."""
        files = record_files(self.held_out(split)[0], self.cache)
        if self.cache == NO_CACHE:
            made = list(self._made(files))
            account = next(part for part in made if isinstance(part, dict))
            tokens = np.concatenate([part for part in made if not isinstance(part, dict)])
            return Documents(InMemory(tokens, account), "", str(files[0]))
        stream = self._whole(files).tokens()
        return Documents(stream, stream.scanned(self.cache)["digest"], str(files[0]))

    def file_groups(self, split: Split) -> list[FileGroup]:
        """What `data prepare` can make ahead."""
        if self.cache == NO_CACHE:
            return []
        return self._whole(record_files(self.held_out(split)[0], self.cache)).missing()

    def _whole(self, files: list[Path]) -> TokenisedFiles:
        tokenizer, template = self.open_tokenizer(), self._template()
        digests = cached_by_file(self.cache, "text", files, file_digest)
        key = [5, self.kind, tokenizer.key, tokenizer.begin, dict(tokenizer.special)]
        key += [template and [template.source, template.tools_source], self.ignore, self.roles, *self.about]
        key += [self.length]

        def name(numbers: Sequence[int]) -> str:
            text = json.dumps([*key, [digests[number] for number in numbers]], sort_keys=True)
            return f"chat-{hashlib.sha256(text.encode()).hexdigest()[:24]}"

        whole, groups = name(range(len(files))), []
        for numbers in grouped_files(files):
            own = [files[number] for number in numbers]
            size = sum(file.stat().st_size for file in own)
            groups.append(FileGroup(self.cache, f"part-{whole}-{name(numbers)}", partial(self._made, own), size))
        return TokenisedFiles(self.cache, whole, groups, joined)

    def _template(self) -> Template | None:
        """The chat template; None if the recipe names none and the tokenizer has none."""
        return None if self.template is None and self.open_tokenizer().template is None else self.chat_template()

    def _made(self, files: Sequence[Path]) -> Iterator[Part]:
        return self.parts(Reader(self, self.open_tokenizer(), self._template(), files))


@dataclass(frozen=True)
class Reader:
    """Reads and tokenises the records of files, with an account of what they have."""

    data: Templated
    tokenizer: Tokenizer
    template: Template | None
    files: Sequence[Path]
    account: Account = field(default_factory=Account)

    @cached_property
    def begin(self) -> str:
        """What the tokenizer puts before a plain text."""
        return self.tokenizer.begin

    @cached_property
    def end(self) -> str:
        """The text of the token that ends a plain text; empty if the tokenizer names none. DataError if its vocabulary
        lacks that token."""
        end = self.tokenizer.special.get("eos_token", "")
        try:
            if end:
                self.tokenizer.token_id(end)
        except DataError as error:
            hint = "name a token of the vocabulary as eos_token in tokenizer_config.json"
            raise DataError(f"{error.message}, which its folder names as the end of a text", hint) from error
        return end

    @cached_property
    def _template(self) -> Template:
        template = self.template or self.data.chat_template()  # raises: there is none
        if not template.writes_answers:
            raise DataError("the chat template does not write what the assistant says", "use another: data.template")
        return template

    @cached_property
    def _writer(self) -> MessageWriter:
        return MessageWriter(self._template, self.data.ignore, self.account)

    @cached_property
    def calls(self) -> bool:
        """Whether the template writes calls of functions."""
        return self.template is not None and self.template.writes("tool_calls")

    @cached_property
    def ending(self) -> str:
        """How answers end, for the account."""
        try:
            ending = self._template.ending()
        except DataError:  # some templates need more than a question and an answer
            return "end as the template writes them"
        return f"end with {ending!r}" if ending else "end without a token: the model does not learn to stop"

    def records(self) -> Iterator[Record]:
        """The records of all files."""
        return (record for path in self.files for record in records(path, self.data.limits))

    def conversation(self, record: Record, fields: Mapping[str, str]) -> Conversation:
        """The conversation in a record; its fields are counted."""
        read = conversation(record, fields, ignore=self.data.ignore, roles=self.data.roles, calls=self.calls)
        self.account.add(IGNORED, read.ignored)
        self.account.add(UNKNOWN, read.unknown)
        return read

    def rendered(self, read: Conversation, learned: Sequence[int]) -> Rendered:
        """A conversation as text with the spans of the messages `learned`.

        DataError if there is no template, if it fails, or if it leaves out what matters.
        """
        texts = [read.messages[number].get("content") or read.messages[number].get("tool_calls") for number in learned]
        self.account.add(ANSWER, [self.ending if one else "have no text: the model learns to end" for one in texts])
        return self._writer.rendered(read.messages, read.where, read.context, learned)

    def encode_with_spans(self, texts: Iterable[Rendered]) -> Iterator[np.ndarray]:
        """The tokens of each text, uint32, with TARGET_BIT where they begin in a part that the assistant wrote."""
        waiting = iter(texts)
        while group := list(islice(waiting, AT_ONCE)):
            for tokens, learned in self.tokenizer.encode_with_spans([(one.text, one.spans) for one in group]):
                yield tokens.astype(np.uint32) | (learned.astype(np.uint32) << np.uint32(31))  # TARGET_BIT


@dataclass(frozen=True, kw_only=True)
class Chat(Templated):
    """Rows of tokens from conversations, instructions or plain texts. A record has `messages`; `prompt` and `response`;
    `instruction`, `input` and `output`; or `text`."""

    kind: Literal["chat"] = "chat"
    fields: dict[str, str] = field(default_factory=dict)
    """The records' names of fields, where they differ from the usual ones: {prompt: question, response: answer}."""
    learn: Literal["assistant", "all"] = "assistant"
    """The tokens that count in the loss. Plain texts count as a whole."""
    pack: bool = True
    """Put several conversations into a row; tokens attend only to tokens of the same one. If false, one to a row."""
    too_long: Literal["skip", "cut"] = "skip"
    """What happens to a conversation of more than `length` tokens: it is left out, or its end is. Plain texts are cut
    into several rows."""

    @classmethod
    def guesses(cls, path: Path) -> Iterator[Guess]:
        return chat_guesses(path)

    @property
    def renamed(self) -> Mapping[str, str]:
        return self.fields

    def open(self, split: Split) -> Source:
        test = self.held_out(split)[1]
        return self.documents(split).rows_of(split, test, self.length, None if self.pack else 1)

    @property
    def about(self) -> Sequence[object]:
        return (self.fields, self.learn, self.too_long)

    def parts(self, reader: Reader) -> Iterator[Part]:
        counts: dict[str, int] = dict.fromkeys(COUNTED, 0)
        documents: list[Document] = []
        plain: list[bool] = []
        sizes: list[int] = []
        texts = self._texts(reader, counts, plain, sizes)
        for number, tokens in enumerate(reader.encode_with_spans(texts)):
            size = sizes[number]
            if plain[number] and not reader.begin and len(tokens):  # the first token of a document is not predicted
                size -= len(reader.tokenizer.decode([int(tokens[0] & ~TARGET_BIT)]).encode())
            documents += self._cut(Document(tokens, size), plain[number], counts)
        return content(documents, counts, reader.account)

    def _texts(self, reader: Reader, counts: dict[str, int], plain: list[bool], sizes: list[int]) -> Iterator[Rendered]:
        """Each record as text; `plain` gets whether it is a plain text, `sizes` the bytes of it that are learned."""
        for record in reader.records():
            read = reader.conversation(record, self.fields)
            if read.empty:
                counts["empty"] += 1
                continue
            rendered = self._rendered(reader, read)
            sizes.append(len(read.text.encode()) if read.text else self._size(read, rendered, reader))
            plain.append(bool(read.text))
            yield rendered

    def _size(self, read: Conversation, rendered: Rendered, reader: Reader) -> int:
        """The bytes of text that are learned, without what template and tokenizer put around it."""
        numbers = read.learned if self.learn != "all" else () if read.excluded else range(len(read.messages))
        learned = [read.messages[number] for number in sorted(numbers)]
        contents = [str(one["content"] or "").strip() for one in learned]
        spans = [rendered.text[start:stop].strip() for start, stop in rendered.spans]
        parts = spans * (len(contents) if self.learn == "all" else 1)
        alone = all(not any(one[key] for key in one.keys() - BESIDE) for one in learned)  # no calls of tools
        if alone and len(parts) == len(contents) and all(map(str.__contains__, parts, contents)):
            return sum(len(text.encode()) for text in contents)
        ending = reader.template.ending() if reader.template else ""
        text = "".join(span.removesuffix(ending).strip() for span in spans)  # the template says more, or other words
        for marker in filter(None, reader.tokenizer.special.values()):
            text = text.replace(marker, "") if isinstance(marker, str) else text
        return len(text.encode())

    def _rendered(self, reader: Reader, read: Conversation) -> Rendered:
        if read.text:
            return self._plain(reader, read.text)
        excluded = sorted(read.excluded)
        if excluded:
            reader.account.add(TURN, ["marked as not to be learned"] * len(excluded))
        if self.learn == "all" and any(read.messages[number]["role"] != ASSISTANT for number in excluded):
            message = f"{read.where}: a turn that is not the assistant's is marked as not to be learned"
            raise DataError(message, "data.learn: all learns such turns: leave the marks or the records out")
        if self.learn == "assistant":
            return reader.rendered(read, read.learned)
        rendered = reader.rendered(read, [number for number in excluded if read.messages[number]["role"] == ASSISTANT])
        bounds = [0, *(bound for span in rendered.spans for bound in span), len(rendered.text)]
        spans = zip(bounds[::2], bounds[1::2], strict=True)  # what is between those that are not learned
        return replace(rendered, spans=tuple((start, stop) for start, stop in spans if stop > start))

    def _plain(self, reader: Reader, text: str) -> Rendered:
        """A plain text between the begin and the end token, which it may have already."""
        begin = "" if reader.begin and text.startswith(reader.begin) else reader.begin
        end = "" if reader.end and text.rstrip().endswith(reader.end) else reader.end
        added = [f"begin token {begin!r} added"] if begin else []
        added += [f"end token {end!r} added"] if end else []
        added += [] if reader.end else ["no end token: the tokenizer names none"]
        reader.account.add(TEXT, added)
        whole = begin + text + end
        return Rendered(whole, ((0, len(whole)),))

    def _cut(self, whole: Document, plain: bool, counts: dict[str, int]) -> Iterator[Document]:
        """The documents of a record; one of n tokens fills n - 1 slots of a row: its last token is only a target.

        The bytes of a record of which only parts are used are shared out by their numbers of targets.
        """
        tokens, most = whole.tokens, self.length + 1
        each = whole.size / max(targets_in(tokens), 1)
        if plain:
            starts = range(0, max(len(tokens) - 1, 1), self.length)
            parts = [tokens[start : start + most] for start in starts if len(tokens) - start > 1]
            yield from (Document(part, each * targets_in(part)) for part in parts)
            return
        if len(tokens) > most:
            counts["too_long"] += 1
            tokens = tokens[:most]
            if self.too_long == "skip":
                return
        if targets_in(tokens):
            yield Document(tokens, each * targets_in(tokens))
        elif len(tokens) < most:
            counts["empty"] += 1
