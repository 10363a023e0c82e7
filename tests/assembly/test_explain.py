"""Where the mesh places every parameter, and by which rule."""

import json
from collections.abc import Callable
from pathlib import Path

import jax
import pytest

from dtrain.assembly.assemble import assemble
from dtrain.assembly.explain import explain
from dtrain.models.nn.param import paths
from dtrain.recipe.load import load
from tests.conftest import Dtrain

RECIPES = Path(__file__).parents[2] / "recipes"
MESH = ["mesh={data: 1, fsdp: 2, expert: 2, tensor: 2}", "model.experts={count: 4, active: 2, hidden: 64}"]


def test_golden_of_a_mixture(golden: Callable[[str, str], None]) -> None:
    found = explain(load(RECIPES / "decoder-tiny.yaml", MESH, 8), 8)
    golden("explain.txt", "\n".join(found.lines()) + "\n")


def test_its_parts_are_those_that_jax_makes() -> None:
    recipe = load(RECIPES / "decoder-tiny.yaml", MESH, 8)
    found = explain(recipe, 8)
    mesh = recipe.mesh.build(recipe.mesh.sizes(8), jax.devices())
    for part, spec in zip(found.parameters, jax.tree.leaves(found.layout.specs()), strict=True):
        local = jax.sharding.NamedSharding(mesh, spec).shard_shape(part.shape)
        size = 4
        for extent in local:
            size *= extent
        assert part.bytes_per_device == size, part.name


def test_frozen_parameters_count_in_the_dtype_in_which_they_are_kept() -> None:
    adapters = [
        "init={run: runs/base}",
        "lora={rank: 2, targets: [blocks.query.weight], dtype: bfloat16}",
        "mesh={fsdp: 4}",
    ]
    recipe = load(RECIPES / "decoder-tiny.yaml", adapters, 4)
    found = explain(recipe, 4)
    shapes = assemble(recipe, jax.devices()[:4], recipe.data.example(), 100).shapes.params
    made = dict(zip(jax.tree.leaves(paths(shapes)), jax.tree.leaves(shapes), strict=True))
    assert {part.name: part.bytes for part in found.parameters} == {
        name: leaf.size * leaf.dtype.itemsize for name, leaf in made.items()
    }
    assert {leaf.dtype.name for leaf in made.values()} == {"bfloat16", "float32"}
    assert any(line.endswith("per device, in bfloat16 and float32") for line in found.lines())


@pytest.mark.slow
def test_as_json_sizes_are_in_bytes(dtrain: Dtrain) -> None:
    found = json.loads(dtrain("explain", "decoder-tiny", *MESH, "--devices", "8", "--json").stdout)
    by_name = {part["name"]: part for part in found["parameters"]}
    assert by_name["blocks.moe.experts.up"]["split"] == {"experts": "expert", "embed": "fsdp", "hidden": "tensor"}
    assert by_name["embed"]["bytes"] == 4 * by_name["embed"]["bytes_per_device"] == 256 * 96 * 4


def test_a_typo_is_answered(in_process: Dtrain) -> None:
    assert "did you mean" in in_process("explain", "decoder-tinny", code=2).stderr
    assert (
        "unknown preset 'lama3-8b'; did you mean 'llama3-8b'?"
        in in_process("explain", "decoder-tiny", "model.preset=lama3-8b", code=2).stderr
    )


@pytest.mark.nightly
def test_it_shows_the_program_itself(dtrain: Dtrain) -> None:
    """The step of the run itself, traced or compiled, for this machine or for absent hardware."""
    mesh = "mesh={data: 2, fsdp: 2, tensor: 2}"
    assert "reduce_scatter" in dtrain("explain", "decoder-tiny", mesh, "engine=shard_map", "--jaxpr").stdout
    assert "all-gather" in dtrain("explain", "decoder-tiny", mesh, "engine=shard_map", "--hlo").stdout
    wide = ["model.width=512", "model.context=512", "model.heads=8", "model.kv_heads=8", "data.length=512"]
    assert "splash" in dtrain("explain", "decoder-tiny", *wide, "batch=32", "--jaxpr", "--on", "v5e-4").stdout
    assert "v5e-16" in dtrain("explain", "decoder-tiny", "--hlo", "--on", "v5e-15", code=2).stderr
