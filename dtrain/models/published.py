"""The names of a decoder's parameters in Hugging Face's checkpoints, and the layout of their values there.

A matrix is stored there as (out, in), without a dim for the heads, with one tensor per layer and per expert. GPT-2
stores (in, out), and queries, keys and values concatenated in one tensor.
"""

import math
import re
from dataclasses import dataclass
from itertools import product

import numpy as np

from dtrain.models.decoder import Decoder
from dtrain.models.nn.param import Param
from dtrain.models.rope import Learned

UNUSED = re.compile(r"(^|\.)(attn\.(masked_)?bias|rotary_emb\.inv_freq)$")
"""Tensors in some files that are not parameters: masks and rotary frequencies, which are computed."""

HEAD = "lm_head.weight"
"""The output head. Some files of tied models have it too, as a copy of the embedding."""

QKV = ("query", "key", "value")


KINDS = ("weight", "bias")
APART = {"layer": "layer", "experts": "expert"}
"""Dims whose every index has a tensor of its own, and the field for that index in the tensor's name."""


@dataclass(frozen=True)
class Place:
    """The published name of a parameter and the layout of its tensor."""

    name: str
    """With {layer} and {expert} for the indices of those dims."""
    transposed: bool = False
    """Whether the tensor is transposed: (out, in) in place of (in, out)."""
    part: int = 0
    parts: int = 1
    """Index and number of the parameters that are concatenated in the tensor."""

    def names(self, param: Param) -> list[str]:
        """The tensors of the parameter, in the order of its leading dims."""
        dims = _apart(param)
        ranges = [range(size) for size in param.shape[: len(dims)]]
        return [
            self.name.format(**{APART[dim]: number for dim, number in zip(dims, numbers, strict=True)})
            for numbers in product(*ranges)
        ]

    def shape(self, param: Param) -> tuple[int, ...]:
        """The shape of each tensor: a matrix is (in, out) or (out, in), its head dims merged."""
        *outer, last = _flat(param)
        shape = (*outer, last * self.parts)
        return shape[::-1] if self.transposed else shape

    def read(self, tensor: np.ndarray, param: Param) -> np.ndarray:
        """The values of the parameter in one tensor."""
        matrix = tensor.T if self.transposed else tensor
        return np.split(matrix, self.parts, axis=-1)[self.part].reshape(param.shape[len(_apart(param)) :])

    def write(self, values: np.ndarray, param: Param) -> np.ndarray:
        """The inverse of `read`, for this parameter only: the caller concatenates the parts."""
        flat = values.reshape(_flat(param))
        return flat.T if self.transposed else flat


@dataclass(frozen=True)
class Whole(Place):
    """A parameter under dtrain's own name and in its own shape."""

    def names(self, param: Param) -> list[str]:
        return [self.name]

    def shape(self, param: Param) -> tuple[int, ...]:
        return param.shape

    def read(self, tensor: np.ndarray, param: Param) -> np.ndarray:
        return tensor

    def write(self, values: np.ndarray, param: Param) -> np.ndarray:
        return values.reshape(param.shape)


def _apart(param: Param) -> list[str]:
    return [dim for dim in param.names[:2] if dim in APART]


def _flat(param: Param) -> tuple[int, ...]:
    """(in, out) of a matrix, which has a `fan_in`; else the shape of a table; one dim for a stacked bias or scale."""
    count = len(_apart(param))
    sizes = dict(enumerate(param.shape[count:]))
    inside = math.prod(size for dim, size in sizes.items() if param.names[count + dim] in param.fan_in)
    total = math.prod(sizes.values())
    if param.fan_in:
        return inside, total // inside
    return (total,) if count else param.shape


def places(model: Decoder) -> dict[str, Place]:
    """The dotted path of each parameter that has a published name, with that name and layout."""
    return _gpt2() if isinstance(model.position, Learned) else _llama(model)


def _gpt2() -> dict[str, Place]:
    layer = "h.{layer}."
    names = {"embed": Place("wte.weight"), "position": Place("wpe.weight")}
    for ours, theirs in {"norm": "ln_f", "blocks.norm1": f"{layer}ln_1", "blocks.norm2": f"{layer}ln_2"}.items():
        names |= {f"{ours}.scale": Place(f"{theirs}.weight"), f"{ours}.bias": Place(f"{theirs}.bias")}
    for part, ours in enumerate(QKV):
        names |= {f"blocks.{ours}.{what}": Place(f"{layer}attn.c_attn.{what}", part=part, parts=3) for what in KINDS}
    names |= {f"blocks.out.{what}": Place(f"{layer}attn.c_proj.{what}") for what in KINDS}
    for ours, theirs in {"up": "c_fc", "down": "c_proj"}.items():
        names[f"blocks.mlp.{ours}"] = Place(f"{layer}mlp.{theirs}.weight")
        names[f"blocks.mlp.{ours}_bias"] = Place(f"{layer}mlp.{theirs}.bias")
    return names


def _llama(model: Decoder) -> dict[str, Place]:
    """Llama, Mistral, Qwen, Gemma and Mixtral."""
    layer = "model.layers.{layer}."
    names = {
        "embed": Place("model.embed_tokens.weight"),
        "norm.scale": Place("model.norm.weight"),
        "head": Place("lm_head.weight", transposed=True),
    }
    norms = {"norm1": "input", "norm2": "pre_feedforward" if model.post_norm else "post_attention"}
    norms |= {"post1": "post_attention", "post2": "post_feedforward"} if model.post_norm else {}
    names |= {f"blocks.{ours}.scale": Place(f"{layer}{theirs}_layernorm.weight") for ours, theirs in norms.items()}
    for ours in (*QKV, "out"):
        theirs = f"{layer}self_attn.{ours[0]}_proj"
        names[f"blocks.{ours}.weight"] = Place(f"{theirs}.weight", transposed=True)
        names[f"blocks.{ours}.bias"] = Place(f"{theirs}.bias")
    names |= {f"blocks.{ours}_norm": Place(f"{layer}self_attn.{ours[0]}_norm.weight") for ours in ("query", "key")}
    experts = f"{layer}mlp" if model.qk_norm else f"{layer}block_sparse_moe"  # Qwen 3, or Mixtral
    mixtral = {"gate": "w1", "down": "w2", "up": "w3"}
    for ours, short in mixtral.items():
        names[f"blocks.mlp.{ours}"] = Place(f"{layer}mlp.{ours}_proj.weight", transposed=True)
        names[f"blocks.mlp.{ours}_bias"] = Place(f"{layer}mlp.{ours}_proj.bias")
        name = f"{ours}_proj" if model.qk_norm else short
        names[f"blocks.moe.experts.{ours}"] = Place(f"{experts}.experts.{{expert}}.{name}.weight", transposed=True)
    return names | {"blocks.moe.router": Place(f"{experts}.gate.weight", transposed=True)}
