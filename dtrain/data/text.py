"""Rows of tokens from text files, which are tokenised once into a cache; its file name is a hash of all inputs."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from dtrain.core.errors import DataError
from dtrain.core.types import Fraction, Positive
from dtrain.data.batch import Example
from dtrain.data.data_check import SPLITS, TEXT_BYTES, DataCheck
from dtrain.data.digest_cache import NO_CACHE, cached_by_file, file_digest
from dtrain.data.files import address_packages, resolve_files
from dtrain.data.guess import Guess, split_files
from dtrain.data.paths import refuse_suffix
from dtrain.data.picture_folder import has_pictures
from dtrain.data.source import Load, Source, Split, Unaugmented
from dtrain.data.stream import InMemory, Stream
from dtrain.data.tokenise import FileGroup, Tokenised, TokenisedFiles, grouped_files
from dtrain.data.tokenizer import BYTES, Tokenizer, open_tokenizer, packages_of
from dtrain.data.tokens import held_out, windows
from dtrain.data.windows import row_example

TEXTS = (".txt", ".md", ".text")
LENGTH = 128
"""Tokens of a row that `dtrain new` writes."""
TOGETHER, PARTS = 50_000, 100
"""Tokens that are decoded together to measure how many bytes a token has, and the most such parts, of which all take
about two seconds."""
_RECORDS = "the records would be trained on as raw text: extract their text to .txt files"
_PACKED = "unpack it first"
_TOKENS = "for tokens, set data.kind to tokens"
FORMATS = {
    **dict.fromkeys((".json", ".jsonl", ".ndjson", ".parquet", ".arrow", ".feather"), _RECORDS),
    **dict.fromkeys((".tfrecord", ".array_record", ".sqlite"), _RECORDS),
    **dict.fromkeys((".pdf", ".docx", ".epub"), "convert it to .txt first"),
    **dict.fromkeys((".gz", ".bz2", ".xz", ".zst", ".lz4", ".zip", ".tar", ".tgz", ".7z"), _PACKED),
    **dict.fromkeys((".npy", ".npz", ".bin"), _TOKENS),
}


@dataclass(frozen=True, kw_only=True)
class Text(Unaugmented):
    """Rows of tokens from text files."""

    keeps: ClassVar[str] = "tokens"
    kind: Literal["text"] = "text"
    files: tuple[str, ...]
    """Files, globs or addresses (gs://, s3://); {dtrain} is replaced by the folder of the installed dtrain package."""
    length: Positive
    """Tokens per row."""
    tokenizer: str = "bytes"
    """"bytes", or the path of a tokenizer.json or of a folder that contains one."""
    test: Fraction = 0.1
    """Fraction of the text, at its end, that is held out for testing."""
    test_files: tuple[str, ...] = ()
    """Files for testing; if set, no part of `files` is held out."""
    random: bool = True
    """Training rows start at random positions, with replacement; if false, the text is cut into consecutive rows, each
    used once per epoch."""
    pack: bool = False
    """Treat every file as a document, and let tokens attend only to tokens of the same document."""
    end: str = "<|endoftext|>"
    """Token that ends a document, used with `pack`; with the tokenizer "bytes" it is always 0."""
    cache: str = "~/.cache/dtrain"
    """Folder for cached tokens and digests of files."""
    load: Load = field(default_factory=Load)

    @classmethod
    def guesses(cls, path: Path) -> Iterator[Guess]:
        files, testing = split_files(path, TEXTS, below=True)
        if not files or (path.is_dir() and has_pictures(path)):  # notes beside pictures
            return
        size = sum(Path(name).stat().st_size for name in (*files, *testing))
        section: dict[str, Any] = {"files": files, "length": max(8, min(LENGTH, size // 20))}
        section |= {"test_files": testing} if testing else {}
        several = f" in {len(files) + len(testing)} files" if len(files) + len(testing) > 1 else ""
        comments = {"length": "bytes in a row: without `tokenizer`, each byte is a token"}
        yield Guess(f"{size:,} bytes of text{several}", section, "--kind text", comments)

    @property
    def tokenized(self) -> bool:
        return True

    def tokenises(self) -> Iterator[Tokenised]:
        yield Tokenised(self.tokenizer, self.files, self.cache, records=False)

    @property
    def ends_texts(self) -> bool:
        return self.pack

    @property
    def end_text(self) -> str:
        return self.end if self.pack else ""

    @property
    def packages(self) -> tuple[str, ...]:
        return (*packages_of(self.tokenizer), *address_packages((*self.files, *self.test_files)))

    def example(self) -> Example:
        return row_example(self.length, self.pack)

    def open(self, split: Split) -> Source:
        files, tokenizer = self._files(split), self.open_tokenizer()
        separator = self._separator(tokenizer)
        stream = self._whole(files).tokens()
        if not self.test_files:
            stream = held_out(stream, self.test, split)
        label = str(files[0]) if len(files) == 1 else f"one of {files[0]} and {len(files) - 1} more files"
        random = self.random and split == "train"
        rows = windows([label], [stream], self.length, random, separator, split, self.cache)
        if split == "train":
            return rows
        keeps = _keeps(tokenizer, files[0])
        size = _bytes_per_token(stream, tokenizer, separator) if keeps else self._file_bytes(files)
        return replace(rows, text_bytes=size)

    @property
    def has_examples(self) -> bool:
        return bool(self.files)

    def in_order(self) -> "Text":
        return replace(self, random=False)

    def without_cache(self) -> "Text":
        return replace(self, cache=NO_CACHE)

    def inspect(self, check: DataCheck) -> None:
        files = check.files(self.files, self.test_files, "text")
        works = check.tokenizer(self, self.end_text)
        check.examples["train"] = self.example()
        if not (files and works):
            return
        if self.tokenizer != BYTES:
            check.not_checked.append("data: the number of tokens in the text, and the largest token")
        elif not check.too_large(f"the text of {len(files)} files", files, TEXT_BYTES):
            self._read_bytes(check)

    def _read_bytes(self, check: DataCheck) -> None:
        """Read the bytes of the text as the run's tokens, without the cache that a run writes."""
        separator = 0 if self.pack else None
        for split in SPLITS:
            files = resolve_files(self.test_files if split == "test" and self.test_files else self.files, "text")
            ending = b"" if separator is None else b"\0"
            stream: Any = InMemory(np.frombuffer(b"".join(path.read_bytes() + ending for path in files), np.uint8))
            stream = stream if self.test_files else held_out(stream, self.test, split)
            random = self.random and split == "train"
            try:
                check.take(split, windows([str(files[0])], [stream], self.length, random, separator, split, NO_CACHE))
            except DataError as error:
                check.refuse("data.length", error)

    def open_tokenizer(self) -> Tokenizer:
        """The tokenizer; DataError if it does not exist."""
        return open_tokenizer(self.tokenizer)

    def file_groups(self, split: Split) -> list[FileGroup]:
        """What `data prepare` can make ahead."""
        return self._whole(self._files(split)).missing()

    def _files(self, split: Split) -> list[Path]:
        names = self.test_files if split == "test" and self.test_files else self.files
        files = resolve_files(names, "text", cache=self.cache)
        for file in files:
            refuse_suffix(file, "text", FORMATS)
        return files

    def _separator(self, tokenizer: Tokenizer) -> int | None:
        return tokenizer.token_id(self.end) if self.pack else None

    def _whole(self, files: list[Path]) -> TokenisedFiles:
        """The tokens of all files, from the cache if it has them."""
        digests, tokenizer = cached_by_file(self.cache, "text", files, file_digest), self.open_tokenizer()
        separator = self._separator(tokenizer)

        def name(numbers: Sequence[int]) -> str:
            own = [digests[number] for number in numbers]
            return hashlib.sha256("\n".join([tokenizer.key, str(separator), *own]).encode()).hexdigest()[:24]

        whole, groups = name(range(len(files))), []
        for numbers in grouped_files(files):
            own = [(files[number], digests[number]) for number in numbers]
            size = sum(file.stat().st_size for file, _ in own)
            groups.append(FileGroup(self.cache, f"part-{whole}-{name(numbers)}", partial(self._made, own), size))
        return TokenisedFiles(self.cache, whole, groups, _joined)

    def _file_bytes(self, files: Sequence[Path]) -> float:
        """Bytes of text for each token of the files, for a tokenizer whose tokens do not give the text again."""
        return sum(file.stat().st_size for file in files) / max(len(self._whole(list(files)).tokens()), 1)

    def _made(self, files: Sequence[tuple[Path, str]]) -> Iterator[np.ndarray]:
        tokenizer = self.open_tokenizer()
        paths, digests = [path for path, _ in files], [digest for _, digest in files]
        return _tokens(paths, digests, tokenizer, self._separator(tokenizer))


def _keeps(tokenizer: Tokenizer, file: Path) -> bool:
    """Whether tokens become as many bytes as the text had that they were made of, at the begin of a file."""
    if tokenizer.key == BYTES:
        return True
    with file.open("rb") as opened:
        text = opened.read(KEPT).decode(errors="ignore")
    decoded = tokenizer.decode(tokenizer.encode(text.encode()).tolist())
    return abs(len(decoded.encode()) - len(text.encode())) <= 1  # some decoders leave out the first space


KEPT = 2**14
"""Bytes of text with which a tokenizer is tried."""


def _joined(parts: Sequence[Stream]) -> Iterator[np.ndarray]:
    return (part.tokens for part in parts)


def _bytes_per_token(stream: Stream, tokenizer: Tokenizer, separator: int | None) -> float:
    """Bytes of text for each predicted token of a stream, as a whole or in parts that are spread evenly over it.

    A separator is predicted and has no text; the first token of a document, or of a text without separators, is not
    predicted (see `windows`).
    """
    if separator is None and tokenizer.key == BYTES:
        return 1.0
    starts = np.arange(0, len(stream), TOGETHER)
    chosen = starts[np.unique(np.linspace(0, len(starts) - 1, min(len(starts), PARTS)).astype(int))]
    counts = [_predicted(stream.tokens[start : start + TOGETHER], tokenizer, separator) for start in chosen]
    text, tokens = np.sum(counts, axis=0) if counts else (0, 0)
    return float(text) / max(int(tokens), 1)


def _predicted(tokens: np.ndarray, tokenizer: Tokenizer, separator: int | None) -> tuple[int, int]:
    """Bytes and number of the tokens of a part that are predicted; its first one counts as that of a document."""
    ends = np.flatnonzero(tokens == separator) if separator is not None else np.empty(0, np.int64)
    documents = [part[part != separator].tolist() for part in np.split(tokens, ends + 1)]
    text = sum(_size(tokenizer, document) - _size(tokenizer, document[:1]) for document in documents)
    begins = np.concatenate([[0], ends + 1])
    return text, len(tokens) - int((begins < len(tokens)).sum())


def _size(tokenizer: Tokenizer, tokens: list[int]) -> int:
    return len(tokens) if tokenizer.key == BYTES else len(tokenizer.decode(tokens).encode())


def _tokens(
    files: Sequence[Path], digests: Sequence[str], tokenizer: Tokenizer, separator: int | None
) -> Iterator[np.ndarray]:
    """Yield the tokens of each file, followed by the separator if there is one."""
    tokenizer.encode(b"")  # report an invalid tokenizer here, where the message does not name a text file
    for path, digest in zip(files, digests, strict=True):
        try:
            text = path.read_bytes()
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from error
        if hashlib.sha256(text).hexdigest() != digest:
            hint = "run the same command again when no other program writes to the file"
            raise DataError(f"{path}: changed while it was read", hint)
        try:
            tokens = tokenizer.encode(text)
        except DataError as error:
            raise DataError(f"{path}: {error.message}", error.hint) from error
        yield tokens
        if separator is not None:
            yield np.array([separator], tokens.dtype)
