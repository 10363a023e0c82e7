import pytest

from dtrain.core.chips import CHIPS, chip_of
from dtrain.track.meters import Meters

VALUES = {"train/loss": 1.0, "time/step_ms": 10.0}


def test_mfu_is_model_flops_over_the_peak() -> None:
    found = Meters(examples=64, tokens=0, flops=1e12, peak=2e14).rates(VALUES)
    assert found["rate/mfu"] == pytest.approx(0.5)
    assert found["rate/examples_per_s"] == pytest.approx(6400)


def test_mfu_is_not_guessed_where_no_peak_is_known() -> None:
    assert "rate/mfu" not in Meters(examples=64, tokens=0, flops=1e12, peak=None).rates(VALUES)


def test_jax_names_find_their_chip() -> None:
    for name, chip in (
        ("TPU v5 lite", "v5e"),
        ("TPU v5p", "v5p"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
    ):
        found = chip_of(name)
        assert found is not None
        assert found.name == chip
    assert chip_of("cpu") is None
    assert len({kind for chip in CHIPS for kind in chip.kinds}) == sum(len(chip.kinds) for chip in CHIPS)
