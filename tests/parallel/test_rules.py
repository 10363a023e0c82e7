import pytest
from jax.sharding import PartitionSpec

from dtrain.errors import RecipeError
from dtrain.models.layers import bias, weight
from dtrain.parallel.mesh import Mesh
from dtrain.parallel.rules import Layout

MESH = {"data": 2, "fsdp": 2, "tensor": 4}


def layout(declared: object, mesh: Mesh | None = None) -> Layout:
    return Layout(MESH, (mesh or Mesh()).table(), declared)


def test_dims_lie_where_the_rules_say() -> None:
    specs = layout({"w": weight((8, 8), "embed hidden", "embed"), "b": bias((8,), "classes")}).specs()
    assert specs == {"w": PartitionSpec("fsdp", "tensor"), "b": PartitionSpec()}


def test_a_recipe_may_split_further_dims() -> None:
    specs = layout({"b": bias((8,), "classes")}, Mesh(rules={"classes": "tensor"})).specs()
    assert specs == {"b": PartitionSpec("tensor")}


def test_what_does_not_divide_is_refused_with_both_numbers_and_what_would_do() -> None:
    with pytest.raises(RecipeError) as caught:
        layout({"block": {"w": weight((8, 6), "embed hidden", "embed")}}).check()
    assert caught.value.problems == (
        "mesh.tensor: tensor = 4 does not divide hidden = 6 of block.w (8, 6); these do: 1, 2, 3, 6",
    )


def test_one_axis_for_two_dims_is_refused() -> None:
    with pytest.raises(RecipeError, match="matched by two rules for one axis, embed: fsdp and embed: fsdp"):
        layout({"w": weight((8, 8), "embed embed", "embed")}).check()


def test_what_stands_whole_is_told() -> None:
    declared = {"w": weight((8, 8), "embed hidden", "embed"), "head": {"b": bias((10,), "classes")}}
    assert layout(declared).whole() == [("head.b", 10)]
    assert Layout({"data": 8, "fsdp": 1, "tensor": 1}, Mesh().table(), declared).whole() == []
