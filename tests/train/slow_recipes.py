"""Models and data that are impure, slow or wrong on purpose."""

import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

CALLS = [0.0]


@dataclass(frozen=True)
class Net:
    how: str = ""

    def init(self, key, example):
        return {"w": jax.random.normal(key, (example["image"].size, 10)) * 0.1, "s": jnp.float32(1.0)}

    def outputs(self, params, batch, ctx):
        x = batch["image"].reshape(len(batch["image"]), -1)
        y = x @ params["w"] * params["s"]
        if self.how == "print":
            jax.debug.print("mean {}", y.mean())
        elif self.how == "pure":
            shape = jax.ShapeDtypeStruct(y.shape, y.dtype)
            y = y + jax.pure_callback(np.zeros_like, shape, jax.lax.stop_gradient(y))
        elif self.how == "numpy random":
            y = y + np.random.default_rng().normal()
        elif self.how == "clock":
            y = y * (1 + time.time() % 1)
        elif self.how == "global":
            CALLS[0] += 1
            y = y * CALLS[0]
        elif self.how == "constant":
            y = y + jnp.asarray(np.random.default_rng(0).normal(size=(800, 784)).astype("float32")).sum() * 0
        elif self.how == "log":
            y = y + jnp.log(params["s"])
        elif self.how == "root":
            y = y * jnp.sqrt(params["s"] - 1.0)
        return y


class Rows:
    """64 rows; reading a batch takes time, or compiles a program."""

    classes = 10

    def __init__(self, split, how: str = "") -> None:
        self.how, self.labels = how, np.arange(64) % 10

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self, indices):
        if self.how == "sleep":
            time.sleep(2e-2 * len(indices))
        image = np.broadcast_to(self.labels[indices, None, None, None] / 10, (len(indices), 4, 4, 1)).astype("float32")
        if self.how == "compile":
            CALLS[0] += 1
            with jax.transfer_guard("allow"):
                image = image + np.asarray(jax.jit(lambda x: x * 0)(np.zeros(int(CALLS[0]), "float32"))).sum()
        return {"image": image, "label": self.labels[indices]}
