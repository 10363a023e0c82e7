"""Appended text is readable at once, does not wait for a sync, and is synced on a schedule."""

import os
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from dtrain.core.errors import EnvironmentFault
from dtrain.track import appender
from dtrain.track.appender import Appender
from tests.waiting import until


@contextmanager
def blocked_sync(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Each sync sets the first event when it begins, and waits for the second."""
    began, proceed = threading.Event(), threading.Event()

    def fsync(_handle: int) -> None:
        began.set()
        assert proceed.wait(20)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        yield began, proceed
        proceed.set()


def test_a_write_is_readable_at_once_and_does_not_wait_for_a_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows"
    with blocked_sync(monkeypatch) as (began, proceed), closing(Appender(path, pytest.fail, every=0.01)) as file:
        file.write("one\n")
        assert path.read_text() == "one\n"
        assert began.wait(20)
        file.write("two\n")
        file.write("three\n")
        assert path.read_text() == "one\n"
        proceed.set()
        file.sync()
        assert path.read_text() == "one\ntwo\nthree\n"


def test_what_many_threads_write_is_whole_and_in_their_order(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    with closing(Appender(path, pytest.fail, every=0.001)) as file:
        writers = [
            threading.Thread(target=lambda name=name: [file.write(f"{name} {n}\n") for n in range(300)])
            for name in "abc"
        ]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
        # the thread that synced writes the queued text
        until(lambda: len(path.read_text().splitlines()) >= 900)
        rows = path.read_text().splitlines()
    assert len(rows) == 900
    for name in "abc":
        assert [row for row in rows if row[0] == name] == [f"{name} {n}" for n in range(300)]


def test_nothing_new_is_not_synced_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    done = threading.Event()
    monkeypatch.setattr(os, "fsync", lambda handle: (synced.append(handle), done.set()))
    with closing(Appender(tmp_path / "rows", pytest.fail, every=0.01)) as file:
        file.write("one\n")
        assert done.wait(20)
        assert not threading.Event().wait(0.2)
        assert len(synced) == 1


def test_a_sync_that_fails_is_reported_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output, again = [], threading.Event()

    def fsync(_handle: int) -> None:
        if not output:
            raise OSError(5, "Input/output error")
        again.set()

    monkeypatch.setattr(os, "fsync", fsync)
    with closing(Appender(tmp_path / "rows", output.append, every=0.01)) as file:
        file.write("one\n")
        assert again.wait(20)
    assert output == [f"could not sync {tmp_path / 'rows'} to disk: Input/output error"]


def test_a_file_system_that_is_gone_is_reported_by_the_next_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output, reported, stat = [], threading.Event(), os.fstat
    with closing(Appender(tmp_path / "rows", lambda text: (output.append(text), reported.set()), every=0.01)) as file:
        own = file._file.fileno()

        def gone(handle: int) -> os.stat_result:
            if handle == own:
                raise OSError(107, "Transport endpoint is not connected")
            return stat(handle)

        monkeypatch.setattr(os, "fstat", gone)
        monkeypatch.setattr(os, "fsync", gone)
        file.write("one\n")
        assert reported.wait(20)
    assert set(output) == {f"could not sync {tmp_path / 'rows'} to disk: Transport endpoint is not connected"}


def test_a_queued_text_that_cannot_be_written_is_an_error_of_the_next_write(tmp_path: Path) -> None:
    with closing(Appender(tmp_path / "rows", lambda _: None)) as file:
        with Path("/dev/full").open("ab") as full:
            os.dup2(full.fileno(), file._file.fileno())
        with file._lock:
            file.write("one\n")
        with pytest.raises(EnvironmentFault, match=r"cannot write to .*rows: No space left on device"):
            file.write("two\n")


def test_the_larger_the_file_the_rarer_it_is_synced(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    with path.open("wb") as file:
        file.truncate(int(100 * appender.EVERY * appender.RATE))
    with closing(Appender(path, pytest.fail)) as large:
        assert large._pause() == 100 * appender.EVERY
    with closing(Appender(tmp_path / "new", pytest.fail)) as small:
        assert small._pause() == appender.EVERY
