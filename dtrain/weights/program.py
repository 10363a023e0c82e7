"""Export what a model predicts as one file: a StableHLO program with its parameters, which JAX alone runs."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp

from dtrain.core import extras
from dtrain.core.errors import EnvironmentFault, RecipeError
from dtrain.core.files import atomic_write, overwrite
from dtrain.data.batch import IMAGE
from dtrain.models.nn.model import PROBABILITY
from dtrain.models.nn.single_device import SingleDeviceContext
from dtrain.weights.load import LoadedRun

PROGRAM = ".stablehlo"
"""The suffix of such a file."""
PLATFORMS = ("cpu", "cuda", "tpu")


def export_program(loaded: LoadedRun, path: Path) -> list[str]:
    """Write the program, and beside it NAME.json with its input and the names of the classes; what was written.

    It takes pictures as they are read, uint8 (any number, height, width, channels), prepares them as the run's data
    does, and returns the probabilities of the classes (number, classes), in float32 on CPUs, NVIDIA GPUs and TPUs.
    RecipeError if the run's model does not classify pictures.
    """
    from jax import export

    model, data, example = loaded.recipe.model, loaded.recipe.data.main, loaded.assembly.layout.example
    if data.normalisation is None or IMAGE not in example or not model.predicts:
        message = f"{path}: a program is written of a model that classifies pictures"
        raise RecipeError(message, f"parameters alone: dtrain export {loaded.recipe.name} {path.stem}.safetensors")
    if absent := extras.missing(["flatbuffers"]):
        raise EnvironmentFault(f"{path}: flatbuffers is not installed", extras.command(absent), "E-PACKAGE")
    params = jax.device_get(loaded.params)

    def probabilities(image_BHWC: jax.Array) -> jax.Array:
        batch = data.prepare({IMAGE: image_BHWC}, jax.random.key(0), False)
        outputs = model.predict(jax.tree.map(jnp.asarray, params), batch, SingleDeviceContext())
        if PROBABILITY not in outputs:
            raise RecipeError(f"{path}: the model predicts {', '.join(sorted(outputs))}, no {PROBABILITY} of classes")
        return outputs[PROBABILITY]

    (count,) = export.symbolic_shape("count")
    feature = example[IMAGE]
    given = jax.ShapeDtypeStruct((count, *feature.shape), feature.dtype)
    exported = export.export(jax.jit(probabilities), platforms=PLATFORMS)(given)
    about = {
        "input": {"dtype": str(feature.dtype), "shape": ["any number", *feature.shape]},
        "output": {"dtype": "float32", "shape": ["any number", exported.out_avals[0].shape[1]]},
        "classes": list(loaded.classes),
        "platforms": list(exported.platforms),
        "from": f"{loaded.recipe.name} at {loaded.chosen}",
        "jax": jax.__version__,
    }
    sidecar = path.with_suffix(".json")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as file:
            file.write(exported.serialize())
        overwrite(sidecar, json.dumps(about, indent=2, ensure_ascii=False) + "\n")
    except OSError as error:
        raise EnvironmentFault(f"cannot write {path}: {error.strerror or error}") from error
    size = " x ".join(map(str, feature.shape))
    return [
        f"{path}: {path.stat().st_size / 1e6:,.1f} MB, {feature.dtype} pictures of {size} to probabilities",
        f"{sidecar}: its input and classes",
        f"run it: jax.export.deserialize(open({path.name!r}, 'rb').read()).call(pictures)",
    ]
