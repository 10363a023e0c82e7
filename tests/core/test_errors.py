"""The mapping from exceptions to exit codes, with the operating system's error message."""

import errno
from pathlib import Path

import pytest

from dtrain.core.errors import DataError, NotFinite, cause, lost_connection, user_error

FULL = (
    'RESOURCE_EXHAUSTED: Error writing "a" in OCDBT database at local file "/r/": Failed to write 9166 bytes to '
    "file 6: No space left on device [os_error_code='28']"
)


def raised_from(error: BaseException, origin: BaseException) -> BaseException:
    error.__cause__ = origin
    return error


@pytest.mark.parametrize(
    "code", ["ENOSPC", "EACCES", "EROFS", "ENOENT", "EISDIR", "ENOTDIR", "ELOOP", "ENAMETOOLONG", "EMFILE", "EIO"]
)
def test_what_the_operating_system_refuses_is_a_fault_of_the_machine(code: str) -> None:
    found = user_error(OSError(getattr(errno, code), "refused", "runs/a/log.txt"))
    assert found
    assert (found.exit_code, found.message.split(" (")[0]) == (3, "refused: runs/a/log.txt")


def test_the_reason_is_found_along_the_chain() -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    for error in (
        raised_from(ValueError("x" * 1000), full),
        ExceptionGroup("several", [RuntimeError("x"), full]),
        ValueError(FULL),
    ):
        found = user_error(error)
        assert found
        assert (found.exit_code, found.message) == (3, "No space left on device")
        assert "free some space" in found.hint


def test_a_cyclic_chain_of_causes_ends() -> None:
    one, two = RuntimeError("one"), RuntimeError("two")
    one.__cause__, two.__cause__ = two, one
    assert user_error(one) is None
    assert cause(one) == "one"


def test_what_is_known_stays_and_bugs_stay_bugs() -> None:
    known = DataError("x")
    assert user_error(known) is known
    assert user_error(KeyError("x")) is None
    assert user_error(OSError("no number")) is None
    assert user_error(raised_from(NotFinite("x"), OSError(errno.EIO, "x"))).exit_code == 7  # pyright: ignore[reportOptionalMemberAccess]


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        ("UNAVAILABLE: recvmsg:Connection reset by peer", True),
        ("UNAVAILABLE: Socket closed", True),
        ("UNAVAILABLE: x\nAdditional GRPC error information from remote target coordination_service: y", True),
        ("UNAVAILABLE: Error reading gs://bucket/x: HTTP 503", False),
        ("Gloo all-reduce failed: Connection closed by peer [127.0.0.1]:1", True),
        ("UNAVAILABLE: TPU backend not found", False),
        ("INTERNAL: UNAVAILABLE: recvmsg:Connection reset by peer in the text of another error", False),
    ],
)
def test_a_lost_connection_to_another_process_is_told_from_a_bug(text: str, lost: bool) -> None:
    assert (lost_connection(RuntimeError(text)) is not None) == lost


def test_a_folder_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        (tmp_path / "moved" / "run.json").write_text("")
    assert cause(caught.value).endswith("run.json (its folder no longer exists: it was moved or deleted)")
