"""The checksum of a state: independent of its sharding, different for every changed bit."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dtrain.assembly.checksum import state_checksum
from dtrain.assembly.state import State
from dtrain.core.errors import NotFinite

MESH = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))


WHOLE = PartitionSpec()


def state(spec: PartitionSpec = WHOLE, **changes: np.ndarray) -> State:
    numbers = np.random.default_rng(0)
    arrays = {
        "w": numbers.normal(size=(16, 8)).astype(np.float32),
        "b": numbers.normal(size=(16, 4)).astype(jnp.bfloat16),
        "n": np.arange(16, dtype=np.int32),
        "k": np.arange(16) % 3 == 0,
    } | changes
    place = lambda x, s: jax.device_put(x, NamedSharding(MESH, s))  # noqa: E731
    step = place(np.int32(5), PartitionSpec())
    return State(step, {name: place(x, spec) for name, x in arrays.items()}, ())


def test_it_is_the_same_however_the_state_is_spread() -> None:
    sums = {
        state_checksum(1, state(spec)).checksum()
        for spec in (PartitionSpec(), PartitionSpec("x"), PartitionSpec(("y", "x")))
    }
    assert len(sums) == 1


def test_every_bit_counts() -> None:
    whole, chance = np.asarray(state().params["w"]), random.Random(0)
    plain = state_checksum(1, state()).checksum()
    for _ in range(50):
        bits = whole.copy().view(np.uint32)
        bits[chance.randrange(16), chance.randrange(8)] ^= np.uint32(1 << chance.randrange(32))
        changed = bits.view(np.float32)
        if np.isfinite(changed).all():
            found = state_checksum(1, state(w=changed)).checksum()
            assert found[0] != plain[0]
            assert found[1] != plain[1]
    assert state_checksum(1, state(w=whole[::-1].copy())).checksum() != plain


def test_what_is_not_finite_is_named() -> None:
    poisoned = np.asarray(state().params["w"]).copy()
    poisoned[3, 3] = np.inf
    with pytest.raises(NotFinite, match=r"state of step 7 is not finite: params.w; it is not saved"):
        state_checksum(7, state(w=poisoned)).checksum()


def test_arrays_of_one_shape_share_a_program(caplog: pytest.LogCaptureFixture) -> None:
    """One program for all arrays took 36 s to compile for a model of 200 small arrays, and never ended for 400."""
    many = {f"a{number:03}": np.full((7, 11), number, np.float32) for number in range(300)}
    with jax.log_compiles(), caplog.at_level("WARNING"):
        first = state_checksum(1, state(**many)).checksum()
    compiled = [line for line in caplog.messages if line.startswith("Finished XLA compilation")]
    assert len(compiled) <= 8
    assert state_checksum(1, state(**{**many, "a150": many["a151"]})).checksum() != first
    assert state_checksum(1, state(**many)).checksum() == first
