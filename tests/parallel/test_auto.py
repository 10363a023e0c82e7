"""The engine `auto`: which engine it is, by chip, slice, mesh and model."""

import dataclasses
from pathlib import Path

import pytest

from dtrain.assembly.assemble import Assembly, assemble, engine_on
from dtrain.assembly.explain import explain
from dtrain.core.chips import CHIPS
from dtrain.core.errors import RecipeError
from dtrain.core.slices import target
from dtrain.parallel.auto import Auto
from dtrain.parallel.engine import EngineSection
from dtrain.plan.plan import quick
from dtrain.plan.target import stand_ins
from dtrain.recipe.load import load
from dtrain.recipe.recipe import Recipe

DECODER = "{kind: decoder, vocab: 256, context: 64, layers: 2, width: 64, heads: 4, hidden: 128}"
TEXT = """
model: {model}
data: {data}
optimizer: {{kind: adamw, lr: 1e-3}}
batch: 2048
steps: 10
mesh: {{data: 1, fsdp: -1}}
"""
V5P = next(chip for chip in CHIPS if chip.name == "v5p")


def recipe(folder: Path, *changes: str, model: str = DECODER) -> Recipe:
    tokens = "{kind: tokens, files: [t.bin], length: 64}"
    data = tokens if "decoder" in model else "{kind: synthetic, image: [8, 8, 1], classes: 4}"
    (folder / "r.yaml").write_text(TEXT.format(model=model, data=data))
    return load(folder / "r.yaml", changes)


def assembled(given: Recipe, on: str) -> Assembly:
    """The recipe on stand-ins for the devices of a target."""
    example = given.data.example()
    assert example is not None
    return assemble(given, stand_ins(target(on)), example, 10)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("on", "changes", "kind"),
    [
        ("v5p-128", [], "shard_map"),
        ("v4-64", [], "shard_map"),
        ("tpu7x-64", [], "shard_map"),
        ("v6e-16", [], "shard_map"),
        ("v6e-32", [], "shard_map"),
        ("v6e-16", ["batch=1024"], "shard_map"),
        ("v6e-16", ["batch=512"], "jit"),
        ("v6e-16", ["accumulate=4"], "jit"),
        ("v5p-128", ["batch=64"], "shard_map"),
        ("v6e-8", [], "jit"),
        ("v6e-64", [], "jit"),
        ("v5e-16", [], "jit"),
        ("h100-8", [], "jit"),
        ("cpu-8", [], "jit"),
        ("v5p-128", ["mesh={data: 2, fsdp: -1}"], "shard_map"),
        ("v5p-128", ["mesh={data: -1, fsdp: 1}"], "jit"),
        ("v5p-128", ["mesh={data: 1, fsdp: -1, tensor: 2}"], "jit"),
        ("v5p-128", ["mesh={data: 1, fsdp: -1, rules: {vocab: fsdp}}"], "jit"),
        ("v5p-128", ["engine=jit"], "jit"),
        ("v5e-16", ["engine=shard_map"], "shard_map"),
    ],
)
def test_auto_is_the_engine_that_is_faster_on_the_chip(tmp_path: Path, on: str, changes: list[str], kind: str) -> None:
    where = target(on)
    assert engine_on(recipe(tmp_path, *changes), where.chip, where.devices, where.slices).kind == kind


def test_engines_were_compared_with_language_models_on_one_slice(tmp_path: Path) -> None:
    assert engine_on(recipe(tmp_path), V5P, 64, 1).kind == "shard_map"
    assert engine_on(recipe(tmp_path), V5P, 64, 2).kind == "jit"
    assert engine_on(recipe(tmp_path, model="mlp"), V5P, 64, 1).kind == "jit"


def test_the_engine_has_the_settings_of_auto(tmp_path: Path) -> None:
    own = {"overlap": "products", "steps_per_call": 4, "xla": {"xla_tpu_scoped_vmem_limit_kib": 65536}}
    given = dataclasses.replace(recipe(tmp_path), engine=Auto(**own))
    for devices, kind in ((64, "shard_map"), (1, "jit")):
        engine = engine_on(given, V5P, devices, 1)
        assert engine.kind == kind
        assert {name: getattr(engine, name) for name in own} == own
    assert recipe(tmp_path, "engine={steps_per_call: 4}").engine == Auto(steps_per_call=4)


def test_plans_and_runs_have_the_same_engine(tmp_path: Path) -> None:
    given = recipe(tmp_path)
    planned = quick(given, target("v5p-128"))
    assert planned.engine.kind == assembled(given, "v5p-128").engine.kind == "shard_map"
    assert planned.recipe.engine == given.engine  # what is planned next may be on another slice or mesh
    assert "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter" in planned.engine.chosen("tpu", V5P)
    assert quick(recipe(tmp_path), target("cpu-8")).engine.kind == assembled(given, "cpu-8").engine.kind == "jit"
    assert explain(given, 64, target("v5p-128")).engine == "shard_map"
    assert explain(given, 64).engine == "auto"


def test_what_the_chosen_engine_cannot_do_is_refused_on_that_chip(tmp_path: Path) -> None:
    """And not on a CPU, nor where auto is the other engine."""
    experts = DECODER.replace("}", ", experts: {count: 4, active: 2, hidden: 64}}")
    given = recipe(tmp_path, "engine={overlap: kernels}", model=experts)
    assert [assembled(given, on).engine.kind for on in ("cpu-8", "v5p-128")] == ["jit", "shard_map"]
    with pytest.raises(RecipeError, match="ends the process with collectives beside kernels of experts"):
        assembled(given, "v5e-16")


def test_auto_itself_has_no_program() -> None:
    """So that a use of the recipe's section, in place of the assembly's engine, is an error of types."""
    assert set(dir(Auto())) - set(dir(EngineSection())) == {"kind", "refusal"}
    assert not {"compile", "chosen", "grads", "sums", "rows", "place", "trace"} & set(dir(EngineSection()))
