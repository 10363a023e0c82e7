"""The state of every optimizer has the same paths in a checkpoint as in the program that restores it."""

from pathlib import Path
from typing import get_args

import jax
import pytest

from dtrain.checkpoint.policy import Checkpoint
from dtrain.checkpoint.store import Store
from dtrain.models.mlp import MLP
from dtrain.optim.optimizer import Optimizer
from dtrain.optim.update import transformation
from dtrain.train.state import state_initializer


@pytest.mark.slow
@pytest.mark.parametrize("kind", get_args(Optimizer), ids=lambda kind: kind.__name__)
def test_the_state_of_every_optimizer_is_read_back(tmp_path: Path, kind: type) -> None:
    declared = MLP(sizes=(8, 6, 4)).params()
    make = state_initializer(declared, transformation(kind(lr=0.1, ema=0.9), declared, 5), "float32", 0)
    state = jax.jit(make)()
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    with Store(tmp_path / "c", Checkpoint()) as store:
        store.save(1, state, {}, {})
        store.wait()
        found = store.restore(1, shapes)
    assert jax.tree.structure(found) == jax.tree.structure(state)
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), found, state)))
