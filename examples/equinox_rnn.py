"""A recurrent network in Equinox that reads an image row by row with `lax.scan`."""

import equinox as eqx
import jax
import jax.numpy as jnp

from dtrain import axes_of, vary
from dtrain.equinox import Equinox


class Net(eqx.Module):
    cell: eqx.nn.GRUCell
    out: eqx.nn.Linear

    def __init__(self, width, key):
        first, second = jax.random.split(key)
        self.cell, self.out = eqx.nn.GRUCell(8, width, key=first), eqx.nn.Linear(width, 10, key=second)

    def __call__(self, image):
        rows = image[:, :, 0]
        start = vary(jnp.zeros(self.cell.hidden_size), axes_of(rows))
        state, _ = jax.lax.scan(lambda state, row: (self.cell(row, state), None), start, rows)
        return self.out(state)


def model(width=64):
    return Equinox(lambda key: Net(width, key))
