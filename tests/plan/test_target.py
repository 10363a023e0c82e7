"""Names of slices, and what is answered to a wrong one."""

import pytest

from dtrain.errors import RecipeError
from dtrain.hardware import CHIPS
from dtrain.plan.target import devices, stand_ins
from dtrain.slices import target


@pytest.mark.parametrize(
    ("name", "chips", "devices", "shape"),
    [
        ("v5e-16", 16, 16, (4, 4)),
        ("v5litepod-256", 256, 256, (16, 16)),
        ("v4-32", 16, 16, (2, 2, 4)),
        ("v5p-128", 64, 64, (4, 4, 4)),
        ("v5p-12288", 6144, 6144, (16, 16, 24)),
        ("v5p:16x20x28", 8960, 8960, (16, 20, 28)),
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
        ("v5e:32x32", "v5e-256"),
        ("nonsense", "such as v5e-16"),
        ("", "such as v5e-16"),
    ],
)
def test_an_unknown_slice_is_answered_with_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(RecipeError) as error:
        target(name)
    assert hint in error.value.hint


@pytest.mark.tpu_compiler
def test_libtpu_knows_every_slice_that_can_be_had() -> None:
    pytest.importorskip("libtpu", reason="libtpu is not installed")
    for chip in CHIPS:
        for count in chip.slices if chip.dims else ():
            if count <= 4096 or count == chip.most:
                found = target(f"{chip.name}-{count * chip.counted}")
                assert len(devices(found)) == found.devices
