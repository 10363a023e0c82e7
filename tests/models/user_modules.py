"""Flax modules as a user writes them: a mode argument of another name, recurrent cells."""

import flax.linen as nn
import jax
from flax import nnx

from dtrain.data.batch import Batch
from dtrain.flax import NNX, Linen
from dtrain.models.nn.context import Context
from dtrain.models.nn.model import Loss


class OwnName(nn.Module):
    """Batch statistics and dropout behind an argument that dtrain does not know."""

    @nn.compact
    def __call__(self, x, is_train=False):
        x = nn.BatchNorm(use_running_average=not is_train, momentum=0.9)(nn.Dense(16)(x.reshape(len(x), -1)))
        return nn.Dense(10)(nn.Dropout(0.5, deterministic=not is_train)(nn.relu(x)))


class Averages(nn.Module):
    """Flax's own name of the argument."""

    @nn.compact
    def __call__(self, x, use_running_average):
        x = nn.BatchNorm(use_running_average=use_running_average)(nn.Dense(16)(x.reshape(len(x), -1)))
        return nn.Dense(10)(nn.relu(x))


class Rows(nn.Module):
    """An image as a sequence of rows, through a recurrent cell."""

    @nn.compact
    def __call__(self, x):
        x = nn.RNN(nn.GRUCell(16))(x[..., 0])
        return nn.Dense(10)(nn.RNN(nn.OptimizedLSTMCell(12))(x)[:, -1])


class NNXRows(nnx.Module):
    """The same in NNX."""

    def __init__(self, rngs: nnx.Rngs):
        self.rnn = nnx.RNN(nnx.GRUCell(8, 16, rngs=rngs))
        self.head = nnx.Linear(16, 10, rngs=rngs)

    def __call__(self, x):
        return self.head(self.rnn(x[..., 0])[:, -1])


def linen_rnn():
    return Linen(Rows())


def nnx_rnn():
    return NNX(NNXRows)


class Prices:
    """Numbers of another name than `label`, compared with one learned value."""

    exact_inputs: tuple[str, ...] = ("price",)

    def init(self, key: jax.Array, example: Batch) -> dict[str, jax.Array]:
        return {"value": jax.numpy.zeros(())}

    def loss(self, params: dict[str, jax.Array], batch: Batch, ctx: Context) -> Loss:
        away = jax.numpy.abs(batch["price"].astype("float32") - params["value"].astype("float32"))
        return Loss(away.sum(), jax.numpy.float32(len(away)), {})
