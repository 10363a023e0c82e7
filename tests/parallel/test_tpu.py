"""The step compiled for absent TPUs, by libtpu alone; tests/plan compiles published shapes."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from dtrain.assembly.assemble import assemble
from dtrain.assembly.state import placement
from dtrain.recipe.load import load

pytestmark = [
    pytest.mark.tpu_compiler,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"),
]
EFFORT = "jax_exec_time_optimization_effort"
RECIPE = """
model: {model}
data: {{kind: tokens, files: [none.bin], length: {length}, dtype: uint32}}
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
    "data": "{data: -1}",
}


@pytest.fixture(autouse=True)
def allow_several_processes_to_load_libtpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")


@pytest.fixture(autouse=True)
def compile_with_little_effort() -> Iterator[None]:
    """These tests ask whether a step compiles and with which kernels, not how fast it is: a third of the time."""
    before = getattr(jax.config, EFFORT, None)
    if before is None:  # not in every JAX
        yield
        return
    jax.config.update(EFFORT, -1.0)
    yield
    jax.config.update(EFFORT, before)


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
    return (made := assemble(recipe, devices, example, 100)).compile(made.train())


@pytest.mark.parametrize(
    ("axis", "topology", "engine"),
    [
        ("data, fsdp, tensor", "v5e:4x4", "shard_map"),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in (
                ("data, fsdp, tensor", "v5e:4x4", "jit"),
                ("fsdp over all", "v5p:4x4x4", "shard_map"),
                ("sequence", "v5e:4x4", "shard_map"),
                ("sequence", "v5e:4x4", "jit"),
                ("expert", "v5e:4x4", "shard_map"),
                ("expert", "v5p:4x4x4", "jit"),
                ("pipeline", "v5e:4x4", "jit"),
                ("data", "v5e:4x4", "pmap"),
            )
        ),
    ],
)
def test_every_axis_compiles(tmp_path: Path, axis: str, topology: str, engine: str) -> None:
    model = MIXED if axis == "expert" else SMALL
    text = compiled(tmp_path, topology, f"mesh={AXES[axis]}", f"engine={engine}", "accumulate=4", model=model).as_text()
    assert ("tpu_custom_call" in text) == (engine != "pmap")  # splash; pmap has no kernels for attention


@pytest.mark.nightly
def test_reduce_scatters_run_on_the_sparse_cores(tmp_path: Path) -> None:
    """The compiler of every chip that has them takes the options; elsewhere no collective is there."""
    for topology, overlap in (
        ("v5p:2x2x2", "kernels"),
        ("v5p:2x2x2", "auto"),
        ("v6e:2x4", "auto"),
        ("tpu7x:2x2x1", "auto"),
        ("v5e:2x4", "sparsecore"),  # has none: "kernels"
    ):
        engine = f"engine={{kind: shard_map, overlap: {overlap}}}"
        text = compiled(tmp_path, topology, "mesh={fsdp: 8}", engine, model=SMALL).as_text()
        assert ('async_execution_thread="sparsecore"' in text) == (overlap == "auto"), topology


@pytest.mark.nightly
def test_a_users_init_of_2_gb_never_holds_more_than_a_devices_share_and_one_leaf() -> None:
    from jax.experimental import topologies

    own = ["model.target=tests.models.user_models:Large", "model.args={}", "mesh={fsdp: 8}", "batch=64"]
    recipe = load(Path(__file__).parents[2] / "examples" / "plain_jax.yaml", [*own, "optimizer={kind: sgd, lr: 0.1}"])
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices
    made = assemble(recipe, devices, recipe.data.open("train").example, 10)
    sizes = [4 * leaf.size for leaf in jax.tree.leaves(made.shapes.params)]
    create = jax.jit(made.make, out_shardings=placement(made.shapes))
    used = create.lower({}).compile().memory_analysis()
    assert sum(sizes) > 2**31
    state = 2 * sum(sizes) / 8  # parameters and momentum
    assert used.output_size_in_bytes == pytest.approx(state, rel=0.01)
    assert used.temp_size_in_bytes <= max(sizes)
