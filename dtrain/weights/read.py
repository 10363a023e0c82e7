"""Read parameters from safetensors files, under dtrain's or the published names, onto the devices of a run."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from dtrain.checkpoint.tensors import Tensors
from dtrain.core.counts import counted
from dtrain.core.errors import DataError, RecipeError
from dtrain.models.configs import kind_of, names_of
from dtrain.models.families.tensors import HEAD
from dtrain.models.multi_token import MULTI_TOKEN
from dtrain.models.nn.param import Param, Tree, dotted
from dtrain.models.nn.quantised import Quantised, is_quantised, quantise
from dtrain.models.parts import is_in
from dtrain.models.place import Naming, Place, Whole
from dtrain.recipe.recipe import Recipe

SHOWN = 8
"""Differences that an error message lists."""
FURTHER = ".eh_proj.weight"
"""The tensor that joins the embedding of a token with what was predicted before it."""
NEW = {
    "head.": "for other classes start with a new last layer",
    f"{MULTI_TOKEN}.": "the file has no layers that predict further tokens: start with new ones",
}
"""What a run often begins anew, by what the paths of its parameters begin with, and what is said of it."""
COPIES = (".embed_tokens.weight", ".shared_head.head.weight")
"""Of a layer that predicts further tokens: the model's embedding and head once more."""
UNUSED = re.compile(r"(^|\.)(attn\.(masked_)?bias|rotary_emb\.inv_freq|num_batches_tracked)$|^(vit\.)?pooler\.dense\.")
"""Tensors in some files that are not parameters of the model: masks and rotary frequencies, which are computed; counts
of the steps of batch normalisation; a layer after a classifier's token."""
ENCODERS = re.compile(
    r"^(model\.)?(vision_tower|vision_model|audio_tower|multi_modal_projector|embed_vision|embed_audio|visual)\."
)
"""Tensors of encoders of images and sounds beside a decoder."""
NESTED = "model.language_model."
"""What `model.` is where an image encoder is inside `model`, too; the output head has its usual name (Qwen 3.5)."""
PREFIXES = (
    "",
    "transformer.",
    "language_model.",
    NESTED,
    "_orig_mod.",
    "module.",
    "_orig_mod.transformer.",
    "module.transformer.",
)
"""Prefixes of the parameter names in some files: of GPT-2, of decoders that have an image encoder beside them, and of
models that were wrapped by torch.compile or for several devices."""
WRAPPED = ("_orig_mod.", "module.")
EMBEDDINGS = {"GPT-2": "wte.weight", "Llama": "model.embed_tokens.weight"}
"""Name of the embedding in files of each architecture."""
Say = Callable[[str], None]


class Located(NamedTuple):
    """Where the parameters are in the files."""

    table: Mapping[str, Place]
    """By the parameter's path."""
    prefix: str
    """Of the names of all tensors."""


def prefixed(prefix: str, name: str) -> str:
    """The name of a tensor in files whose names have this prefix."""
    if prefix != NESTED:
        return f"{prefix}{name}"
    return f"{prefix}{name.removeprefix('model.')}" if name.startswith("model.") else name


def is_published(table: Mapping[str, Place]) -> bool:
    """Whether files have the published names, not dtrain's own."""
    return not any(isinstance(place, Whole) for place in table.values())


def find_tensors(
    tensors: Tensors,
    model: Any,
    ours: Mapping[str, Param],
    source: Path,
    new: Sequence[str] = (),
    say: Say = lambda _: None,
) -> Located:
    """Find every parameter but those of `new` in the files.

    DataError, with the differences, if one is missing or has another shape, or if a tensor is of no parameter.
    """
    table = tensor_names(tensors, model, ours)
    embed = table["embed"].name if "embed" in table else ""
    anchor = next((place.name for name, place in table.items() if name in ours and "{" not in place.name), "")
    prefix = next((prefix for prefix in PREFIXES if anchor and prefixed(prefix, anchor) in tensors), "")
    shapes = {
        prefixed(prefix, tensor): (name, table[name].shape(param))
        for name, param in ours.items()
        for tensor in table[name].names(param)
    }
    expected = {tensor: shape for tensor, (name, shape) in shapes.items() if name not in new}
    if prefix.startswith(WRAPPED):
        say(f"{source}: the tensors have the prefix {prefix!r} of a wrapped model, which is left out")
    if tensors.left_out:
        say(f"{source}: not read, not of the model: {', '.join(tensors.left_out)}")
    beyond, other = (names - shapes.keys() if model.namings else set[str]() for names in _further(tensors))
    copies = {name for name in beyond if name.endswith(COPIES)}
    unread = {
        "layers that predict further tokens, which model.multi_token trains": beyond - copies,
        "copies of the embedding and the head": copies,
        "layers that predict further tokens": other,
        "encoders of images or sounds": _encoders(tensors, model) - shapes.keys(),
        "keys and values that layers with shared keys do not use": _unused_keys(tensors, model, prefix),
    }
    for what, names in unread.items():
        if names:
            say(f"{source}: not read: {counted(len(names), 'tensor')} of {what}")
    further = set[str]().union(*unread.values())
    # files of a model with tied embeddings may contain the head as well: then it must equal the embedding
    tied_head = {HEAD} if HEAD in tensors and HEAD not in shapes and "embed" in table else set()
    none = not (other or _further(tensors)[0])
    parts = {
        f"{part}*": {tensor for tensor, (name, _) in shapes.items() if name.startswith(part)}
        for part in NEW
        if none or MULTI_TOKEN not in part
    }
    _refuse_unlike(tensors, expected, tied_head | further | (shapes.keys() - expected.keys()), source, parts)
    if tied_head and not np.array_equal(tensors[HEAD], tensors[prefixed(prefix, embed)]):
        raise DataError(
            f"{source}: {HEAD} differs from the embedding, but the recipe has model.tied: true", "set model.tied: false"
        )
    return Located({name: place for name, place in table.items() if name not in new}, prefix)


def _further(tensors: Tensors) -> tuple[set[str], set[str]]:
    """The tensors of layers that predict further tokens (DeepSeek-AI 2024, section 2.2): those after the model's own,
    known by their projection, and those under names that dtrain does not read."""
    layers = {name.removesuffix(FURTHER) for name in tensors if name.endswith(FURTHER)}
    after = {name for name in tensors if any(name.startswith(f"{one}.") for one in layers)}
    return after, {name for name in tensors if name.startswith("mtp.")}


def _encoders(tensors: Tensors, model: Any) -> set[str]:
    """Tensors of encoders beside a published model: what a user's own model does not have is refused."""
    return {name for name in tensors if ENCODERS.match(name)} if model.namings else set()


def _unused_keys(tensors: Tensors, model: Any, prefix: str) -> set[str]:
    """Tensors that the published family has for every layer, and this model not for those that share keys."""
    names = {prefixed(prefix, name) for naming in model.namings for name in naming.unused}
    return {name for name in tensors if name in names}


def read(
    tensors: Tensors, where: Located, ours: Mapping[str, Param], shapes: Mapping[str, jax.ShapeDtypeStruct | Quantised]
) -> dict[str, Any]:
    """The parameters of `shapes`, by path, with their shardings; each device reads only its own part of each. Matrices
    to be quantised become so on the host: an accelerator never holds their values in full."""

    def load(tensor: str, index: tuple[slice, ...]) -> np.ndarray:
        return tensors.part(prefixed(where.prefix, tensor), index)

    def leaf(name: str, like: Any) -> Any:
        place, param = where.table[name], ours[name]
        if is_quantised(like):
            return _quantised(like, param, lambda wanted: place.read(load, param, wanted))

        def share(index: Any) -> np.ndarray:
            """What one device holds: a part of the parameter, and zeros beyond the parameter's size (`pad_vocab`)."""
            bounds = [part.indices(size)[:2] for part, size in zip(index, like.shape, strict=True)]
            values = np.zeros([stop - start for start, stop in bounds], like.dtype)
            wanted = [slice(start, min(stop, size)) for (start, stop), size in zip(bounds, param.shape, strict=True)]
            if all(part.start < part.stop for part in wanted):
                values[tuple(slice(0, part.stop - part.start) for part in wanted)] = place.read(load, param, wanted)
            return values

        return jax.make_array_from_callback(like.shape, like.sharding, share)

    return {name: leaf(name, like) for name, like in shapes.items()}


def _quantised(like: Quantised, param: Param, values: Callable[[list[slice]], np.ndarray]) -> Quantised:
    """The parameter in the form of `like`, from a function that reads a part of its values. Of stacked layers, one at a
    time is in the host's memory in full."""
    rows, made = like.dim % len(param.shape), dict[str, tuple[np.ndarray, np.ndarray]]()

    def part(wanted: list[slice]) -> tuple[np.ndarray, np.ndarray]:
        if (key := str(wanted)) not in made:
            layers = range(wanted[0].start, wanted[0].stop) if param.names[0] == "layer" else []
            each = [[slice(layer, layer + 1), *wanted[1:]] for layer in layers] or [wanted]
            codes, scales = zip(*(quantise(values(one), like) for one in each), strict=True)
            made[key] = np.concatenate(codes), np.concatenate(scales)
        return made[key]

    def leaf(number: int, shape: jax.ShapeDtypeStruct) -> jax.Array:
        each = param.shape[rows] // shape.shape[rows]  # rows of the matrix for one here: 1 or 2 of codes, or a block

        def share(index: Any) -> np.ndarray:
            own = [slice(*part.indices(size)[:2]) for part, size in zip(index, shape.shape, strict=True)]
            first, after = own[rows].start * each, own[rows].stop * each
            start = first - first % like.block
            whole = slice(start, after + -after % like.block)  # of whole blocks
            found = part([*own[:rows], whole, *own[rows + 1 :]])[number]
            inside = slice((first - start) // each, (after - start) // each)
            return found[(*[slice(None)] * rows, inside)]

        return jax.make_array_from_callback(shape.shape, shape.sharding, share)

    return dataclasses.replace(like, codes=leaf(0, like.codes), scales=leaf(1, like.scales))


def tensor_names(tensors: Tensors, model: Any, ours: Mapping[str, Param]) -> Mapping[str, Place]:
    """Where each parameter is in the file: under dtrain's names or the published ones, whichever match more tensors.

    Raises DataError if the file has the published names of another architecture.
    """
    if not model.namings:
        return own_names(ours)

    def found(naming: Naming) -> int:
        return len(_present(tensors, naming, ours))

    def fitting(naming: Naming) -> int:
        """Families may share names, for tensors of other shapes."""
        return sum(tensors.shape(name) == shape for name, shape in _present(tensors, naming, ours).items())

    best = max(model.namings, key=lambda naming: (found(naming), fitting(naming)))
    table = best.places
    own, published = sum(name in tensors for name in ours), max(map(found, model.namings))
    if own > published or (not published and ours.keys() - table.keys()):
        return own_names(ours)
    embed = table["embed"].name if "embed" in table else ""
    expected = "GPT-2" if embed.endswith(EMBEDDINGS["GPT-2"]) else "Llama"
    there = any(prefixed(prefix, embed) in tensors for prefix in PREFIXES)
    for family, name in EMBEDDINGS.items():
        if embed and not there and family != expected and any(prefixed(prefix, name) in tensors for prefix in PREFIXES):
            own_family = best.family if best.family not in ("llama", "gpt2") else expected
            message = f"the file has the parameter names of {family}; the recipe's model has those of {own_family}"
            raise DataError(message, f"start from a recipe for a {family} model: `dtrain recipes presets`")
    return published_names(model, ours, table)


def _present(tensors: Tensors, naming: Naming, ours: Mapping[str, Param]) -> dict[str, tuple[int, ...]]:
    """The first tensor of each parameter that the file has under that naming, with the shape that it would have."""
    return {
        name: place.shape(param)
        for ours_name, param in ours.items()
        if (place := naming.places.get(ours_name))
        for prefix in PREFIXES
        if (name := prefixed(prefix, place.names(param)[0])) in tensors
    }


def _refuse_unlike(
    tensors: Tensors,
    expected: Mapping[str, tuple[int, ...]],
    known: set[str],
    source: Path,
    parts: Mapping[str, Set[str]],
) -> None:
    """`parts`: by the pattern of their parameters, tensors that a run can begin anew."""
    problems = [
        *(f"{name} is missing" for name in expected if name not in tensors),
        *(
            f"{name} is not a parameter of the model"
            for name in tensors
            if name not in expected.keys() | known and not UNUSED.search(name)
        ),
        *(
            f"{name} has shape {tensors.shape(name)}, in the model {shape}"
            for name, shape in expected.items()
            if name in tensors and tensors.shape(name) != shape
        ),
    ]
    if problems:
        more = [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        head = f"{source} does not match this recipe's model:"
        hint = "compare the recipe's sizes with the file's"
        for pattern, names in parts.items():
            if all(problem.partition(" ")[0] in names for problem in problems):
                hint = f'{NEW[pattern[:-1]]}: init: {{weights: {source}, new: ["{pattern}"]}}'
        if not any(name in tensors for name in expected):
            head = f"{source} is of another model: none of its {len(list(tensors))} tensors has a name of the recipe's:"
            hint = "compare the recipe's model with the model that the file was exported from"
            if all(f"model.{name}" in expected for name in tensors if name not in known and not UNUSED.search(name)):
                head = f"{source} has the names of a model without its head, which lack 'model.':"
                hint = "save it with its head: AutoModelForCausalLM in place of AutoModel"
        raise DataError("\n  ".join([head, *problems[:SHOWN], *more]), hint, "E-WEIGHTS")


def own_names(declared: Mapping[str, Param]) -> dict[str, Place]:
    return {name: Whole(name) for name in declared}


def published_names(
    model: Any, declared: Mapping[str, Param], table: Mapping[str, Place] | None = None
) -> Mapping[str, Place]:
    """The published name of every parameter, from `table` or the model's usual ones. RecipeError if one has none."""
    if table is None:
        table = dict(model.namings[0].places) if model.namings else {}
    nameless = [name for name in declared if name not in table]
    if nameless:
        message = f"parameter {nameless[0]} has no published name"
        raise RecipeError(message if table else f"{message}: models of kind {model.kind} have only dtrain's own names")
    return table


def base_names(model: Any, declared: Mapping[str, Param], kind: str) -> Mapping[str, Place]:
    """The published names of every parameter in weights of that `model_type`; the model's usual ones where that is
    empty, or other weights were published under it."""
    families = [names_of(one) for one in (kind, kind_of(model)) if one]
    own = (naming.places for family in families for naming in model.namings if naming.family == family)
    return published_names(model, declared, next(own, None))


def part_of(recipe: Recipe, tree: Mapping[str, Any], part: str) -> dict[str, Any]:
    """What belongs to that part of a run's parameters, by path; "": all but those of the recipe's parts, and those that
    the objective takes from elsewhere."""
    if part:
        return {name: leaf for name, leaf in tree.items() if is_in(part, name)}
    others = (*recipe.minimised.sources(), *recipe.parts)
    return {name: leaf for name, leaf in tree.items() if not any(is_in(other, name) for other in others)}


def without_padding(declared: Tree) -> dict[str, Param]:
    """The parameters by path, without the padding that files do not have."""
    return {
        name: dataclasses.replace(param, shape=param.unpadded or param.shape)
        for name, param in leaves_by_path(declared).items()
    }


def leaves_by_path(tree: Tree, is_leaf: Callable[[object], bool] | None = None) -> dict[str, Any]:
    return {dotted(path): leaf for path, leaf in jax.tree.leaves_with_path(tree, is_leaf=is_leaf)}
