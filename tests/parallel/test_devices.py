"""Fake devices."""

import jax

from dtrain.parallel.jit import SCHEDULER, Jit
from dtrain.parallel.pmap import Pmap
from dtrain.parallel.shard_map import ShardMap

MEMORY, CONCURRENCY = (f"CPU_SCHEDULER_TYPE_{name}_OPTIMIZED" for name in ("MEMORY", "CONCURRENCY"))


def test_programs_of_jit_for_fake_devices_keep_the_order_of_collectives() -> None:
    """With concurrency, many runs over `sequence` under jit end in a deadlock; without it, some runs under shard_map
    give wrong numbers."""
    assert jax.local_device_count() == 8
    assert Jit().options("cpu") == {SCHEDULER: MEMORY}
    assert Jit(xla={SCHEDULER: CONCURRENCY}).options("cpu") == {SCHEDULER: CONCURRENCY}
    assert not Jit().options("tpu")
    for engine in (ShardMap(), Pmap()):
        assert not engine.options("cpu")


def test_the_option_has_an_effect_on_the_compiled_program() -> None:
    def step(x: jax.Array) -> jax.Array:
        chains = [x + float(i) for i in range(8)]  # independent of each other: one by one, or all at once
        for _ in range(4):
            chains = [jax.numpy.tanh(chain @ chain) for chain in chains]
        return sum(chain.sum() for chain in chains)  # type: ignore[return-value]

    traced = jax.jit(step).trace(jax.ShapeDtypeStruct((64, 64), "float32"))
    texts = {Jit(xla={SCHEDULER: value}).compile(traced, "cpu").as_text() for value in (MEMORY, CONCURRENCY)}
    assert len(texts) == 2
