"""Fake devices: collectives meet those that they belong to, whatever the order in which devices come to them."""

import re
from pathlib import Path

import jax
import pytest

from dtrain.assembly.assemble import assemble
from dtrain.parallel.engine import MEMORY, SCHEDULER
from dtrain.parallel.jit import Jit
from dtrain.parallel.pmap import Pmap
from dtrain.parallel.shard_map import ShardMap
from dtrain.recipe.load import load
from tests.conftest import Dtrain

CONCURRENCY = "CPU_SCHEDULER_TYPE_CONCURRENCY_OPTIMIZED"
MESH = "mesh={data: 2, fsdp: 2, tensor: 2}"
SMALL = ["batch=8", "data.length=64", "model.width=32", "model.heads=4", "steps=12", "evaluate.every=0"]


def test_programs_for_fake_devices_keep_the_order_of_collectives() -> None:
    assert jax.local_device_count() == 8
    for engine in (Jit, ShardMap, Pmap):
        assert engine().options("cpu") == {SCHEDULER: MEMORY}
        assert engine(xla={SCHEDULER: CONCURRENCY}).options("cpu") == {SCHEDULER: CONCURRENCY}
        assert not engine().options("tpu")


def test_the_option_has_an_effect_on_the_compiled_program() -> None:
    def step(x: jax.Array) -> jax.Array:
        chains = [x + float(i) for i in range(8)]  # independent of each other: one by one, or all at once
        for _ in range(4):
            chains = [jax.numpy.tanh(chain @ chain) for chain in chains]
        return sum(chain.sum() for chain in chains)  # type: ignore[return-value]

    traced = jax.jit(step).trace(jax.ShapeDtypeStruct((64, 64), "float32"))
    texts = {Jit(xla={SCHEDULER: value}).compile(traced, "cpu").as_text() for value in (MEMORY, CONCURRENCY)}
    assert len(texts) == 2


def test_every_collective_of_a_step_has_a_channel_of_its_own() -> None:
    """JAX gives those of `shard_map` one channel: devices that come to two of them in different orders mixed values."""
    recipe = load("decoder-tiny", [*SMALL, "optimizer.schedule=constant", MESH, "engine=shard_map"])
    example = recipe.data.open("train").example
    assembly = assemble(recipe, jax.devices(), example, 12)
    text = assembly.engine.compile(assembly.train(), "cpu").as_text()
    assert text
    channels = re.findall(r"channel_id=(\d+)", text)
    assert len(channels) > 20
    assert len(set(channels)) == len(channels)


@pytest.mark.slow
def test_losses_on_a_mesh_of_three_axes_are_those_of_one_device(dtrain: Dtrain, tmp_path: Path) -> None:
    """With one channel for all, nine of ten such runs crashed or waited for ever, and one gave other losses."""
    common = ["decoder-tiny", *SMALL, "optimizer.schedule=constant", "track.every=4"]
    dtrain("run", *common, "name=one")
    for number in range(2):
        dtrain("run", *common, MESH, "engine=shard_map", f"name=mesh-{number}", "--devices", "8")
    one, *others = (
        [float(x) for x in re.findall(r'"train/loss": ([\d.]+)', (tmp_path / f"runs/{name}/metrics.jsonl").read_text())]
        for name in ("one", "mesh-0", "mesh-1")
    )
    assert len(one) == 3
    assert all(other == pytest.approx(one, rel=1e-5) for other in others)
