"""Kinds of a decoder's layers, and the order in which they follow each other."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from dtrain.core.types import Positive, Share
from dtrain.models.rope import NoPosition, Rope

DENSE, SPARSE, ATTENTION = "dense", "sparse", "attention"
Mixer = Literal["attention", "delta", "convolution", "mamba"]
"""How a layer mixes the tokens of a row."""
OTHER_MIXERS = tuple(name for name in get_args(Mixer) if name != ATTENTION)
"""Each has a section of that name in the model, with its sizes."""


@dataclass(frozen=True, kw_only=True)
class LayerKind:
    """Neighbouring layers of one kind."""

    count: Positive = 1
    """How many follow each other."""
    window: Positive | None = None
    """Keys that a query attends to, its own included; default: all earlier ones."""
    chunk: Positive | None = None
    """Keys that a query attends to are those of its chunk of so many positions, in place of a window (Llama 4)."""
    position: Rope | NoPosition | None = None
    """How queries and keys are rotated; default: `model.position`."""
    dense: bool = False
    """A feed-forward layer of width `model.hidden` in a model whose other layers have experts."""
    mixer: Mixer = ATTENTION
    """How tokens are mixed: attention; delta, a linear attention of the sizes of `model.delta` (Qwen 3.5);
    convolution, over the few tokens of `model.convolution` (LFM2); or mamba, with the states of `model.mamba`
    (Granite 4)."""
    head_dim: Positive | None = None
    """Values per head in these layers; default: `model.head_dim` (Gemma 4: larger heads in layers without a window)."""
    kv_heads: Positive | None = None
    """Heads of keys and values in these layers; default: `model.kv_heads`."""
    shared_values: bool = False
    """Values are the keys, before these are normalised and rotated: there is no matrix for them (Gemma 4)."""
    shared_keys: bool = False
    """Keys and values are those of the last layer before, of the same window, rotation and sizes, that has its own:
    there are no matrices for them (Gemma 3n, Gemma 4)."""
    hidden: Positive | None = None
    """Width of the feed-forward layer in these layers; default: `model.hidden`."""
    sparsity: Share = 0.0
    """Share of the hidden values that are set to zero, by the mean and the deviation of the values of a token; 0: none
    (Gemma 3n)."""

    def group(self, experts: bool) -> str:
        """Layers of one group have parameters of the same shapes: they are stacked in one array for each. `experts`:
        whether the model has a mixture of experts."""
        kind = DENSE if self.dense else SPARSE
        name = kind if experts and self.mixer == ATTENTION else f"{self.mixer}_{kind}" if experts else self.mixer
        sizes = {"dim": self.head_dim, "kv": self.kv_heads, "hidden": self.hidden}
        own = [f"{what}{size}" for what, size in sizes.items() if size] + ["shared"] * self.shared_values
        return "_".join([name, *own, *["keyless"] * self.shared_keys])

    @property
    def keys(self) -> str:
        """The name of keys and values that such layers can share."""
        return f"keys {self.window} {self.chunk} {self.position} {self.head_dim} {self.kv_heads}"


def shared_from(layers: Sequence[LayerKind]) -> tuple[int | None, ...]:
    """For each layer that shares the keys of an earlier one the number of that; KeyError if there is none."""
    own, found = dict[str, int](), list[int | None]()
    for number, kind in enumerate(layers):
        found.append(own[kind.keys] if kind.shared_keys else None)
        own |= {kind.keys: number} if kind.mixer == ATTENTION and not kind.shared_keys else {}
    return tuple(found)


def windowed(
    position: object, window: int | None, global_every: int, window_theta: float | None
) -> tuple[LayerKind, ...]:
    """A round of layers with the window, the last of `global_every` without; with rotations of their own, unscaled, by
    `window_theta`."""
    local = None
    if window_theta and isinstance(position, Rope):
        local = replace(position, theta=window_theta, scaling=None)
    near = (LayerKind(window=window, position=local),)
    return (*near * (global_every - 1), LayerKind()) if global_every else near


def expanded(kinds: Sequence[LayerKind]) -> tuple[LayerKind, ...]:
    """The kind of each layer, with a count of 1."""
    return tuple(replace(kind, count=1) for kind in kinds for _ in range(kind.count))


def compressed(layers: Sequence[LayerKind]) -> tuple[LayerKind, ...]:
    """The shortest pattern that gives these layers when it is repeated, with equal neighbours counted."""
    period = next(
        size for size in range(1, len(layers) + 1) if all(one == layers[i % size] for i, one in enumerate(layers))
    )
    kinds: list[LayerKind] = []
    for layer in layers[:period]:
        if kinds and replace(kinds[-1], count=1) == layer:
            kinds[-1] = replace(layer, count=kinds[-1].count + 1)
        else:
            kinds.append(layer)
    return tuple(kinds)
