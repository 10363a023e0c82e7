"""Pictures and words in one space (CLIP, Radford et al. 2021), by the sigmoid loss of Zhai et al. 2023: digits, names.

Every picture is compared with the words of all devices. A measure finds the word of each held-out picture, and reverse.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dtrain import Loss, Metric, layers

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
LETTERS = np.array([[ord(letter) - 96 if letter else 0 for letter in [*word, *[""] * 5][:5]] for word in WORDS])


@dataclass(frozen=True)
class Pairs:
    width: int = 64

    def params(self) -> Any:
        def tower(inputs: int) -> Any:
            return [layers.dense(a, b, "embed hidden") for a, b in ((inputs, 128), (128, self.width))]

        return {
            "image": tower(64),
            "text": tower(5 * 32),
            "scale": layers.scale((), ""),
            "shift": layers.bias((), ""),
        }

    def code(self, tower: Any, x: Any, ctx: Any) -> Any:
        first, second = tower
        x = layers.linear(ctx.gather(second), jax.nn.relu(layers.linear(ctx.gather(first), x)))
        return x / (jnp.linalg.norm(x, axis=1, keepdims=True) + 1e-6)

    def codes(self, params: Any, batch: Any, ctx: Any) -> tuple[Any, Any, Any]:
        letters = jnp.asarray(LETTERS)[batch["label"]]  # the caption of each picture
        text = jax.nn.one_hot(letters, 32).reshape(len(letters), -1)
        image = self.code(params["image"], batch["image"].reshape(-1, 64), ctx)
        return image, self.code(params["text"], text, ctx), letters

    def loss(self, params: Any, batch: Any, ctx: Any) -> Loss:
        image, text, letters = self.codes(params, batch, ctx)
        weight = batch.get("weight", jnp.ones(len(image)))
        texts, others, counts = (ctx.gather_examples(x) for x in (text, letters, weight))
        alike = 10 * ctx.gather(params["scale"]) * (image @ texts.T) + ctx.gather(params["shift"]) - 3
        same = (letters[:, None] == others[None]).all(2)
        error = -(jax.nn.log_sigmoid(jnp.where(same, alike, -alike)) * counts[None]).sum(1) / counts.sum()
        return Loss((error * weight).sum(), weight.sum(), {})

    def predict(self, params: Any, batch: Any, ctx: Any) -> dict[str, Any]:
        image, text, _ = self.codes(params, batch, ctx)
        return {"image": image, "text": text}


class Retrieval:
    metrics = tuple(Metric(f"{what}_recall", higher_is_better=True, unit="%") for what in ("text", "image"))

    def __call__(self, step: int, rows: Any) -> dict[str, float]:
        triples = [(data["label"], out["image"], out["text"]) for data, out in rows]
        label, image, text = (np.concatenate(part) for part in zip(*triples))
        alike = image @ text.T
        found = {"text": label[alike.argmax(1)], "image": label[alike.argmax(0)]}
        return {f"{what}_recall": np.mean(other == label) for what, other in found.items()}
