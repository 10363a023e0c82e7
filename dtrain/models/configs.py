"""The config.json of published models of every family: the model that one describes, and the files of a model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dtrain.core.types import JsonObject
from dtrain.data.batch import Preparation
from dtrain.models.decoder import Decoder
from dtrain.models.families.config import FAMILIES, SAME, config_of, published_model
from dtrain.models.families.fields import Published
from dtrain.models.image_configs import CONFIG, NoConfig, image_files, image_model, is_of_images


def described_model(config: JsonObject, context: int, path: Path) -> Published:
    """The model of a config.json; of a decoder, for rows of at most `context` tokens.

    DataError if its architecture is not supported, or a field is missing or has an impossible value.
    """
    return image_model(config, path) if is_of_images(config) else published_model(config, context, path)


def names_of(kind: str) -> str:
    """Whose names the tensors of a decoder of that `model_type` have; empty for other models."""
    kind = SAME.get(kind, kind)
    return FAMILIES[kind].names if kind in FAMILIES else ""


def kind_of(model: Any) -> str:
    """The `model_type` as which a decoder is exported; empty for other models, and where no type computes the same."""
    return str((config_of(model) or {}).get("model_type", "")) if isinstance(model, Decoder) else ""


def files_beside(
    model: Any, library: str, classes: Sequence[str], pictures: Preparation | None, kind: str = ""
) -> tuple[dict[str, JsonObject], str]:
    """The files beside the parameters with which that library computes the same, by name, and what is to say about
    them; none, and why, if it has no such model.

    `classes`: their names, if they have some. `pictures`: how the data prepares them. `kind`: the `model_type` that a
    decoder is written as, if that computes the same.
    """
    none = f"this model matches no architecture of {library} that dtrain exports"
    if isinstance(model, Decoder):
        config = config_of(model, kind)
        return ({CONFIG: config}, "") if config else ({}, none)
    if pictures is None:
        return {}, "the data has no pixels that are normalised (data.pixels)"
    try:
        return image_files(model, library, classes, pictures)
    except NoConfig as error:
        return {}, f"{none}: {error}"
