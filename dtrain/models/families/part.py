"""A part of config.json, read and written by one description."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dtrain.core.types import JsonObject
from dtrain.models.families.fields import Fields

if TYPE_CHECKING:
    from dtrain.models.decoder import Decoder

REQUIRED = object()
"""In place of a default: config.json must have the field."""


@dataclass(frozen=True)
class Part:
    """Some settings of a decoder, and the fields of config.json that say the same."""

    defaults: Mapping[str, object]
    """The values of fields that a config.json may leave out, as transformers has them."""
    read: Callable[[Fields], JsonObject]
    """The settings, from the fields."""
    write: Callable[["Decoder"], JsonObject] = field(default=lambda _: {})
    """The fields, from a model."""
