"""Names of slices, and the error for a wrong name."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dtrain.core.chips import CHIPS
from dtrain.core.errors import RecipeError
from dtrain.core.slices import target
from dtrain.parallel.gather import gathered
from dtrain.parallel.mesh import FSDP_AXES, Mesh
from dtrain.plan.target import devices, stand_ins


@pytest.mark.parametrize(
    ("name", "chips", "devices", "shape"),
    [
        ("v5e-16", 16, 16, (4, 4)),
        ("v5litepod-256", 256, 256, (16, 16)),
        ("v4-32", 16, 16, (2, 2, 4)),
        ("v5p-128", 64, 64, (4, 4, 4)),
        ("v5p-12288", 6144, 6144, (16, 16, 24)),
        ("v5p:8x20x28", 4480, 4480, (8, 20, 28)),
        ("tpu7x-18432", 9216, 18432, (16, 24, 24)),
        ("v6e-8", 8, 8, (2, 4)),
        ("tpu7x-128", 64, 128, (4, 4, 4)),
        ("h100-64", 64, 64, ()),
        ("cpu-8", 8, 8, ()),
    ],
)
def test_a_name_is_chips_and_devices(name: str, chips: int, devices: int, shape: tuple[int, ...]) -> None:
    found = target(name)
    assert (found.chips, found.devices, found.shape) == (chips, devices, shape)
    assert len(stand_ins(found)) == devices


def test_slices_multiply() -> None:
    found = target("v5e-256", 4)
    assert found.devices == 1024
    assert {device.slice_index for device in stand_ins(found)} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("v5e-15", "v5e-1, v5e-4, v5e-8, v5e-16"),
        ("v5p-12", "v5p-8, v5p-16"),
        ("v6-8", "v6e-8"),
        ("h100-12", "multiples of 8"),
        ("v5p:4x4x6", "v5p-128"),
        ("v5p:8x4x4", "ascending order: v5p:4x4x8"),
        ("v5e:32x32", "the largest available slice is v5e-256"),
        ("v5p-17920", "the largest available slice is v5p-12288"),
        ("v5p-100000", "v5p-12288; --slices N combines several"),
        ("v5p:16x20x28", "v5p-12288"),
        ("v4-16384", "v4-8192"),
        ("v6e-512", "v6e-256"),
        ("tpu7x-20480", "tpu7x-18432"),
        ("h100-100000", "multiples of 8 up to h100-16384"),
        ("nonsense", "examples of valid names: v5e-16"),
        ("", "examples of valid names: v5e-16"),
    ],
)
def test_an_unknown_slice_is_answered_with_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(RecipeError) as error:
        target(name)
    assert hint in error.value.hint


def test_no_name_or_hint_gives_more_chips_than_the_largest_slice() -> None:
    """Google Cloud's largest: 6144 chips of v5p (a pod has 8960), 4096 of v4, 9216 of TPU7x, 256 of v5e and v6e."""
    largest = {"v4": 4096, "v5e": 256, "v5p": 6144, "v6e": 256, "tpu7x": 9216}
    assert {chip.name: max(chip.slices) for chip in CHIPS if chip.dims} == largest


def test_the_network_between_gpu_hosts_is_that_of_the_machine_that_is_priced() -> None:
    """Gbit/s of a machine of eight GPUs: docs.cloud.google.com/compute/docs/gpus/gpu-network-bandwidth."""
    machines = {"a2-highgpu-8g": 100, "a2-ultragpu-8g": 100, "a3-highgpu-8g": 800}
    machines |= {"a3-ultragpu-8g": 3200, "a4-highgpu-8g": 3200}
    gpus = [chip for chip in CHIPS if chip.platform == "gpu"]
    assert {chip.cloud.machine: 8 * 8 * chip.network_bandwidth / 1e9 for chip in gpus if chip.cloud} == machines


@pytest.mark.parametrize(
    ("name", "rented", "machine"),
    [
        ("h100-16", 16, "a3-highgpu-8g"),
        ("h100-3", 4, "a3-highgpu-4g"),
        ("h200-1", 8, "a3-ultragpu-8g"),
        ("v5p-128", 64, ""),
        ("cpu-8", 8, ""),
    ],
)
def test_gpus_are_rented_by_the_machine(name: str, rented: int, machine: str) -> None:
    assert (target(name).rented, target(name).machine) == (rented, machine)


@pytest.mark.nightly
@pytest.mark.tpu_compiler
def test_libtpu_describes_every_slice_that_can_be_rented() -> None:
    pytest.importorskip("libtpu", reason="libtpu is not installed")
    for chip in CHIPS:
        for count in chip.slices if chip.dims else ():
            if count <= 4096 or count == chip.max_chips:
                found = target(f"{chip.name}-{count * chip.units_per_chip}")
                assert len(devices(found)) == found.devices


@pytest.mark.nightly
@pytest.mark.tpu_compiler
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
@pytest.mark.parametrize("name", ["v5p-128", "v4-256"])
def test_programs_are_compiled_with_the_wraparound_links_of_the_slice(name: str) -> None:
    """Without its wraparound links, the compiler replaces a gather over all dims by an all-reduce, twice the bytes."""
    on = target(name)
    mesh = Mesh(data=1, fsdp=-1)
    built = mesh.build(mesh.jax_sizes(placed := devices(on)), placed)
    matrix = jax.ShapeDtypeStruct((8192, 4096), jnp.bfloat16, sharding=NamedSharding(built, PartitionSpec(FSDP_AXES)))
    cuts = ((0, FSDP_AXES),)
    gather = jax.shard_map(lambda w: gathered(w, cuts, "bfloat16", "bfloat16"), mesh=built,
                           in_specs=PartitionSpec(FSDP_AXES), out_specs=PartitionSpec(), check_vma=False)  # fmt: skip
    text = jax.jit(gather).lower(matrix).compile().as_text() or ""
    assert "3DAllGather" in text
    assert " all-reduce(" not in text


@pytest.mark.parametrize(
    ("name", "closed"),
    [
        ("v5p-128", (True, True, True)),
        ("v5p-32", (False, False, False)),
        ("v5e-256", (True, True)),
        ("v5e-128", (False, True)),
        ("v6e-16", (False, False)),
        ("tpu7x-256", (True, True, True)),
    ],
)
def test_wraparound_links(name: str, closed: tuple[bool, ...]) -> None:
    on = target(name)
    assert on.chip
    assert on.chip.closed(on.shape) == closed
