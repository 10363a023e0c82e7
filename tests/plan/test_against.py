"""A plan against one that was kept: what grew is named, and exits with 1."""

import json
from pathlib import Path
from typing import Any

import pytest

from dtrain.core.errors import DataError, RecipeError
from dtrain.core.slices import target
from dtrain.plan.against import Comparison, compared
from dtrain.plan.plan import quick
from dtrain.plan.report import values
from dtrain.recipe.load import load
from tests.conftest import Dtrain

RECIPES = Path(__file__).parents[2] / "recipes"


def planned(*overrides: str, on: str = "v5e-4") -> dict[str, Any]:
    """A quick plan of a small decoder as JSON gives it."""
    found = target(on)
    return json.loads(json.dumps(values(quick(load(RECIPES / "decoder-tiny.yaml", overrides, found.devices), found))))


@pytest.fixture(scope="module")
def kept() -> dict[str, Any]:
    return planned()


def grown(found: Comparison) -> dict[str, float]:
    return {change.name: change.ratio for change in found.grew}


def test_an_equal_plan_holds_and_a_larger_one_is_named_by_quantity(kept: dict[str, Any]) -> None:
    assert not compared("b.json", kept, planned(), 0.0).changes[0].ratio - 1
    assert not grown(compared("b.json", kept, planned(), 0.0))
    found = compared("b.json", kept, planned("batch=32"), 0.01)
    assert grown(found)["FLOPs of products"] == pytest.approx(2)
    assert {"peak memory", "step time", "time of matrix products"} <= grown(found).keys()
    assert "batch: 16 to 32" in "\n".join(found.lines())
    assert not grown(compared("b.json", kept, planned("batch=32"), 10.0))  # what is allowed to grow elevenfold


def test_a_collective_that_is_new_is_named_with_its_axis(kept: dict[str, Any]) -> None:
    found = compared("b.json", kept, planned("mesh={fsdp: 4}"), 0.01)
    text = "\n".join(found.lines())
    assert "all-gather over fsdp: calls: 0 to" in text and "(new)" in text
    assert "all-reduce over data: bytes" in {change.name for change in found.fell}
    assert "memory of parameters" in {change.name for change in found.fell}
    assert "mesh.fsdp: 1 to 4" in text
    assert json.loads(json.dumps(found.values()))["grew"]


def test_only_plans_of_one_kind_are_compared(kept: dict[str, Any]) -> None:
    with pytest.raises(RecipeError, match="its target is v5e-4, this plan's v5e-8"):
        compared("b.json", kept, planned(on="v5e-8"), 0.01)
    with pytest.raises(RecipeError, match="its tier is compiled, this plan's quick"):
        compared("b.json", kept | {"tier": "compiled"}, kept, 0.01)
    with pytest.raises(DataError, match="are not those of a plan"):
        compared("b.json", kept | {"network": [{}]}, kept, 0.01)


def test_the_lines_of_code_whose_time_grew_are_named_where_both_plans_have_them(kept: dict[str, Any]) -> None:
    one = {"part": "product", "line": "net.py:7", "seconds": 1e-6}
    before, now = kept | {"seconds_by_line": [one]}, kept | {"seconds_by_line": [one | {"seconds": 2e-6}]}
    now["step_seconds"] = kept["step_seconds"] * 1.1
    assert "  matrix products of net.py:7: 0.001 ms to 0.002 ms (+100.0%)" in [
        *compared("b", before, now, 0.01).lines()
    ]
    del before["seconds_by_line"]
    assert not compared("b", before, now, 0.01).places


def test_the_command_exits_with_1_if_something_grew(in_process: Dtrain, tmp_path: Path) -> None:
    place = ["plan", "decoder-tiny", "--on", "v5e-4", "--quick"]
    (tmp_path / "b.json").write_text(in_process(*place, "--json").stdout)
    assert "none of" in in_process(*place, "--against", "b.json").stdout
    assert "step time" in in_process(*place, "--against", "b.json", "batch=32", code=1).stdout
    in_process(*place, "--against", "b.json", "batch=32", "--within", "10")
    shown = json.loads(in_process(*place, "--against", "b.json", "--json").stdout)
    assert shown["against"]["grew"] == [] and shown["step_seconds"] > 0
    plans = tmp_path / "runs" / "mine" / "plans"
    plans.mkdir(parents=True)
    (plans / "v5e-4-quick.json").write_text((tmp_path / "b.json").read_text())
    assert "mine/plans/v5e-4-quick.json" in in_process(*place, "--against", "mine").stdout
    refused = in_process("plan", "decoder-tiny", "--on", "v5e-8", "--quick", "--against", "mine", code=4).stderr
    assert "the run has plans for v5e-4-quick" in refused
    assert "--within 0.5 goes with --against" in in_process(*place, "--within", "0.5", code=2).stderr
    assert "no run 'absent'" in in_process(*place, "--against", "absent", code=2).stderr
    refused = in_process(*place, "--against", "b.json", "model.layers=900", "model.width=4096", code=3)
    assert "DOES NOT FIT" in refused.stdout
    assert "not compared with" in refused.stderr
    (tmp_path / "b.json").write_text("[]")
    assert "is no plan of one target" in in_process(*place, "--against", "b.json", code=4).stderr
