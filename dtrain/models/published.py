"""The names that Hugging Face's checkpoints give a decoder's parameters, and how the numbers lie there.

A product's matrix is kept there as (out, in), without a dim for the heads, one tensor a layer and an expert;
GPT-2 keeps (in, out), and queries, keys and values side by side.
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
"""Tensors of some files that are no parameters: masks, and waves that are computed."""

HEAD = "lm_head.weight"
"""Which some files of tied models have, too: the embedding told twice."""

QKV = ("query", "key", "value")


KINDS = ("weight", "bias")
APART = {"layer": "layer", "experts": "expert"}
"""Dims of which each number has a tensor of its own, and what it is called in a name."""


@dataclass(frozen=True)
class Place:
    """Where a parameter stands, and how."""

    name: str
    """With {layer} and {expert} for the dims that are kept apart."""
    turned: bool = False
    """(out, in) in place of (in, out)."""
    part: int = 0
    parts: int = 1
    """Which of how many that stand side by side."""

    def names(self, param: Param) -> list[str]:
        """The tensors that hold the parameter, in the order of its own first dims."""
        dims = _apart(param)
        ranges = [range(size) for size in param.shape[: len(dims)]]
        return [
            self.name.format(**{APART[dim]: number for dim, number in zip(dims, numbers, strict=True)})
            for numbers in product(*ranges)
        ]

    def shape(self, param: Param) -> tuple[int, ...]:
        """Of each of the tensors: (in, out) or (out, in) of a matrix, whatever dims its heads have."""
        *outer, last = _flat(param)
        found = (*outer, last * self.parts)
        return found[::-1] if self.turned else found

    def read(self, found: np.ndarray, param: Param) -> np.ndarray:
        """The parameter's part of one tensor."""
        whole = found.T if self.turned else found
        return np.split(whole, self.parts, axis=-1)[self.part].reshape(param.shape[len(_apart(param)) :])

    def write(self, values: np.ndarray, param: Param) -> np.ndarray:
        """The other way; what stands beside it is not there yet."""
        flat = values.reshape(_flat(param))
        return flat.T if self.turned else flat


@dataclass(frozen=True)
class Whole(Place):
    """A parameter under our own name, as it is."""

    def names(self, param: Param) -> list[str]:
        return [self.name]

    def shape(self, param: Param) -> tuple[int, ...]:
        return param.shape

    def read(self, found: np.ndarray, param: Param) -> np.ndarray:
        return found

    def write(self, values: np.ndarray, param: Param) -> np.ndarray:
        return values.reshape(param.shape)


def _apart(param: Param) -> list[str]:
    return [dim for dim in param.names[:2] if dim in APART]


def _flat(param: Param) -> tuple[int, ...]:
    """(in, out) of what is applied as a product; the rows of a table; all values of a bias."""
    count = len(_apart(param))
    sizes = dict(enumerate(param.shape[count:]))
    inside = math.prod(size for dim, size in sizes.items() if param.names[count + dim] in param.fan_in)
    whole = math.prod(sizes.values())
    if param.fan_in:
        return inside, whole // inside
    return (whole,) if count else param.shape


def places(model: Decoder) -> dict[str, Place]:
    """The dotted path of each parameter that has a published name, with its place."""
    return _gpt2() if isinstance(model.position, Learned) else _llama(model)


def _gpt2() -> dict[str, Place]:
    layer = "h.{layer}."
    found = {"embed": Place("wte.weight"), "position": Place("wpe.weight")}
    for ours, theirs in {"norm": "ln_f", "blocks.norm1": f"{layer}ln_1", "blocks.norm2": f"{layer}ln_2"}.items():
        found |= {f"{ours}.scale": Place(f"{theirs}.weight"), f"{ours}.bias": Place(f"{theirs}.bias")}
    for part, ours in enumerate(QKV):
        found |= {f"blocks.{ours}.{what}": Place(f"{layer}attn.c_attn.{what}", part=part, parts=3) for what in KINDS}
    found |= {f"blocks.out.{what}": Place(f"{layer}attn.c_proj.{what}") for what in KINDS}
    for ours, theirs in {"up": "c_fc", "down": "c_proj"}.items():
        found[f"blocks.mlp.{ours}"] = Place(f"{layer}mlp.{theirs}.weight")
        found[f"blocks.mlp.{ours}_bias"] = Place(f"{layer}mlp.{theirs}.bias")
    return found


def _llama(model: Decoder) -> dict[str, Place]:
    """Llama, Mistral, Qwen, Gemma and Mixtral."""
    layer = "model.layers.{layer}."
    found = {
        "embed": Place("model.embed_tokens.weight"),
        "norm.scale": Place("model.norm.weight"),
        "head": Place("lm_head.weight", turned=True),
    }
    norms = {"norm1": "input", "norm2": "pre_feedforward" if model.post_norm else "post_attention"}
    norms |= {"post1": "post_attention", "post2": "post_feedforward"} if model.post_norm else {}
    found |= {f"blocks.{ours}.scale": Place(f"{layer}{theirs}_layernorm.weight") for ours, theirs in norms.items()}
    for ours in (*QKV, "out"):
        theirs = f"{layer}self_attn.{ours[0]}_proj"
        found[f"blocks.{ours}.weight"] = Place(f"{theirs}.weight", turned=True)
        found[f"blocks.{ours}.bias"] = Place(f"{theirs}.bias")
    found |= {f"blocks.{ours}_norm": Place(f"{layer}self_attn.{ours[0]}_norm.weight") for ours in ("query", "key")}
    experts = f"{layer}mlp" if model.qk_norm else f"{layer}block_sparse_moe"  # Qwen 3, or Mixtral
    mixtral = {"gate": "w1", "down": "w2", "up": "w3"}
    for ours, short in mixtral.items():
        found[f"blocks.mlp.{ours}"] = Place(f"{layer}mlp.{ours}_proj.weight", turned=True)
        found[f"blocks.mlp.{ours}_bias"] = Place(f"{layer}mlp.{ours}_proj.bias")
        name = f"{ours}_proj" if model.qk_norm else short
        found[f"blocks.moe.experts.{ours}"] = Place(f"{experts}.experts.{{expert}}.{name}.weight", turned=True)
    return found | {"blocks.moe.router": Place(f"{experts}.gate.weight", turned=True)}
