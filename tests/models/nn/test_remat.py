"""The operations that the backward pass recomputes, counted in the traced gradient for every policy and platform."""

import importlib.util
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import pytest

from dtrain.assembly.assemble import assemble
from dtrain.core.errors import RecipeError
from dtrain.core.slices import target
from dtrain.models.nn.context import Layers
from dtrain.models.nn.remat import Remat
from dtrain.models.nn.single_device import SingleDeviceContext
from dtrain.plan.jaxpr_flat import bare
from dtrain.plan.target import assume_cudnn, devices, stand_ins
from dtrain.recipe.load import load

RECIPE = """
model: {kind: decoder, vocab: 128, context: 256, layers: 2, width: 512, heads: 8, kv_heads: 4, hidden: 256}
data: {kind: tokens, files: [none.bin], length: 256}
optimizer: {kind: sgd, lr: 1e-4}
precision: {compute: bfloat16}
batch: 32
steps: 10
"""
EXPERTS = "model.experts={count: 4, active: 2, hidden: 256, shared: 1}"
SHARD_MAP = "engine=shard_map"
PLACES = {
    "one CPU": ("cpu-1", []),
    "splash by shard_map": ("v5e-4", [SHARD_MAP, "mesh={data: 1, fsdp: 2, tensor: 2}"]),
    "splash by jit": ("v5e-4", ["mesh={data: 1, fsdp: 4}"]),
    "cudnn": ("h100-8", [SHARD_MAP, "mesh={data: 8}"]),
    "ring": ("v5e-4", [SHARD_MAP, "mesh={data: 1, sequence: 4}"]),
    "ring of splash": ("v5e-4", [SHARD_MAP, "mesh={data: 1, sequence: 4}", "data.length=1024", "model.context=1024"]),
    "experts": ("v5e-4", [EXPERTS, "mesh={data: 4}"]),
    "experts apart": ("v5e-4", [SHARD_MAP, EXPERTS, "mesh={data: 1, expert: 4}"]),
}
KERNELS = {
    "splash_mha_fwd_residuals": "attention",
    "dot_product_attention_fwd_wrapper": "attention",
    "dot_general": "product",
    "ragged_dot_general": "grouped",
    "ppermute": "ring turn",
    "reduce_scatter": "sum",
    "device_put": "offload",
}
CUDNN = {
    "full": {"product": 6, "attention": 1},
    "attention": {"product": 6},
    "dots": {},
    "offload": {"product": 6, "attention": 1, "offload": 2},
}
"""The backward pass needs the results of all seven products of a layer but the last."""

SPLASH = {policy: again | {"product": 8} if again else {} for policy, again in CUDNN.items()}
"""On a TPU queries and keys are rotated by a product each."""

MIXED = {policy: again | {"product": 9, "grouped": 2} if again else {} for policy, again in SPLASH.items()}
"""Queries, keys, both rotations, values, the output of attention, the router, and two of three matrices of the shared
experts."""

AGAIN: dict[str, dict[str, dict[str, int]]] = {
    "one CPU": {  # plain attention computes its two products again: attention weights are never saved
        "full": {"product": 8}, "attention": {"product": 8}, "dots": {"product": 2},
        "offload": {"product": 8, "offload": 2},
    },
    "splash by shard_map": {  # the sum over `tensor` of the output of attention
        policy: again | {"sum": 1} if again else {} for policy, again in SPLASH.items()
    },
    "splash by jit": SPLASH,
    "cudnn": CUDNN,
    # ten products of attention, in two turns of the ring
    "ring": {
        "full": {"product": 18, "ring turn": 2}, "attention": {"product": 8},
        "dots": {"product": 2},  # the two rotations
        "offload": {"product": 18, "ring turn": 2, "offload": 2},
    },
    "ring of splash": {  # three kernels of the first turn, two of each other
        "full": {"product": 8, "attention": 5, "ring turn": 2}, "attention": {"product": 8},
        "dots": {"product": 2},
        "offload": {"product": 8, "attention": 5, "ring turn": 2, "offload": 2},
    },
    "experts": MIXED,
    "experts apart": MIXED,
}  # fmt: skip


def primitives(program: Any) -> Counter[str]:
    """How often each primitive or kernel occurs in a traced program; the body of a loop is counted once."""
    found: Counter[str] = Counter()
    for equation in bare(program).eqns:
        name = equation.primitive.name
        if name == "pallas_call":
            found[str(equation.params.get("name"))] += 1
            continue
        found[name] += 1
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple) else (value,):
                if hasattr(bare(inner), "eqns"):
                    found += primitives(inner)
    return found


def step(folder: Path, place: str, remat: str) -> Counter[str]:
    on = target(PLACES[place][0])
    path = folder / "recipe.yaml"
    path.write_text(RECIPE)
    recipe = load(path, [*PLACES[place][1], f"model.remat={remat}"], on.devices)
    example = recipe.data.example()
    assert example is not None
    if on.chip and on.chip.platform == "gpu":
        assume_cudnn(on.chip)
    return primitives(assemble(recipe, stand_ins(on), example, 10).train().jaxpr)


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
def test_each_policy_recomputes_what_it_does_not_save(tmp_path: Path, place: str) -> None:
    saving_all = step(tmp_path, place, "none")
    assert set(AGAIN[place]) == set(get_args(Remat)) - {"none"}
    for remat, expected in AGAIN[place].items():
        more = step(tmp_path, place, remat)
        again = Counter(dict.fromkeys(KERNELS.values(), 0))
        for name, kind in KERNELS.items():
            again[kind] += more[name] - saving_all[name]
        assert +again == Counter(expected), remat


NAMED: dict[str, dict[str, int]] = {
    "query": {"product": 1}, "key": {"product": 1}, "value": {"product": 1}, "out": {"product": 1},
    "gate": {"product": 1}, "up": {"product": 1}, "attention": {"attention": 1},
}  # fmt: skip
"""What is not computed again if this value is saved."""


EXPERTS = {name: {"product": 1, "grouped": 1} for name in ("gate", "up")}
"""Of shared and of other experts."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "other"),
    [
        ("one CPU", {"attention": {}}),  # its attention weights are never saved
        ("splash by shard_map", {"query": {"product": 2}, "key": {"product": 2}, "out": {"product": 1, "sum": 1}}),
        pytest.param(
            "splash by jit", {"query": {"product": 2}, "key": {"product": 2}}, marks=pytest.mark.nightly
        ),  # rotated
        ("cudnn", {}),
        pytest.param("experts", EXPERTS, marks=pytest.mark.nightly),
        pytest.param("experts apart", EXPERTS, marks=pytest.mark.nightly),
    ],
)
def test_a_list_saves_what_it_names(tmp_path: Path, place: str, other: dict[str, dict[str, int]]) -> None:
    rotated = {"query": {"product": 2}, "key": {"product": 2}} if place.startswith("experts") else {}
    nothing = step(tmp_path, place, "full")
    assert step(tmp_path, place, "[]") == nothing
    for saved, expected in (NAMED | rotated | other).items():
        fewer: Counter[str] = Counter()
        with_it = step(tmp_path, place, f"[{saved}]")
        for name, kind in KERNELS.items():
            fewer[kind] += nothing[name] - with_it[name]
        assert +fewer == Counter(expected), saved
    assert sum(step(tmp_path, place, "dots").values()) == sum(
        step(tmp_path, place, f"[{', '.join(NAMED)}]").values()
    ) or place.startswith("experts")  # the router's product has no name


@pytest.mark.parametrize(
    ("changes", "name"),
    [(["model.remat=[down]"], "down"), (["model.remat=[gate]", "model.feed_forward=gelu"], "gate")],
)
def test_a_value_that_the_backward_pass_does_not_read_is_refused(tmp_path: Path, changes: list[str], name: str) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    with pytest.raises(RecipeError, match=f"does not read {name}"):
        load(tmp_path / "recipe.yaml", changes)
    assert load(tmp_path / "recipe.yaml", ["model.post_norm=true", "model.remat=[down]"]).model


@pytest.mark.slow
def test_parameters_are_gathered_again_when_all_else_is_saved(tmp_path: Path) -> None:
    """Seven matrices; the two scales of the norms, of a few bytes, may be saved."""
    gathers = {remat: step(tmp_path, "splash by shard_map", remat)["all_gather"] for remat in ("none", "full")}
    assert gathers["full"] - gathers["none"] <= 4


def test_products_of_other_models_are_saved_too() -> None:
    """Products written with `@`, under a policy that saves products."""

    def block(layer: Any, x: jax.Array, shared: Any, ctx: Any) -> tuple[jax.Array, Any]:
        return jnp.tanh(jnp.tanh(x @ layer) @ layer), {}

    def loss(layers: jax.Array, remat: Remat) -> jax.Array:
        out, _ = SingleDeviceContext().stack([block], layers, jnp.ones((4, 8)), how=Layers(remat))
        return out.sum()

    found = {
        remat: primitives(jax.make_jaxpr(jax.grad(loss), static_argnums=1)(jnp.ones((3, 8, 8)), remat))["dot_general"]
        for remat in ("none", "full", "dots")
    }
    assert found == {"none": 6, "full": 8, "dots": 6}


@pytest.mark.tpu_compiler
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
@pytest.mark.parametrize(("blocks", "layers", "unroll"), [(1, 1, 1), (3, 3, 1), (1, 3, 3), (2, 3, 1)])
def test_layers_outside_of_a_loop_are_computed_again(blocks: int, layers: int, unroll: int) -> None:
    """XLA would keep what both passes compute: counted in the program of a TPU."""

    def block(number: int, layer: Any, x: jax.Array, shared: Any, ctx: Any) -> tuple[jax.Array, Any]:
        return jnp.tanh(jnp.tanh(x @ layer) @ layer) + number, {}

    several = [partial(block, number) for number in range(blocks)]

    def loss(layers: jax.Array, x: jax.Array, remat: Remat) -> jax.Array:
        out, _ = SingleDeviceContext().stack(several, layers, x, how=Layers(remat, unroll))
        return (out**2).sum()

    device: Any = devices(target("v5e-1"))[0]
    on = partial(jax.ShapeDtypeStruct, dtype=jnp.float32, sharding=jax.sharding.SingleDeviceSharding(device))

    def tanhs(remat: Remat) -> int:
        compiled = jax.jit(jax.grad(loss), static_argnums=2).lower(on((layers, 256, 256)), on((512, 256)), remat)
        return (compiled.compile().as_text() or "").count(" tanh(")

    assert (tanhs("none"), tanhs("full")) == (2 * layers, 4 * layers)
