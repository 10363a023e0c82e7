"""Optimizers as a user writes them."""

import jax
import jax.numpy as jnp
import optax


def clipped(learning_rate, b1=0.9):
    return optax.chain(optax.scale_by_adam(b1=b1), optax.clip(0.5), optax.scale_by_learning_rate(learning_rate))


def shampoo(learning_rate):
    """A preconditioner for rows and one for columns, in a container of its own for each matrix (Gupta et al. 2018)."""

    def begin(p):
        return {"left": jnp.eye(p.shape[0]), "right": jnp.eye(p.shape[1])} if p.ndim == 2 else {"plain": jnp.ones(())}

    def init(params):
        return {"count": jnp.zeros((), jnp.int32), "stats": jax.tree.map(begin, params)}

    def update(gradients, state, params=None):
        def each(g, kept):
            if g.ndim != 2:
                return kept
            return {"left": kept["left"] + g @ g.T, "right": kept["right"] + g.T @ g}

        def move(g, kept):
            return kept["left"] @ g @ kept["right"] / jnp.linalg.norm(kept["left"]) if g.ndim == 2 else g

        stats = jax.tree.map(each, gradients, state["stats"])
        updates = jax.tree.map(move, gradients, stats)
        return jax.tree.map(lambda u: -learning_rate(0) * u, updates), {"count": state["count"] + 1, "stats": stats}

    return optax.GradientTransformation(init, update)


def by_label(learning_rate):
    """Another optimizer for some of the parameters, chosen by a function of their tree."""

    def labels(params):
        return {name: "bias" if name == "b" else "matrix" for name in params}

    return optax.partition({"bias": optax.sgd(learning_rate), "matrix": optax.adam(learning_rate)}, labels)


def nothing(learning_rate):
    return 3


def broken(learning_rate):
    raise ValueError("no such thing")


def rateless():
    return optax.sgd(0.1)


def needs_value(learning_rate):
    return optax.lbfgs(learning_rate)
