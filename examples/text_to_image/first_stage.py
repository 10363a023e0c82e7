"""VQ-GAN (Esser et al. 2021): a picture of 32 x 32 pixels as 8 x 8 codes, and back.

Both players are one loss: `stop` keeps each from learning for the other. The recipe's group `critic.*` has settings of
its own.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from nets import added, conv, convolved, larger, residual

from dtrain import Loss, Metric

stop = jax.lax.stop_gradient


def unit(x: Any) -> Any:
    return x * jax.lax.rsqrt((x * x).sum(-1, keepdims=True) + 1e-12)


@dataclass(frozen=True)
class VQGAN:
    width: int = 48
    codes: int = 128
    code_size: int = 8
    softness: float = 0.2
    """How far a code is drawn towards vectors that are nearer to others."""
    critic_from: int = 500
    """The step from which the decoder learns from the critic."""
    critic_weight: float = 0.02
    metrics = (Metric("l1", higher_is_better=False), Metric("critic", higher_is_better=False))

    def init(self, key: Any, example: Any) -> Any:
        del example
        k, w = iter(jax.random.split(key, 16)), self.width
        encoder = [conv(next(k), 3, 3, w // 2), conv(next(k), 4, w // 2, w), residual(next(k), w)]
        encoder += [conv(next(k), 4, w, w), residual(next(k), w), conv(next(k), 1, w, self.code_size)]
        decoder = [conv(next(k), 1, self.code_size, w), residual(next(k), w), conv(next(k), 3, w, w)]
        decoder += [residual(next(k), w), conv(next(k), 3, w, w // 2), conv(next(k), 3, w // 2, 3)]
        critic = [conv(next(k), 4, 3, w), conv(next(k), 4, w, w), conv(next(k), 4, w, 1)]
        book = unit(jax.random.normal(next(k), (self.codes, self.code_size)))
        return {"vq": {"encoder": encoder, "book": book, "decoder": decoder}, "critic": critic}

    def encoded(self, vq: Any, image: Any) -> tuple[Any, Any]:
        """The vectors (B, 8, 8, code_size) of pictures, and the nearest codes (B, 8, 8)."""
        first, half, res, quarter, again, last = vq["encoder"]
        x = added(res, convolved(half, jax.nn.silu(convolved(first, 2 * image - 1)), 2))
        z = unit(convolved(last, jax.nn.silu(added(again, convolved(quarter, jax.nn.silu(x), 2)))))
        return z, (z @ unit(vq["book"]).T).argmax(-1)

    def decoded(self, vq: Any, code: Any) -> Any:
        """Pictures (B, 32, 32, 3) from 0 to 1 of vectors (B, 8, 8, code_size)."""
        first, res, half, again, whole, last = vq["decoder"]
        x = added(res, convolved(first, code))
        x = added(again, convolved(half, larger(jax.nn.silu(x))))
        x = convolved(last, jax.nn.silu(convolved(whole, larger(jax.nn.silu(x)))))
        return jax.nn.sigmoid(x)

    def realness(self, critic: Any, image: Any) -> Any:
        """How real each region looks to the critic (B, 4, 4)."""
        x = 2 * image - 1
        for layer in critic[:-1]:
            x = jax.nn.leaky_relu(convolved(layer, x, 2), 0.2)
        return convolved(critic[-1], x, 2)[..., 0]

    def loss(self, params: Any, batch: Any, ctx: Any) -> Loss:
        vq, critic, image = params["vq"], params["critic"], batch["image"]
        z, code = self.encoded(vq, image)
        near = unit(vq["book"])[code]
        drawn = self.decoded(vq, z + stop(near - z))  # gradients go past the choice of the code
        l1 = abs(drawn - image).mean((1, 2, 3))
        match = ((stop(z) - near) ** 2 + 0.25 * (z - stop(near)) ** 2).sum(-1).mean((1, 2))
        # every code is drawn towards the vectors near it, so that none is left unused
        alike = stop(z) @ unit(vq["book"]).T
        match += 0.25 * (jax.nn.softmax(alike / self.softness) * (2 - 2 * alike)).sum(-1).mean((1, 2))
        fooled = -self.realness(jax.tree.map(stop, critic), drawn).mean((1, 2))
        weight = self.critic_weight * (ctx.step >= self.critic_from)
        real, fake = self.realness(critic, image), self.realness(critic, stop(drawn))
        critic_loss = (jax.nn.relu(1 - real) + jax.nn.relu(1 + fake)).mean((1, 2))
        counts = batch.get("weight", jnp.ones(len(image)))
        total = l1 + 4 * ((drawn - image) ** 2).mean((1, 2, 3)) + match + weight * fooled + critic_loss
        sums = {"l1": (l1 * counts).sum(), "critic": (critic_loss * counts).sum()}
        return Loss((total * counts).sum(), counts.sum(), sums)

    def predict(self, params: Any, batch: Any, ctx: Any) -> dict[str, Any]:
        del ctx
        return {"code": self.encoded(params["vq"], batch["image"])[1]}

    def sample(self, params: Any, batch: Any, ctx: Any) -> dict[str, Any]:
        """Each picture beside what its codes keep of it."""
        del ctx
        vq, image = params["vq"], batch["image"]
        drawn = self.decoded(vq, unit(vq["book"])[self.encoded(vq, image)[1]])
        return {"picture and codes": pixels(jnp.concatenate([image, drawn], 2))}


def pixels(image: Any) -> Any:
    return jnp.round(255 * image).astype(jnp.uint8)
