from pathlib import Path

import pytest

from tests.conftest import Dtrain

MODULE = """
from dataclasses import dataclass
from dtrain.model import Flops
from dtrain.models.layers import classify, dense, linear

@dataclass(frozen=True)
class Net:
    classes: int
    noise: bool = False

    def params(self):
        return {"out": dense(64, self.classes, "embed classes")}

    def loss(self, params, batch, ctx):
        x = batch["image"].reshape(len(batch["image"]), -1)
        if self.noise:
            import numpy as np
            x = x + np.random.random()
        return classify(linear(ctx.gather(params["out"]), x), batch, ctx)

    def flops(self, example, examples):
        return Flops(6.0 * 64 * self.classes * examples, "6N")

    def mismatch(self, example):
        return ""

class Half:
    def __init__(self, **_): pass
    def params(self): return {}
"""
RECIPE = """
model: {kind: custom, target: "my_net:Net", args: {classes: 10}}
data: digits
optimizer: {kind: sgd, lr: 0.05}
batch: 64
steps: 40
"""


@pytest.fixture(autouse=True)
def files(tmp_path: Path) -> None:
    (tmp_path / "my_net.py").write_text(MODULE)
    (tmp_path / "mine.yaml").write_text(RECIPE)


def test_a_model_of_ones_own_trains_under_any_engine(dtrain: Dtrain) -> None:
    done = dtrain("run", "mine.yaml", "engine=shard_map", "mesh.fsdp=4", "--devices", "4")
    assert "model custom: 650 parameters" in done.stderr


def test_checking_does_not_run_its_code(dtrain: Dtrain, tmp_path: Path) -> None:
    (tmp_path / "my_net.py").write_text("open('ran', 'w')")
    dtrain("check", "mine.yaml")
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
def test_a_trace_that_is_not_pure_is_reported(dtrain: Dtrain) -> None:
    done = dtrain("run", "mine.yaml", "model.args.noise=true")
    assert "warning: tracing the step twice gave two programs" in done.stderr


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.target=nowhere:Net", "nowhere:Net could not be built: No module named 'nowhere'"),
        ("model.target=my_net:Nett", "has no attribute 'Nett'"),
        ("model.args={klasses: 10}", "unexpected keyword argument 'klasses'"),
        ("model.target=my_net:Half", "lacks loss, flops, mismatch"),
        ("model.target=my_net", "is not of the form package.module:Class"),
    ],
)
def test_what_cannot_be_had_is_said(dtrain: Dtrain, override: str, message: str) -> None:
    assert message in dtrain("run", "mine.yaml", override, code=2).stderr
