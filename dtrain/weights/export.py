"""Export a run's parameters as safetensors files: one file, or a folder that `transformers` or PEFT opens."""

import json
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from dtrain.checkpoint.tensors import PICKLES, write
from dtrain.core.counts import counted
from dtrain.core.errors import RecipeError
from dtrain.core.files import overwrite
from dtrain.core.types import JsonObject
from dtrain.data.tokenizer_files import FILES, TEMPLATE, write_tokenizer
from dtrain.models.agreement import CONFIG, record
from dtrain.models.configs import files_beside, kind_of, names_of
from dtrain.models.image_configs import PREPROCESSOR
from dtrain.models.lora import ADAPTERS
from dtrain.models.multi_token import FURTHER_LAYERS, MULTI_TOKEN
from dtrain.models.nn.param import Param
from dtrain.models.parts import is_in
from dtrain.models.place import Place
from dtrain.weights.load import LoadedRun, values_of
from dtrain.weights.peft import adapter_config, adapter_tensors
from dtrain.weights.program import PROGRAM
from dtrain.weights.read import base_names, leaves_by_path, own_names, published_names, without_padding

SUFFIX = ".safetensors"
FORMATS = {".gguf", ".h5", ".msgpack", ".onnx"}
"""Suffixes of other formats: a target with one of them is a mistake, not a folder."""
VERIFICATION = "verification.json"
"""The result of comparing an export with transformers."""
SHARD = 5 * 10**9
"""Bytes from which on a folder's tensors are written to another file."""
Names = Literal["own", "published", "timm"]
"""dtrain's names of parameters, those of transformers, or those of timm."""
DType = Literal["float32", "bfloat16", "float16"]


def refuse_other_formats(path: Path) -> None:
    """RecipeError if the target has the suffix of another format."""
    if path.suffix in PICKLES | FORMATS and not path.is_dir():
        hint = f"use {path.with_suffix(SUFFIX)}, a folder, or {path.with_suffix(PROGRAM)}, a program"
        raise RecipeError(f"{path}: export writes {SUFFIX} and {PROGRAM} files", hint)


def export(
    loaded: LoadedRun,
    path: Path,
    names: Names | None = None,
    adapters: bool = False,
    dtype: DType = "float32",
    base: str = "",
) -> list[str]:
    """Write all parameters, or with `adapters` those of `lora` alone; sentences that state what was written.

    `base`: the `model_type` of the published weights that the run began with: adapters get its names, and a model that
    is still one of that type is written as one.

    A folder gets published names, config.json and the tokenizer where the model has them, or PEFT's form of adapters;
    a .safetensors file gets dtrain's names, unless `names` says otherwise. RecipeError if published names do not exist
    for the model, or if the run has no adapters.
    """
    refuse_other_formats(path)
    single = path.suffix == SUFFIX and not path.is_dir()
    if adapters and not loaded.adapters:
        raise RecipeError(f"{loaded.recipe.name} has no adapters: its recipe has no lora", "leave --adapters out")
    if adapters and not single and not loaded.recipe.model.generates:
        raise RecipeError("--adapters: PEFT's form is written of language models alone", "leave --adapters out")
    about = {"dtrain": f"{loaded.recipe.name} at step {loaded.step}"}
    if adapters and single:
        arrays = {
            name: np.asarray(jax.device_get(value)) for name, value in leaves_by_path(dict(loaded.adapters)).items()
        }
        write(path, _cast(arrays, dtype), about)
        return [_written(path)]
    if adapters:
        return _export_adapters(loaded, path, dtype, base, about)
    model: Any = loaded.recipe.model
    declared = without_padding(loaded.assembly.layout.declared)
    library = "timm" if names == "timm" else "transformers"
    pictures, why = loaded.recipe.data.main.pictures, "no library has names for this model"
    files, why = files_beside(model, library, loaded.classes, pictures, base) if model.namings else ({}, why)
    published = names not in (None, "own") or (names is None and not single and bool(files))
    kind = files.get(CONFIG, {}).get("model_type")
    table = _named(model, declared, library, kind) if published else own_names(declared)
    served = not published or not files or bool(files.get(CONFIG, {}).get(FURTHER_LAYERS))
    beside = set[str]() if served else {name for name in declared if is_in(MULTI_TOKEN, name)}
    declared = {name: param for name, param in declared.items() if name not in beside}
    what = counted(len(beside), "parameter")
    left = [f"left out: {what} of model.multi_token, for which {kind} has no names"] if beside else []
    counts = {place.count for name in declared if (place := table[name]).count}
    tensors = chain(_tensors(loaded, declared, table), ((name, np.zeros((), np.int64)) for name in sorted(counts)))
    about |= record(model) | ({"fitted": json.dumps(loaded.fitted["values"])} if loaded.fitted else {})
    if single:
        write(path, _cast(dict(tensors), dtype), about)
        return [_written(path), *left]
    before = _files_of_an_export(path)
    written = _write_shards(path, tensors, dtype, about)
    lines = [_written(file) for file in written]
    lines += left
    if published:
        lines += _write_files(files, why, library, loaded, path, dtype)
    else:
        lines.append(f"parameters have dtrain's own names: {why if names is None else 'as asked'}")
    for file in before - {*written, *(path / name for name in files if published)}:
        file.unlink(missing_ok=True)
    return lines


def _files_of_an_export(folder: Path) -> set[Path]:
    """The files in the folder that say what its parameters are, from an earlier export. RecipeError if they come from
    elsewhere: beside other parameters they would be wrong."""
    from safetensors import SafetensorError, safe_open

    patterns = (CONFIG, VERIFICATION, PREPROCESSOR, f"model*{SUFFIX}", f"model{SUFFIX}.index.json")
    found = {file for pattern in patterns for file in folder.glob(pattern)} if folder.is_dir() else set[Path]()
    for file in sorted(file for file in found if file.suffix == SUFFIX):
        try:
            with safe_open(file, framework="numpy") as tensors:
                ours = "dtrain" in (tensors.metadata() or {})
        except (SafetensorError, OSError):
            ours = False
        if not ours:
            raise RecipeError(f"{folder} has parameters that dtrain did not write: {file.name}", "give another folder")
    if found and not any(file.suffix == SUFFIX for file in found):
        raise RecipeError(f"{folder} has {', '.join(sorted(file.name for file in found))}", "give another folder")
    return found


def _written(path: Path) -> str:
    return f"{path}: {path.stat().st_size / 1e6:,.1f} MB"


def _tensors(
    loaded: LoadedRun, declared: Mapping[str, Param], table: Mapping[str, Place]
) -> Iterator[tuple[str, np.ndarray]]:
    """Each tensor with its name; one parameter at a time is in the host's memory.

    A stacked parameter becomes one tensor per layer and expert. A published tensor may join several parameters, such as
    queries, keys and values (GPT-2's c_attn), whose parts are concatenated in their order.
    """
    values, parts_of = values_of(loaded), dict[str, dict[int, np.ndarray]]()
    for name, param in declared.items():
        place, value = table[name], np.asarray(jax.device_get(values[name]))
        tensors = place.names(param)
        for tensor, part in zip(tensors, value.reshape(len(tensors), -1), strict=True):
            parts = parts_of.setdefault(tensor, {})
            parts[place.key] = place.write(part, param)
            if (whole := place.joined(parts)) is not None:
                yield tensor, np.asarray(whole, order="C")  # np.ascontiguousarray would give a scalar a dim
                del parts_of[tensor]


def _cast(arrays: Mapping[str, np.ndarray], dtype: DType) -> dict[str, np.ndarray]:
    """The arrays in that dtype; those of whole numbers as they are."""
    return {name: x if x.dtype.kind in "iu" else x.astype(jax.numpy.dtype(dtype)) for name, x in arrays.items()}


def _write_shards(
    folder: Path, tensors: Iterator[tuple[str, np.ndarray]], dtype: DType, about: Mapping[str, str]
) -> list[Path]:
    """Write model.safetensors, or several files with their index."""
    parts: list[tuple[Path, list[str]]] = []
    waiting: dict[str, np.ndarray] = {}
    total = 0

    def flush() -> None:
        path = folder / f"model-{len(parts) + 1:05}{SUFFIX}"
        write(path, waiting, about)
        parts.append((path, list(waiting)))
        waiting.clear()

    for name, array in tensors:
        waiting |= _cast({name: array}, dtype)
        total += waiting[name].nbytes
        if sum(array.nbytes for array in waiting.values()) > SHARD:
            flush()
    if waiting:
        flush()
    if len(parts) == 1:
        return [parts[0][0].replace(folder / f"model{SUFFIX}")]
    index, files = {}, []
    for number, (path, names) in enumerate(parts, 1):
        files.append(path.replace(folder / f"model-{number:05}-of-{len(parts):05}{SUFFIX}"))
        index |= dict.fromkeys(names, files[-1].name)
    listed = {"metadata": {"total_size": total}, "weight_map": index}
    overwrite(folder / f"model{SUFFIX}.index.json", json.dumps(listed, indent=2) + "\n")
    return files


def _write_files(
    files: dict[str, JsonObject], why: str, library: str, loaded: LoadedRun, folder: Path, dtype: DType
) -> list[str]:
    """Write config.json and what goes with it, such as the tokenizer; what was written, and what was not, and `why`."""
    if not files:
        return [f"no {CONFIG}: {why}"]
    config = files[CONFIG]
    for name, values in files.items():
        values = values | {"dtype": dtype} if name == CONFIG and library == "transformers" else values
        overwrite(folder / name, json.dumps(values, indent=2) + "\n")
    kind = config["architectures"][0] if library == "transformers" else f"{config['architecture']} of {library}"
    if not loaded.recipe.model.generates:
        return [f"{', '.join(files)}: {kind}", *filter(None, [why])]
    data = loaded.recipe.data
    names = write_tokenizer(getattr(data, "tokenizer", None), data.main.own_template(), folder)
    lines = [f"{', '.join([*files, *names])}: {kind}"]
    if names:
        return lines
    left = [name for name in (*FILES, TEMPLATE) if (folder / name).is_file() and name not in files]
    more = f"; {', '.join(dict.fromkeys(left))} of before may be of another model" if left else ""
    return [*lines, f"no tokenizer: the run's data has no file of one{more}"]


def _named(model: Any, declared: Mapping[str, Param], library: str, kind: object = None) -> Mapping[str, Place]:
    """The published names of that library, for decoders of that `model_type`. RecipeError if the model has none."""
    found = [naming for naming in model.namings if naming.library == library]
    family = names_of(kind) if isinstance(kind, str) else ""
    own = next((naming.places for naming in found if not family or naming.family == family), None)
    if own is None and model.namings:
        libraries = ", ".join(sorted({naming.library for naming in model.namings}))
        raise RecipeError(
            f"--names {library}: {library} has no names for this model", f"there are those of {libraries}"
        )
    return published_names(model, declared, own)


def _export_adapters(loaded: LoadedRun, folder: Path, dtype: DType, base: str, about: Mapping[str, str]) -> list[str]:
    """PEFT's form: adapter_model.safetensors and adapter_config.json."""
    assert loaded.lora is not None
    declared = without_padding(loaded.assembly.layout.declared)
    table = base_names(loaded.recipe.model, declared, base)
    adapters = {
        name: pair
        for name, pair in loaded.adapters.items()
        if not is_in(MULTI_TOKEN, name.removeprefix(f"{ADAPTERS}."))
    }
    left = len(loaded.adapters) - len(adapters)  # the base there has no such layers
    tensors = adapter_tensors(adapters, {name: (table[name], declared[name]) for name in declared})
    config, path = adapter_config(loaded.lora, tensors), folder / f"adapter_model{SUFFIX}"
    write(path, _cast(tensors, dtype), about)
    overwrite(folder / "adapter_config.json", json.dumps(config, indent=2) + "\n")
    kept = f", in {own}: this run has it so" if (own := loaded.lora.dtype) else ""
    usual = "" if base else f" (its type is not recorded; modules are named as in {kind_of(loaded.recipe.model)})"
    lines = [_written(path), f"adapter_config.json: for PEFT, on the model that the base came from{usual}{kept}"]
    return [*lines, f"left out: {counted(left, 'adapter')} of model.multi_token"] if left else lines
