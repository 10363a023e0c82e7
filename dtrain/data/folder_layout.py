"""Which split and class each picture of a folder belongs to, and what is left out."""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple

from dtrain.core.errors import DataError

SUFFIXES = {
    ".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".bmp", ".dib", ".gif", ".webp", ".ppm", ".pgm", ".pbm", ".pnm", ".tif",
    ".tiff",
}  # fmt: skip
"""Suffixes of pictures that are read."""
JPEG = "convert them first, for example with ImageMagick: magick mogrify -format jpg FILES"
UNREAD = {
    **dict.fromkeys((".heic", ".heif", ".avif", ".jp2", ".j2k", ".jxl"), JPEG),
    **dict.fromkeys((".cr2", ".cr3", ".nef", ".arw", ".dng", ".orf", ".rw2", ".raf"), "develop them to JPEG first"),
    **dict.fromkeys((".svg", ".psd", ".xcf"), "render them to PNG first"),
    **dict.fromkeys((".dcm", ".nii", ".exr", ".hdr"), "convert their values to 8-bit PNG first"),
}
"""Suffixes of pictures that are not read, with what to do."""
Part = Literal["train", "test", "val", "unlabelled"]


def _names(*splits: str) -> tuple[str, ...]:
    """The usual names of folders of a split: train, seg_train, train_set, trainset, train_images, images_train."""
    forms = ("{}", "seg_{}", "{}_set", "{}set", "{}_images", "images_{}", "{}_data")
    return tuple(form.format(split) for split in splits for form in forms)


SPLITS: Mapping[str, Part] = {
    **dict.fromkeys(_names("train", "training", "trn"), "train"),
    **dict.fromkeys(_names("test", "testing", "tst"), "test"),
    **dict.fromkeys((*_names("val", "valid", "validation", "dev"), "eval", "holdout"), "val"),
    **dict.fromkeys(("seg_pred", "pred", "predict", "unlabelled", "unlabeled"), "unlabelled"),
}
"""What a top folder of such a name holds, in any case."""
LAYOUT = "one folder per class with image files in it, or train/ and test/ folders that contain such class folders"
HIDDEN = (".", "__MACOSX")


class Placed(NamedTuple):
    """A picture with its part of the data and its class."""

    part: Part
    label: str
    path: str


@dataclass(frozen=True)
class FolderLayout:
    """The pictures of a folder, and what of its files is not one."""

    pictures: tuple[Placed, ...]
    left_out: Mapping[str, int]
    """Numbers of files by what they are: ".txt files", "pictures without a class folder"."""
    inside: str = ""
    """The single folder that all class folders are in."""
    has_splits: bool = False

    def of(self, part: Part) -> list[Placed]:
        """The pictures of a part."""
        return [one for one in self.pictures if one.part == part]


def paths_below(root: Path) -> Iterator[Path]:
    """The files below a folder, those of linked folders too. OSError for a folder that cannot be read, DataError for a
    link to a folder that contains it."""

    def fail(error: OSError) -> None:
        raise error  # os.walk would skip an unreadable folder, and its class would be missing

    for folder, subfolders, names in os.walk(root, onerror=fail, followlinks=True):
        for link in (path for path in (Path(folder, name) for name in subfolders) if path.is_symlink()):
            if Path(folder).resolve().is_relative_to(link.resolve()):
                raise DataError(f"{link}: is a link to a folder that contains it", "remove the link")
        yield from (Path(folder, name) for name in names)


def is_picture(name: str) -> bool:
    """Whether the name is that of a picture that is read."""
    return PurePosixPath(name).suffix.lower() in SUFFIXES


def is_hidden(path: str) -> bool:
    """Whether a file or one of its folders is hidden, or metadata of an archive."""
    return any(part.startswith(HIDDEN) for part in PurePosixPath(path).parts)


def folder_layout(root: str, paths: Iterable[str], ignore: Sequence[str] = ()) -> FolderLayout:
    """The layout of the files below `root`. `ignore`: suffixes of pictures that are left out.

    DataError for pictures of formats that are not read, and for folders that can be understood in two ways.
    """
    left: Counter[str] = Counter()
    shown = [path for path in paths if not is_hidden(path)]
    _refuse_unread(root, shown, ignore)
    pictures = []
    for path in shown:
        if is_picture(path) and _suffix(path) not in ignore:
            pictures.append(path)
        else:
            left[f"{_suffix(path) or 'files without a suffix'}{' files' * bool(_suffix(path))}"] += 1
    inside = _wrapper(pictures)
    parts = [PurePosixPath(path.removeprefix(inside)).parts for path in pictures]
    tops = {part[0] for part in parts if len(part) > 1}
    splits = {top for top in tops if top.lower() in SPLITS}
    _refuse_mixture(root, parts, tops, splits)
    placed = []
    for path, names in zip(pictures, parts, strict=True):
        part: Part = "train"
        where = f" in {names[0]}/" if splits and len(names) > 1 else ""
        if splits and len(names) > 1:
            part = SPLITS[names[0].lower()]
            names = names[2:] if len(names) > 3 and names[1].lower() == names[0].lower() else names[1:]
        if part == "unlabelled" or len(names) < 2:
            left[f"pictures without a class folder{where}"] += 1
            continue
        placed.append(Placed(part, names[0], path))
    _refuse_depths(root, placed, inside)
    return FolderLayout(tuple(sorted(placed)), dict(left), inside, bool(splits))


def _suffix(path: str) -> str:
    return PurePosixPath(path).suffix.lower()


def _refuse_unread(root: str, paths: Sequence[str], ignore: Sequence[str]) -> None:
    found = Counter(_suffix(path) for path in paths if _suffix(path) in UNREAD and _suffix(path) not in ignore)
    if found:
        suffix = found.most_common(1)[0][0]
        first = next(path for path in paths if _suffix(path) == suffix)
        counts = ", ".join(f"{count:,} {name}" for name, count in sorted(found.items()))
        message = f"{root}: has pictures that dtrain does not read: {counts}; the first is {first}"
        raise DataError(message, f"{UNREAD[suffix]}; or leave them out: data.ignore: [{', '.join(sorted(found))}]")


def _wrapper(pictures: Sequence[str]) -> str:
    """The folder, with its slash, that all pictures are in, below which there are several folders; empty if none is."""
    parts = [PurePosixPath(path).parts for path in pictures]
    top = next(iter(parts), ("",))[0]
    if top.lower() in SPLITS or any(part[0] != top or len(part) < 3 for part in parts):
        return ""
    below = {part[1] for part in parts}
    if len(below) == 1 and next(iter(below)).lower() not in SPLITS:
        inner = _wrapper([path.removeprefix(f"{top}/") for path in pictures])
        return f"{top}/{inner}" if inner else ""
    return f"{top}/" if below else ""


def _refuse_mixture(root: str, parts: Sequence[tuple[str, ...]], tops: set[str], splits: set[str]) -> None:
    """DataError for top folders of which some name splits and others do not, or that all have the same folders."""
    others = sorted(tops - splits)
    if splits and others:
        message = f"{root}: {', '.join(sorted(splits))} can be splits, but {', '.join(others[:5])} beside them no split"
        hint = (
            "keep only split folders, or only class folders, in data.root; rename a class that is called like a split"
        )
        raise DataError(message, hint)
    if splits or len(tops) < 2:
        return
    below = {top: {part[1] for part in parts if part[0] == top and len(part) > 2} for top in tops}
    counts = Counter(name for one in below.values() for name in one)
    shared = sorted(name for name, count in counts.items() if count > 1)
    if shared and len(counts) > 1 and all(len(part) > 2 for part in parts):
        classes, names = ", ".join(shared[:5]), ", ".join(sorted(tops)[:5])
        message = f"{root}: several of {names} have the folders {classes}: the classes can be the former or the latter"
        hint = "name split folders train, val or test; or move the pictures of a class directly into its folder"
        raise DataError(message, hint)


def _refuse_depths(root: str, placed: Sequence[Placed], inside: str) -> None:
    """DataError for a class with pictures both in its folder and in folders below, where those have names of their own
    in several classes: the latter can be the classes."""
    depths: dict[int, str] = {}
    for one in placed:
        depths.setdefault(len(PurePosixPath(one.path.removeprefix(inside)).parts), one.path)
    if len(depths) > 1:
        (_, shallow), *_, (_, deep) = sorted(depths.items())
        message = f"{root}: pictures lie at different depths: {shallow} and {deep}"
        raise DataError(message, "put all pictures of a class directly into its folder; classes are the top folders")
