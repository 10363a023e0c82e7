import dataclasses
import re
from pathlib import Path

import jax
import numpy as np
import pytest

from dtrain.assembly.assemble import assemble
from dtrain.core.errors import FieldError
from dtrain.core.slices import target
from dtrain.parallel.jit import Jit
from dtrain.parallel.mesh import FSDP_AXES, JAX_AXES, Mesh
from dtrain.parallel.shard_map import ShardMap
from dtrain.plan.target import stand_ins
from dtrain.recipe.load import load

RECIPES = Path(__file__).parents[2] / "recipes"


def test_the_axis_of_size_minus_one_takes_the_remaining_devices() -> None:
    one = dict.fromkeys(JAX_AXES, 1)
    assert Mesh(data=-1, fsdp=2, tensor=2).sizes(8) == one | {"data": 2, "fsdp": 2, "tensor": 2}
    assert Mesh().sizes(1) == one


def test_a_mesh_that_does_not_fit_shows_the_arithmetic() -> None:
    with pytest.raises(FieldError, match=r"data 3 x tensor 2: 6 != 8 devices"):
        Mesh(data=3, tensor=2).sizes(8)
    with pytest.raises(FieldError, match=r"data -1 x fsdp 3: 3 does not divide 8 devices"):
        Mesh(fsdp=3).sizes(8)


def test_two_axes_of_minus_one_and_an_axis_of_zero_are_refused() -> None:
    with pytest.raises(FieldError, match="only one axis may be -1"):
        Mesh(data=-1, fsdp=-1)
    with pytest.raises(FieldError, match="at least one device"):
        Mesh(tensor=0)


def test_an_axis_crosses_the_slices_that_the_recipe_gives_it() -> None:
    """Along every other axis, all devices are of one slice."""
    mesh = Mesh(data=4, fsdp=2, slices={"data": 2})
    grid = mesh.build(mesh.sizes(8), jax.devices()).devices.reshape(4, 2)
    slices = [{device.id // 4 for device in row} for row in grid]
    assert slices == [{0}, {0}, {1}, {1}]


def test_by_default_data_crosses_the_slices() -> None:
    devices = stand_ins(target("v5e-4", 2))
    mesh = Mesh(data=4, fsdp=2)
    grid = mesh.build(mesh.jax_sizes(devices), devices).devices.reshape(4, 2)
    assert [{device.slice_index for device in row} for row in grid] == [{0}, {0}, {1}, {1}]


@pytest.mark.parametrize(
    ("mesh", "message", "hint"),
    [
        (Mesh(data=1, fsdp=-1), "2 does not divide data = 1", r"mesh.slices=\{fsdp: 2\}"),
        (Mesh(data=1, fsdp=8, slices={"fsdp": 4}), "crosses 4 slices; the devices are in 2", "product is 2"),
    ],
)
def test_slices_that_no_axis_crosses_are_refused_with_the_key_to_set(mesh: Mesh, message: str, hint: str) -> None:
    devices = stand_ins(target("v5e-4", 2))
    with pytest.raises(FieldError, match=message) as error:
        mesh.build(mesh.jax_sizes(devices), devices)
    assert re.search(hint, error.value.hint)


def test_slices_that_do_not_divide_their_axis_are_refused() -> None:
    with pytest.raises(FieldError, match="3 slices do not divide data = 4"):
        Mesh(data=4, slices={"data": 3})


def test_dims_that_engines_depend_on_keep_their_axes() -> None:
    with pytest.raises(FieldError, match="batch is always split by"):
        Mesh(rules={"batch": "data"})


def test_embed_and_unnamed_dims_are_not_split_by_tensor() -> None:
    with pytest.raises(FieldError, match="embed is split by fsdp, or replicated; found tensor"):
        Mesh(rules={"embed": "tensor"})
    with pytest.raises(FieldError, match="_ names the dims that no rule may split"):
        Mesh(rules={"_": "tensor"})


def test_an_axis_of_minus_one_has_at_least_its_slices() -> None:
    mesh = Mesh(fsdp=2, slices={"data": 2})
    assert mesh.least == 4
    assert mesh.sizes(8)["data"] == 4
    with pytest.raises(FieldError, match="4 does not divide 6 devices"):
        mesh.sizes(6)


@pytest.mark.slow
@pytest.mark.parametrize("output", [{"fsdp": 64}, {"fsdp": 14}, {"fsdp": 35, "tensor": 4}, {"fsdp": 2, "tensor": 8}])
def test_on_any_torus_the_devices_of_an_axis_form_a_block(output: dict[str, int]) -> None:
    """Sides of 20 and 28 have prime factors that JAX's `create_device_mesh` cannot split."""
    devices = stand_ins(target("v5p:8x20x28"))
    mesh = Mesh(data=-1, **output)  # pyright: ignore[reportArgumentType]
    grid = mesh.build(mesh.jax_sizes(devices), devices).devices
    assert {device.id for device in grid.flat} == set(range(4480))
    for axis, size in mesh.jax_sizes(devices).items():
        along = np.moveaxis(grid, JAX_AXES.index(axis), 0).reshape(size, -1)[:, 0]
        sides = [len({device.coords[dim] for device in along}) for dim in range(3)]
        assert np.prod(sides) == size


def test_under_shard_map_fsdp_has_an_axis_for_each_dimension_of_the_torus() -> None:
    recipe = load(RECIPES / "mlp-digits.yaml", ["mesh={data: 1, fsdp: 64}", "batch=64"], 64)
    devices, example = stand_ins(target("v5p-128")), recipe.data.open("train").example
    sizes = {
        engine.kind: assemble(dataclasses.replace(recipe, engine=engine), devices, example, 100).layout.sizes
        for engine in (Jit(), ShardMap())
    }
    assert [sizes["shard_map"][axis] for axis in FSDP_AXES] == [4, 4, 4]
    assert [sizes["jit"][axis] for axis in FSDP_AXES] == [64, 1, 1]
