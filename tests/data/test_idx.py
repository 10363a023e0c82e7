import gzip
import http.server
import struct
import threading
import tracemalloc
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from dtrain.core.errors import DataError
from dtrain.data.idx import FILES, IDX, read


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def write(folder: Path, count: int = 12, classes: int = 10) -> None:
    draw = np.random.default_rng(0)
    for images, labels in FILES.values():
        (folder / images).write_bytes(idx(draw.integers(0, 256, (count, 5, 4), np.uint8)))
        (folder / f"{labels}.gz").write_bytes(gzip.compress(idx(draw.integers(0, classes, count).astype(np.uint8))))


def test_both_plain_and_packed_files_are_read(tmp_path: Path) -> None:
    write(tmp_path)
    data = IDX(root=str(tmp_path), download=False)
    source = data.open("train")
    assert source.example == data.example()
    assert source.rows(np.array([3, 1]))["image"].shape == (2, 5, 4, 1)
    assert source.fingerprint != data.open("test").fingerprint


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not an IDX file: it has 0 bytes"),
        (b"PK\3\4whatever", "not an IDX file: it begins with 50 4b 03 04, not with 00 00"),
        (b"\0\0\x0d\1" + b"\0\0\0\1" + b"\0" * 4, "IDX type 13"),
        (b"\0\0\x08\3\0\0\0\1", "ends within its header"),
        (idx(np.zeros((2, 5, 4), np.uint8))[:-1], "declares 2 x 5 x 4 = 40 bytes, but 39 follow"),
        (idx(np.zeros((2, 5, 4), np.uint8)) + b"\0", "declares 2 x 5 x 4 = 40 bytes, but more follow"),
        (b"\0\0\x08\xff" + b"\0\0\0\1" * 255 + b"\0", "an array of 255 dims; 1 to 4 are supported"),
        (b"\0\0\x08\0\0", "an array of 0 dims"),
        (b"\0\0\x08\4" + b"\xff" * 16, "declares 4294967295 x .* bytes, but 0 follow"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "images"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        read(path)
    assert str(path) in caught.value.message


def test_a_damaged_gzip_is_named(tmp_path: Path) -> None:
    path = tmp_path / "images.gz"
    for content in (gzip.compress(idx(np.zeros((2, 5, 4), np.uint8)))[:-9], b"no gzip at all"):
        path.write_bytes(content)
        with pytest.raises(DataError, match="cannot be read") as caught:
            read(path)
        assert str(path) in caught.value.message


def test_a_small_gzip_is_not_unpacked_beyond_the_size_in_its_header(tmp_path: Path) -> None:
    path = tmp_path / "images.gz"
    path.write_bytes(gzip.compress(idx(np.zeros((2, 5, 4), np.uint8)) + bytes(2**26)))
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="declares 2 x 5 x 4 = 40 bytes, but more follow"):
            read(path)
        assert tracemalloc.get_traced_memory()[1] < 2**22
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("images", "labels", "message"),
    [
        ((12, 0, 0), (12,), "the images are empty: 0 x 0"),
        ((12, 5), (12,), "images have 2 dims"),
        ((12, 5, 4), (12, 1), "labels have 2 dims"),
        ((0, 5, 4), (0,), "contain no example"),
    ],
)
def test_arrays_of_other_shapes_are_refused(
    tmp_path: Path, images: tuple[int, ...], labels: tuple[int, ...], message: str
) -> None:
    for name, shape in zip(FILES["train"], (images, labels), strict=True):
        (tmp_path / name).write_bytes(idx(np.zeros(shape, np.uint8)))
    with pytest.raises(DataError, match=message):
        IDX(root=str(tmp_path)).open("train")


def test_other_labels_are_other_data(tmp_path: Path) -> None:
    write(tmp_path)
    before = IDX(root=str(tmp_path)).open("train").fingerprint
    (tmp_path / f"{FILES['train'][1]}.gz").write_bytes(gzip.compress(idx(np.zeros(12, np.uint8))))
    assert IDX(root=str(tmp_path)).open("train").fingerprint != before


def test_labels_must_fit_the_classes_and_the_images(tmp_path: Path) -> None:
    write(tmp_path, classes=10)
    with pytest.raises(DataError, match="with 3 classes; labels count from 0"):
        IDX(root=str(tmp_path), classes=3).open("train")
    (tmp_path / FILES["train"][0]).write_bytes(idx(np.zeros((3, 5, 4), np.uint8)))
    with pytest.raises(DataError, match="3 images but 12 labels"):
        IDX(root=str(tmp_path)).open("train")


def test_the_hint_for_missing_files_explains_how_to_provide_them(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        IDX(root=str(tmp_path), download=False).open("train")
    assert "t10k-labels-idx1-ubyte.gz" in caught.value.hint


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A folder served by HTTP on this machine only."""
    folder = tmp_path / "mirror"
    folder.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield folder, f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.slow
def test_the_files_are_fetched_and_checked_by_content(tmp_path: Path, mirror: tuple[Path, str], mnist: Path) -> None:
    folder, address = mirror
    for images, labels in FILES.values():
        for name in (images, labels):  # compressed again: other bytes, the same content
            content = gzip.decompress((mnist / f"{name}.gz").read_bytes())
            (folder / f"{name}.gz").write_bytes(gzip.compress(content, 1))
    root = tmp_path / "root"
    fetched = IDX(root=str(root), mirrors=(f"{address}/nowhere", address)).open("test")
    assert len(fetched) == 10_000
    assert {path.name for path in root.iterdir()} == {f"{name}.gz" for name in FILES["test"]}


def test_what_is_not_mnist_is_not_kept(tmp_path: Path, mirror: tuple[Path, str]) -> None:
    folder, address = mirror
    name = FILES["train"][0]
    (folder / f"{name}.gz").write_bytes(gzip.compress(b"something else"))
    with pytest.raises(DataError, match="the content has sha256") as caught:
        IDX(root=str(tmp_path / "root"), mirrors=(address,)).open("train")
    assert "without a network, put" in caught.value.hint
    assert not (tmp_path / "root").exists()


def test_the_real_files_are_read(mnist: Path) -> None:
    train, test = (IDX(root=str(mnist), download=False).open(split) for split in ("train", "test"))
    assert (len(train), len(test)) == (60_000, 10_000)
    assert np.bincount(test.rows(np.arange(10_000))["label"]).tolist() == [
        980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009
    ]  # fmt: skip
