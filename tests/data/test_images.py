import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dtrain.core.errors import DataError
from dtrain.data import image_files
from dtrain.data.batches import refuse_changed
from dtrain.data.image_files import ImageFiles
from dtrain.data.images import Images


def picture(path: Path, shade: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((6, 9, 3), shade, np.uint8)).save(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "pets"
    for i in range(20):
        picture(root / "cat" / f"{i}.png", 10)
        picture(root / "dog" / f"{i}.jpg", 200)
    (root / "cat" / "notes.txt").write_text("no image")
    return root


def test_a_folder_for_each_class(folder: Path) -> None:
    data = Images(root=str(folder), size=(4, 5), test=0.25)
    train, test = data.open("train"), data.open("test")
    assert len(train) + len(test) == 40
    assert len(test) > 2
    assert train.example["label"].values == 2
    rows = train.rows(np.arange(len(train)))
    assert rows["image"].shape == (len(train), 4, 5, 3)
    shades = rows["image"].astype(int).mean((1, 2, 3)).round()
    assert set(zip(rows["label"].tolist(), shades.tolist(), strict=True)) == {(0, 10.0), (1, 200.0)}


def test_a_zip_holds_the_same(folder: Path, tmp_path: Path) -> None:
    packed = tmp_path / "pets.zip"
    with zipfile.ZipFile(packed, "w") as file:
        for path in sorted(folder.rglob("*.*")):
            file.write(path, path.relative_to(folder))
    plain, zipped = (Images(root=str(root), size=(4, 4)).open("train") for root in (folder, packed))
    index = np.arange(len(plain))
    for name, value in plain.rows(index).items():
        assert np.array_equal(zipped.rows(index)[name], value)


def test_split_folders_are_used_where_they_are(tmp_path: Path) -> None:
    for split, count in (("train", 3), ("val", 2)):
        for i in range(count):
            picture(tmp_path / split / "a" / f"{i}.png", 1)
            picture(tmp_path / split / "b" / f"{i}.png", 2)
    data = Images(root=str(tmp_path), size=(2, 2))
    assert (len(data.open("train")), len(data.open("test"))) == (6, 4)


def test_adding_files_moves_none_between_the_splits(folder: Path) -> None:
    data = Images(root=str(folder), size=(2, 2), test=0.3, cache=str(folder.parent / "cache"))
    before = {file.path for file in data.open("test").files}  # pyright: ignore[reportAttributeAccessIssue]
    picture(folder / "ant" / "new.png", 3)
    after = {file.path for file in data.open("test").files}  # pyright: ignore[reportAttributeAccessIssue]
    assert before <= after


def test_the_hint_for_missing_and_empty_folders_describes_the_layout(tmp_path: Path) -> None:
    for root, message in ((tmp_path / "nowhere", "does not exist"), (tmp_path, "no image in a class folder")):
        with pytest.raises(DataError, match=message) as caught:
            Images(root=str(root), size=(2, 2)).open("train")
        assert "one folder per class" in caught.value.hint


@pytest.mark.parametrize("content", [b"", b"no image at all"])
def test_a_corrupt_image_is_named(folder: Path, content: bytes) -> None:
    broken = folder / "cat" / "3.png"
    broken.write_bytes(content)
    with pytest.raises(DataError, match="cannot be read as an image") as caught:
        Images(root=str(folder), size=(2, 2), test=0.0).open("train")
    assert "cat/3.png" in caught.value.message


def test_a_cut_off_image_and_a_damaged_zip_are_named(folder: Path, tmp_path: Path) -> None:
    broken = folder / "dog" / "3.jpg"
    broken.write_bytes(broken.read_bytes()[:200])
    with pytest.raises(DataError, match=r"3\.jpg: cannot be read"):
        Images(root=str(folder), size=(2, 2), test=0.0).open("train")
    (tmp_path / "x.zip").write_bytes(b"PK nothing")
    with pytest.raises(DataError, match=r"x\.zip: cannot be read as a zip"):
        Images(root=str(tmp_path / "x.zip"), size=(2, 2)).open("train")


def images(root: Path, **more: Any) -> Images:
    options = {"root": str(root), "size": (2, 2), "test": 0.0, "cache": str(root.parent / "cache")}
    return Images(**(options | more))


def refused(data: Images, message: str) -> DataError:
    with pytest.raises(DataError, match=message) as caught:
        source = data.open("train")
        source.rows(np.arange(len(source)))
    return caught.value


def test_only_the_formats_of_images_are_decoded_whatever_the_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path}/called\n")
    (tmp_path / "bin" / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    (tmp_path / "eps" / "a").mkdir(parents=True)
    (tmp_path / "eps" / "a" / "x.png").write_text(
        "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n%%EOF\n"
    )
    refused(images(tmp_path / "eps"), r"eps/a/x\.png: cannot be read as an image")
    assert not (tmp_path / "called").exists()


def test_an_image_of_too_many_pixels_is_not_decoded(tmp_path: Path) -> None:
    for number, side in enumerate((8_200, 12_000, 60_000)):  # Pillow warns of the second and refuses the third
        path = tmp_path / str(number) / "a" / "x.ppm"
        path.parent.mkdir(parents=True)
        path.write_bytes(f"P6 {side} {side} 255\n".encode())
        refused(images(tmp_path / str(number)), r"x\.ppm: ")


def test_values_of_more_than_8_bits_are_refused(tmp_path: Path) -> None:
    (tmp_path / "set" / "a").mkdir(parents=True)
    Image.fromarray(np.full((4, 4), 40_000, np.uint16)).save(tmp_path / "set" / "a" / "x.png")
    refused(images(tmp_path / "set"), r"x\.png: has more than 8 bits per value")


def zipped(path: Path, change: Callable[[bytearray], None]) -> Images:
    picture(path.with_suffix(".png"), 7)
    with zipfile.ZipFile(path, "w") as file:
        file.write(path.with_suffix(".png"), "a/x.png")
    content = bytearray(path.read_bytes())
    change(content)
    path.write_bytes(content)
    return images(path)


def both_headers(content: bytearray, local: int, value: int) -> None:
    """Set a byte in a file's local header and, two bytes later, in its entry of the zip directory."""
    content[local] = value
    content[content.index(b"PK\1\2") + local + 2] = value


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: both_headers(content, 6, 1), r"x\.png: cannot be read as an image: .*encrypted"),
        (lambda content: both_headers(content, 8, 99), r"x\.png: cannot be read as an image: .*compression"),
        (lambda content: both_headers(content, 8, 8), r"x\.png: cannot be read as an image: Error -3"),
        (lambda content: both_headers(content, 8, 14), r"x\.png: cannot be read as an image"),
        (lambda content: content.__setitem__(content.index(b"IEND") - 1, 9), r"x\.png: cannot be read .*CRC-32"),
        (lambda content: content.__setitem__(content.index(b"PK\1\2") + 6, 99), r"cannot be read as a zip: .*version"),
    ],
    ids=["encrypted", "unknown compression", "no deflate", "no lzma", "flipped", "version"],
)
def test_a_damaged_or_encrypted_zip_is_refused(
    tmp_path: Path, change: Callable[[bytearray], None], message: str
) -> None:
    refused(zipped(tmp_path / "x.zip", change), message)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_zip_that_holds_a_name_twice_is_refused(tmp_path: Path) -> None:
    picture(tmp_path / "x.png", 7)
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as file:
        for _ in range(2):
            file.write(tmp_path / "x.png", "a/x.png")
    refused(images(tmp_path / "x.zip"), r"contains a/x\.png 2 times")


@pytest.mark.parametrize("kind", ["folder", "zip"])
def test_other_pixels_in_files_of_the_same_size_are_other_data(tmp_path: Path, kind: str) -> None:
    found, root = [], tmp_path / ("set.zip" if kind == "zip" else "set")
    for shade in (1, 2, 1):
        picture(tmp_path / "set" / "a" / "x.bmp", shade)
        os.utime(tmp_path / "set" / "a" / "x.bmp", (10**9, 10**9))
        if kind == "zip":
            with zipfile.ZipFile(root, "w") as file:
                file.write(tmp_path / "set" / "a" / "x.bmp", "a/x.bmp")
        found.append(images(root).open("train").fingerprint)
    assert found[0] == found[2] != found[1]


def test_small_pictures_are_decoded_once_and_many_are_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[str] = []
    before = image_files.decoded
    monkeypatch.setattr(image_files, "decoded", lambda where, *how: found.append(where) or before(where, *how))
    source = Images(root=str(folder), size=(4, 5)).open("train")
    first, again = (source.rows(np.arange(len(source))) for _ in range(2))
    np.testing.assert_array_equal(first["image"], again["image"])
    assert len(found) == len(set(found)) == len(source)
    monkeypatch.setattr(image_files, "KEPT", 0)
    other = Images(root=str(folder), size=(4, 5)).open("train")
    for _ in range(2):
        np.testing.assert_array_equal(other.rows(np.arange(len(other)))["image"], first["image"])
    assert len(found) == 3 * len(source)


def test_an_image_that_is_replaced_during_a_run_is_named(folder: Path, tmp_path: Path) -> None:
    source = images(folder).open("train")
    source.rows(np.arange(3))
    path = folder / "cat" / "0.png"
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(DataError, match=r"cat/0\.png: was modified or replaced"):
        source.rows(np.arange(len(source)))
    data = zipped(tmp_path / "x.zip", lambda _: None)
    source = data.open("train")
    (tmp_path / "x.zip").write_bytes((tmp_path / "x.zip").read_bytes()[:-9])
    with pytest.raises(DataError, match=r"x\.zip: was modified or replaced"):
        refuse_changed(source)


def test_classes_keep_their_names_and_hidden_files_are_none(folder: Path) -> None:
    picture(folder / ".thumbnails" / "a.png", 1)
    picture(folder / "__MACOSX" / "a.png", 1)
    picture(folder / "cat" / "._1.png", 1)
    source = images(folder).open("train")
    assert isinstance(source, ImageFiles)
    assert source.class_names == ("cat", "dog")
    assert len(source) == 40


def test_linked_folders_are_classes_and_circles_are_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "cats").symlink_to(folder / "cat")
    assert len(images(tmp_path / "linked").open("train")) == 20
    (folder / "cat" / "again").symlink_to(folder)
    refused(images(folder), "cat/again: is a link to a folder that contains it")


def test_draft_decodes_large_jpeg_files_at_a_fraction_of_their_size(tmp_path: Path) -> None:
    x, y = np.meshgrid(np.arange(640), np.arange(480))
    smooth = np.stack([127 + 120 * np.sin(x / 90), 127 + 120 * np.cos(y / 70), (x + y) / 5], axis=-1).astype(np.uint8)
    for name in ("a/large.jpg", "a/large.png", "b/small.jpg"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        size = (70, 60) if "small" in name else (640, 480)
        Image.fromarray(smooth).resize(size).save(tmp_path / "in" / name)
    exact, fast = (images(tmp_path / "in", size=(48, 64), draft=draft).open("train") for draft in (False, True))
    assert exact.fingerprint != fast.fingerprint
    names = [Path(file.path).name for file in fast.files]  # pyright: ignore[reportAttributeAccessIssue]
    ours, drafted = (source.rows(np.arange(3))["image"].astype(int) for source in (exact, fast))
    for name, one, other in zip(names, ours, drafted, strict=True):
        difference = abs(one - other)
        assert difference.max() <= 12
        assert (difference.max() > 0) == (name == "large.jpg")  # the others have no smaller size that is large enough
    with Image.open(
        tmp_path / "in/a/large.jpg"
    ) as image:  # by libjpeg at 1/8 of the size, which Pillow leaves as it is
        image.draft("RGB", (64, 48))
        assert image.size == (80, 60)
        row = drafted[names.index("large.jpg")]
        assert np.array_equal(row, np.asarray(image.resize((64, 48)), int))
