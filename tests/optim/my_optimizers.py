"""Optimizers as a user writes them."""

import optax


def clipped(learning_rate, b1=0.9):
    return optax.chain(optax.scale_by_adam(b1=b1), optax.clip(0.5), optax.scale_by_learning_rate(learning_rate))


def nothing(learning_rate):
    return 3


def broken(learning_rate):
    raise ValueError("no such thing")


def rateless():
    return optax.sgd(0.1)


def needs_value(learning_rate):
    return optax.lbfgs(learning_rate)
