"""Tokens of many files, made group by group: an interrupted start keeps the groups that are done, and several processes
can make them at once."""

import hashlib
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dtrain.core.errors import DataError, EnvironmentFault
from dtrain.core.files import atomic_write, file_lock
from dtrain.core.parent import exit_with_caller
from dtrain.data.digest_cache import file_stamp, read_sealed, write_sealed
from dtrain.data.paths import expand_path
from dtrain.data.stream import Part, Stream

Made = Iterable[Part]


def cached(cache: str, name: str, make: Callable[[], Made]) -> Stream:
    """The cached tokens with that name; created with `make` if they are missing or damaged.

    EnvironmentFault if the cache folder cannot be written.
    """
    path = cache_file(cache, name)
    stream = _verified(path, cache)
    if stream is None:
        try:
            with file_lock(path):
                stream = _verified(path, cache) or _create(path, cache, make())
        except OSError as error:
            hint = "set data.cache to a folder that you can write to"
            message = f"cannot write the token cache: {error.filename or path}: {error.strerror}"
            raise EnvironmentFault(message, hint) from error
    return stream


def cache_file(cache: str, name: str) -> Path:
    """The path of the cached tokens with that name."""
    return expand_path(cache) / f"tokens-{name}.bin"


def _verified(path: Path, cache: str) -> Stream | None:
    """The cached tokens if their size and digest are as written, else None."""
    metadata = read_sealed(path.with_suffix(".json"))
    if metadata is None or not path.is_file():
        return None
    try:
        stream = Stream(
            path,
            metadata["dtype"],
            0,
            metadata["count"],
            tuple(file_stamp(path)),
            derived=True,
            account=metadata.get("account", {}),
        )
        if stream.found[0] != len(stream) * np.dtype(stream.dtype).itemsize:
            return None
        return stream if stream.scanned(cache)["digest"] == metadata["digest"] else None
    except DataError:  # unreadable, or being replaced by another process
        return None


def _create(path: Path, cache: str, parts: Made) -> Stream:
    digest, count, dtype, account = hashlib.sha256(), 0, "uint8", {}
    for obstacle in (path, path.with_suffix(".json")):
        if obstacle.is_dir():
            obstacle.rmdir()
    with atomic_write(path) as file:
        for part in parts:
            if isinstance(part, dict):
                account = part
                continue
            written = np.ascontiguousarray(part)
            file.write(written.data)
            digest.update(written.data)
            count, dtype = count + len(part), part.dtype.str
    write_sealed(
        path.with_suffix(".json"), {"dtype": dtype, "count": count, "digest": digest.hexdigest(), "account": account}
    )
    stream = _verified(path, cache)
    if stream is None:
        message = f"{path}: its content differs from what was written"
        raise EnvironmentFault(message, "the disk may be damaged: set data.cache to a folder on another disk")
    return stream


GROUP = 16 * 2**20
"""Bytes of files that are tokenised together, at least, where there are more files."""


class Tokenised(NamedTuple):
    """Files whose texts a tokenizer makes into tokens."""

    tokenizer: str
    """As the recipe names it."""
    files: tuple[str, ...]
    cache: str
    records: bool = True
    """Whether they are files of records; else of plain text."""
    fields: tuple[str, ...] | None = None
    """The fields of the records that are texts; None: all."""


@dataclass(frozen=True)
class FileGroup:
    """The tokens of consecutive files, which a cache keeps until the tokens of all files are together."""

    cache: str
    name: str
    make: Callable[[], Made]
    """Can be pickled."""
    size: int
    """Bytes of the files."""

    def tokens(self) -> Stream:
        """The tokens, from the cache if it has them."""
        return cached(self.cache, self.name, self.make)

    def discard(self) -> None:
        """Delete the cached tokens."""
        path = cache_file(self.cache, self.name)
        for one in (path, path.with_suffix(".json"), path.with_suffix(".lock")):
            with suppress(OSError):
                one.unlink()


@dataclass(frozen=True)
class TokenisedFiles:
    """The tokens of all files."""

    cache: str
    name: str
    groups: Sequence[FileGroup]
    join: Callable[[Sequence[Stream]], Made]
    """The content of the cache from that of the groups."""

    def tokens(self) -> Stream:
        """The tokens, from the cache if it has them. The groups are deleted then."""
        if len(self.groups) == 1:
            return cached(self.cache, self.name, self.groups[0].make)
        stream = cached(self.cache, self.name, lambda: self.join([group.tokens() for group in self.groups]))
        for group in self.groups:
            group.discard()
        return stream

    def missing(self) -> list[FileGroup]:
        """The groups to make; none if the cache has the whole, or if there is only one."""
        path = cache_file(self.cache, self.name)
        return [] if path.is_file() or len(self.groups) == 1 else list(self.groups)


def grouped_files(files: Sequence[Path]) -> list[list[int]]:
    """The numbers of consecutive files that are tokenised together."""
    found: list[list[int]] = []
    size = GROUP
    for number, file in enumerate(files):
        if size >= GROUP:
            found.append([])
            size = 0
        found[-1].append(number)
        size += file.stat().st_size
    return found


def tokenise_in_processes(
    groups: Sequence[FileGroup], jobs: int, stopping: Callable[[], None] = lambda: None
) -> Iterator[FileGroup]:
    """Make the groups in so many processes, and yield each when the cache has it. Raises what a process failed with.

    `stopping` is called when that, or Ctrl-C, ends it early, before it waits for the processes to end.
    """
    pool = ProcessPoolExecutor(min(jobs, len(groups)), get_context("spawn"), initializer=_quiet)
    try:
        waiting = {pool.submit(_made, group): group for group in groups}
        for done in as_completed(waiting):
            done.result()
            yield waiting[done]
    except BrokenProcessPool as error:
        hint = "it may have needed more memory than there is: use fewer --jobs"
        raise EnvironmentFault("a process that tokenised files was killed", hint) from error
    except BaseException:
        stopping()
        for process in active_children():
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _quiet() -> None:
    """In a process of the pool: leave Ctrl-C to the command, and end with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    exit_with_caller()


def _made(group: FileGroup) -> None:
    try:
        group.tokens()
    except SystemExit:  # the unfinished file is deleted by now; the pool would take the next group
        os._exit(1)
