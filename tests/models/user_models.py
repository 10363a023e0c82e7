"""Models as users write them, for tests: named in recipes by `target`."""

from typing import Any

import jax
import jax.numpy as jnp

from dtrain import Loss, Param, layers


def zeros(_: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jnp.zeros(shape)


def pixels(batch: Any) -> jax.Array:
    return batch["image"].reshape(len(batch["image"]), -1)


class Contrastive:
    """Each image against all others of the step: noisy copies of one image are alike (InfoNCE)."""

    def init(self, key: jax.Array, example: Any) -> Any:
        return {"project": jax.random.normal(key, (64, 32)) / 8}

    def loss(self, params: Any, batch: Any, ctx: Any) -> Loss:
        x = pixels(batch)
        noise = jax.vmap(lambda key: jax.random.normal(key, (64,)))(ctx.keys(batch)) if ctx.train else 0.1
        one, other = jnp.tanh(x @ params["project"]), jnp.tanh((x + 0.1 * noise) @ params["project"])
        everyone = ctx.gather_examples(other)
        own = (one * other).sum(1)
        weight = batch["weight"] if "weight" in batch else jnp.ones(len(x))
        nll = jax.nn.logsumexp(one @ everyone.T, axis=1) - own
        scale = ctx.sum_over_examples(jnp.abs(one).sum()) / ctx.sum_over_examples(jnp.asarray(one.size, jnp.float32))
        return Loss((nll * weight).sum() * (1 + scale), weight.sum(), {})


class Running:
    """A linear classifier of images minus their running mean, which is no trained parameter."""

    def params(self) -> Any:
        mean = Param((64,), "_", zeros, trained=False, exact=True)
        return {"mean": mean, "out": layers.dense(64, 10, "embed classes")}

    def loss(self, params: Any, batch: Any, ctx: Any) -> Loss:
        x, mean = pixels(batch), ctx.gather(params["mean"])
        loss = layers.classify(layers.linear(ctx.gather(params["out"]), x - mean[None]), batch, ctx)
        weight = batch["weight"] if "weight" in batch else jnp.ones(len(x))
        return loss._replace(statistics={"mean": ((0.9 * mean[None] + 0.1 * x) * weight[:, None]).sum(0)})


class Unknown(Running):
    def loss(self, params: Any, batch: Any, ctx: Any) -> Loss:
        return Running.loss(self, params, batch, ctx)._replace(statistics={"out.bias": jnp.zeros(10)})


class Mishapen(Running):
    def loss(self, params: Any, batch: Any, ctx: Any) -> Loss:
        return Running.loss(self, params, batch, ctx)._replace(statistics={"mean": jnp.zeros(3)})


class Patterned(Contrastive):
    statistics = ("projet",)


class Denoiser:
    """Restores images from noise that is drawn in every kind of step, and weighs them by the number of the step."""

    def init(self, key: jax.Array, example: Any) -> Any:
        return {"map": jax.random.normal(key, (64, 64)) / 8}

    def restored(self, params: Any, batch: Any, keys: Any) -> jax.Array:
        noise = jax.vmap(lambda key: jax.random.normal(key, (64,)))(keys)
        return (pixels(batch) + noise) @ params["map"]

    def loss(self, params: Any, batch: Any, ctx: Any) -> Loss:
        x = pixels(batch)
        error = ((self.restored(params, batch, self.keys(batch, ctx)) - x) ** 2).mean(1) * (1 + 0.1 * ctx.step)
        weight = batch["weight"] if "weight" in batch else jnp.ones(len(x))
        return Loss((error * weight).sum(), weight.sum(), {})

    def keys(self, batch: Any, ctx: Any) -> Any:
        return ctx.keys(batch, "noise")

    def predict(self, params: Any, batch: Any, ctx: Any) -> Any:
        return {"restored": self.restored(params, batch, ctx.keys(batch, "noise"))}


class ByPlace(Denoiser):
    """The same with keys by place, which differ between meshes."""

    def keys(self, batch: Any, ctx: Any) -> Any:
        return jax.random.split(jax.random.key(0), len(batch["image"]))


class TrainsUnlike(Denoiser):
    """It compares examples in training alone: by their place, by a mean of what a device has, or by that of all."""

    how = ""

    def keys(self, batch: Any, ctx: Any) -> Any:
        return ctx.keys(batch, "noise")

    def loss(self, params: Any, batch: Any, ctx: Any) -> Loss:
        own = super().loss(params, batch, ctx)
        if not ctx.train:
            return own
        pixels = batch["image"].reshape(len(batch["image"]), -1).mean(1)
        mean = pixels.mean()
        if self.how == "all":
            count = ctx.sum_over_examples(jnp.float32(len(pixels)))
            mean = ctx.sum_over_examples(pixels.sum()) / count
        place = jnp.arange(len(pixels), dtype=jnp.float32)
        each = place * pixels if self.how == "place" else 1e3 * jnp.square(pixels - mean)
        weight = batch["weight"] if "weight" in batch else jnp.ones_like(pixels)
        return own._replace(sum=own.sum + (each * weight).sum())


class TrainsByPlace(TrainsUnlike):
    how = "place"


class TrainsByMean(TrainsUnlike):
    how = "mean"


class TrainsByMeanOfAll(TrainsUnlike):
    how = "all"


class Integers:
    def init(self, key: jax.Array, example: Any) -> Any:
        return {"count": jnp.zeros(3, jnp.int32)}

    def loss(self, params: Any, batch: Any, ctx: Any) -> Loss: ...  # type: ignore[empty-body]


class Large:
    """Half a billion values, 2 GB, in sixteen matrices and a head."""

    def init(self, key, example):
        keys = jax.random.split(key, 17)
        layers = [jax.random.normal(keys[i], (4096, 8192)) * 0.01 for i in range(16)]
        return {"layers": layers, "out": jnp.zeros((4096, 10))}

    def outputs(self, params, batch, ctx):
        return batch["image"].reshape(-1, 64) @ params["out"][:64]


class Twice:
    """A model that draws the same random numbers for two layers."""

    names = ("", "")

    def init(self, key, example):
        return jax.random.normal(key, (64, 10)) * 0.1

    def outputs(self, params, batch, ctx):
        x = batch["image"].reshape(-1, 64)
        for name in self.names if ctx.train else ():
            x = x * jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, (64,)))(ctx.keys(batch, name))
        return x @ params


class Named(Twice):
    """Two names, and a scan that asks for keys in its body."""

    names = ("first", "second")

    def outputs(self, params, batch, ctx):
        def body(x, _):
            keys = ctx.keys(batch, "in the loop") if ctx.train else None
            return (x if keys is None else x + 0.01 * jax.vmap(jax.random.normal)(keys)[:, None]), None

        logits = Twice.outputs(self, params, batch, ctx)
        return jax.lax.scan(body, logits, None, length=2)[0]


class Quantised:
    """Convolutions and a codebook (van den Oord et al. 2017) whose values are few beside the activations."""

    def init(self, key, example):
        shapes = {"first": (3, 3, example["image"].shape[-1], 16), "down": (3, 3, 16, 32), "codes": (64, 32)}
        shapes |= {"up": (3, 3, 32, 16), "last": (3, 3, 16, 10)}
        return {name: 0.1 * jax.random.normal(key, shape) for name, shape in shapes.items()}

    def outputs(self, params, batch, ctx):
        def conv(x, name, stride=1):
            how = {"padding": "SAME", "dimension_numbers": ("NHWC", "HWIO", "NHWC")}
            return jax.lax.conv_general_dilated(x, params[name], (stride, stride), **how)

        x = conv(jax.nn.relu(conv(batch["image"], "first")), "down", 2)
        codes, flat = params["codes"], x.reshape(-1, 32)
        distance = (flat**2).sum(1, keepdims=True) - 2 * flat @ codes.T + (codes**2).sum(1)[None]
        nearest = codes[distance.argmin(1)].reshape(x.shape)
        x = x + jax.lax.stop_gradient(nearest - x)
        x = jax.image.resize(x, (len(x), *batch["image"].shape[1:3], 32), "nearest")
        return conv(jax.nn.relu(conv(x, "up")), "last").mean((1, 2))
