"""Parsed programs: small texts with the expected cost computed by hand, and programs that JAX compiles here."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dtrain.core.chips import CHIPS
from dtrain.parallel.mesh import Mesh
from dtrain.plan.compiled import lacks_main_memory, without_aliases
from dtrain.plan.cost import Costs, product_flops
from dtrain.plan.network import Network, dims_used, members
from dtrain.plan.program import Op, arrays, read, trips
from dtrain.plan.replay import Replay, StepCost

V5E = next(chip for chip in CHIPS if chip.name == "v5e")
RING = Network(V5E, (4, 4), {"fsdp": 16}, np.array([(i // 4, i % 4, 0) for i in range(16)]), np.zeros(16, int))

OVERLAPPED = """HloModule jit_step, is_scheduled=true

%cond (p: (s32[], f32[1024,1024])) -> pred[] {
  %p = (s32[], f32[1024,1024]{1,0:T(8,128)}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] constant(9)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

%body (q: (s32[], f32[1024,1024])) -> (s32[], f32[1024,1024]) {
  %q = (s32[], f32[1024,1024]{1,0:T(8,128)}) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %two = s32[] constant(2)
  %next = s32[] add(%j, %two)
  %x = f32[1024,1024]{1,0:T(8,128)} get-tuple-element(%q), index=1
  %start = (f32[1024,1024]{1,0}, f32[1024,1024]{1,0}) collective-permute-start(%x), source_target_pairs={{0,1},{1,2}}
  %y = f32[1024,1024]{1,0:T(8,128)} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %done = f32[1024,1024]{1,0:T(8,128)} collective-permute-done(%start)
  ROOT %t = (s32[], f32[1024,1024]{1,0:T(8,128)}) tuple(%next, %done)
}

ENTRY %main (a: f32[1024,1024]) -> f32[1024,1024] {
  %a = f32[1024,1024]{1,0:T(8,128)} parameter(0), metadata={op_name="state.params['w']"}
  %zero = s32[] constant(1)
  %init = (s32[], f32[1024,1024]{1,0:T(8,128)}) tuple(%zero, %a)
  %loop = (s32[], f32[1024,1024]{1,0:T(8,128)}) while(%init), condition=%cond, body=%body
  ROOT %out = f32[1024,1024]{1,0:T(8,128)} get-tuple-element(%loop), index=1
}
"""


def replayed(text: str) -> StepCost:
    return Replay(read(text), V5E, RING).run()


def test_a_loop_is_counted_by_its_bounds() -> None:
    """From 1 to 9 in steps of 2: four iterations."""
    program = read(OVERLAPPED)
    assert trips(program, program.entry.ops["loop"], program.entry) == 4


def test_time_is_that_of_the_longer_of_work_and_network() -> None:
    found = replayed(OVERLAPPED)
    product, sent = 2 * 1024**3 / (0.9 * 197e12), 4 * 1024**2 / 45e9 + 1e-6
    assert sent > product
    assert found.seconds == pytest.approx(4 * sent)
    moved = 3 * 4 * 1024**2 / (0.9 * 819e9)  # both operands are one array, read once
    busy = found.parts["product"] + found.parts["memory"]
    assert busy == pytest.approx(4 * max(product, moved * 2 / 3), rel=1e-4)
    collective = found.collectives["collective-permute", ("fsdp",)]
    assert collective.calls == 4
    assert collective.exposed == pytest.approx(found.parts["network"])


def test_dims_are_padded_to_tiles_and_fast_memory_is_recognised() -> None:
    (array,) = arrays("bf16[3,100]{1,0:T(8,128)(2,1)S(1)}")
    assert (array.bytes, array.space) == (8 * 128 * 2, 1)
    (column,) = arrays("f32[128,1]{0,1:T(1,128)}")
    assert column.bytes == 128 * 4


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("replica_groups={{0,2},{1,3}}", [0, 2]),
        ("replica_groups=[2,4]<=[8]", [0, 1, 2, 3]),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", [0, 4]),
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}", [0, 1, 2, 3]),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}", [0, 4]),
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}", [0, 1, 2, 3]),
        ("replica_groups=mesh['a'=8] {'a':(2)2}", [0, 2]),
        ("source_target_pairs={{3,0},{0,1}}", [3, 0]),
        ("dimensions={0}", None),
    ],
)
def test_groups_are_read_in_every_spelling(text: str, found: list[int] | None) -> None:
    assert members(Op("x", "all-gather", (), (), f", channel_id=1, {text}, dimensions={{0}}", False)) == found


def test_a_group_is_named_by_the_axes_it_spans() -> None:
    network = Network(V5E, (4, 4), {"data": 4, "tensor": 4}, RING.coords, RING.slice_of)
    assert network.group([0, 4, 8, 12]).axes == ("data",)
    assert network.along(("tensor",)).extents == (4,)
    assert network.along(("data", "tensor")).size == 16


def test_a_torus_sends_both_ways_and_an_open_line_one() -> None:
    v5p = next(chip for chip in CHIPS if chip.name == "v5p")
    coords = np.array(list(np.ndindex(4, 4, 4)))
    torus = Network(v5p, (4, 4, 4), {"x": 4, "y": 4, "z": 4}, coords, np.zeros(64, int))
    size = 1e9
    assert torus.time("all-gather", torus.along(("z",)), size) == pytest.approx(size * 3 / 4 / 180e9, rel=1e-2)
    whole = torus.time("all-reduce", torus.along(("x", "y", "z")), size)
    assert whole == pytest.approx(2 * size * 63 / 64 / 540e9, rel=1e-2)
    line = Network(V5E, (4, 4), {"x": 4, "y": 4}, RING.coords, RING.slice_of)
    assert line.time("all-gather", line.along(("y",)), size) == pytest.approx(size * 3 / 4 / 45e9, rel=1e-2)


RINGS = [
    ('"emitter":"3DAllGatherOnMajorDim"', 3),
    ('"emitter":"1DAllGatherNonMajorDimImbalanced","debug":"group_size = 16"', 1),
    ('"emitter":"RotatedPincerEmitter","strategy":"StrategyND","debug":"{colors:2 phases:2 cores:{4 4},{4 4} n:0}"', 2),
    ('"emitter":"SingleInputAllReduceScatterFusion","debug":"StrategyRing{colors:1 phases:1 cores:{4} n:0}"', 1),
    ('"emitter":"AllToAllEmitter"', None),
]


@pytest.mark.parametrize(("config", "dims"), RINGS)
def test_the_dimensions_that_a_collective_uses_are_read(config: str, dims: int | None) -> None:
    attributes = f', channel_id=1, backend_config={{"collective_algorithm_config":{{{config}}}}}'
    assert dims_used(Op("x", "all-gather", (), (), attributes, False)) == dims


def test_one_ring_through_a_torus_is_slower_than_all_its_dimensions() -> None:
    v5p = next(chip for chip in CHIPS if chip.name == "v5p")
    coords = np.array(list(np.ndindex(4, 4, 4)))
    torus = Network(v5p, (4, 4, 4), {"x": 64}, coords, np.zeros(64, int))
    one, two, three = (torus.time("all-gather", torus.along(("x",)), 1e9, dims) for dims in (1, 2, 3))
    assert three == torus.time("all-gather", torus.along(("x",)), 1e9)
    assert [one / three, two / three] == pytest.approx([3, 1.5], rel=0.05)
    line = Network(V5E, (4, 4), {"x": 4, "y": 4}, RING.coords, RING.slice_of)
    assert line.time("all-gather", line.along(("y",)), 1e9, 1) == line.time("all-gather", line.along(("y",)), 1e9)


GATHER = """all-gather(%p0), channel_id=3, replica_groups=[1,16]<=[16], dimensions={0}, \
backend_config={"collective_algorithm_config":{"emitter":"1DAllGatherOnMajorDim"}}""".replace("\\\n", "")
IN_FLIGHT = f"""HloModule m, is_scheduled=true

%starting (p0: bf16[64,1024]) -> (bf16[64,1024], bf16[1024,1024], u32[]) {{
  %p0 = bf16[64,1024]{{1,0:T(8,128)(2,1)}} parameter(0)
  %g = bf16[1024,1024]{{1,0:T(8,128)(2,1)}} {GATHER}
  ROOT %s = (bf16[64,1024]{{1,0}}, bf16[1024,1024]{{1,0}}, u32[]) custom-call(%p0, %g), \
custom_call_target="AsyncCollectiveStart"
}}

%async_collective_fusion.1 (p0: bf16[64,1024], p1: bf16[1024,1024], p2: bf16[512,512]) \
-> (bf16[512,512], bf16[64,1024], bf16[1024,1024]) {{
  %p0 = bf16[64,1024]{{1,0:T(8,128)(2,1)}} parameter(0)
  %p1 = bf16[1024,1024]{{1,0:T(8,128)(2,1)}} parameter(1)
  %p2 = bf16[512,512]{{1,0:T(8,128)(2,1)}} parameter(2)
  %d = bf16[512,512]{{1,0:T(8,128)(2,1)}} dot(%p2, %p2), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
  %g = bf16[1024,1024]{{1,0:T(8,128)(2,1)}} {GATHER}
  ROOT %t = (bf16[512,512]{{1,0}}, bf16[64,1024]{{1,0}}, bf16[1024,1024]{{1,0}}) tuple(%d, %p0, %g)
}}

%ending (p0: bf16[64,1024], p1: bf16[1024,1024]) -> bf16[1024,1024] {{
  %p0 = bf16[64,1024]{{1,0:T(8,128)(2,1)}} parameter(0)
  %p1 = bf16[1024,1024]{{1,0:T(8,128)(2,1)}} parameter(1)
  %g = bf16[1024,1024]{{1,0:T(8,128)(2,1)}} {GATHER}
  ROOT %c = bf16[1024,1024]{{1,0:T(8,128)(2,1)}} custom-call(%p0, %p1, %g), custom_call_target="AsyncCollectiveDone"
}}

ENTRY %main (a: bf16[64,1024], b: bf16[512,512]) -> bf16[1024,1024] {{
  %a = bf16[64,1024]{{1,0:T(8,128)(2,1)}} parameter(0)
  %b = bf16[512,512]{{1,0:T(8,128)(2,1)}} parameter(1)
  %room = bf16[32,1024,1024]{{2,1,0:T(8,128)(2,1)}} custom-call(), custom_call_target="AllocateBuffer"
  %joined = bf16[1024,1024]{{1,0:T(8,128)(2,1)}} custom-call(%a, %b), custom_call_target="ConcatBitcast"
  %s = (bf16[64,1024]{{1,0}}, bf16[1024,1024]{{1,0}}, u32[]) fusion(%a), kind=kCustom, calls=%starting
  %s0 = bf16[64,1024]{{1,0:T(8,128)(2,1)}} get-tuple-element(%s), index=0
  %s1 = bf16[1024,1024]{{1,0:T(8,128)(2,1)}} get-tuple-element(%s), index=1
  %w1 = (bf16[512,512]{{1,0}}, bf16[64,1024]{{1,0}}, bf16[1024,1024]{{1,0}}) fusion(%s0, %s1, %b), kind=kCustom, \
calls=%async_collective_fusion.1
  %x = bf16[512,512]{{1,0:T(8,128)(2,1)}} get-tuple-element(%w1), index=0
  %w2 = (bf16[512,512]{{1,0}}, bf16[64,1024]{{1,0}}, bf16[1024,1024]{{1,0}}) fusion(%s0, %s1, %x), kind=kCustom, \
calls=%async_collective_fusion.1
  %y0 = bf16[64,1024]{{1,0:T(8,128)(2,1)}} get-tuple-element(%w2), index=1
  %y1 = bf16[1024,1024]{{1,0:T(8,128)(2,1)}} get-tuple-element(%w2), index=2
  ROOT %e = bf16[1024,1024]{{1,0:T(8,128)(2,1)}} fusion(%y0, %y1), kind=kCustom, calls=%ending
}}
""".replace("\\\n", "")


def test_a_gather_in_flight_is_counted_once() -> None:
    """By the network only: neither the fusions that it passes through nor reserved buffers count its bytes."""
    found = replayed(IN_FLIGHT)
    assert found.moved == 2 * 2 * 2 * 512 * 512  # each of two products reads one matrix and writes one
    collective = found.collectives["all-gather", ("fsdp",)]
    assert (collective.calls, collective.bytes) == (1, 2 * 1024 * 1024)
    assert collective.seconds == pytest.approx(2 * 1024**2 * 15 / 16 / 90e9 + 16e-6)
    assert found.seconds == pytest.approx(collective.seconds)


ALL_REDUCE_SCATTER = """HloModule m, is_scheduled=true

%%reducing (p0: f32[1024,1024]) -> f32[64,1024] {
  %%p0 = f32[1024,1024]{1,0:T(8,128)} parameter(0)
  %%r = f32[1024,1024]{1,0:T(8,128)} all-reduce(%%p0), channel_id=3, replica_groups=[1,16]<=[16], to_apply=%%add
  %%i = s32[] constant(0)
  ROOT %%s = f32[%d,1024]{1,0:T(8,128)} dynamic-slice(%%r, %%i, %%i), dynamic_slice_sizes={%d,1024}
}

ENTRY %%main (a: f32[1024,1024]) -> f32[%d,1024] {
  %%a = f32[1024,1024]{1,0:T(8,128)} parameter(0)
  ROOT %%f = f32[%d,1024]{1,0:T(8,128)} fusion(%%a), kind=kCustom, calls=%%reducing, \
backend_config={"collective_algorithm_config":{"debug":"StrategyRing{colors:1 cores:{16}}"}}
}
""".replace("\\\n", "")


def test_a_sum_of_which_a_fusion_keeps_a_part_is_scattered() -> None:
    """XLA writes it as an all-reduce; it moves half of the bytes of one. The algorithm is named by the fusion."""
    scattered = replayed(ALL_REDUCE_SCATTER % ((64,) * 4)).collectives
    assert list(scattered) == [("reduce-scatter", ("fsdp",))]
    seconds = 4 * 1024**2 * 15 / 16 / 90e9 + 16e-6
    assert scattered["reduce-scatter", ("fsdp",)].seconds == pytest.approx(seconds)
    whole = replayed(ALL_REDUCE_SCATTER % ((1024,) * 4)).collectives["all-reduce", ("fsdp",)]
    assert whole.seconds == pytest.approx(2 * (seconds - 16e-6) + 16e-6)


def test_slices_communicate_over_the_slow_network() -> None:
    two = Network(V5E, (4, 4), {"data": 2, "fsdp": 16}, np.tile(RING.coords, (2, 1)), np.repeat([0, 1], 16))
    inside, across = (two.time("all-reduce", two.along((axis,)), 1e9) for axis in ("fsdp", "data"))
    assert across > 10 * inside


@pytest.mark.parametrize("shapes", [((64, 32), (32, 48)), ((8, 64, 32), (8, 32, 16))])
def test_products_that_jax_compiles_are_counted_exactly(shapes: tuple[tuple[int, ...], ...]) -> None:
    """In a scan of eleven iterations; XLA's own figure counts the body once."""
    a, b = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)

    def step(a: jax.Array, b: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda total, _: (total + (a * total.mean()) @ b, None), a @ b, None, length=10)[0]

    text = jax.jit(step).lower(a, b).compile().as_text()
    flops = 11 * 2 * np.prod(shapes[0]) * shapes[1][-1]
    assert replayed(text or "").flops == flops


def test_a_convolution_counts_the_taps_that_meet_input() -> None:
    text = """HloModule m, is_scheduled=true

ENTRY %main (x: f32[1,5,3], w: f32[3,3,7]) -> f32[1,5,7] {
  %x = f32[1,5,3]{2,1,0} parameter(0)
  %w = f32[3,3,7]{2,1,0} parameter(1)
  ROOT %c = f32[1,5,7]{2,1,0} convolution(%x, %w), window={size=3 pad=1_1}, dim_labels=b0f_0io->b0f
}
"""
    entry = read(text).entry
    assert product_flops(entry.ops["c"], entry) == 2 * 7 * 3 * (3 * 5 - 2)


def test_what_is_sliced_or_changed_in_place_costs_its_part() -> None:
    text = """HloModule m, is_scheduled=true

%fused (p0: f32[64,128], p1: s32[], p2: f32[1,128]) -> f32[64,128] {
  %p0 = f32[64,128]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %p2 = f32[1,128]{1,0} parameter(2)
  %z = s32[] constant(0)
  ROOT %d = f32[64,128]{1,0} dynamic-update-slice(%p0, %p2, %p1, %z)
}

ENTRY %main (a: f32[64,128], i: s32[], u: f32[1,128]) -> f32[64,128] {
  %a = f32[64,128]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %u = f32[1,128]{1,0} parameter(2)
  ROOT %f = f32[64,128]{1,0} fusion(%a, %i, %u), kind=kLoop, calls=%fused
}
"""
    program = read(text)
    cost = Costs(program).of(program.entry.ops["f"], program.entry)
    assert cost.bytes == pytest.approx(2 * 128 * 4 + 4, abs=4)


@pytest.mark.parametrize(("kind", "rows"), [("copy", 1), ("negate", 64)])
def test_a_slice_of_a_copy_in_place_reads_the_slice_alone(kind: str, rows: int) -> None:
    text = f"""HloModule m, is_scheduled=true

%inner (p: f32[64,128]) -> f32[64,128] {{
  %p = f32[64,128]{{1,0}} parameter(0)
  ROOT %c = f32[64,128]{{1,0}} {kind}(%p)
}}

%fused (p0: f32[64,128], p1: s32[]) -> f32[1,128] {{
  %p0 = f32[64,128]{{1,0}} parameter(0)
  %p1 = s32[] parameter(1)
  %z = s32[] constant(0)
  %g = f32[64,128]{{1,0}} fusion(%p0), kind=kLoop, output_to_operand_aliasing={{{{}}: (0, {{}})}}, calls=%inner
  ROOT %d = f32[1,128]{{1,0}} dynamic-slice(%g, %p1, %z), dynamic_slice_sizes={{1,128}}
}}

ENTRY %main (a: f32[64,128], i: s32[]) -> f32[1,128] {{
  %a = f32[64,128]{{1,0}} parameter(0)
  %i = s32[] parameter(1)
  ROOT %f = f32[1,128]{{1,0}} fusion(%a, %i), kind=kLoop, calls=%fused
}}
"""
    program = read(text)
    cost = Costs(program).of(program.entry.ops["f"], program.entry)
    assert cost.bytes == pytest.approx((rows + 1) * 128 * 4 + 4, abs=4)


def test_collectives_that_jax_compiles_are_found_by_axis() -> None:
    mesh = Mesh(data=2, fsdp=4)
    sizes = mesh.sizes(8)
    made = mesh.build(sizes, jax.devices())
    x = jax.ShapeDtypeStruct((16, 32), jnp.float32, sharding=NamedSharding(made, PartitionSpec("fsdp")))
    text = jax.jit(lambda x: x * 2, out_shardings=NamedSharding(made, PartitionSpec())).lower(x).compile().as_text()
    network = Network(V5E, (2, 4), dict(made.shape), np.array([(i // 4, i % 4, 0) for i in range(8)]), np.zeros(8, int))
    collective = Replay(read(text or ""), V5E, network).run().collectives
    assert collective["all-gather", ("fsdp",)].bytes == 16 * 32 * 4


@pytest.mark.parametrize(
    ("output", "main"),
    [
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 29.52G of 15.75G hbm.", True),
        ("RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: XLA:TPU compile permanent error.", True),
        ("RESOURCE_EXHAUSTED: E1001: CompileTimeScopedVmemOom: Ran out of memory in memory space vmem", False),
        ("INTERNAL: Mosaic failed to compile", False),
    ],
)
def test_a_kernel_short_of_fast_memory_is_no_plan_that_does_not_fit(output: str, main: bool) -> None:
    assert lacks_main_memory(output) == main


KERNEL_IN_FUSION = """HloModule jit_step, is_scheduled=true

%async_collective_fusion.1 (p0: s8[1,8,8], p1: bf16[32,4096,128], p2: bf16[64,4096]) -> bf16[32,4096,128] {
  %p0 = s8[1,8,8]{2,1,0} parameter(0)
  %p1 = bf16[32,4096,128]{2,1,0} parameter(1)
  %p2 = bf16[64,4096]{1,0} parameter(2)
  %places = s32[4096,128]{1,0} iota(), iota_dimension=0
  %splash_mha_fwd.3 = bf16[32,4096,128]{2,1,0} custom-call(%p0, %p1, %places), custom_call_target="tpu_custom_call"
  %all-gather.1 = bf16[64,4096]{1,0} all-gather(%p2), channel_id=1, replica_groups={{0}}, dimensions={0}
  ROOT %both = (bf16[32,4096,128]{2,1,0}, bf16[64,4096]{1,0}) tuple(%splash_mha_fwd.3, %all-gather.1)
}

ENTRY %main (mask: s8[1,8,8], q: bf16[32,4096,128], w: bf16[64,4096]) -> bf16[32,4096,128] {
  %mask = s8[1,8,8]{2,1,0} parameter(0)
  %q = bf16[32,4096,128]{2,1,0} parameter(1)
  %w = bf16[64,4096]{1,0} parameter(2)
  %fusion = (bf16[32,4096,128]{2,1,0}, bf16[64,4096]{1,0}) fusion(%mask, %q, %w), kind=kCustom, \
calls=%async_collective_fusion.1
  ROOT %out = bf16[32,4096,128]{2,1,0} get-tuple-element(%fusion), index=0
}
""".replace("\\\n", "")


def test_a_kernel_in_a_fusion_that_overlaps_with_a_collective_is_counted() -> None:
    live = 9 / 16  # of 8 x 8 blocks, those on and below the diagonal
    assert replayed(KERNEL_IN_FUSION).kernel_flops == 2 * 2 * 32 * 4096 * 4096 * 128 * live


def test_an_array_that_a_loop_carries_has_memory_once() -> None:
    """As in a dump for v5p, which lists what a loop begins with and the loop's parameter, in the same memory."""
    live = {
        "custom-call.10{}": 500,
        "wide.param.80{8}": 500,
        "wide.param.80{2}": 100,
        "fusion.3{}": 200,
        "copy.1{}": 100,
    }
    assert without_aliases(live, 800) == {"custom-call.10{}": 500, "fusion.3{}": 200, "copy.1{}": 100}
    assert without_aliases(live, 900) == {name: size for name, size in live.items() if name != "wide.param.80{8}"}
    assert without_aliases(live, 1400) == live
    alone = {"wide.param.80{8}": 500, "fusion.3{}": 200}
    assert without_aliases(alone, 400) == alone  # nothing of that size beside it


def test_products_of_8_bits_have_a_rate_of_their_own() -> None:
    text = """HloModule jit_step, is_scheduled=true

ENTRY %main (a: KIND[4096,4096], b: OTHER[4096,4096]) -> SUM[4096,4096] {
  %a = KIND[4096,4096]{1,0:T(8,128)} parameter(0)
  %b = OTHER[4096,4096]{1,0:T(8,128)} parameter(1)
  ROOT %y = SUM[4096,4096]{1,0:T(8,128)} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""

    def product(kind: str, other: str, sums: str) -> float:
        return replayed(text.replace("KIND", kind).replace("OTHER", other).replace("SUM", sums)).parts["product"]

    plain = product("bf16", "bf16", "bf16")
    assert product("s8", "s8", "s32") == pytest.approx(plain / V5E.int8)
    assert product("f8e4m3fn", "f8e4m3fn", "f32") == pytest.approx(plain / V5E.fp8)
    assert product("s8", "bf16", "bf16") == product("bf16", "bf16", "f32") == plain
    assert V5E.int8 == 2.0
