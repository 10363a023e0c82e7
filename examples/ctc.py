"""Reading sequences without alignment (CTC, Graves et al. 2006): strings of digits from frames of noisy tones.

The sum over alignments is a scan. Its start is marked as different on each device (`vary`), as `shard_map` asks; the
loss of optax, whose scan has no such mark, works under the engine jit alone.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dtrain import Loss, Metric, axes_of, layers, vary

FRAMES, LONGEST, LOW = 40, 6, -1e9


class Tones:
    """Strings of 3 to 6 digits; each digit is a tone of 3 to 6 frames among 16 bands."""

    def __init__(self, split: str, rows: int = 4096):
        self.first, self.count = (0, rows) if split == "train" else (10**6, rows // 8)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        draw = np.random.default_rng(self.first + index)
        digits = draw.integers(0, 10, draw.integers(3, LONGEST + 1))
        sound, at = draw.normal(0, 0.3, (FRAMES, 16)), 1
        for digit in digits:
            length = draw.integers(3, 6)
            sound[at : at + length, [digit, digit + 6]] += 1
            at += length + 1
        return {"sound": sound, "digits": np.pad(digits + 1, (0, LONGEST - len(digits)))}  # 0 is the blank


@dataclass(frozen=True)
class Reader:
    width: int = 64

    def params(self) -> Any:
        return [layers.dense(a, b, "embed hidden") for a, b in ((3 * 16, self.width), (self.width, 11))]

    def logits(self, params: Any, batch: Any, ctx: Any) -> Any:
        x = jnp.concatenate([jnp.roll(batch["sound"], k, 1) for k in (1, 0, -1)], 2)
        first, second = map(ctx.gather, params)
        return jax.nn.log_softmax(layers.linear(second, jax.nn.relu(layers.linear(first, x))))

    def loss(self, params: Any, batch: Any, ctx: Any) -> Loss:
        nll = ctc(self.logits(params, batch, ctx), batch["digits"])
        weight = batch.get("weight", jnp.ones(len(nll)))
        return Loss((nll * weight).sum(), weight.sum(), {})

    def predict(self, params: Any, batch: Any, ctx: Any) -> dict[str, Any]:
        return {"best": self.logits(params, batch, ctx).argmax(2)}


def ctc(log_p: Any, digits: Any) -> Any:
    """The negative log-likelihood of strings (B, S), 0 beyond their ends, by frames (B, T, 11): (B,)."""
    path = jnp.stack([jnp.zeros_like(digits), digits], 2).reshape(len(digits), -1)
    path = jnp.pad(path, ((0, 0), (0, 1)))  # blank, digit, blank, ..., blank
    skips = (path != 0) & (path != jnp.pad(path, ((0, 0), (2, 0)))[:, :-2])  # no blank between unlike
    each = jnp.take_along_axis(log_p, path[:, None], 2)

    def step(alpha: Any, now: Any) -> tuple[Any, None]:
        one, two = (jnp.pad(alpha, ((0, 0), (k, 0)), constant_values=LOW)[:, :-k] for k in (1, 2))
        return now + jnp.logaddexp(jnp.logaddexp(alpha, one), jnp.where(skips, two, LOW)), None

    start = jnp.where(jnp.arange(path.shape[1]) < 2, each[:, 0], LOW)
    alpha, _ = jax.lax.scan(step, vary(start, axes_of(log_p)), each[:, 1:].swapaxes(0, 1))
    end = 2 * (digits > 0).sum(1, keepdims=True)
    return -jnp.logaddexp(*(jnp.take_along_axis(alpha, end - k, 1)[:, 0] for k in (0, 1)))


class WordErrors:
    metrics = (Metric("exact", higher_is_better=True, unit="%"),)

    def __call__(self, step: int, rows: Any) -> dict[str, float]:
        pairs = [pair for data, out in rows for pair in zip(data["digits"], out["best"], strict=True)]
        read = [[d for d in best[np.insert(best[1:] != best[:-1], 0, True)] if d] for _, best in pairs]
        return {"exact": np.mean([own == [d for d in digits if d] for own, (digits, _) in zip(read, pairs)])}
