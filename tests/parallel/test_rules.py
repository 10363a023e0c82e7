from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from dtrain.core.errors import RecipeError
from dtrain.data.batch import Feature
from dtrain.models.mlp import MLP
from dtrain.models.nn.context import Context
from dtrain.models.nn.layers import Drop, bias, kept, weight
from dtrain.models.nn.matmul import matmul
from dtrain.models.nn.param import Param, Tree
from dtrain.models.nn.param import normal as drawn
from dtrain.parallel.auto import others
from dtrain.parallel.jit import Jit
from dtrain.parallel.mesh import JAX_AXES, Mesh
from dtrain.parallel.pmap import Pmap
from dtrain.parallel.rules import Layout, zigzag_positions
from dtrain.parallel.shard_map import ShardMap
from tests.engines import gradients, place

ONE = dict.fromkeys(JAX_AXES, 1)
MESH = ONE | {"data": 2, "fsdp": 2, "tensor": 4}


def layout(declared: object, mesh: Mesh | None = None) -> Layout:
    return Layout(MESH, (mesh or Mesh()).table(), declared)


def test_dims_are_split_by_the_rules() -> None:
    specs = layout({"w": weight((8, 8), "embed hidden", "embed"), "b": bias((8,), "classes")}).specs()
    assert specs == {"w": PartitionSpec("fsdp", "tensor"), "b": PartitionSpec()}


def test_a_recipe_may_split_further_dims() -> None:
    specs = layout({"b": bias((8,), "classes")}, Mesh(rules={"classes": "tensor"})).specs()
    assert specs == {"b": PartitionSpec("tensor")}


def test_a_rule_for_a_dim_that_no_parameter_has_is_refused() -> None:
    declared = {"w": weight((8, 8), "embed hidden", "embed")}
    found = layout(declared, Mesh(rules={"embd": "fsdp", "vocab": "replicated"})).problems()
    assert dict(found) == {
        "rules.embd": "no parameter has a dim 'embd'; did you mean embed?",
        "rules.vocab": "no parameter has a dim 'vocab'; this model has embed, hidden",
    }


def test_replicated_query_heads_need_replicated_keys() -> None:
    declared = {"q": bias((8,), "heads"), "k": bias((8,), "kv_heads")}
    assert [where for where, _ in layout(declared, Mesh(rules={"heads": "replicated"})).problems()] == ["rules.heads"]
    same = layout(declared, Mesh(rules={"heads": "replicated", "kv_heads": "fsdp"})).problems()
    assert [where for where, _ in same] == ["tensor"]  # which then has nothing to split


def test_what_does_not_divide_is_refused_with_both_numbers_and_possible_sizes() -> None:
    with pytest.raises(RecipeError) as caught:
        layout({"block": {"w": weight((8, 6), "embed hidden", "embed")}}).check()
    assert caught.value.problems == (
        "mesh.tensor: tensor = 4 does not divide hidden = 6 of block.w (8, 6); possible sizes: 1, 2, 3, 6",
    )


def test_one_axis_for_two_dims_is_refused() -> None:
    with pytest.raises(RecipeError, match="matched by two rules for one axis, embed: fsdp and embed: fsdp"):
        layout({"w": weight((8, 8), "embed embed", "embed")}).check()


def test_replicated_parameters_are_listed() -> None:
    declared = {"w": weight((8, 8), "embed hidden", "embed"), "head": {"b": bias((10,), "classes")}}
    assert [(name, param.size) for name, param in layout(declared).replicated()] == [("head.b", 10)]
    assert Layout(ONE | {"data": 8}, Mesh().table(), declared).replicated() == []


def test_an_axis_that_would_split_nothing_is_refused() -> None:
    declared = {"w": weight((8, 8), "embed hidden", "embed")}
    found = Layout(ONE | {"pipeline": 2, "expert": 2}, Mesh().table(), declared).problems()
    assert [axis for axis, _ in found] == ["pipeline", "expert"]
    assert "pipeline = 2 splits nothing: this model has no layers to split" in found[0][1]


def test_rows_that_the_mesh_does_not_divide_are_refused() -> None:
    token = Feature((36,), "int32", None, ("length",))
    declared = {"w": weight((8, 8), "embed hidden", "embed")}
    found = Layout(ONE | {"sequence": 4}, Mesh().table(), declared, example={"token": token}).problems()
    assert found == [("sequence", "the row length 36 of 'token' is not a multiple of 2 x sequence 4 x tensor 1 = 8")]


@pytest.mark.parametrize("parts", [2, 4])
def test_in_zigzag_order_every_part_has_the_same_number_of_query_key_pairs(parts: int) -> None:
    assert zigzag_positions(33, 1).tolist() == list(range(33))
    order = zigzag_positions(32, parts)
    assert sorted(order) == list(range(32))
    pairs = [sum(place + 1 for place in part) for part in np.split(order, parts)]
    assert len(set(pairs)) == 1


def test_shard_map_refuses_rules_that_it_does_not_support() -> None:
    def refusal(rules: dict[str, Any]) -> str:
        return ShardMap().refusal(Layout(MESH, Mesh(rules=rules).table(), {}))

    assert refusal({}) == refusal({"classes": "fsdp"}) == refusal({"hidden": "fsdp"}) == ""
    assert "shard_map can split classes over fsdp only" in refusal({"classes": "tensor"})
    assert "vocab: fsdp needs mesh.fsdp = 1" in refusal({"vocab": "fsdp"})


def test_jit_refuses_to_split_a_custom_dim_over_tensor_inside_a_shard_map_region() -> None:
    declared = {"w": bias((2, 8), "layer wide")}
    rules = Mesh(rules={"wide": "tensor"}).table()
    assert "mesh.rules can split over fsdp only" in Jit().refusal(Layout(MESH | {"pipeline": 2}, rules, declared))
    assert Jit().refusal(Layout(MESH, rules, declared)) == ""


@dataclass(frozen=True, kw_only=True)
class Twice(MLP):
    """Sums an array that is not a partial sum."""

    def logits(self, params: Tree, image_BHWC: jax.Array, ctx: Context, drop: Drop = kept) -> jax.Array:
        return ctx.reduce(super().logits(params, image_BHWC, ctx, drop), "hidden")


@dataclass(frozen=True, kw_only=True)
class Never(MLP):
    """Does not sum the partial products."""

    def logits(self, params: Tree, image_BHWC: jax.Array, ctx: Context, drop: Drop = kept) -> jax.Array:
        x = image_BHWC.reshape(len(image_BHWC), -1)
        for i in range(2):
            x = matmul(x, ctx.gather(params[f"layer{i}"])["weight"])
        return x


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Twice(sizes=(64, 32, 10)), "x is the same on every device of tensor"),
        (Never(sizes=(64, 32, 10)), "the loss differs between the devices of tensor"),
    ],
)
def test_missing_and_repeated_sums_over_devices_are_refused(model: MLP, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        gradients(place(model, ShardMap(), Mesh(data=1, tensor=2)))


def test_a_refusal_names_the_engines_that_are_left() -> None:
    plain, tensor = {"w": weight((8, 8), "embed hidden", "embed")}, {"w": weight((8, 8), "embed classes", "embed")}
    assert Pmap().refusal(layout(plain))
    assert others(layout(plain)) == "use engine: jit or shard_map"
    own = layout(tensor, Mesh(rules={"classes": "tensor"}))
    assert ShardMap().refusal(own)
    assert others(own) == "use engine: jit"
    stacked = {"w": Param((2, 8, 8), "layer embed classes", drawn(1.0))}
    neither = Layout(MESH | {"pipeline": 2}, Mesh(rules={"classes": "tensor"}).table(), stacked)
    assert Jit().refusal(neither)
    assert others(neither) == "use another mesh, or leave mesh.rules out"
