"""Low-rank adapters in the form of Hugging Face's PEFT library, both ways."""

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dtrain.checkpoint.tensors import Tensors
from dtrain.core.errors import DataError, RecipeError
from dtrain.core.files import read_object
from dtrain.core.types import JsonObject
from dtrain.models.layer_pattern import DENSE
from dtrain.models.lora import ADAPTERS, Lora
from dtrain.models.nn.param import Param, Tree
from dtrain.models.place import Place

Say = Callable[[str], None]


CONFIG = "adapter_config.json"
PREFIX = "base_model.model."
"""Before the name of a module of `transformers` in PEFT's files."""
PLAIN: JsonObject = {
    "peft_type": "LORA", "bias": "none", "use_dora": False, "use_rslora": False, "fan_in_fan_out": False,
    "modules_to_save": None, "layers_to_transform": None, "rank_pattern": {}, "alpha_pattern": {},
    "trainable_token_indices": None, "target_parameters": None, "alora_invocation_tokens": None,
}  # fmt: skip
"""Fields of adapter_config.json with the value at which an adapter is plain LoRA on whole matrices."""
NEUTRAL: JsonObject = {
    "layer_replication": None, "lora_bias": False, "use_qalora": False, "use_bdlora": None, "arrow_config": None,
    "velora_config": None, "monteclora_config": None, "kasa_config": None, "lora_ga_config": None,
    "ensure_weight_tying": False,
}  # fmt: skip
"""More such fields, which newer versions of PEFT have."""
IGNORED = {
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode", "r",
    "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "layers_pattern", "init_lora_weights",
    "megatron_config", "megatron_core", "loftq_config", "eva_config", "corda_config", "qalora_group_size",
    "runtime_config",
}  # fmt: skip
"""Fields that are read, or that say how the adapter was trained and where its matrices are, which the tensors show."""
UNCHANGED_BASE = (True, False, "gaussian", "eva")
"""Values of init_lora_weights that leave the base as it was published."""


def adapter_tensors(adapters: Mapping[str, Tree], places: Mapping[str, tuple[Place, Param]]) -> dict[str, np.ndarray]:
    """PEFT's tensors of the adapters: lora_A (rank, in) and lora_B (out, rank) of each layer's matrix.

    RecipeError for a matrix that is a part of a larger tensor in published files.
    """
    tensors = {}
    for path, pair in adapters.items():
        name = path.removeprefix(f"{ADAPTERS}.")
        place, param = places[name]
        if f"{DENSE}.mlp." in name:  # PEFT 0.21 takes the ends of their names for those of experts
            message = f"{name}: PEFT loses adapters of layers without experts in a model that has some"
            raise RecipeError(message, "export the sum of base and adapters: leave --adapters out")
        if not place.alone:
            message = f"{name} is not a matrix (out, in) of its own in published files, as adapters of PEFT need"
            raise RecipeError(message, "export the sum of base and adapters: leave --adapters out")
        modules = place.names(param)
        a, b = (np.asarray(jax.device_get(pair[part]), np.float32) for part in ("a", "b"))
        rank = a.shape[-1]
        for module, a_one, b_one in zip(
            modules, a.reshape(len(modules), -1, rank), b.reshape(len(modules), rank, -1), strict=True
        ):
            stem = f"{PREFIX}{module.removesuffix('.weight')}"
            tensors[f"{stem}.lora_A.weight"] = np.ascontiguousarray(a_one.T)
            tensors[f"{stem}.lora_B.weight"] = np.ascontiguousarray(b_one.T)
    return tensors


def adapter_config(lora: Lora, tensors: Mapping[str, object]) -> JsonObject:
    """adapter_config.json. RecipeError if the run trained other parameters in full."""
    if lora.train:
        message = f"lora.train: {', '.join(lora.train)} were trained in full; an adapter file does not have them"
        raise RecipeError(message, "export the sum of base and adapters: leave --adapters out")
    modules = sorted({name.rsplit(".", 3)[1] for name in tensors})
    return PLAIN | {
        "task_type": "CAUSAL_LM",
        "r": lora.rank,
        "lora_alpha": lora.alpha or lora.rank,
        "lora_dropout": 0.0,
        "target_modules": modules,
        "inference_mode": True,
        "base_model_name_or_path": None,
    }


def read_config(folder: Path) -> JsonObject:
    """A valid adapter_config.json. DataError if it describes more than plain LoRA."""
    path = folder / CONFIG
    config = read_object(path, "a PEFT adapter")
    absent = [name for name in ("r", "lora_alpha") if name not in config]
    if absent:
        raise DataError(f"{path} cannot be read as a PEFT adapter: it has no {absent[0]}")
    rank, alpha = config["r"], config["lora_alpha"]
    init = config.get("init_lora_weights", True)
    if init not in UNCHANGED_BASE:  # PiSSA, OLoRA, CorDA, LoftQ ... subtract their initial product from the base
        message = f"{path}: init_lora_weights: {init} may belong to a base whose weights were changed with it"
        hint = "save it as plain LoRA: PEFT's save_pretrained(path, path_initial_model_for_weight_conversion=...)"
        raise DataError(message, hint)
    for name, found in config.items():
        neutral = (PLAIN | NEUTRAL).get(name)
        if name not in IGNORED and found != neutral and (found or neutral):
            raise DataError(f"{path}: {name}: {found} is not supported", "dtrain reads plain LoRA adapters")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float) or alpha <= 0:
        raise DataError(f"{path}: r: {rank}, lora_alpha: {alpha} are not a rank and a factor")
    return config


def adapted_names(tensors: Tensors, places: Mapping[str, tuple[Place, Param]], folder: Path) -> list[str]:
    """The parameters that the file has adapters for. DataError if it has others, or not those of every layer."""
    stems = {re.sub(r"\.lora_[AB](\.default)?\.weight$", "", name).removeprefix(PREFIX) for name in tensors}
    found = []
    for name, (place, param) in places.items():
        modules = [module.removesuffix(".weight") for module in place.names(param)] if param.fan_in else []
        own = [module for module in modules if module in stems]
        if own and len(own) < len(modules):
            message = f"{folder} has adapters for {len(own)} of the {len(modules)} matrices of {name}"
            raise DataError(message, "dtrain's adapters are for all layers or none")
        if own and not place.alone:
            raise DataError(f"{folder} has an adapter for {own[0]}, which dtrain reads as several parameters")
        found += [name] if own else []
        stems -= set(own)
    outer = sorted(stem for stem in stems if re.search(r"(^|\.)(lm_head|embed_tokens|wte|wpe)(\.|$)", stem))
    if outer:
        message = f"{folder} has adapters or weights of {', '.join(outer)}; dtrain reads those of the blocks' matrices"
        raise DataError(message, "merge it with PEFT first, merge_and_unload(), and import the whole model")
    if stems:
        raise DataError(f"{folder} has adapters for {min(stems)}, which the base does not have")
    return found


def read_adapter(tensors: Tensors, place: Place, param: Param, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """`a` and `b` of one parameter, with these shapes. DataError if the file's have others."""
    read = {}
    for part, theirs in (("a", "lora_A"), ("b", "lora_B")):
        names = [f"{PREFIX}{module.removesuffix('.weight')}.{theirs}.weight" for module in place.names(param)]
        if missing := [name for name in names if name not in tensors]:
            raise DataError(f"{missing[0]} is missing")
        size = math.prod(shapes[part]) // len(names)
        if unlike := [name for name in names if math.prod(tensors.shape(name)) != size]:
            raise DataError(f"{unlike[0]} has shape {tensors.shape(unlike[0])}; the base needs {size:,} values")
        read[part] = np.stack([tensors[name].astype(np.float32).T for name in names]).reshape(shapes[part])
    return read
