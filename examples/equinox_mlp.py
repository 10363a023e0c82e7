"""A multilayer perceptron in Equinox, with dropout."""

import equinox as eqx

from dtrain.equinox import Equinox


class Net(eqx.Module):
    mlp: eqx.nn.MLP
    dropout: eqx.nn.Dropout

    def __init__(self, width, key):
        self.mlp = eqx.nn.MLP(64, 10, width, depth=2, key=key)
        self.dropout = eqx.nn.Dropout(0.1)

    def __call__(self, image, key=None):
        return self.mlp(self.dropout(image.ravel(), key=key))


def model(width=128):
    return Equinox(lambda key: Net(width, key))
