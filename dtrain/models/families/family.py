"""A published architecture of decoders."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dtrain.core.types import JsonObject
from dtrain.models.families.part import Part

if TYPE_CHECKING:
    from dtrain.models.decoder import Decoder


@dataclass(frozen=True)
class Family:
    """A published architecture."""

    architecture: str
    """The class of transformers."""
    parts: tuple[Part, ...]
    names: str = "llama"
    """Whose names its tensors have: a key of the tables in `tensors` and `older_names`."""
    written: bool = True
    """Whether models are exported as it."""
    opens: Callable[["Decoder"], bool] = lambda _: True
    """Whether versions 4.57 and 5 of transformers both open what is written, and compute the same from it."""

    @property
    def defaults(self) -> JsonObject:
        """The values of fields that a config.json may leave out."""
        return {name: value for part in self.parts for name, value in part.defaults.items()}

    def config(self, model: "Decoder") -> JsonObject:
        """The fields of config.json."""
        return {name: value for part in self.parts for name, value in part.write(model).items()}


def whole_heads(model: "Decoder") -> bool:
    """Whether heads are as wide as the class of transformers makes them, which takes no `head_dim`."""
    return model.heads * model.head_size == model.width
