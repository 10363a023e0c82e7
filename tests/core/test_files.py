"""Small files on a full disk."""

import errno
from pathlib import Path

import pytest

from dtrain.core.files import overwrite, update


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """No file can be created or grow: the disk is full."""

    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", refused)


@pytest.mark.usefixtures("full")
def test_a_full_disk_leaves_a_file_as_it_is_or_updates_it_within_its_blocks(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(b'{"state": "running", "step": 3000}\n')
    with pytest.raises(OSError, match="No space"):
        overwrite(path, "{}")
    assert path.read_bytes() == b'{"state": "running", "step": 3000}\n'
    for text in ('{"state": "failed", "reason": "No space left on device"}\n', "{}\n"):
        update(path, text)
        assert path.read_bytes().decode() == text


@pytest.mark.usefixtures("full")
def test_a_file_that_would_need_another_block_is_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(b"{}\n")
    with pytest.raises(OSError, match="No space"):
        update(path, "x" * (path.stat().st_blocks * 512 + 1))
    assert path.read_bytes() == b"{}\n"
    with pytest.raises(OSError, match="No space"):
        update(tmp_path / "new.json", "{}\n")
    assert not list(tmp_path.glob("new*"))
