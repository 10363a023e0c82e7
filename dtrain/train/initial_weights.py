"""Parameters of safetensors files that a run starts from (`init.weights`, `objective.teacher.weights`)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.sharding import PartitionSpec

from dtrain.checkpoint.tensors import opened
from dtrain.core.errors import CheckpointError, DataError, RecipeError
from dtrain.core.types import JsonObject
from dtrain.models.agreement import agree
from dtrain.models.distillation import TEACHER, Distillation
from dtrain.models.nn.param import Param
from dtrain.models.nn.patterns import matched
from dtrain.recipe.recipe import Init
from dtrain.train.assembly import Assembly
from dtrain.train.checksum import values_checksum
from dtrain.train.objective import teacher_of
from dtrain.train.weights import Located, by_path, is_published, located, naming, part_of, read, unpadded

Say = Callable[[str], None]


@dataclass(frozen=True)
class InitialWeights:
    """Parameters of safetensors files: those that a new run starts from, or those of its teacher."""

    source: Path
    where: Located
    ours: Mapping[str, Param]
    """The parameters that are read, by their paths in the files' model."""
    names: Mapping[str, str]
    """Their paths in this run, by those."""
    shapes: Mapping[str, jax.ShapeDtypeStruct]
    """Their shapes and shardings."""
    replicated: jax.sharding.Sharding
    lines: Sequence[str]
    """What a user should know: how many parameters come from there, and which do not."""
    expected: Sequence[int] = ()
    """The checksum of the values that the run was started from; empty for a new run."""

    @property
    def origin(self) -> str:
        """The folder or file."""
        return str(self.source.absolute())

    def read(self) -> dict[str, jax.Array]:
        """The parameters by their paths here. CheckpointError if they are not those that the run was started from."""
        with opened(self.source) as tensors:
            values = read(tensors, self.where, self.ours, self.shapes)
        given = {self.names[name]: value for name, value in values.items()}
        if self.expected and self.record(given)["checksum"] != list(self.expected):
            message = f"{self.source} does not have the parameters that this run was started from"
            raise CheckpointError(message, "restore those files, or give this run another name: name=...")
        return given

    def record(self, given: Mapping[str, jax.Array]) -> JsonObject:
        return {"weights": self.origin, "checksum": list(values_checksum(dict(given), self.replicated))}


def weights_from(assembly: Assembly, init: Init, say: Say, checksum: Sequence[int], part: str) -> InitialWeights:
    """Find the parameters of this run in the files of `init.weights`.

    All but those of `init.new` must be there. DataError if one is not, or if config.json describes another model.
    """
    source, recipe = Path(init.weights), assembly.recipe
    if not source.exists():
        raise DataError(f"init.weights: {source} does not exist", "give a folder or a file of safetensors")
    declared, shapes = (
        part_of(recipe, by_path(tree), part) for tree in (assembly.layout.declared, assembly.shapes.params)
    )
    model = (
        teacher_of(recipe.objective.teacher) if isinstance(recipe.objective, Distillation) and part else recipe.model
    )
    left_out = matched(init.new, list(declared), "init.new")
    frozen = [name for name in left_out if not declared[name].saved]
    if frozen:
        own = frozen[0].removeprefix(f"{part}.")
        raise RecipeError(f"init.new: {own} would be frozen at random values", f"train it in full, lora.train: [{own}]")
    names = {name.removeprefix(f"{part}.") if part else name: name for name in declared}
    sizes = unpadded(declared)
    ours = {own: sizes[name] for own, name in names.items()}
    new = [own for own, name in names.items() if name in left_out]
    with opened(source) as tensors:
        published = is_published(naming(tensors, model, ours))
        agree(model, tensors.metadata, source, say, published=published, override=False)
        where = located(tensors, model, ours, source, new)
    taken = {own: name for own, name in names.items() if own not in new}
    what = f"{part}: " if part == TEACHER else "initialised "
    lines = [f"{what}from {source}: {len(taken)} of {len(names)} parameters"]
    lines += [f"initialised at random: {', '.join(new)}"] if new else []
    return InitialWeights(
        source,
        where,
        {own: ours[own] for own in taken},
        taken,
        {own: shapes[name] for own, name in taken.items()},
        replicated=assembly.layout.sharding(PartitionSpec()),
        lines=lines,
        expected=checksum,
    )
