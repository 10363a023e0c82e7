"""From the names of a parameter's dims to its place on the mesh."""

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from dtrain.core.errors import RecipeError
from dtrain.data.batch import Example
from dtrain.models.nn.param import Param, Tree, paths
from dtrain.parallel.mesh import AXES, MEMORY_AXES, RULES

Rules = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Layout:
    """A mesh's sizes, its rules, the declared parameters and the examples: all that decides who holds what.

    `mesh` is the mesh of JAX, or None where only the arithmetic is wanted.
    """

    sizes: Mapping[str, int]
    rules: Rules
    declared: Tree
    mesh: jax.sharding.Mesh | None = None
    example: Example = field(default_factory=dict)

    def axes(self, dim: str | None) -> tuple[str, ...]:
        """The axes that split this dim; axes of one device split nothing."""
        return tuple(axis for axis in self.rules.get(dim or "", ()) if self.sizes[axis] > 1)

    def parts(self, dim: str) -> int:
        """Into how many parts this dim is split."""
        return math.prod(self.sizes[axis] for axis in self.axes(dim))

    def shares(self, dim: str) -> int:
        """How many devices split the work along this dim; those that only save memory do not count."""
        return math.prod(self.sizes[axis] for axis in self.axes(dim) if axis not in MEMORY_AXES)

    def spec(self, dims: Iterable[str | None]) -> PartitionSpec:
        """Where each of these dims lies; PartitionSpec() where nothing is split."""
        entries = [self.axes(dim) for dim in dims]
        while entries and not entries[-1]:
            entries.pop()
        return PartitionSpec(*(entry[0] if len(entry) == 1 else entry or None for entry in entries))

    def specs(self) -> Tree:
        """The spec of every parameter."""
        return jax.tree.map(lambda param: self.spec(param.names), self.declared)

    def input(self, name: str) -> PartitionSpec:
        """Where the batch array of that name lies."""
        return self.spec(("batch", *(self.example[name].dims if name in self.example else ())))

    def zigzag_order(self, name: str) -> np.ndarray | None:
        """The order in which a row's tokens are laid over the sequence axis; None for the order they have.

        Part s of S holds chunks s and 2S - 1 - s of 2S, so that under a causal mask all parts see
        equally many keys (Brandon et al. 2023).
        """
        parts = self.sizes["sequence"]
        if parts == 1 or name not in self.example or self.example[name].dims[:1] != ("length",):
            return None
        return zigzag_positions(self.example[name].shape[0], parts)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes that each hold their own examples, of more than one device."""
        return self.axes("batch")

    @property
    def token_axes(self) -> tuple[str, ...]:
        """The axes that each hold their own tokens: those over which losses and gradients are summed."""
        return (*self.axes("batch"), *self.axes("length"))

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        """The spec on this mesh."""
        assert self.mesh is not None, "a layout without devices places nothing"
        return NamedSharding(self.mesh, spec)

    @property
    def platform(self) -> str:
        """What the mesh's devices are: "cpu", "gpu" or "tpu"."""
        return self.mesh.devices.flat[0].platform if self.mesh is not None else "cpu"

    def problems(self) -> list[tuple[str, str]]:
        """(axis, message) for every parameter that the rules cannot place, and every axis that splits nothing."""
        alike: dict[tuple[str, str, int], list[str]] = {}
        for path, param in zip(jax.tree.leaves(paths(self.declared)), jax.tree.leaves(self.declared), strict=True):
            for axis, dim, size, message in self._unplaced(path, param):
                alike.setdefault((axis, dim, size), []).append(message)
        found = [
            (axis, messages[0] + (f" (and {len(messages) - 1} more alike)" if len(messages) > 1 else ""))
            for (axis, _, _), messages in alike.items()
        ]
        return found + self._unused() + self._heads() + self._idle() + self._uneven()

    @property
    def dims(self) -> set[str]:
        """The names of the parameters' dims."""
        return {dim for param in jax.tree.leaves(self.declared) for dim in param.names}

    def _unused(self) -> list[tuple[str, str]]:
        """Rules of the recipe for dims that no parameter has."""
        known, found = self.dims - {"_"}, []
        for dim in (dim for dim, axes in self.rules.items() if axes != RULES.get(dim) and dim not in known):
            near = difflib.get_close_matches(dim, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"this model has {', '.join(sorted(known))}"
            found.append((f"rules.{dim}", f"no parameter has a dim {dim!r}; {hint}"))
        return found

    def _heads(self) -> list[tuple[str, str]]:
        """Query heads on every device whose keys and values are not."""
        if (
            not {"heads", "kv_heads"} <= self.dims
            or "tensor" in self.axes("heads")
            or "tensor" not in self.axes("kv_heads")
        ):
            return []
        why = "heads are on every device and kv_heads split by tensor: a query head would not find its keys"
        return [("rules.heads", f"{why}; give kv_heads the same rule")]

    def _unplaced(self, path: str, param: Param) -> list[tuple[str, str, int, str]]:
        """(axis, dim, its size, message) for each dim that cannot be split as the rules say."""
        found, taken = [], dict[str, str]()
        for size, dim in zip(param.shape, param.names, strict=True):
            for axis in self.axes(dim)[:1]:  # of several axes that make up one, the first has its name
                if axis in taken:
                    rules = f"{taken[axis]}: {axis} and {dim}: {axis}"
                    message = f"{path} {param.shape} is matched by two rules for one axis, {rules}"
                    found.append((axis, rules, 0, message))
                taken[axis] = dim
                if size % self.parts(dim):
                    message = f"{axis} = {self.parts(dim)} does not divide {dim} = {size} of {path} {param.shape}"
                    way = ", or mesh.rules: {kv_heads: replicated}" if dim == "kv_heads" else ""
                    found.append((axis, dim, size, f"{message}; {fitting(size)}{way}"))
        return found

    def _idle(self) -> list[tuple[str, str]]:
        """Axes whose devices would all do the same work."""
        dims = self.dims | {dim for feature in self.example.values() for dim in feature.dims}
        busy = {axis for dim in dims for axis in self.axes(dim)} | {"data", "fsdp"}
        what = {"pipeline": "layers", "sequence": "tokens", "expert": "experts", "tensor": "matrices"}
        return [
            (axis, f"{axis} = {self.sizes[axis]} splits nothing: this model has no {what[axis]} to split; use 1")
            for axis in AXES
            if self.sizes[axis] > 1 and axis not in busy and (axis != "sequence" or self.example)
        ]

    def _uneven(self) -> list[tuple[str, str]]:
        """Rows whose length the mesh does not divide."""
        found = []
        for name, feature in self.example.items():
            sequence, tensor = self.sizes["sequence"], self.sizes["tensor"]
            unit = (2 * sequence if sequence > 1 else 1) * tensor
            if feature.dims[:1] == ("length",) and feature.shape[0] % unit:
                why = f"{feature.shape[0]} {name} do not divide by 2 x sequence {sequence} x tensor {tensor}"
                why = why if sequence > 1 else f"{feature.shape[0]} {name} do not divide by tensor {tensor}"
                found.append(("sequence" if sequence > 1 else "tensor", f"{why}; a multiple of {unit} would"))
                break
        return found

    def check(self) -> None:
        """RecipeError with every parameter that the rules cannot place."""
        problems = [f"mesh.{axis}: {message}" for axis, message in self.problems()]
        if problems:
            raise RecipeError(problems)

    def whole(self) -> list[tuple[str, int]]:
        """(path, values) of the parameters that stand whole on every device of a mesh that could split them."""
        if all(self.sizes[axis] == 1 for axis in AXES if axis != "data"):
            return []
        names, leaves = jax.tree.leaves(paths(self.declared)), jax.tree.leaves(self.declared)
        return [
            (name, param.size)
            for name, param in zip(names, leaves, strict=True)
            if not any(self.axes(dim) for dim in param.names)
        ]


def fitting(size: int) -> str:
    """Which numbers of parts would do."""
    return f"these do: {', '.join(str(n) for n in range(1, min(size, 64) + 1) if size % n == 0)}"


def zigzag_positions(length: int, parts: int) -> np.ndarray:
    """The places 0 to length - 1 in the order in which `parts` parts hold them."""
    if parts == 1:
        return np.arange(length)
    chunks = np.arange(length).reshape(2 * parts, -1)
    return np.concatenate([chunks[[s, 2 * parts - 1 - s]].reshape(-1) for s in range(parts)])


def split_axes(spec: PartitionSpec) -> tuple[str, ...]:
    """All mesh axes that a spec names."""
    entries = (entry if isinstance(entry, tuple) else (entry,) for entry in cast(Iterable[Any], spec))
    return tuple(axis for entry in entries for axis in entry if axis)


def bytes_of(declared: Tree, dtype: str) -> int:
    """Bytes of all parameters together in that dtype."""
    return sum(param.size for param in jax.tree.leaves(declared)) * jnp.dtype(dtype).itemsize
