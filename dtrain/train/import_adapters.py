"""Make a run with low-rank adapters from a folder of PEFT, on the parameters of another run."""

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import numpy as np

from dtrain.checkpoint.tensors import opened
from dtrain.core.errors import RecipeError
from dtrain.core.run_dir import Folder, folder
from dtrain.core.types import JsonObject
from dtrain.models.lora import ADAPTERS, BASE
from dtrain.recipe.load import load, plain
from dtrain.recipe.recipe import Init, Recipe
from dtrain.recipe.yaml import dump
from dtrain.train.assembly import assemble
from dtrain.train.choose import refuse_no_run
from dtrain.train.convert import new_run, save_first
from dtrain.train.initial import initial_from
from dtrain.train.peft import adapted_names, read_adapter, read_config
from dtrain.train.weights import by_path, published_names, unpadded

Say = Callable[[str], None]


def import_adapters(
    source: Path, name: str, base: Path, overrides: Sequence[str], devices: int | None, runs: Path, say: Say
) -> Folder:
    """Create the run `name`, whose step 0 has the adapters of the folder, with the run `base` as its frozen base.

    DataError if they are not plain LoRA adapters for the base; nothing is left behind then.
    """
    refuse_no_run(Folder(base))
    values, config = plain(load(Folder(base).recipe)), read_config(source)
    if values.get("lora"):
        raise RecipeError(f"{base} has adapters itself", "name the run that has the parameters of the model")
    original = load(Folder(base).recipe)
    declared = unpadded(original.model.params())
    table = published_names(original.model, declared)
    places = {name: (table[name], declared[name]) for name in declared}
    with opened(source) as tensors:
        names = adapted_names(tensors, places, source)
        values |= {"init": {"run": str(base)}}
        values["lora"] = {"rank": config["r"], "alpha": float(config["lora_alpha"]), "targets": names}
        recipe = _recipe(values, name, overrides, devices)
        example = recipe.data.example()
        assert example is not None, "only decoders have published names, and their data has known shapes"
        assembly = assemble(recipe, jax.devices(), example, recipe.steps or 2**31)
        shapes = by_path(assembly.shapes.params)
        given: dict[str, Any] = {}
        for path in names:
            keys = {part: f"{ADAPTERS}.{path}.{part}" for part in ("a", "b")}
            read = read_adapter(tensors, *places[path], {part: shapes[key].shape for part, key in keys.items()})
            given |= {key: _placed(read[part], shapes[key]) for part, key in keys.items()}
    initial = initial_from(assembly, Init(run=str(base)), say)
    frozen = initial.read()
    place = folder(runs, name)
    notes = {"imported": str(source.absolute()), BASE: initial.record(frozen)}
    given |= frozen
    with new_run(place, say) as lease:
        save_first(assembly, given, example, place, lease, notes)
    return place


def _recipe(values: JsonObject, name: str, overrides: Sequence[str], devices: int | None) -> Recipe:
    with TemporaryDirectory() as temporary:
        path = Path(temporary) / f"{name}.yaml"
        path.write_text(dump(values | {"name": name}))
        return load(path, overrides, devices)


def _placed(values: np.ndarray, like: jax.ShapeDtypeStruct) -> jax.Array:
    return jax.make_array_from_callback(like.shape, like.sharding, lambda index: values[index].astype(like.dtype))
