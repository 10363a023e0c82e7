"""What sums of gradients in the compute dtype save."""

from pathlib import Path

import pytest

from dtrain.core.slices import target
from dtrain.plan.plan import quick
from dtrain.plan.sums import saving
from tests.plan.test_plan import recipe

DEFAULT = "precision.reduce=float32"


@pytest.mark.slow
def test_sums_in_bfloat16_are_named_with_the_time_that_they_save(tmp_path: Path) -> None:
    on = target("v5e-4")
    plan = quick(recipe(tmp_path, "gpt2-124m", 1024, 32, DEFAULT, "engine=shard_map"), on)
    found = saving(plan)
    assert found
    assert 0.02 < found.part < 0.5
    assert plan.timing
    assert found.seconds == pytest.approx(found.part * plan.timing.seconds)
    assert "precision.reduce: compute saves about" in found.text
    assert found.text.endswith("gradients are then summed over devices in bfloat16")
    assert found.values["set"] == "precision.reduce=compute"


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["precision.reduce=compute", "precision={compute: float32}"])
def test_a_setting_that_changes_nothing_is_not_named(tmp_path: Path, setting: str) -> None:
    assert saving(quick(recipe(tmp_path, "gpt2-124m", 1024, 32, DEFAULT, setting), target("v5e-4"))) is None
