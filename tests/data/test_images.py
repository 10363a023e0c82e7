import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dtrain.data.images import Images
from dtrain.errors import DataError


def picture(path: Path, shade: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((6, 9, 3), shade, np.uint8)).save(path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "pets"
    for i in range(20):
        picture(root / "cat" / f"{i}.png", 10)
        picture(root / "dog" / "deep" / f"{i}.jpg", 200)
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
    data = Images(root=str(folder), size=(2, 2), test=0.3)
    before = {path for path, _, _ in data.open("test").files}  # pyright: ignore[reportAttributeAccessIssue]
    picture(folder / "ant" / "new.png", 3)
    after = {path for path, _, _ in data.open("test").files}  # pyright: ignore[reportAttributeAccessIssue]
    assert before <= after


def test_missing_and_empty_folders_say_what_is_expected(tmp_path: Path) -> None:
    for root, message in ((tmp_path / "nowhere", "does not exist"), (tmp_path, "holds no image of a class")):
        with pytest.raises(DataError, match=message) as caught:
            Images(root=str(root), size=(2, 2)).open("train")
        assert "a folder for each class" in caught.value.hint


@pytest.mark.parametrize("content", [b"", b"no image at all"])
def test_a_corrupt_image_is_named(folder: Path, content: bytes) -> None:
    broken = folder / "cat" / "3.png"
    broken.write_bytes(content)
    source = Images(root=str(folder), size=(2, 2), test=0.0).open("train")
    with pytest.raises(DataError, match="cannot be read as an image") as caught:
        source.rows(np.arange(len(source)))
    assert "cat/3.png" in caught.value.message


def test_a_cut_off_image_and_a_damaged_zip_are_named(folder: Path, tmp_path: Path) -> None:
    broken = folder / "dog" / "deep" / "3.jpg"
    broken.write_bytes(broken.read_bytes()[:200])
    source = Images(root=str(folder), size=(2, 2), test=0.0).open("train")
    with pytest.raises(DataError, match=r"3\.jpg: cannot be read"):
        source.rows(np.arange(len(source)))
    (tmp_path / "x.zip").write_bytes(b"PK nothing")
    with pytest.raises(DataError, match=r"x\.zip: cannot be read as a zip"):
        Images(root=str(tmp_path / "x.zip"), size=(2, 2)).open("train")
