"""Image files with one folder per class, in a folder or a zip file."""

import hashlib
import stat
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import numpy as np

from dtrain.core.errors import DataError
from dtrain.core.types import Fraction, Positive
from dtrain.data.batch import Batch, Example
from dtrain.data.data_check import BYTES, DataCheck, few
from dtrain.data.digest_cache import NO_CACHE, cached_by_file, file_digest, file_stamp
from dtrain.data.folder_layout import LAYOUT, FolderLayout, Part, Placed, folder_layout, is_picture, paths_below
from dtrain.data.guess import FEW, LOOKED_AT, Guess
from dtrain.data.image_files import (
    MAX_BYTES,
    Colour,
    Decoding,
    Fit,
    Head,
    ImageFile,
    ImageFiles,
    head,
    heads_in_zip,
    sizes_of,
)
from dtrain.data.overlap import overlap
from dtrain.data.paths import expand_path, reason
from dtrain.data.picture_folder import has_pictures
from dtrain.data.pixels import Pixels, WithPixels
from dtrain.data.source import Load, Source, Split

SPLITS: Mapping[str, tuple[Part, ...]] = {"test": ("test", "val"), "val": ("val", "test")}
"""The folders that hold the examples for testing, the first that there is, by `held_out`."""
HEADERS = 200_000
"""Most pictures whose headers `check` looks at."""
SHOWN = 20
"""Most bad pictures, or classes, that a message names."""
SIDE = 64
"""Height and width that `dtrain new` writes: small enough for a CPU."""


@dataclass(frozen=True, kw_only=True)
class Images(WithPixels):
    """Image files under `root`: CLASS/FILE, or train/CLASS/FILE and test/CLASS/FILE (val/, Training/ and the like)."""

    keeps: ClassVar[str] = "digests and headers of the pictures, which each run decodes"
    kind: Literal["images"] = "images"
    root: str
    """A folder or a .zip file."""
    size: tuple[Positive, Positive]
    """Height and width to which every image is resized."""
    fit: Fit = "crop"
    """How an image of another shape gets there: crop keeps its centre, pad adds `background`, stretch distorts it."""
    background: Colour = (255, 255, 255)
    """The colour (red, green, blue) under transparent pixels, and around images that are padded."""
    channels: Literal[1, 3] = 3
    """1 for grayscale, 3 for RGB."""
    test: Fraction = 0.1
    """Fraction of the images held out for testing, selected by a hash of the file name; used only if there is no test
    folder."""
    held_out: Literal["val", "test"] = "val"
    """The folder that is evaluated where there are two, val and test: the other one is not used."""
    ignore: tuple[str, ...] = ()
    """Suffixes of pictures to leave out, such as .heic."""
    draft: bool = False
    """Decode large JPEG files at 1/2, 1/4 or 1/8 of their size, whichever is still at least `size`: much faster, with
    slightly different pixels."""
    pixels: Pixels = field(default_factory=Pixels)
    cache: str = "~/.cache/dtrain"
    """Folder in which digests and headers of the files are cached, so that later starts need not read every file."""
    load: Load = field(default_factory=Load)

    @classmethod
    def guesses(cls, path: Path) -> Iterator[Guess]:
        """One if there are pictures. Their size is that of small pictures, else SIDE."""
        if path.suffix.lower() != ".zip" and not (path.is_dir() and has_pictures(path)):
            return
        data = cls(root=str(path), size=(SIDE, SIDE))
        layout, _ = data._layout(path)
        few = [one.path for one in layout.pictures[:: max(1, len(layout.pictures) // LOOKED_AT)]]
        sides, is_gray = sizes_of(path, few)
        common = int(np.median(sides))
        alike = min(sides) == max(sides) and common % 4 == 0  # 28, for example, as it is
        side = min(SIDE, common if alike else max(8, 8 * int(np.median(sides) / 8 + 0.5)))
        classes = Counter(one.label for one in layout.pictures)
        if len(classes) < 2:
            message = f"{path}: all {len(layout.pictures):,} pictures are of one class, {next(iter(classes))}"
            raise DataError(message, f"dtrain expects {LAYOUT}")
        shown = ", ".join(f"{name} {count:,}" for name, count in sorted(classes.items())[:SHOWN])
        more = f" and {len(classes) - SHOWN} more" if len(classes) > SHOWN else ""
        section: dict[str, Any] = {"root": str(path), "size": [side, side]}
        section |= {"channels": 1} if is_gray else {}
        section |= {"test": 0.2} if data._evaluated(layout) is None and len(layout.pictures) < FEW else {}
        across = f"the shorter side of {'all' if alike else 'half'} of them has {'' if alike else 'under '}"
        across += f"{common if alike else common + 1:,} pixels"
        yield Guess(
            f"{len(layout.pictures):,} pictures of {len(classes)} classes: {shown}{more}",
            section,
            "--kind images",
            {
                "size": f"height and width to which each is cropped; {across}",
                "channels": "they are gray",
                "test": "the share that is held out",
            },
            tuple(f"left out: {count:,} {what}" for what, count in sorted(layout.left_out.items())),
        )

    @property
    def packages(self) -> tuple[str, ...]:
        return ("PIL",)

    def example(self) -> Example | None:
        return None

    @property
    def decoding(self) -> Decoding:
        """How files become pixels."""
        return Decoding(self.fit, self.background, self.draft)

    def open(self, split: Split) -> Source:
        root = expand_path(self.root)
        layout, entries = self._layout(root)
        # those of all pictures once: a run opens the training split first
        looked = layout.pictures if split == "train" else self._of(split, layout)
        return self._opened(root, layout, entries, split, self._heads(root, looked, entries, split))

    def _layout(self, root: Path) -> "tuple[FolderLayout, dict[str, Entry]]":
        """Where the pictures are. DataError if there is none, or if the folders can be understood in two ways."""
        entries = {entry.path: entry for entry in _entries(root)}
        layout = folder_layout(str(root), entries, self.ignore)
        if not layout.pictures:
            found = ", ".join(f"{count:,} {what}" for what, count in sorted(layout.left_out.items()))
            message = f"{root} contains no image in a class folder{f'; it has {found}' * bool(found)}"
            raise DataError(message, f"dtrain expects {LAYOUT}")
        return layout, entries

    def _heads(
        self, root: Path, pictures: Sequence[Placed], entries: "Mapping[str, Entry]", split: Split
    ) -> dict[str, Head]:
        """What the header of each picture says, by path. DataError that names all pictures which cannot be used."""
        paths = [one.path for one in pictures]
        if root.is_dir():
            found = cached_by_file(self.cache, f"heads {split}", [root / path for path in paths], head)
            heads = [Head(*values) for values in found]
        else:
            heads = heads_in_zip(root, paths)
        bad = [f"{root}/{path}: {one.problem}" for path, one in zip(paths, heads, strict=True) if one.problem]
        bad += [
            f"{root}/{path}: has {entries[path].size:,} bytes; the limit is {MAX_BYTES:,}"
            for path in paths
            if entries[path].size > MAX_BYTES
        ]
        if bad:
            more = f"\n  and {len(bad) - SHOWN:,} more" if len(bad) > SHOWN else ""
            first = bad[0] if len(bad) == 1 else f"{len(bad):,} pictures:\n  " + "\n  ".join(bad[:SHOWN]) + more
            raise DataError(first, "repair or remove them")
        return dict(zip(paths, heads, strict=True))

    def _opened(
        self,
        root: Path,
        layout: FolderLayout,
        entries: "Mapping[str, Entry]",
        split: Split,
        heads: Mapping[str, Head],
        digested: bool = True,
    ) -> ImageFiles:
        names = sorted({one.label for one in layout.pictures})
        labels = {name: label for label, name in enumerate(names)}
        chosen = self._of(split, layout)
        if not chosen:
            raise DataError(f"{root} contains no image for the {split} split", f"dtrain expects {LAYOUT}")
        selected = [(labels[one.label], entries[one.path]) for one in chosen]
        shape = (*self.size, self.channels)
        digests = [entry.digest for _, entry in selected]
        if root.is_dir() and digested:
            paths = [root / entry.path for _, entry in selected]
            digests = cached_by_file(self.cache, f"images {split}", paths, file_digest)
        content = [(entry.path, label, digest) for (label, entry), digest in zip(selected, digests, strict=True)]
        own = [heads[one.path] for one in chosen]
        # the pixels of earlier versions have the fingerprint of earlier versions
        same = self.fit == "stretch" and not any(one.turned or one.alpha for one in own)
        how = (("draft",) if self.draft else ()) if same else self.decoding
        decoded = (content, shape, *how)
        digest = hashlib.sha256(repr(decoded).encode(errors="surrogateescape")).hexdigest()[:16]
        files = tuple(ImageFile(entry.path, label, entry.size, entry.mtime_ns) for label, entry in selected)
        size, mtime, *_ = file_stamp(root)
        zipped = None if root.is_dir() else (size, mtime)
        return ImageFiles(
            root,
            files,
            shape,
            digests=tuple(digests),
            classes=tuple(names),
            fingerprint=f"images:{split}:{len(files)}:{digest}",
            decoding=self.decoding,
            zipped=zipped,
            found=tuple(self._notes(layout, chosen, own, split)),
        )

    def _evaluated(self, layout: FolderLayout) -> Part | None:
        """The folder that is evaluated; None if pictures are held out by a hash of their paths."""
        present = {one.part for one in layout.pictures}
        return next((part for part in SPLITS[self.held_out] if part in present), None)

    def _of(self, split: Split, layout: FolderLayout) -> list[Placed]:
        """The pictures of a split."""
        if (held := self._evaluated(layout)) is None:
            return [one for one in layout.pictures if _hashed_split(one.path, self.test) == split]
        return layout.of(held if split == "test" else "train")

    def _notes(
        self, layout: FolderLayout, chosen: Sequence[Placed], heads: Sequence[Head], split: Split
    ) -> Iterator[str]:
        """What was found, and what is left out."""
        counts = Counter(one.label for one in chosen)
        classes = ", ".join(f"{name} {counts[name]:,}" for name in sorted(counts)[:SHOWN])
        more = f" and {len(counts) - SHOWN} more classes" if len(counts) > SHOWN else ""
        yield f"{len(chosen):,} pictures: {classes}{more}"
        if len({one.label for one in layout.pictures}) == 1:
            yield f"all pictures are in one class folder, {chosen[0].label}"
        if missing := sorted({one.label for one in layout.pictures} - counts.keys()):
            yield f"no picture of {', '.join(missing[:SHOWN])} in this split"
        for text, count in (
            ("are turned as their EXIF data says", sum(one.turned for one in heads)),
            (f"have transparent pixels, over the background {list(self.background)}", sum(one.alpha for one in heads)),
            ("have several frames, of which the first is used", sum(one.frames > 1 for one in heads)),
        ):
            if count:
                yield f"{count:,} {text}"
        if split == "test":
            return
        if layout.inside:
            yield f"the class folders are in {layout.inside}"
        other: Part = "test" if self._evaluated(layout) == "val" else "val"
        if unused := layout.of(other):
            yield f"{len(unused):,} pictures of {other} are not used: evaluate them with data.held_out={other}"
        if layout.left_out:
            yield "left out: " + ", ".join(f"{count:,} {what}" for what, count in sorted(layout.left_out.items()))

    def without_cache(self) -> "Images":
        return replace(self, cache=NO_CACHE)

    def inspect(self, check: DataCheck) -> None:
        root = Path(self.root).expanduser()
        if root.is_dir() and not few([str(root / "**" / "*")], HEADERS):
            check.not_checked.append(f"data: the images of {root}, over {HEADERS:,} files")
            return
        if root.exists() and not (root.is_dir() or root.is_file()):
            check.problems.append(("data.root", DataError(f"{root} is neither a folder nor a .zip")))
            return
        try:
            layout, entries = self._layout(root)
            heads = self._heads(root, layout.pictures, entries, "train")
            train, test = (self._opened(root, layout, entries, of, heads, digested=False) for of in ("train", "test"))
            check.take("train", train)
            check.take("test", test)
            _compare(train, test, check)
        except DataError as error:
            check.refuse("data.root", error)

    def prepare(self, batch: Batch, key: jax.Array, train: bool) -> Batch:
        return self.pixels.apply(batch, 255.0, key, train)


def _compare(train: ImageFiles, test: ImageFiles, check: DataCheck) -> None:
    """Record the held-out pictures that are in the training data as well: files whose size is in both splits are read
    and compared."""
    sizes = {file.size for file in train.files} & {file.size for file in test.files}
    if sum(file.size for one in (train, test) for file in one.files if file.size in sizes) > BYTES:
        check.not_checked.append(f"held-out pictures in the training data: over {BYTES >> 20} MiB to compare")
        return

    def compared(split: Split, source: ImageFiles) -> ImageFiles:
        if source.zipped:  # a zip has a checksum for each file
            return source
        digests = [
            file_digest(source.root / file.path) if file.size in sizes else f"{split} {number}"
            for number, file in enumerate(source.files)
        ]
        return replace(source, digests=tuple(digests))

    check.notes += overlap(compared("train", train), compared("test", test))


class Entry(NamedTuple):
    """A file below the root."""

    path: str
    size: int
    mtime_ns: int
    digest: str = ""
    """For a file in a zip: its CRC and size from the zip directory, which every read verifies."""


def _entries(root: Path) -> Iterator[Entry]:
    try:
        if not root.exists():
            raise DataError(f"{root} does not exist", f"set data.root to a folder, or a .zip file, with {LAYOUT}")
        yield from _below(root) if root.is_dir() else _zipped(root)
    except OSError as error:
        raise DataError(f"{error.filename or root}: cannot be read: {error.strerror or error}") from error


def _below(root: Path) -> Iterator[Entry]:
    for path in paths_below(root):
        within = path.relative_to(root).as_posix()
        if not is_picture(path.name):
            yield Entry(within, 0, 0)
        elif stat.S_ISREG((status := path.stat()).st_mode):
            yield Entry(within, status.st_size, status.st_mtime_ns)


def _zipped(root: Path) -> list[Entry]:
    try:
        with zipfile.ZipFile(root) as file:
            entries = [entry for entry in file.infolist() if not entry.is_dir()]
    except Exception as error:  # a damaged zip directory raises other errors than BadZipFile, too
        raise DataError(f"{root}: cannot be read as a zip: {reason(error)}") from error
    names = [entry.filename for entry in entries]
    outside = [name for name in names if name.startswith("/") or ".." in name.split("/")]
    if outside:
        raise DataError(
            f"{root}: contains {outside[0]}, outside of its folders", "zip the folder again, from inside of it"
        )
    for name, count in Counter(names).most_common(1):
        if count > 1:
            raise DataError(f"{root}: contains {name} {count} times", "create the zip again with each name once")
    return [Entry(entry.filename, entry.file_size, 0, f"{entry.CRC:08x}:{entry.file_size}") for entry in entries]


def _hashed_split(path: str, test: float) -> Split:
    """The split of a file, from a hash of its path alone, so that new files do not move others between splits."""
    digest = hashlib.sha256(path.encode(errors="surrogateescape")).digest()
    return "test" if int.from_bytes(digest[:4], "big") / 2**32 < test else "train"
