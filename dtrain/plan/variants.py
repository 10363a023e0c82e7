"""Variants of a recipe: other meshes, remat policies and microbatches, other engines and compiler options."""

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from dtrain.assembly.assemble import engine_on
from dtrain.core.errors import RecipeError
from dtrain.core.slices import Target
from dtrain.parallel.compiler_options import Options
from dtrain.parallel.jit import Jit
from dtrain.parallel.mesh import AXES, DATA, EXPERT, FSDP, TENSOR, Mesh, mesh_sizes
from dtrain.parallel.shard_map import ShardMap
from dtrain.recipe.crosscheck import problems_of
from dtrain.recipe.recipe import Engine, Recipe

WHOLE_GATHERS: dict[str, bool | int | str] = {"xla_tpu_enable_windowed_einsum_for_all_gather": False}
"""Compiler option for windowed products in the sums of gradients only: parameters are gathered as a whole."""

WHOLE_PRODUCTS: dict[str, bool | int | str] = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000}
"""Compiler option against windowed products (collective matmul): no product is split."""

WAYS: tuple[tuple[str, Jit | ShardMap], ...] = (
    ("", ShardMap()),
    ("", Jit()),
    ("collectives overlapped", Jit(overlap="products")),
    ("collectives overlapped", ShardMap(overlap="products")),
    ("collectives overlapped with kernels", ShardMap(overlap="kernels")),
    ("collectives on the SparseCores", ShardMap(overlap="sparsecore")),
    ("collectives on the SparseCores", Jit(overlap="sparsecore")),
    ("windowed products in gradients only", Jit(xla=WHOLE_GATHERS)),
    ("no windowed products", Jit(xla=WHOLE_PRODUCTS)),
    ("no windowed products, collectives overlapped", Jit(overlap="products", xla=WHOLE_PRODUCTS)),
    ("no collectives overlapped", ShardMap(overlap="none")),
    ("no collectives overlapped", Jit(overlap="none")),
)
"""Engines and compiler options to try, in order: name, engine."""

MICROBATCHES = (1, 2, 4)
Program = tuple[str, Options]


@dataclass(frozen=True)
class Candidate:
    """A variant of the given recipe, and its changes."""

    recipe: Recipe
    changes: dict[str, Any]
    """Overrides of the given recipe, as a plain tree."""

    @property
    def text(self) -> str:
        """The changes in one line."""
        return ", ".join(map(self._described, self.changes)) or "the given recipe"

    def _described(self, key: str) -> str:
        value = self.changes[key]
        if key == "mesh":
            sizes = {axis: getattr(self.recipe.mesh, axis) for axis in AXES}
            return "mesh " + " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size != 1)
        if key == "engine":
            engine, options = self.recipe.engine, set(self.recipe.engine.xla.items())
            known = [(name, way) for name, way in WAYS if (way.kind, way.overlap) == (engine.kind, engine.overlap)]
            fitting = [(len(way.xla), name) for name, way in known if set(way.xla.items()) <= options]
            return ", ".join([value["kind"], *filter(None, [max(fitting)[1]] if fitting else [])])
        if key == "model":
            texts = {
                name: what if isinstance(what, str | int) else f"[{', '.join(what)}]" for name, what in value.items()
            }
            return ", ".join(f"{name} {text}" for name, text in texts.items())
        return f"{value} microbatches" if key == "accumulate" else f"{key} {value}"


def meshes(recipe: Recipe, on: Target) -> Iterator[Candidate]:
    """Every other mesh of data, fsdp, tensor and expert over the devices that the recipe's sizes allow, the simplest
    first."""
    mixture, old = recipe.model.structure.mixture, recipe.mesh
    sizes = [n for n in range(1, on.devices + 1) if on.devices % n == 0]
    shapes = [
        (tensor, expert, on.devices // (tensor * expert * fsdp), fsdp)
        for tensor in sizes
        if tensor <= 8
        for expert in sizes
        if (mixture.count if mixture else 1) % expert == 0 and on.devices % (tensor * expert) == 0
        for fsdp in sizes
        if on.devices % (tensor * expert * fsdp) == 0
    ]
    for tensor, expert, data, fsdp in sorted(shapes, key=lambda shape: (shape[0] * shape[1], shape[2])):
        sizes = dict.fromkeys(AXES, 1) | {DATA: data, FSDP: fsdp, TENSOR: tensor, EXPERT: expert}
        crossed = dict.fromkeys(old.slices, 1) | ({DATA: on.slices} if on.slices > 1 else {})
        if data % on.slices or sizes == mesh_sizes(old.sizes(on.devices)):
            continue
        mesh = Mesh(**sizes, slices=crossed, rules=old.rules)  # pyright: ignore[reportArgumentType]
        changed = dataclasses.replace(recipe, mesh=mesh)
        changed_axes = {key: value for key, value in vars(mesh).items() if value != getattr(old, key)}
        if not problems_of(changed, on.devices):
            yield Candidate(changed, {"mesh": changed_axes})


def remat_variants(candidate: Candidate, on: Target, microbatches: Sequence[int] = MICROBATCHES) -> Iterator[Candidate]:
    """The same mesh with other microbatches, and with what the model may change without changing results: remat
    policies, chunks of the loss."""
    recipe, model = candidate.recipe, candidate.recipe.model
    choices = model.structure.alternatives
    for values in product(*choices.values()):
        fields = {name: value for name, value in zip(choices, values, strict=True) if value != choices[name][0]}
        for parts in sorted({recipe.accumulate, *microbatches}):
            changed = dataclasses.replace(recipe, model=model.replaced(fields), accumulate=parts)
            changes = ({"model": model.overrides(fields)} if fields else {}) | (
                {"accumulate": parts} if parts != recipe.accumulate else {}
            )
            if changes and not problems_of(changed, on.devices):
                yield Candidate(changed, candidate.changes | changes)


def engine_variants(candidate: Candidate, base: Recipe, on: Target) -> Iterator[Candidate]:
    """The candidate with the other engines and compiler options, each program once. The options are for TPUs, and tried
    only there."""
    recipe = candidate.recipe
    experts = recipe.model.structure.mixture is not None
    tried: list[Program | None] = [_program(engine_on(recipe, on.chip, on.devices, on.slices), on, experts)]
    for _, way in WAYS:
        engine = dataclasses.replace(
            way, xla={**recipe.engine.xla, **way.xla}, steps_per_call=recipe.engine.steps_per_call
        )
        changed, program = dataclasses.replace(recipe, engine=engine), _program(engine, on, experts)
        named = bool(way.xla) or way.overlap != "auto"
        absent = program is None or way.overlap == "sparsecore" != way.overlapped(on.platform, on.chip)
        if absent or (named and on.platform != "tpu") or program in tried or problems_of(changed, None):
            continue
        tried.append(program)
        kept = {"kind"} | ({"overlap"} if base.engine.overlap != "auto" else set())
        section = {key: value for key, value in vars(engine).items() if key in kept or value != getattr(Jit(), key)}
        rest = {key: value for key, value in candidate.changes.items() if key != "engine"}
        yield Candidate(changed, rest | ({"engine": section} if engine != base.engine else {}))


def _program(engine: Engine, on: Target, experts: bool) -> Program | None:
    """What of an engine decides the program; None if its options are refused there."""
    try:
        return engine.kind, engine.chosen(on.platform, on.chip, experts=experts)
    except RecipeError:
        return None
