"""Collectives that the quick tier overlaps with work, and the memory traffic that it counts."""

import math
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from dtrain.core.chips import CHIPS
from dtrain.core.slices import target
from dtrain.parallel.jit import Jit
from dtrain.parallel.shard_map import ShardMap
from dtrain.plan.jaxpr_cost import overlap
from dtrain.plan.jaxpr_flat import bare, flatten, gathered, traffic
from dtrain.plan.network import Group
from dtrain.plan.plan import quick
from dtrain.plan.variants import WHOLE_GATHERS, WHOLE_PRODUCTS
from tests.plan.test_plan import recipe

FSDP, TENSOR = ("fsdp", "fsdp_y"), ("tensor",)


@pytest.mark.parametrize(
    ("chip", "engine", "gathers", "sums"),
    [
        ("v5e", Jit(), True, True),
        ("v5e", Jit(xla=dict(WHOLE_PRODUCTS)), True, False),
        ("v5e", Jit(xla=dict(WHOLE_GATHERS)), True, True),
        ("v5e", ShardMap(), True, False),
        ("v4", Jit(), False, False),
        ("v5p", Jit(), True, False),
        ("v5p", Jit(overlap="none"), False, False),
        ("v5p", ShardMap(overlap="products"), True, False),
        ("h100", ShardMap(), True, True),
        ("h100", Jit(), True, False),
        ("a100", ShardMap(xla={"xla_gpu_enable_latency_hiding_scheduler": False}), False, False),
        ("a100", ShardMap(xla={"xla_gpu_enable_latency_hiding_scheduler": "false"}), False, False),
        ("a100", ShardMap(xla={"xla_gpu_enable_latency_hiding_scheduler": 0}), False, False),
    ],
)
def test_what_a_compiler_hides(chip: str, engine: Jit | ShardMap, gathers: bool, sums: bool) -> None:
    found = overlap(engine, engine.kind == "jit", next(one for one in CHIPS if one.name == chip), 16)
    assert [found.hides(kind, FSDP) for kind in ("all-gather", "reduce-scatter")] == [gathers, sums]
    assert not any(found.hides(kind, TENSOR) for kind in ("all-gather", "reduce-scatter", "all-reduce"))
    assert found.hides("collective-permute", TENSOR)


def test_options_decide_whether_products_are_windowed_and_kernels_hide_collectives() -> None:
    v5e, v5p = (next(one for one in CHIPS if one.name == name) for name in ("v5e", "v5p"))
    assert [overlap(Jit(xla=dict(xla)), True, v5e, 16).windowed for xla in ({}, WHOLE_GATHERS)] == [True, False]
    engines = (ShardMap(overlap="products"), ShardMap(overlap="kernels"), ShardMap())
    assert [overlap(engine, False, v5p, 64).kernels for engine in engines] == [False, True, True]


def test_products_are_windowed_on_at_most_32_devices() -> None:
    v5e, v6e = (next(one for one in CHIPS if one.name == name) for name in ("v5e", "v6e"))
    assert [overlap(Jit(), True, v6e, devices).windowed for devices in (8, 16, 32, 64, 256)] == [True] * 3 + [False] * 2
    assert [overlap(Jit(), True, v5e, devices).waits for devices in (16, 32, 64)] == [False, True, False]


def test_a_sum_over_a_plane_is_an_all_reduce_to_the_compiler_that_places_it() -> None:
    v5e, plane = next(one for one in CHIPS if one.name == "v5e"), Group(16, ("fsdp",), (4, 4))
    whole = overlap(Jit(xla=dict(WHOLE_PRODUCTS)), True, v5e, 16)
    assert whole.kind("reduce-scatter", plane) == "all-reduce"
    assert whole.kind("reduce-scatter", Group(4, ("fsdp",), (4,))) == "reduce-scatter"
    assert overlap(Jit(), True, v5e, 16).kind("reduce-scatter", plane) == "reduce-scatter"
    assert whole.dims(plane, 2) == 1
    assert whole.dims(Group(64, ("fsdp",), (4, 4, 4), (4, 4, 4)), 3) is None


@pytest.mark.slow
@pytest.mark.parametrize(("length", "hidden"), [(2048, True), (128, False)])
def test_gathers_are_hidden_as_far_as_products_last(tmp_path: Path, length: int, hidden: bool) -> None:
    found = quick(recipe(tmp_path, "llama3-8b", length, 16), target("v5e-16"))
    assert found.timing
    tally = found.timing.tally
    gathers = tally.collectives["all-gather", ("fsdp",)]
    assert tally.seconds == pytest.approx(sum(tally.parts.values()))
    assert tally.parts["network"] == pytest.approx(sum(collective.exposed for collective in tally.collectives.values()))
    assert (
        gathers.exposed < 1e-3 * gathers.seconds
        if hidden
        else (0.2 * gathers.seconds < gathers.exposed < gathers.seconds)
    )


@pytest.mark.slow
def test_a_windowed_product_adds_up_in_main_memory_where_its_result_is_large(tmp_path: Path) -> None:
    """A result of 64 MiB stays in fast memory; one of 128 MiB is read and written again for the operand's parts."""

    def seconds_per_flop(batch: int, *overrides: str) -> float:
        found = quick(recipe(tmp_path, "llama3.2-1b", 4096, batch, *overrides), target("v5e-16")).timing
        assert found
        return (found.tally.parts["product"] + found.tally.parts["memory"]) / found.tally.flops

    small, large = seconds_per_flop(16), seconds_per_flop(32)
    assert large > 1.3 * small
    assert seconds_per_flop(32, "engine=shard_map") == pytest.approx(small, rel=0.1)


def test_a_gathered_dim_is_followed_through_views() -> None:
    mesh = jax.sharding.AbstractMesh((4,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("fsdp")

    def whole(w: jax.Array) -> jax.Array:
        w = jax.lax.all_gather(w, "fsdp", axis=0, tiled=True)
        return w.reshape(w.shape[0], -1) @ jnp.ones((6, 2))

    mapped = jax.shard_map(whole, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    outer = jax.make_jaxpr(mapped)(jax.ShapeDtypeStruct((8, 2, 3), jnp.float32))
    program = flatten(bare(outer.jaxpr.eqns[-1].params["jaxpr"]))
    product = next(step for step in program.steps if step.name == "dot_general")
    assert gathered(program, ("fsdp",))[product.read[0]] == (0, ("fsdp",))


def test_what_is_fused_is_read_from_memory_once() -> None:
    """Two arrays are read and one is written; a reduction reads its operands although its result is small."""
    a, b = jax.ShapeDtypeStruct((64, 128), jnp.float32), jax.ShapeDtypeStruct((64, 128), jnp.float32)
    size = 4 * math.prod(a.shape)
    moved = lambda function: sum(traffic(flatten(jax.make_jaxpr(function)(a, b).jaxpr)))  # noqa: E731
    assert moved(lambda a, b: jnp.exp(a) * b + a) == 3 * size
    assert moved(lambda a, b: (a * b).sum()) == pytest.approx(2 * size, abs=8)
    assert moved(lambda a, b: jnp.exp(a[:8] + b[:8])) == 3 * size / 8
