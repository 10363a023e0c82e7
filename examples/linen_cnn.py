"""A convolutional network in Flax Linen, with batch normalisation and dropout."""

import flax.linen as nn

from dtrain.flax import Linen


class Net(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x, train):
        for width in (self.width, 2 * self.width):
            x = nn.Conv(width, (3, 3), use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
            x = nn.max_pool(x, (2, 2), (2, 2))
        x = nn.Dropout(0.2, deterministic=not train)(x.reshape(len(x), -1))
        return nn.Dense(10)(x)


def model(width=16):
    return Linen(Net(width))
