"""The names of a decoder's parameters in Hugging Face's checkpoints, and the layout of their values there.

A matrix is stored there as (out, in), without a dim for the heads, with one tensor per layer and per expert. GPT-2
stores (in, out), and queries, keys and values concatenated in one tensor.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from dtrain.models.decoder import Decoder
from dtrain.models.nn.param import Param
from dtrain.models.rope import Learned

UNUSED = re.compile(r"(^|\.)(attn\.(masked_)?bias|rotary_emb\.inv_freq)$|^(vision_tower|multi_modal_projector)\.")
"""Tensors in some files that are not parameters of the decoder: masks and rotary frequencies, which are computed, and
an image encoder."""
FUSED = "self_attn.qkv_proj.weight"
"""The tensor of queries, keys and values together (Phi-3)."""

HEAD = "lm_head.weight"
"""The output head. Some files of tied models have it too, as a copy of the embedding."""

QKV = ("query", "key", "value")


KINDS = ("weight", "bias")
APART = {"layer": "layer", "experts": "expert"}
"""Dims whose every index has a tensor of its own, and the field for that index in the tensor's name."""


Index = Sequence[slice]
Load = Callable[[str, tuple[slice, ...]], np.ndarray]
"""Reads a part of a tensor by its name: one slice with start and stop for each of its dims."""


@dataclass(frozen=True)
class Place:
    """The published name of a parameter and the layout of its tensor."""

    name: str
    """With {layer} and {expert} for the indices of those dims."""
    transposed: bool = False
    """Whether the tensor is transposed: (out, in) in place of (in, out)."""
    start: int = 0
    total: int = 0
    """Where several parameters are concatenated along `out` in one tensor: the first index of this one, and the size
    of `out` of the tensor; 0 where the tensor is the parameter's own."""

    def names(self, param: Param) -> list[str]:
        """The tensors of the parameter, in the order of its leading dims."""
        dims = _apart(param)
        ranges = [range(size) for size in param.shape[: len(dims)]]
        return [self._named(dims, numbers) for numbers in product(*ranges)]

    def _named(self, dims: Sequence[str], numbers: Sequence[int]) -> str:
        return self.name.format(**{APART[dim]: number for dim, number in zip(dims, numbers, strict=True)})

    def shape(self, param: Param) -> tuple[int, ...]:
        """The shape of each tensor: a matrix is (in, out) or (out, in), its head dims merged."""
        *outer, last = (math.prod(sizes) for sizes in _groups(param))
        shape = (*outer, self.total or last)
        return shape[::-1] if self.transposed else shape

    def read(self, load: Load, param: Param, index: Index) -> np.ndarray:
        """The part of the parameter at `index`: a slice with start and stop for each of its dims.

        Of each tensor only the rows and columns are read that the part needs.
        """
        dims = _apart(param)
        apart, inner = index[: len(dims)], index[len(dims) :]
        ranges = [range(part.start, part.stop) for part in apart]
        parts = [self._part(load, self._named(dims, numbers), param, list(inner)) for numbers in product(*ranges)]
        if not dims:
            return parts[0]
        return np.stack(parts).reshape(*map(len, ranges), *parts[0].shape)

    def _part(self, load: Load, name: str, param: Param, inner: list[slice]) -> np.ndarray:
        """The part of one tensor. Of dims that are merged in it, only the first is sliced in the file."""
        wanted, shape, rest = [], [], []
        for sizes in _groups(param):
            first, *others = (inner.pop(0) for _ in sizes)
            size = math.prod(sizes[1:])
            wanted.append(slice(first.start * size, first.stop * size))
            shape += [first.stop - first.start, *sizes[1:]]
            rest += [slice(None), *others]
        wanted[-1] = slice(wanted[-1].start + self.start, wanted[-1].stop + self.start)
        values = load(name, tuple(wanted[::-1] if self.transposed else wanted))
        return (values.T if self.transposed else values).reshape(shape)[tuple(rest)]

    def write(self, values: np.ndarray, param: Param) -> np.ndarray:
        """A whole tensor of this parameter alone: the caller concatenates those that share one, in order of `start`."""
        flat = values.reshape([math.prod(sizes) for sizes in _groups(param)])
        return flat.T if self.transposed else flat


@dataclass(frozen=True)
class Whole(Place):
    """A parameter under dtrain's own name and in its own shape."""

    def names(self, param: Param) -> list[str]:
        return [self.name]

    def shape(self, param: Param) -> tuple[int, ...]:
        return param.shape

    def read(self, load: Load, param: Param, index: Index) -> np.ndarray:
        return load(self.name, tuple(index))

    def write(self, values: np.ndarray, param: Param) -> np.ndarray:
        return values.reshape(param.shape)


def _apart(param: Param) -> list[str]:
    return [dim for dim in param.names[:2] if dim in APART]


def _groups(param: Param) -> list[tuple[int, ...]]:
    """The sizes of the parameter's dims that are merged into each dim of its tensor.

    A matrix, which has a `fan_in`, is (in, out); a stacked bias or scale has one dim; a table keeps its own.
    """
    count = len(_apart(param))
    sizes, names = param.shape[count:], param.names[count:]
    if param.fan_in:
        cut = 1 + max(number for number, name in enumerate(names) if name in param.fan_in)
        return [sizes[:cut], sizes[cut:]]
    return [sizes] if count else [(size,) for size in sizes]


def places(model: Decoder, fused: bool = False) -> dict[str, Place]:
    """The dotted path of each parameter that has a published name, with that name and layout.

    `fused`: queries, keys and values are one tensor, and so are the two products of a gated feed-forward layer (Phi-3).
    """
    if isinstance(model.position, Learned):
        return _gpt2(model)
    return _llama(model) | (_fused(model) if fused else {})


def _gpt2(model: Decoder) -> dict[str, Place]:
    layer = "h.{layer}."
    names = {"embed": Place("wte.weight"), "position": Place("wpe.weight")}
    for ours, theirs in {"norm": "ln_f", "blocks.norm1": f"{layer}ln_1", "blocks.norm2": f"{layer}ln_2"}.items():
        names |= {f"{ours}.scale": Place(f"{theirs}.weight"), f"{ours}.bias": Place(f"{theirs}.bias")}
    size = model.heads * model.head_size
    for part, ours in enumerate(QKV):
        for what in KINDS:
            names[f"blocks.{ours}.{what}"] = Place(f"{layer}attn.c_attn.{what}", start=part * size, total=3 * size)
    names |= {f"blocks.out.{what}": Place(f"{layer}attn.c_proj.{what}") for what in KINDS}
    for ours, theirs in {"up": "c_fc", "down": "c_proj"}.items():
        names[f"blocks.mlp.{ours}"] = Place(f"{layer}mlp.{theirs}.weight")
        names[f"blocks.mlp.{ours}_bias"] = Place(f"{layer}mlp.{theirs}.bias")
    return names


def _llama(model: Decoder) -> dict[str, Place]:
    """All others: Llama, Mistral, Mixtral, Qwen, Gemma, OLMo 2, and Phi-3 but for its fused tensors."""
    layer = "model.layers.{layer}."
    names = {
        "embed": Place("model.embed_tokens.weight"),
        "norm.scale": Place("model.norm.weight"),
        "head": Place("lm_head.weight", transposed=True),
    }
    norms = {"norm1": "input", "norm2": "pre_feedforward" if model.post_norm else "post_attention"}
    norms = norms if model.pre_norm else {}
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


def _fused(model: Decoder) -> dict[str, Place]:
    layer, sizes = "model.layers.{layer}.", (model.heads, model.groups, model.groups)
    starts = (0, model.heads, model.heads + model.groups)
    total = sum(sizes) * model.head_size
    names = {}
    for ours, start in zip(QKV, starts, strict=True):
        names[f"blocks.{ours}.weight"] = Place(f"{layer}{FUSED}", True, start * model.head_size, total)
    hidden = model.hidden or 4 * model.width
    for part, ours in enumerate(("gate", "up")):
        names[f"blocks.mlp.{ours}"] = Place(f"{layer}mlp.gate_up_proj.weight", True, part * hidden, 2 * hidden)
    return names
