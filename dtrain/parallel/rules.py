"""From the names of a parameter's dims to its place on the mesh."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from dtrain.errors import RecipeError
from dtrain.parallel.mesh import AXES, BATCH_AXES
from dtrain.params import Param, Tree, paths

Rules = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Layout:
    """A mesh's sizes, its rules, and the declared parameters: all that decides who holds what.

    `mesh` is the mesh of JAX, or None where only the arithmetic is wanted.
    """

    sizes: Mapping[str, int]
    rules: Rules
    declared: Tree
    mesh: jax.sharding.Mesh | None = None

    def axes(self, dim: str | None) -> tuple[str, ...]:
        """The axes that split this dim; axes of one device split nothing."""
        return tuple(axis for axis in self.rules.get(dim or "", ()) if self.sizes[axis] > 1)

    def spec(self, dims: Iterable[str | None]) -> PartitionSpec:
        """Where each of these dims lies; PartitionSpec() where nothing is split."""
        entries = [self.axes(dim) for dim in dims]
        while entries and not entries[-1]:
            entries.pop()
        return PartitionSpec(*(entry[0] if len(entry) == 1 else entry or None for entry in entries))

    def specs(self) -> Tree:
        """The spec of every parameter."""
        return jax.tree.map(lambda param: self.spec(param.names), self.declared)

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes that each see their own examples, of more than one device."""
        return tuple(axis for axis in BATCH_AXES if self.sizes[axis] > 1)

    @property
    def batch_parts(self) -> int:
        """Into how many parts a batch is split."""
        return math.prod(self.sizes[axis] for axis in self.batch_axes)

    def sharding(self, spec: PartitionSpec) -> NamedSharding:
        """The spec on this mesh."""
        assert self.mesh is not None, "a layout without devices places nothing"
        return NamedSharding(self.mesh, spec)

    def problems(self) -> list[tuple[str, str]]:
        """(axis, message) for every parameter that the rules cannot place."""
        found = []
        for path, param in zip(jax.tree.leaves(paths(self.declared)), jax.tree.leaves(self.declared), strict=True):
            found += self._unplaced(path, param)
        return found

    def _unplaced(self, path: str, param: Param) -> list[tuple[str, str]]:
        found, taken = [], dict[str, str]()
        for size, dim in zip(param.shape, param.names, strict=True):
            for axis in self.axes(dim):
                if axis in taken:
                    rules = f"{taken[axis]}: {axis} and {dim}: {axis}"
                    found.append((axis, f"{path} {param.shape} is matched by two rules for one axis, {rules}"))
                taken[axis] = dim
                if size % self.sizes[axis]:
                    fits = ", ".join(str(n) for n in range(1, min(size, 64) + 1) if size % n == 0)
                    message = f"{axis} = {self.sizes[axis]} does not divide {dim} = {size} of {path} {param.shape}"
                    found.append((axis, f"{message}; these do: {fits}"))
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


def split_axes(spec: PartitionSpec) -> tuple[str, ...]:
    """All mesh axes that a spec names."""
    entries = (entry if isinstance(entry, tuple) else (entry,) for entry in cast(Iterable[Any], spec))
    return tuple(axis for entry in entries for axis in entry if axis)


def bytes_of(declared: Tree, dtype: str) -> int:
    """Bytes of all parameters together in that dtype."""
    return sum(param.size for param in jax.tree.leaves(declared)) * jnp.dtype(dtype).itemsize
