"""A multi-layer perceptron.

Under `mesh.tensor`, layers alternate between splitting their columns and their rows, so that two layers cost one
all-reduce (Shoeybi et al. 2019, section 3).
"""

import math
from dataclasses import dataclass
from typing import Literal

import jax

from dtrain.core.errors import FieldError
from dtrain.core.types import Positive
from dtrain.data.batch import FEATURES, IMAGE, LABEL, Batch, Example
from dtrain.models.nn.context import Context
from dtrain.models.nn.layers import ImageClassifier, added, dense, three_times
from dtrain.models.nn.matmul import matmul
from dtrain.models.nn.model import Flops
from dtrain.models.nn.param import Tree

ACTIVATIONS = {"relu": jax.nn.relu, "gelu": jax.nn.gelu, "tanh": jax.nn.tanh}


MOST_LAYERS = 1000


@dataclass(frozen=True, kw_only=True)
class MLP(ImageClassifier):
    """Fully connected layers of the given sizes, from the flattened image to the classes."""

    kind: Literal["mlp"] = "mlp"
    sizes: tuple[Positive, ...]
    """Inputs, hidden layers, classes: [784, 512, 256, 10]."""
    activation: Literal["relu", "gelu", "tanh"] = "relu"

    def __post_init__(self) -> None:
        if len(self.sizes) < 2:
            raise FieldError("sizes", f"needs at least two sizes, inputs and classes; found {len(self.sizes)}")
        if len(self.sizes) - 1 > MOST_LAYERS:
            raise FieldError("sizes", f"{len(self.sizes) - 1} layers; at most {MOST_LAYERS}")

    def params(self) -> Tree:
        return {f"layer{i}": self._layer(i) for i in range(len(self.sizes) - 1)}

    def _layer(self, i: int) -> Tree:
        rows, columns = ("hidden", "embed") if i % 2 else ("embed", "hidden")
        if i == len(self.sizes) - 2:
            columns = "classes"
        return dense(self.sizes[i], self.sizes[i + 1], f"{rows} {columns}", gain=math.sqrt(2))

    def inputs(self, batch: Batch) -> jax.Array:
        return batch[FEATURES] if FEATURES in batch else batch[IMAGE]

    def logits(self, params: Tree, image_BHWC: jax.Array, ctx: Context) -> jax.Array:
        """Logits (batch, classes), from images or rows of a table."""
        x = image_BHWC.reshape(len(image_BHWC), -1)
        for i in range(len(self.sizes) - 1):
            layer = ctx.gather(params[f"layer{i}"])
            x = matmul(x, layer["weight"])
            x = added(ctx.reduce(x, "hidden") if i % 2 else x, layer["bias"])
            x = ACTIVATIONS[self.activation](x) if i < len(self.sizes) - 2 else x
        return x

    def flops(self, example: Example, examples: int, declared: Tree) -> Flops:
        forward = 2.0 * sum(a * b for a, b in zip(self.sizes, self.sizes[1:], strict=False))
        return three_times(self, forward, example, examples, declared)

    def mismatch(self, example: Example) -> str:
        what = FEATURES if FEATURES in example else IMAGE
        if not {what, LABEL} <= set(example) or example[LABEL].dtype != "int32":
            return f"the model takes images and labels, or rows of a table; the data has {', '.join(sorted(example))}"
        shape, classes = example[what].shape, example[LABEL].values
        if math.prod(shape) != self.sizes[0]:
            sizes = " x ".join(map(str, shape))
            of = f"rows have {sizes} columns" if what == FEATURES else f"images are {sizes} = {math.prod(shape)} values"
            return f"sizes begins with {self.sizes[0]}; the data's {of}"
        if classes is not None and classes != self.sizes[-1]:
            return f"sizes ends with {self.sizes[-1]}; the data has {classes} classes"
        return ""
