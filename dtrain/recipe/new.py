"""A first recipe for data of a user's own: what was seen in it, and settings that train here in minutes."""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import jax
import numpy as np

from dtrain.core.errors import DataError, RecipeError
from dtrain.core.printable import printable
from dtrain.data.batch import FEATURES, IMAGE, LABEL, TOKEN
from dtrain.data.class_weights import class_counts
from dtrain.data.guess import LOOKED_AT, Guess
from dtrain.data.pixels import WithPixels
from dtrain.data.source import Source
from dtrain.models.agreement import described
from dtrain.models.image_configs import prepared_as, side
from dtrain.models.nn.param import count as count_of
from dtrain.models.nn.param import paths
from dtrain.recipe.compose import name_of
from dtrain.recipe.load import given_part, load, part
from dtrain.recipe.recipe import Data
from dtrain.recipe.sizes import with_sizes

UNEVEN = 3
"""From how many times the examples of the rarest class the most frequent one has, classes are weighted."""
PICTURES, ROWS = 20_000, 100_000
"""Examples that a first run trains on, repeated ones too: one to three minutes on two cores."""
MOST_EPOCHS = 60
TUNED, LEAST_EPOCHS = 3_000, 4
"""Examples that a first run from published weights trains on, and its fewest epochs."""
NEW_HEAD = 10
"""How much faster the new last layer learns than published weights."""
ADAPTED = r"^blocks\.(query|value)\.weight$|\.conv2$"
"""The parameters of classifiers of images for which low-rank adapters are suggested."""
CHANNELS = 3
"""Of pictures, unless the recipe says otherwise."""
TOKENS = 800_000
"""Tokens that the first run of a decoder trains on."""
LARGE = 40
"""Side of pictures from which on the first layers of the net halve it twice: four times as fast on a CPU."""
WIDTH = 100
PLAIN = re.compile(r"(\.{0,2}/)?[A-Za-z_][\w./~-]*", re.ASCII)
WORDS = {"true", "false", "null", "yes", "no", "on", "off", "y", "n", "~"}


@dataclass(frozen=True)
class NewRecipe:
    """A recipe that was not written yet."""

    name: str
    text: str
    seen: tuple[str, ...]
    """What the data has, a line each."""


@dataclass(frozen=True)
class _Settings:
    """What is trained, and for how long."""

    model: Mapping[str, Any]
    model_says: str
    rate: float
    batch: int
    length: Mapping[str, int]
    length_says: str
    pixels: Mapping[str, Any] | None = None
    pixels_say: str = "mean and deviation of the pixels"
    init: Mapping[str, Any] | None = None
    adapters: Mapping[str, Any] | None = None
    best: str = ""
    measures: tuple[str, ...] = ()
    use: str = "predict {name} FILE..."


def readings(path: Path) -> list[tuple[str, Guess]]:
    """Every way in which a kind of data would read a file or folder: (kind, reading).

    DataError if none would, with why not where one says so.
    """
    if not path.exists():
        beside = [one.name for one in path.parent.iterdir()] if path.parent.is_dir() else []
        near = get_close_matches(path.name, beside, 1)
        raise DataError(f"{path} does not exist", f"did you mean {path.with_name(near[0])}?" if near else "")
    path = path.absolute() if str(path).startswith("~") else path  # no user's home
    found, refused = [], []
    for member in get_args(Data):
        try:
            found += [(str(member.kind), guess) for guess in member.guesses(path)]
        except DataError as error:
            refused.append(error)
    if not found:
        known = "a folder of pictures in class folders, a table (CSV, Parquet), text, conversations (JSON lines), .npz"
        raise next(iter(refused), DataError(f"{path}: is nothing that dtrain recognises", f"it recognises {known}"))
    return found


def selected(path: Path, kind: str | None = None, label: str | None = None) -> list[tuple[str, Guess]]:
    """The readings of a kind, and with that column to predict. RecipeError if there are none; see `readings`."""
    found = readings(path)
    of_kind = [one for one in found if kind in (None, one[0])]
    if not of_kind:
        kinds = ", ".join(dict.fromkeys(one for one, _ in found))
        raise RecipeError(f"--kind {kind}: {path} is not read so", f"it can be {kinds}")
    usual = [one for one in of_kind if one[1].usual]
    if label is None and len(usual) == 1:
        return [one for one in of_kind if one[0] != usual[0][0]] + usual
    with_label = [one for one in of_kind if label in (None, one[1].label)]
    if not with_label:
        columns = ", ".join(one.label for _, one in of_kind if one.label)
        hint = f"these can: {columns}" if columns else "--label is for tables and .npz files"
        why = next((one.unfit[label] for _, one in of_kind if label and label in one.unfit), "")
        found = f"that column of {path} cannot be predicted: {why}" if why else f"{path} has no such column"
        raise RecipeError(f"--label {label}: {found}", hint)
    return with_label


def new_recipe(path: Path, kind: str, guess: Guess, name: str | None = None, weights: Path | None = None) -> NewRecipe:
    """The recipe for this reading of the data, which is opened. DataError if it cannot be used as it is.

    `weights`: a folder of published weights of a classifier of images, from which it starts.
    """
    section = {"kind": kind, **guess.section}
    if weights:
        height, width, channels = described(weights).model.image
        if not described(weights).model.fixed_size:
            height, width = side(weights) or (height, width)
        section |= {"size": [height, width]}
        section.pop("channels", None)
        section |= {"channels": channels} if channels != CHANNELS else {}
        says = {"channels": "those of the weights"}
        says["size"] = f"that of the weights, to which each is cropped; {guess.comments['size'].partition('; ')[2]}"
        guess = replace(guess, comments={**guess.comments, **says})
    data = part(Data, section, "data")
    train, test = data.open("train"), data.open("test")
    settings = _for_weights(weights, train, len(train)) if weights else _settings(train, data.main.has_template)
    plain = Path(re.sub(r"\.gz$", "", path.resolve().name))
    name = name or name_of(plain) or "new"
    counts, held_out = class_counts(train), f"{len(train):,} examples to train on, {len(test):,} held out"
    text = [
        f"# {one_line(guess.seen)}.",
        "#",
        f"#   dtrain run {name}.yaml",
        f"#   dtrain {settings.use.format(name=name)}",
        "#",
        f"# {held_out}. Sizes that are not given are those of the data.",
        *_line("model", settings.model, settings.model_says),
        *(_line("init", settings.init, "all but the last layer, which has other classes") if settings.init else ()),
        *(_line("# lora", settings.adapters, "in place of all parameters: saves memory") if settings.adapters else ()),
        "data:",
        *(line for key, value in section.items() for line in _line(f"  {key}", value, guess.comments.get(key, ""))),
    ]
    if settings.pixels and isinstance(data, WithPixels):
        says = f"{settings.pixels_say}, and random changes in training"
        says += "; without flip, if left and right differ in meaning" * ("flip" in settings.pixels)
        text += _line("  pixels", settings.pixels, says)
    schedule = {"kind": "cosine", "warmup": 0.05}
    optimizer = {"kind": "adamw", "lr": settings.rate, "decay": 0.05, "clip": 1.0, "schedule": schedule}
    optimizer |= {"groups": [{"match": "*head.*", "lr": NEW_HEAD}]} if weights else {}
    text += _line("optimizer", optimizer, "warmup is a share of the run")
    text += _line("batch", settings.batch)
    text += [line for key, value in settings.length.items() for line in _line(key, value, settings.length_says)]
    if counts and max(counts.values()) >= UNEVEN * max(1, min(counts.values())) and min(counts.values()):
        rare, often = min(counts, key=counts.__getitem__), max(counts, key=counts.__getitem__)
        says = f"{often} has {counts[often]:,} examples, {rare} {counts[rare]:,}"
        text += _line("class_weights", "balanced", says)
    if settings.measures:
        text += _line("evaluate", {"measures": list(settings.measures)}, "R2 and the root of the mean squared error")
    if settings.best:
        text += _line("checkpoint", {"best": settings.best}, "evaluate and predict take it with --best")
    text += [
        f"# On a slice or on GPUs: `dtrain plan {name}.yaml --on v5e-16 --quick` says what fits and how fast it is.",
        "# Then raise batch and lr, set precision: {compute: bfloat16}, and split it: mesh: {data: -1} or {fsdp: -1}.",
    ]
    made = NewRecipe(name, "\n".join(text) + "\n", (f"{guess.seen}; {held_out}", *guess.notes, *train.notes))
    _refuse_unfit(made, train)
    return made


def _refuse_unfit(made: NewRecipe, train: Source) -> None:
    """DataError if the recipe could not be run: the data has what no model of dtrain's own takes."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / f"{made.name}.yaml"
        path.write_text(made.text)
        try:
            recipe = with_sizes(load(path), train.example)
        except RecipeError as error:
            raise DataError(error.message.replace(f"{folder}/", ""), error.hint) from error
    if unfit := recipe.model.mismatch(train.example):
        raise DataError(unfit, "see the guide, 'A model of your own'")


def _settings(train: Source, chat: bool) -> _Settings:
    """By what the examples have; `chat`: whether they are conversations. DataError if dtrain has no model for them."""
    example, count = train.example, len(train)
    if IMAGE in example and LABEL in example and len(example[IMAGE].shape) == 3:
        return _for_pictures(train, count)
    if LABEL in example and (FEATURES in example or IMAGE in example):
        is_number = example[LABEL].values is None
        batch = 32 if count < 4_000 else 256
        epochs = _epochs(ROWS, count)
        model = {"kind": "mlp", "hidden": [64, 32], "dropout": 0.1}
        says = "two hidden layers" + (", and one number" if is_number else "")
        return _Settings(model, says, 3e-3, batch, {"epochs": epochs}, _steps(epochs, count, batch),
                         best="eval/mae" if is_number else "eval/accuracy",
                         measures=("regression",) if is_number else ())  # fmt: skip
    if TOKEN in example:
        batch, rows = 16, example[TOKEN].shape[0]
        model = {"kind": "decoder", "layers": 2, "width": 128, "heads": 4}
        steps = min(2_000, max(200, TOKENS // (batch * rows)))
        use = f"generate {{name}} {'--chat ' * chat}--prompt '...'"
        return _Settings(model, "a small one, to see the whole way", 2e-3, batch, {"steps": steps},
                         f"{steps * batch / count:.3g} epochs", use=use)  # fmt: skip
    message = f"no model of dtrain's own takes {', '.join(sorted(example))}"
    raise DataError(message, "see the guide, 'A model of your own'")


def _for_pictures(train: Source, count: int) -> _Settings:
    height, width, channels = train.example[IMAGE].shape
    pixels: dict[str, Any] = {**_pixels_of(train), "crop": max(1, min(height, width) // 16)}
    pixels |= {"flip": True, "colour": 0.2} if channels == 3 else {}
    batch, epochs = 32 if count < 5_000 else 64, _epochs(PICTURES, count)
    model: dict[str, Any] = {"kind": "cnn", "stages": [16, 32, 64], "dropout": 0.2}
    if min(height, width) >= LARGE:
        model |= {"stages": [32, 64, 128], "stem": "imagenet"}
    return _Settings(
        model,
        "a small ResNet",
        3e-3,
        batch,
        {"epochs": epochs},
        _steps(epochs, count, batch),
        pixels,
        best="eval/accuracy",
    )


def _pixels_of(train: Source) -> dict[str, Any]:
    """Mean and deviation of the pixels of some pictures, scaled to 0..1."""
    few = np.linspace(0, len(train) - 1, min(len(train), LOOKED_AT)).astype(np.int64)
    image = train.rows(few)[IMAGE]
    scale = 255.0 if image.dtype == np.uint8 else 1.0
    return {"mean": round(float(image.mean()) / scale, 3), "std": round(float(image.std()) / scale, 3) or 1.0}


def _for_weights(weights: Path, train: Source, count: int) -> _Settings:
    """Training in full from published weights of a classifier of images. DataError if they are of another model."""
    model = described(weights).model
    if model.generates:
        message = f"{weights} has the weights of a language model, which does not take pictures"
        raise DataError(message, "give conversations with it: dtrain new chats.jsonl --weights FOLDER")
    short = {key: value for key, value in given_part(model).items() if key not in ("image", "classes")}
    height, width, channels = train.example[IMAGE].shape
    known = prepared_as(weights, channels)
    pixels = {"mean": list(known.mean), "std": list(known.std)} if known else _pixels_of(train)
    pixels |= {"crop": max(1, min(height, width) // 16), "flip": True} | (
        {"colour": 0.2} if channels == CHANNELS else {}
    )
    batch, epochs = 16, max(LEAST_EPOCHS, min(MOST_EPOCHS // 3, round(TUNED / count)))
    of_pixels = "mean and deviation of the pixels" + (" that the weights were trained on" if known else "")
    size = count_of(model.params())  # the larger a net, the smaller its steps
    matrices = [name for name in jax.tree.leaves(paths(model.params())) if re.search(ADAPTED, name)]
    return _Settings(
        short,
        f"the weights' own: {size / 1e6:,.3g} million parameters",
        min(1e-3, max(1e-4, (1e6 / size) ** 0.5 * 1e-3)),
        batch,
        {"epochs": epochs},
        _steps(epochs, count, batch),
        pixels,
        pixels_say=of_pixels,
        init={"weights": str(weights), "new": ["head.*"]},
        adapters={"rank": 8, "targets": _patterns(matrices), "train": ["head.*"]},
        best="eval/accuracy",
    )


def _patterns(names: list[str]) -> list[str]:
    """Patterns for parameters of numbered blocks: each name with its numbers as a star."""
    return list(dict.fromkeys(re.sub(r"\d+(?=[_.])", "*", name) for name in names))


def _epochs(examples: int, count: int) -> int:
    return max(1, min(MOST_EPOCHS, round(examples / count)))


def _steps(epochs: int, count: int, batch: int) -> str:
    return f"{math.ceil(epochs * count / batch):,} steps"


def _line(key: str, value: Any, comment: str = "") -> list[str]:
    """A key of a recipe with its comment: behind it, or above it where the line would be long."""
    line, comment = f"{key}: {_flow(value)}", one_line(comment)
    if not comment or len(line) + len(comment) < WIDTH:
        return [line + (f"  # {comment}" if comment else "")]
    indent = " " * (len(key) - len(key.lstrip()))
    return [f"{indent}# {comment}", line]


def one_line(text: str) -> str:
    """The text without line breaks and control characters: names of others may have them."""
    return printable(" ".join(text.split()))


def _flow(value: Any) -> str:
    """A value as YAML on one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_flow(key)}: {_flow(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_flow, value)) + "]"
    if isinstance(value, str):
        return value if PLAIN.fullmatch(value) and value.lower() not in WORDS else json.dumps(value, ensure_ascii=False)
    if isinstance(value, float):
        return f"{value:g}" if value >= 0.01 else re.sub(r"e-0?", "e-", f"{value:.0e}")
    return json.dumps(value)


def listing(found: list[tuple[str, Guess]]) -> Iterator[str]:
    """A line for each reading, with what selects it."""
    width = max(len(guess.option) for _, guess in found)
    yield from (one_line(f"{guess.option:<{width}}").ljust(width) + f"  {one_line(guess.seen)}" for _, guess in found)
