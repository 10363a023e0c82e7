"""The sharding of the optimizer's state on a mesh."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

from dtrain.assembly import state
from dtrain.core.errors import RecipeError
from dtrain.optim.optimizer import Adafactor
from dtrain.optim.update import transformation
from dtrain.parallel.mesh import Mesh
from dtrain.parallel.rules import Layout
from tests.engines import DECODER

MESH = Mesh(data=2, fsdp=2, tensor=2)


def layout() -> Layout:
    sizes = MESH.sizes(8)
    return Layout(sizes, MESH.table(), DECODER.params(), MESH.build(sizes, jax.devices()))


def test_factored_moments_are_laid_out_by_the_dims_that_they_keep() -> None:
    optimizer, on = Adafactor(lr=1e-3, factor_from=8, ema=0.9), layout()
    update = transformation(optimizer, on.declared, 10)
    found = state.abstract(state.state_initializer(on.declared, update, "float32", 0), on, optimizer.state_dims)
    moments = found.optimizer[0][0]
    assert moments.rows["blocks"]["query"]["weight"].shape == (4, 32)
    assert moments.rows["blocks"]["query"]["weight"].sharding.spec == P(None, "fsdp")
    assert moments.columns["blocks"]["query"]["weight"].shape == (4, 4, 8)
    assert moments.columns["blocks"]["query"]["weight"].sharding.spec == P(None, "tensor")
    assert found.optimizer[1].averaged["blocks"]["query"]["weight"].sharding.spec == P(None, "fsdp", "tensor")


def test_state_of_another_shape_than_its_parameter_is_refused_where_nothing_lays_it_out() -> None:
    def init(params: object) -> object:
        return optax.TraceState(jax.tree.map(lambda p: jnp.zeros((8, *p.shape)), params))

    update, on = optax.GradientTransformation(init, lambda u, s, _=None: (u, s)), layout()
    with pytest.raises(RecipeError, match=r"optimizer state trace.blocks.key.weight \(8, 4, 32, 2, 8\)"):
        state.abstract(state.state_initializer(on.declared, update, "float32", 0), on)
