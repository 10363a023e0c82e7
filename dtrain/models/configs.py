"""The config.json of published models of every family: the model that one describes, and the files of a model."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dtrain.core.types import JsonObject
from dtrain.models.decoder import Decoder
from dtrain.models.hf_config import Published, published_model
from dtrain.models.hf_export import config_of
from dtrain.models.image_configs import CONFIG, Normalisation, image_files, image_model, is_of_images

Pixels = tuple[Sequence[float], Sequence[float]]
"""Mean and deviation of pixels: one number, or one for each channel."""


def described_model(config: JsonObject, context: int, path: Path) -> Published:
    """The model of a config.json; of a decoder, for rows of at most `context` tokens.

    DataError if its architecture is not supported, or a field is missing or has an impossible value.
    """
    return image_model(config, path) if is_of_images(config) else published_model(config, context, path)


def files_beside(model: Any, library: str, classes: Sequence[str], pixels: Pixels | None) -> dict[str, JsonObject]:
    """The files beside the parameters with which that library computes the same, by name; none if it has no such model.

    `classes`: their names, if they have some. `pixels`: what the data subtracts from pixels and divides them by.
    """
    if isinstance(model, Decoder):
        config = config_of(model)
        return {CONFIG: config} if config else {}
    if pixels is None or not model.image:
        return {}
    mean, std = (tuple(one) * (model.image[2] if len(one) == 1 else 1) for one in pixels)
    return image_files(model, library, classes, Normalisation(mean, std)) or {}


def unlike(given: Pixels, wanted: Normalisation) -> bool:
    """Whether pixels are normalised in another way, by more than a rounding of three digits."""

    def differ(ours: Sequence[float], theirs: Sequence[float]) -> bool:
        ours = tuple(ours) * (len(theirs) if len(ours) == 1 else 1)
        return len(ours) != len(theirs) or not all(math.isclose(a, b, abs_tol=1e-3) for a, b in zip(ours, theirs))

    return differ(given[0], wanted.mean) or differ(given[1], wanted.std)
