"""A classifier of the shapes in real pictures, and a measure of drawn ones by it."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from nets import conv, convolved, dense, linear
from pictures import COLOURS, SHAPES

import dtrain
from dtrain import Loss, Metric


@dataclass(frozen=True)
class ShapeClassifier:
    """The shape in the upper half of a picture, and in its lower half."""

    width: int = 32
    metrics = (Metric("accuracy", higher_is_better=True, unit="%"),)

    def init(self, key: Any, example: Any) -> Any:
        del example
        k, w = jax.random.split(key, 4), self.width
        return [conv(k[0], 3, 3, w), conv(k[1], 4, w, w), conv(k[2], 4, w, w), dense(k[3], w, len(SHAPES))]

    def halves(self, params: Any, image: Any) -> Any:
        """Logits (B, 2, shapes) of the upper and the lower half."""
        x = image.reshape(-1, 16, 32, 3)
        for layer, stride in zip(params[:-1], (1, 2, 2), strict=True):
            x = jax.nn.relu(convolved(layer, x, stride))
        return linear(params[-1], x.max((1, 2))).reshape(-1, 2, len(SHAPES))

    def loss(self, params: Any, batch: Any, ctx: Any) -> Loss:
        del ctx
        logits = self.halves(params, batch["image"])
        label = jnp.stack([batch["top_shape"], batch["bottom_shape"]], 1)
        loss = -jnp.take_along_axis(jax.nn.log_softmax(logits), label[..., None], 2).mean((1, 2))
        counts = batch.get("weight", jnp.ones(len(label)))
        right = (logits.argmax(-1) == label).mean(1)
        return Loss((loss * counts).sum(), counts.sum(), {"accuracy": (right * counts).sum()})

    def predict(self, params: Any, batch: Any, ctx: Any) -> dict[str, Any]:
        del ctx
        return {"shape": self.halves(params, batch["image"]).argmax(-1)}


def colours(pictures: np.ndarray) -> np.ndarray:
    """The number of the colour in COLOURS (n, 2) that is nearest to the part in each half, as the median of its pixels.

    The part's pixels are the quarter that differ most from the ground, the median of the picture's edge.
    """
    halves = pictures.reshape(-1, 2, 16 * 32, 3).astype(np.float32)
    ground = np.median(pictures[:, :, (0, -1)].reshape(len(pictures), -1, 3), 1)[:, None, None]
    order = np.argsort(-((halves - ground) ** 2).sum(-1), axis=2)[..., :80]
    found = np.median(np.take_along_axis(halves, order[..., None], 2), axis=2)
    known = np.array(list(COLOURS.values()), np.float32)
    return ((found[:, :, None] - known) ** 2).sum(-1).argmin(-1)


class Named:
    """The shares of parts that have the colour, and the shape, that the caption names."""

    metrics = (
        Metric("colours", higher_is_better=True, unit="%"),
        Metric("shapes", higher_is_better=True, unit="%"),
    )

    def __init__(self, run: str) -> None:
        self.classifier = dtrain.open(run)

    def __call__(self, step: int, rows: Any) -> dict[str, float]:
        del step
        pairs = list(rows)
        pictures = np.concatenate([drawn["picture"] for _, drawn in pairs])

        def asked(what: str) -> np.ndarray:
            return np.concatenate([np.stack([data[f"top_{what}"], data[f"bottom_{what}"]], 1) for data, _ in pairs])

        shapes = self.classifier.predict({"image": pictures})["shape"]
        return {
            "colours": float((colours(pictures) == asked("colour")).mean()),
            "shapes": float((shapes == asked("shape")).mean()),
        }
