"""Export a run's parameters as safetensors files, with dtrain's or the published names."""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dtrain.checkpoint.tensors import PICKLES, write
from dtrain.core.errors import RecipeError
from dtrain.core.run_dir import overwrite
from dtrain.models.agreement import CONFIG, record
from dtrain.models.hf_export import config_of
from dtrain.train.convert import by_path, own_names, published_names, unpadded, values_of
from dtrain.train.load import LoadedRun

SUFFIX = ".safetensors"
FORMATS = {".gguf", ".h5", ".msgpack", ".onnx"}
"""Suffixes of other formats: a target with one of them is a mistake, not a folder."""


def target(path: Path) -> Path:
    """The file to write: `path` itself, or model.safetensors in that folder. RecipeError if it has another format."""
    if path.suffix == SUFFIX and not path.is_dir():
        return path
    if path.suffix in PICKLES | FORMATS and not path.is_dir():
        raise RecipeError(f"{path}: export writes {SUFFIX} files", f"use {path.with_suffix(SUFFIX)}, or a folder")
    return path / f"model{SUFFIX}"  # the folder is created by `write`


def export_params(loaded: LoadedRun, path: Path, published: bool, adapters: bool = False) -> None:
    """Write all parameters, unsharded, to one file; with `adapters`, those of `lora` alone.

    RecipeError if `published` names do not exist for the model, or if the run has no adapters.
    """
    if adapters:
        _export_adapters(loaded, path)
        return
    declared, values = unpadded(loaded.assembly.layout.declared), values_of(loaded)
    table = published_names(loaded.recipe.model, declared) if published else own_names(declared)
    # A stacked parameter is written as one tensor per layer and expert. A published tensor may join several parameters
    # (GPT-2's c_attn: query, key, value), whose parts are concatenated in their order.
    parts_of: dict[str, dict[int, np.ndarray]] = {}
    for name, param in declared.items():
        place, value = table[name], np.asarray(jax.device_get(values[name]))
        tensors = place.names(param)
        for tensor, part in zip(tensors, value.reshape(len(tensors), -1), strict=True):
            parts_of.setdefault(tensor, {})[place.part] = place.write(part, param)
    arrays = {
        tensor: np.ascontiguousarray(np.concatenate([parts[i] for i in sorted(parts)], -1))
        for tensor, parts in parts_of.items()
    }
    about = {"dtrain": f"{loaded.recipe.name} at step {loaded.step}"}
    write(path, arrays, about | record(loaded.recipe.model))


def _export_adapters(loaded: LoadedRun, path: Path) -> None:
    if not loaded.adapters:
        raise RecipeError(f"{loaded.recipe.name} has no adapters: its recipe has no lora", "leave --adapters out")
    arrays = {name: np.asarray(jax.device_get(value)) for name, value in by_path(dict(loaded.adapters)).items()}
    write(path, arrays, {"dtrain": f"adapters of {loaded.recipe.name} at step {loaded.step}"})


def write_config(model: Any, place: Path) -> str:
    """Write a config.json into the folder, for libraries that read it; a sentence that states the result."""
    path, config = place / CONFIG, config_of(model)
    if config is None:
        return f"no {path} written: this model matches no Hugging Face architecture that dtrain exports"
    if path.exists():
        return f"{path} exists already and is unchanged"
    overwrite(path, json.dumps(config, indent=2) + "\n")
    return f"{path}: {config['model_type']}; a tokenizer is not written"
