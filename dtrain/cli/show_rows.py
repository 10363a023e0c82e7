"""Print examples as the model gets them: tokens as text or numbers, pictures, and values by their names."""

import os
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from dtrain.data.batch import DOCUMENT, IMAGE, LABEL, ROW, TARGET, TOKEN

if TYPE_CHECKING:
    import numpy as np

    from dtrain.data.batch import Batch
    from dtrain.data.source import Source
    from dtrain.data.tokenizer import Tokenizer

WIDTH = 64
"""Most columns of a drawn picture."""
VALUES = 40
"""Most values of a feature that are printed."""
FEW = 16
"""Largest value of pictures that have few levels of grey."""


def show_rows(source: "Source", tokenizer: "Tokenizer | None", indices: Sequence[int]) -> None:
    """Print these examples of a source."""
    import numpy as np

    from dtrain.core.printable import printable

    batch = source.rows(np.asarray(indices))
    for number, index in enumerate(indices):
        row = {name: np.asarray(values[number]) for name, values in batch.items()}
        if TOKEN in row:
            _show_tokens(index, row, tokenizer, source.names_of(DOCUMENT))
            continue
        place = source.place(index)
        typer.secho(f"row {index}: {', '.join(filter(None, (place, _label(source, row))))}", bold=True)
        for name, values in row.items():
            if (written := source.text_of(name, values)) is not None:
                typer.echo(f"  {name} {list(values.shape)}: {printable(written)}")
            elif (name == IMAGE or values.dtype == np.uint8) and values.ndim == 3:
                _show_picture(values)
            elif name not in (LABEL, ROW):
                typer.echo("  " + "\n  ".join(_values(name, values, source.names_of(name))))


def save_pictures(source: "Source", indices: Sequence[int], path: Path) -> None:
    """Write the pictures of these examples side by side into a file. DataError if the examples have none."""
    import numpy as np

    from dtrain.core.errors import DataError, EnvironmentFault

    rows = source.rows(np.asarray(indices))
    names = [name for name, values in rows.items() if values.ndim == 4 and values.dtype == np.uint8]
    images = rows.get(IMAGE, rows[names[0]] if names else None)
    if images is None or images.ndim != 4:
        raise DataError(f"the examples have {', '.join(source.example)}, and no pictures", "leave --png out")
    from PIL import Image

    from dtrain.inference.samples import side_by_side

    sheet = Image.fromarray(side_by_side(np.stack([_pixels(image) for image in images])))
    try:
        sheet.save(path, "PNG")
    except OSError as error:
        raise EnvironmentFault(f"cannot write {path}: {error.strerror or error}") from error


def _pixels(image: "np.ndarray") -> "np.ndarray":
    """A picture (height, width, channels) as uint8 RGB; numbers of another range from their least to their largest."""
    import numpy as np

    if image.dtype != np.uint8 or image.max() <= FEW:
        low, high = float(image.min()), float(image.max())
        image = ((image - low) / max(high - low, 1e-9) * 255).astype(np.uint8)
    return np.repeat(image, 3, 2) if image.shape[2] == 1 else image[..., :3]


def _label(source: "Source", row: "Batch") -> str:
    if LABEL not in row or row[LABEL].ndim:
        return ""
    label = row[LABEL].item()
    named = source.class_names and isinstance(label, int) and 0 <= label < len(source.class_names)
    return f"label {label}" + (f" ({source.class_names[label]})" if named else "")


def _show_picture(image: "np.ndarray") -> None:
    size = " x ".join(map(str, image.shape))
    typer.echo(f"  {size}, values {image.min():g} to {image.max():g}, mean {image.mean():.4g}")
    if not _coloured():
        return
    from PIL import Image

    width = min(WIDTH, image.shape[1])
    height = max(2, round(image.shape[0] * width / image.shape[1]) // 2 * 2)
    drawn = Image.fromarray(_pixels(image)).resize((width, height))
    pixels = drawn.load()
    for y in range(0, height, 2):  # a character is two pixels: its colour the upper one, its background the lower one
        line = (typer.style("\u2580", fg=pixels[x, y], bg=pixels[x, y + 1]) for x in range(width))  # pyright: ignore
        typer.echo("  " + "".join(line))


def _values(name: str, values: "np.ndarray", names: Sequence[str]) -> Iterator[str]:
    """The values of a feature, a line each where they have names."""
    if values.ndim == 1 and len(names) == len(values):
        yield from (f"{one} {value:.6g}" for one, value in zip(names, values.tolist(), strict=True))
        return
    flat = values.reshape(-1)
    more = f" and {len(flat) - VALUES:,} more" if len(flat) > VALUES else ""
    shape = f" {list(values.shape)}" if values.ndim else ""
    yield f"{name}{shape}: {' '.join(f'{value:.6g}' for value in flat[:VALUES].tolist())}{more}"


def _coloured() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def _show_tokens(index: int, row: "Batch", tokenizer: "Tokenizer | None", names: Sequence[str]) -> None:
    import numpy as np

    token, target, document = row[TOKEN], row[TARGET], row.get(DOCUMENT)
    packed = document is not None
    document = np.zeros_like(token) if document is None else document
    typer.secho(f"row {index}: {_summary(token, target, document)}", bold=True)
    for one in np.unique(document).tolist():
        inside = document == one
        if packed and one == document.max() and not (target[inside] >= 0).any():
            continue  # empty slots
        if names:
            typer.secho(f"{names[one]}:", dim=True)
        _print(tokenizer, token[inside], target[inside])


def _summary(token: "np.ndarray", target: "np.ndarray", document: "np.ndarray") -> str:
    learned, count = int((target >= 0).sum()), int(document.max()) + 1
    used = [int((document == one).sum()) for one in range(count) if (target[document == one] >= 0).any()]
    parts = f"{len(used)} documents of {', '.join(map(str, used[:8]))}{' ...' if len(used) > 8 else ''} tokens"
    empty = len(token) - sum(used)
    return f"{len(token)} slots, {learned} count in the loss, {empty} empty; {parts}"


def _print(tokenizer: "Tokenizer | None", token: "np.ndarray", target: "np.ndarray") -> None:
    """Print a document: its tokens, and the last target, which is no token of the row. Without a tokenizer, numbers."""
    from dtrain.core.printable import printable

    ids = [*token.tolist(), *([int(target[-1])] if target[-1] >= 0 else [])]
    learned = [False, *(target >= 0).tolist()][: len(ids)]
    at = 0
    for counts, group in groupby(learned):
        size = len(list(group))
        part = ids[at : at + size]
        text = printable(tokenizer.decode(part)) if tokenizer else " ".join(map(str, part)) + " "
        at += size
        if _coloured():
            typer.secho(text, fg="green" if counts else None, dim=not counts, nl=False)
        else:
            typer.echo(f"⟦{text.rstrip() if not tokenizer else text}⟧" if counts else text, nl=False)
    typer.echo("\n" + "-" * 20)
