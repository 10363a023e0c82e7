"""Photos as people have them: upright, over a background, in usual folders, with what is left out counted."""

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dtrain.core.errors import DataError
from dtrain.data.data_check import DataCheck
from dtrain.data.folder_layout import folder_layout
from dtrain.data.images import Images

RED, BLUE, GREEN = (255, 0, 0), (0, 0, 255), (0, 255, 0)


def photos(root: Path, **how: Any) -> Images:
    return Images(**{"root": str(root), "size": (4, 4), "test": 0.0, "cache": str(root.parent / "cache")} | how)


def halves(width: int, height: int, mode: str = "RGB") -> Image.Image:
    """Red on the left, blue on the right."""
    image = Image.new(mode, (width, height), RED)
    image.paste(BLUE, (width // 2, 0, width, height))
    return image


def first(data: Images) -> np.ndarray:
    return data.open("train").rows(np.arange(1))["image"][0]


@pytest.mark.parametrize(
    ("orientation", "top_left", "bottom_right"),
    [(1, RED, BLUE), (2, BLUE, RED), (3, BLUE, RED), (6, RED, BLUE), (8, BLUE, RED)],
)
@pytest.mark.parametrize("draft", [False, True])
def test_a_photo_is_turned_as_its_exif_data_says(
    tmp_path: Path, orientation: int, top_left: tuple[int, ...], bottom_right: tuple[int, ...], draft: bool
) -> None:
    (tmp_path / "p" / "a").mkdir(parents=True)
    exif = Image.Exif()
    exif[0x0112] = orientation
    halves(16, 16).save(tmp_path / "p" / "a" / "x.jpg", exif=exif, quality=95, subsampling=0)
    pixels = first(photos(tmp_path / "p", draft=draft))
    assert np.abs(pixels[0, 0].astype(int) - top_left).max() < 30
    assert np.abs(pixels[3, 3].astype(int) - bottom_right).max() < 30
    if orientation == 6:  # held upright: the left of the sensor is the top
        assert np.abs(pixels[0, 3].astype(int) - RED).max() < 30


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA", "P"])
def test_transparent_pixels_have_the_background(tmp_path: Path, mode: str) -> None:
    (tmp_path / "p" / "a").mkdir(parents=True)
    image = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    image.convert("RGBA").quantize().save(tmp_path / "p" / "a" / "x.png", transparency=0) if mode in ("P", "PA") else (
        image.convert(mode).save(tmp_path / "p" / "a" / "x.png")
    )
    assert (first(photos(tmp_path / "p")) == 255).all()
    assert (first(photos(tmp_path / "p", background=RED)) == RED).all() or mode == "LA"
    assert any("have transparent pixels" in line for line in photos(tmp_path / "p").open("train").notes)


def test_the_aspect_ratio_is_kept_unless_the_recipe_says_so(tmp_path: Path) -> None:
    (tmp_path / "p" / "a").mkdir(parents=True)
    image = halves(32, 8)
    image.paste(GREEN, (0, 0, 4, 8))
    image.save(tmp_path / "p" / "a" / "x.png")
    crop, pad, stretch = (
        first(photos(tmp_path / "p", fit=fit, background=GREEN)) for fit in ("crop", "pad", "stretch")
    )
    assert (crop[:, 0] == RED).all() and (crop[:, 3] == BLUE).all()
    assert (pad[0] == GREEN).all() and (pad[3] == GREEN).all() and (pad != GREEN).any()
    assert stretch[0, 0, 1] > 100 and (stretch[:, 3] == BLUE).all()
    prints = {photos(tmp_path / "p", fit=fit).open("train").fingerprint for fit in ("crop", "pad", "stretch")}
    assert len(prints) == 3


@pytest.mark.parametrize("suffix", [".tif", ".TIFF", ".jfif", ".webp", ".bmp", ".gif", ".ppm"])
def test_usual_formats_are_read(tmp_path: Path, suffix: str) -> None:
    (tmp_path / "p" / "a").mkdir(parents=True)
    format_ = {".tif": "TIFF", ".jfif": "JPEG"}.get(suffix.lower(), suffix[1:].upper())
    halves(8, 8).save(tmp_path / "p" / "a" / f"x{suffix}", format=format_)
    assert first(photos(tmp_path / "p"))[0, 0, 0] > 200


def test_pictures_that_are_not_read_are_refused_or_ignored_by_name(tmp_path: Path) -> None:
    for name in ("a/x.png", "b/y.png"):
        (tmp_path / "p" / name).parent.mkdir(parents=True, exist_ok=True)
        halves(4, 4).save(tmp_path / "p" / name)
    (tmp_path / "p" / "a" / "z.HEIC").write_bytes(b"heic")
    with pytest.raises(DataError, match=r"does not read: 1 \.heic; the first is a/z\.HEIC") as refused:
        photos(tmp_path / "p").open("train")
    assert "magick" in refused.value.hint and "data.ignore: [.heic]" in refused.value.hint
    assert "left out: 1 .heic files" in photos(tmp_path / "p", ignore=(".heic",)).open("train").notes


def test_all_bad_pictures_are_in_one_message_before_a_run(tmp_path: Path) -> None:
    (tmp_path / "p" / "a").mkdir(parents=True)
    folder = tmp_path / "p" / "a"
    halves(8, 8).save(folder / "good.png")
    halves(200, 200).save(folder / "cut.jpg")
    (folder / "cut.jpg").write_bytes((folder / "cut.jpg").read_bytes()[:900])
    Image.fromarray(np.full((4, 4), 40_000, np.uint16)).save(folder / "sixteen.png")
    (folder / "empty.png").write_bytes(b"")
    with pytest.raises(DataError) as refused:
        photos(tmp_path / "p").open("train")
    lines = refused.value.message.splitlines()
    assert lines[0] == "3 pictures:"
    assert [line.split(": ")[0].split("/")[-1] for line in lines[1:]] == ["cut.jpg", "empty.png", "sixteen.png"]
    check = DataCheck()
    photos(tmp_path / "p").inspect(check)
    assert [key for key, _ in check.problems] == ["data.root"] and not check.opened


@pytest.mark.parametrize(
    ("paths", "parts"),
    [
        (["Training/cat/1.jpg", "Testing/cat/2.jpg"], {("train", "cat"), ("test", "cat")}),
        (["seg_train/seg_train/sea/1.jpg", "seg_test/seg_test/sea/2.jpg"], {("train", "sea"), ("test", "sea")}),
        (["TRAIN/a/1.jpg", "Valid/a/2.jpg", "test/a/3.jpg"], {("train", "a"), ("val", "a"), ("test", "a")}),
        (["photos/cat/1.jpg", "photos/dog/2.jpg"], {("train", "cat"), ("train", "dog")}),
        (["archive/train/cat/1.jpg", "archive/test/cat/1.jpg"], {("train", "cat"), ("test", "cat")}),
        (["train/a/1.jpg", "test/2.jpg"], {("train", "a")}),
        (["cat/1.jpg", "2.jpg", "notes.txt", ".DS_Store"], {("train", "cat")}),
        (["cat/p1/1.jpg", "dog/p2/2.jpg"], {("train", "cat"), ("train", "dog")}),
    ],
)
def test_splits_and_classes_are_found_by_the_usual_names(paths: list[str], parts: set[tuple[str, str]]) -> None:
    assert {(one.part, one.label) for one in folder_layout("root", paths).pictures} == parts


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (["train/a/1.jpg", "test/a/2.jpg", "cats/3.jpg"], "test, train can be splits, but cats beside them no split"),
        (["one/cat/1.jpg", "one/dog/1.jpg", "two/cat/1.jpg", "two/dog/1.jpg"], "the classes can be the former or"),
        (["cat/1.jpg", "dog/more/2.jpg"], "pictures lie at different depths: cat/1.jpg and dog/more/2.jpg"),
    ],
)
def test_folders_with_two_readings_are_refused(paths: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        folder_layout("root", paths)


def test_val_and_test_are_never_merged(tmp_path: Path) -> None:
    for part, count in (("train", 3), ("val", 2), ("test", 1)):
        (tmp_path / "p" / part / "a").mkdir(parents=True)
        for number in range(count):
            halves(4, 4).save(tmp_path / "p" / part / "a" / f"{number}.png")
    (tmp_path / "p" / "test" / "loose.png").write_bytes((tmp_path / "p" / "test" / "a" / "0.png").read_bytes())
    data = photos(tmp_path / "p")
    assert [len(data.open(split)) for split in ("train", "test")] == [3, 2]
    assert len(photos(tmp_path / "p", held_out="test").open("test")) == 1
    assert list(data.open("train").notes) == [
        "3 pictures: a 3",
        "all pictures are in one class folder, a",
        "1 pictures of test are not used: evaluate them with data.held_out=test",
        "left out: 1 pictures without a class folder in test/",
    ]


def paths(*folders: str) -> list[str]:
    return [f"{folder}/{number}.png" for folder in folders for number in range(2)]


@pytest.mark.parametrize(
    ("folders", "expected"),
    [
        (("archive/chest/train/a", "archive/chest/test/a"), {("train", "a"), ("test", "a")}),
        (("archive/chest/a", "archive/chest/b"), {("train", "a"), ("train", "b")}),
        (("train_images/a", "test_images/a", "test_images/b"), {("train", "a"), ("test", "a"), ("test", "b")}),
        (("images_train/a", "images_val/a", "images_val/b"), {("train", "a"), ("val", "a"), ("val", "b")}),
        (("train/a", "holdout/a"), {("train", "a"), ("val", "a")}),
    ],
)
def test_folders_around_and_names_of_splits(folders: tuple[str, ...], expected: set[tuple[str, str]]) -> None:
    found = folder_layout("root", paths(*folders))
    assert {(one.part, one.label) for one in found.pictures} == expected


@pytest.mark.parametrize("folders", [("fold1/cat", "fold1/dog", "fold2/cat"), ("cat/train", "cat/test", "dog/train")])
def test_folders_that_several_have_in_common_are_two_readings(folders: tuple[str, ...]) -> None:
    with pytest.raises(DataError, match="the classes can be the former or the latter"):
        folder_layout("root", paths(*folders))


@pytest.mark.parametrize("name", ["/cat/0.png", "../cat/0.png"])
def test_a_zip_with_names_outside_of_it_is_refused(tmp_path: Path, name: str) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as file:
        file.writestr(name, b"x")
        file.writestr("dog/0.png", b"x")
    with pytest.raises(DataError, match="outside of its folders"):
        photos(tmp_path / "a.zip").open("train")


def test_pictures_of_one_class_are_named(tmp_path: Path) -> None:
    for folder in ("train/images", "test/images"):
        (tmp_path / folder).mkdir(parents=True)
        halves(8, 8).save(tmp_path / folder / "1.png")
    assert any("in one class folder, images" in line for line in photos(tmp_path).open("train").notes)


def test_a_pointer_of_git_lfs_is_no_damaged_picture(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.png").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 3\n")
    with pytest.raises(DataError, match=r"1.png: is a pointer of Git LFS"):
        photos(tmp_path).open("train")
