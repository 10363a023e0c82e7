"""The step compiled for absent TPUs, by libtpu alone."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from dtrain.recipe.load import load
from dtrain.train.assembly import assemble

pytestmark = [
    pytest.mark.tpu_compiler,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"),
]
RECIPE = """
model: {model}
data: {{kind: tokens, files: [none.bin], length: {length}}}
optimizer: {{kind: adamw, lr: 1e-4, clip: 1.0, decay: 0.1}}
precision: {{compute: bfloat16}}
batch: {batch}
steps: 100
"""
SMALL = "{kind: decoder, vocab: 1024, context: 1024, layers: 4, width: 512, heads: 8, kv_heads: 4, hidden: 1024}"
MIXED = SMALL[:-1] + ", experts: {count: 8, active: 2, hidden: 512}}"
AXES = {
    "data, fsdp, tensor": "{data: -1, fsdp: 2, tensor: 2}",
    "fsdp over all": "{data: 1, fsdp: -1}",
    "sequence": "{data: -1, sequence: 4}",
    "expert": "{data: -1, fsdp: 2, expert: 4}",
    "pipeline": "{data: -1, pipeline: 4}",
}


@pytest.fixture(autouse=True)
def allow_several_processes_to_load_libtpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")


def compiled(
    folder: Path, topology: str, *overrides: str, model: str = SMALL, length: int = 1024, batch: int = 256
) -> Any:
    """The compiled training step for that topology."""
    from jax.experimental import topologies

    path = folder / "recipe.yaml"
    path.write_text(RECIPE.format(model=model, length=length, batch=batch))
    recipe = load(path, overrides)
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    example = recipe.data.example()
    assert example is not None
    return assemble(recipe, devices, example, 100).train().lower().compile()


@pytest.mark.parametrize(
    ("axis", "topology", "engine"),
    [
        ("data, fsdp, tensor", "v5e:4x4", "shard_map"),
        ("data, fsdp, tensor", "v5e:4x4", "jit"),
        ("fsdp over all", "v5p:4x4x4", "shard_map"),
        ("sequence", "v5e:4x4", "shard_map"),
        ("sequence", "v5e:4x4", "jit"),
        ("expert", "v5e:4x4", "shard_map"),
        ("expert", "v5p:4x4x4", "jit"),
        ("pipeline", "v5e:4x4", "jit"),
    ],
)
def test_every_axis_compiles(tmp_path: Path, axis: str, topology: str, engine: str) -> None:
    model = MIXED if axis == "expert" else SMALL
    text = compiled(tmp_path, topology, f"mesh={AXES[axis]}", f"engine={engine}", "accumulate=4", model=model).as_text()
    assert ("tpu_custom_call" in text) == (axis != "sequence")  # splash; the ring is plain JAX


def test_llama3_8b_fits_sixteen_small_chips(tmp_path: Path) -> None:
    """MaxText needs 10.0 GB for the same case, with gradients summed in bfloat16."""
    model = "{kind: decoder, preset: llama3-8b}"
    mesh = ["mesh={data: 1, fsdp: 16}", "engine=shard_map", "precision.reduce=compute"]
    step = compiled(tmp_path, "v5e:4x4", *mesh, model=model, length=2048, batch=16)
    assert step.memory_analysis().peak_memory_in_bytes < 10.0e9
    text = step.as_text()
    assert len(re.findall(r" reduce-scatter\(", text)) >= 9
    summed = re.findall(r"= \(?\w+\[([\d,]*)\]\S* all-reduce\(", text)
    assert all(shape.count(",") == 0 for shape in summed), (
        "the gradient of a matrix is all-reduced instead of reduce-scattered"
    )
