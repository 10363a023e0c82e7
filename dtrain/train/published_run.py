"""Make a run from a folder of published weights: its config.json gives the recipe, its tokenizer is copied."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dtrain.core.errors import RecipeError
from dtrain.core.files import overwrite
from dtrain.core.run_dir import folder
from dtrain.core.types import JsonObject
from dtrain.data.codec import codec
from dtrain.data.tokenizer_files import copy_tokenizer
from dtrain.models.agreement import CONFIG, described
from dtrain.models.decoder import Decoder
from dtrain.models.hf_config import Published
from dtrain.models.nn.param import count
from dtrain.recipe.load import load, plain_part
from dtrain.recipe.yaml import dump
from dtrain.train.convert import import_params

TOKENIZER = "tokenizer"
"""The folder in the run folder that holds the files of the tokenizer."""
LENGTH = 1024
"""Most tokens per row of the recipes that are written; a user may set more."""
LARGE = 300_000_000
"""Parameters from which on the layers of the written recipe save only their inputs for the backward pass."""
WORDS = 16_384
"""Most words of the vocabulary whose logits are computed at once in the written recipe."""
Say = Callable[[str], None]

TUNE = """\
# Tune {name} with low-rank adapters on conversations:  dtrain run {file}
#
# chat.jsonl: JSON lines with `messages`, with `prompt` and `response`, or with `instruction` and `output`.
# See them as the model does before the run:  dtrain data show {file}
{model}init: {{{origin}}}
lora:
  rank: 16
  alpha: 32
  targets: ["blocks.query.weight", "blocks.key.weight", "blocks.value.weight", "blocks.out.weight"{mlp}]
data:
  kind: chat
  files: [chat.jsonl]
  length: {length}
  tokenizer: {tokenizer}
{template}optimizer:
  kind: adamw
  lr: 2e-4
  clip: 1.0
  schedule: {{kind: cosine, final: 0.1}}
precision: {{compute: bfloat16}}
batch: 8
epochs: 2
track: {{every: 10}}
"""


def import_published(
    source: Path,
    name: str,
    overrides: Sequence[str],
    devices: int | None,
    runs: Path,
    say: Say,
    *,
    recipe_only: bool = False,
) -> Path:
    """Create the run `name` with the parameters of the folder at step 0, and NAME-tune.yaml, a recipe that tunes it.

    With `recipe_only`, only that recipe is written, and it reads the folder itself. Returns its path; one that exists
    already is not changed. DataError if the folder's model is not
    supported or its files do not fit together; nothing is left behind then.
    """
    published = described(source)
    if published.unchecked:
        say(f"{source / CONFIG} has fields that dtrain does not recognise: {', '.join(published.unchecked)}")
    place = folder(runs, name)
    tokenizer = next(
        (source / name for name in ("tokenizer.json", "tokenizer.model") if (source / name).is_file()), None
    )
    if tokenizer:
        _report_tokenizer(tokenizer, published.model, say)
    else:
        say(f"{source} has no tokenizer.json and no tokenizer.model: set data.tokenizer before training or generating")
    if recipe_only:
        if overrides:
            raise RecipeError(f"--recipe-only takes no overrides, found {overrides[0]}", "give them to dtrain run")
        if Path(f"{name}-tune.yaml").exists():
            raise RecipeError(f"{name}-tune.yaml exists already", "give another name: --out NAME")
        return _written(name, f"weights: {source}", published, str(source), tokenizer is not None)
    own = str(place.path / TOKENIZER)  # without a file there, what needs a tokenizer is refused
    values: JsonObject = {
        "model": _model(published.model),
        "data": {"kind": "chat", "files": [], "length": min(LENGTH, published.model.context), "tokenizer": own},
        "optimizer": {"kind": "adafactor", "lr": 1e-4},  # has hardly any state
        "batch": 8,
        "steps": 1,
    }
    with TemporaryDirectory() as temporary:
        path = Path(temporary) / f"{name}.yaml"
        path.write_text(dump(values))
        recipe = dataclasses.replace(load(path, overrides, devices), name=name)
    import_params(recipe, runs, source, say, before=lambda place: copy_tokenizer(source, place.path / TOKENIZER))
    return _written(name, f"run: {place.path}", published, own, tokenizer is not None)


def _model(model: Decoder) -> dict[str, Any]:
    """The model section, without what is the default."""
    values, default = plain_part(model), {}
    for field in dataclasses.fields(model):
        if field.default is not dataclasses.MISSING:
            default[field.name] = field.default
    return {"kind": model.kind} | {name: value for name, value in values.items() if value != default.get(name)}


def _report_tokenizer(path: Path, model: Decoder, say: Say) -> None:
    size = codec(str(path)).size
    if size > model.vocab:
        say(
            f"{path} has token ids up to {size - 1:,}, the model's vocab is {model.vocab:,}: data with these is refused"
        )


def _written(name: str, origin: str, published: Published, tokenizer: str, found: bool) -> Path:
    path, model = Path(f"{name}-tune.yaml"), published.model
    if path.exists():
        return path
    section, words = _model(model), model.words
    if count(model.params()) > LARGE:
        section["remat"] = "full"
        chunks = (n for n in range(1, words + 1) if words % n == 0 and words // n <= WORDS)
        section["loss_chunks"] = next(chunks)
    gated = ', "blocks.mlp.*"' if not model.experts else ""
    has_template = found and codec(tokenizer).template is not None
    text = TUNE.format(
        name=name,
        file=path,
        model=dump({"model": section}),
        origin=origin,
        mlp=gated,
        length=min(LENGTH, model.context),
        tokenizer=tokenizer,
        template="" if has_template else "  template: alpaca  # the tokenizer has none of its own\n",
    )
    try:
        overwrite(path, text)
    except OSError as error:
        raise RecipeError(f"cannot write {path}: {error.strerror}") from error
    return path
