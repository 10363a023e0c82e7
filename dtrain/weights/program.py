"""Export what a model predicts as one file: a StableHLO program with its parameters, which JAX alone runs."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp

from dtrain.core import extras
from dtrain.core.errors import DtrainError, EnvironmentFault, RecipeError, cause
from dtrain.core.files import atomic_write, overwrite
from dtrain.data.batch import IMAGE
from dtrain.models.nn.model import PROBABILITY
from dtrain.models.nn.single_device import SingleDeviceContext
from dtrain.weights.load import LoadedRun

PROGRAM = ".stablehlo"
"""The suffix of such a file."""
LARGEST = 2**30
"""Most bytes of parameters in such a file, whose format has a limit of 2 GiB."""
PLATFORMS = ("cpu", "cuda", "tpu")


def export_program(loaded: LoadedRun, path: Path) -> list[str]:
    """Write the program, and beside it NAME.stablehlo.json with its input and classes; what was written.

    It takes pictures as the data has them, mostly uint8 (one or more, height, width, channels), prepares them as the
    run's data does, and returns the probabilities of the classes (number, classes), computed in float32 whatever the
    run's precision, on CPUs, NVIDIA GPUs and TPUs. RecipeError if the run's model does not classify pictures, or if its
    parameters are more than such a file holds.
    """
    from jax import export

    model, data, example = loaded.assembly.recipe.model, loaded.recipe.data.main, loaded.assembly.layout.example
    if IMAGE not in example or len(example[IMAGE].shape) != 3 or not model.predicts:
        message = f"{path}: a program is written of a model that classifies pictures of height x width x channels"
        raise RecipeError(message, f"parameters alone: dtrain export {loaded.recipe.name} {path.stem}.safetensors")
    if absent := extras.missing(["flatbuffers"]):
        raise EnvironmentFault(f"{path}: flatbuffers is not installed", extras.command(absent), "E-PACKAGE")
    params = jax.device_get(loaded.params)
    if (size := sum(leaf.nbytes for leaf in jax.tree.leaves(params))) > LARGEST:
        message = (
            f"{path}: a program holds at most {LARGEST / 2**30:.0f} GiB of parameters; these are {size / 2**30:.1f}"
        )
        raise RecipeError(message, f"parameters alone: dtrain export {loaded.recipe.name} FOLDER")

    def probabilities(image_BHWC: jax.Array) -> jax.Array:
        batch = data.prepare({IMAGE: image_BHWC}, jax.random.key(0), False)
        outputs = model.predict(jax.tree.map(jnp.asarray, params), batch, SingleDeviceContext())
        if PROBABILITY not in outputs:
            raise RecipeError(f"{path}: the model predicts {', '.join(sorted(outputs))}, no {PROBABILITY} of classes")
        return outputs[PROBABILITY]

    (count,) = export.symbolic_shape("count")
    feature = example[IMAGE]
    given = jax.ShapeDtypeStruct((count, *feature.shape), feature.dtype)
    # a model of a user's own may need to know the number of examples, as for len(x): it gets one at a time
    one_by_one = jax.vmap(lambda image_HWC: probabilities(image_HWC[None])[0])
    try:
        try:
            exported = export.export(jax.jit(probabilities), platforms=PLATFORMS)(given)
        except Exception:
            exported = export.export(jax.jit(one_by_one), platforms=PLATFORMS)(given)
    except DtrainError:
        raise
    except Exception as error:
        raise RecipeError(f"{path}: the model cannot be traced for any number of pictures: {cause(error)}") from error
    classes = exported.out_avals[0].shape[1]
    about = {
        "input": {"dtype": str(feature.dtype), "shape": ["1 or more", *feature.shape]},
        "output": {"dtype": "float32", "shape": ["1 or more", classes]},
        "classes": list(loaded.classes) or [str(number) for number in range(classes)],
        "computed_in": "float32",
        "platforms": list(exported.platforms),
        "from": f"{loaded.recipe.name} at {loaded.chosen}",
        "jax": jax.__version__,
    }
    sidecar = path.with_name(f"{path.name}.json")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as file:
            file.write(exported.serialize())
        overwrite(sidecar, json.dumps(about, indent=2, ensure_ascii=False) + "\n")
    except OSError as error:
        raise EnvironmentFault(f"cannot write {path}: {error.strerror or error}") from error
    size = " x ".join(map(str, feature.shape))
    return [
        f"{path}: {path.stat().st_size / 1e6:,.1f} MB, {feature.dtype} pictures of {size} to probabilities, in float32",
        f"{sidecar}: its input and classes",
        f"run it: jax.export.deserialize(open({path.name!r}, 'rb').read()).call(pictures)",
    ]
