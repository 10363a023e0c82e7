"""A multi-layer perceptron.

Under `mesh.tensor`, layers alternate between splitting their columns and their rows, so that two layers cost one
all-reduce (Shoeybi et al. 2019, section 3).
"""

import math
from dataclasses import dataclass, replace
from typing import Literal, Self

import jax
import jax.numpy as jnp

from dtrain.core.errors import FieldError
from dtrain.core.metrics import ACCURACY, MAE, Metric
from dtrain.core.types import Float, Positive, PositiveFloat
from dtrain.data.batch import FEATURES, IMAGE, LABEL, Batch, Example
from dtrain.models.nn.context import Context
from dtrain.models.nn.layers import Drop, ImageClassifier, added, dense, kept, regress, three_times
from dtrain.models.nn.matmul import matmul
from dtrain.models.nn.model import VALUE, Flops, Loss
from dtrain.models.nn.param import Tree

ACTIVATIONS = {"relu": jax.nn.relu, "gelu": jax.nn.gelu, "tanh": jax.nn.tanh}


MOST_LAYERS = 1000
HIDDEN = (128,)
"""Hidden layers of a recipe that names none."""


def _input(example: Example) -> str:
    """The name of what the model takes of such examples."""
    return FEATURES if FEATURES in example else IMAGE


@dataclass(frozen=True, kw_only=True)
class MLP(ImageClassifier):
    """Fully connected layers, from the flattened image or the row of a table to the classes, or to a number."""

    kind: Literal["mlp"] = "mlp"
    sizes: tuple[Positive, ...] = ()
    """Inputs, hidden layers, classes (1 for a number): [784, 512, 256, 10]. Default: `hidden` between those of the
    data."""
    hidden: tuple[Positive, ...] | None = None
    """The hidden layers alone, in place of `sizes`; default: [128]."""
    activation: Literal["relu", "gelu", "tanh"] = "relu"
    """After each hidden layer."""
    label: Literal["class", "number"] | None = None
    """What is predicted: a class, or a number, with half the squared error of (number - mean) / std as its loss.
    Default: what the label of the data is where `sizes` is left out, else a class."""
    mean: Float | None = None
    """The mean of the numbers that are predicted; default: that of the training examples."""
    std: PositiveFloat | None = None
    """Their standard deviation; default: that of the training examples."""

    def __post_init__(self) -> None:
        if self.sizes and self.hidden is not None:
            raise FieldError("hidden", "give either sizes, which has the hidden layers, or hidden")
        if len(self.sizes) == 1:
            raise FieldError("sizes", f"needs at least two sizes, inputs and classes; found {len(self.sizes)}")
        if max(len(self.sizes) - 1, len(self.hidden or ())) > MOST_LAYERS:
            where = "sizes" if self.sizes else "hidden"
            raise FieldError(where, f"{max(len(self.sizes) - 1, len(self.hidden or ()))} layers; at most {MOST_LAYERS}")
        if self.label != "number" and (self.mean is not None or self.std is not None):
            raise FieldError("label", "mean and std are those of a number that is predicted", "label: number")
        if self.label == "number" and self.sizes and self.sizes[-1] != 1:
            raise FieldError("sizes", f"ends with {self.sizes[-1]}; a model of a number ends with 1")

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return (MAE,) if self.label == "number" else (ACCURACY,)

    @property
    def left_out(self) -> tuple[str, ...]:
        spread = ("mean", "std") if self.label == "number" and None in (self.mean, self.std) else ()
        return spread if self.sizes else ("sizes", *spread)

    def sized(self, example: Example) -> Self:
        what, label = _input(example), example.get(LABEL)
        if what not in example or label is None or label.shape:
            return self
        is_number = self.label == "number" or (
            self.label is None and not self.sizes and label.dtype.startswith("float")
        )
        outputs = 1 if is_number else label.values
        model = self
        if not self.sizes and outputs:
            hidden = HIDDEN if self.hidden is None else self.hidden
            model = replace(model, sizes=(math.prod(example[what].shape), *hidden, outputs), hidden=None)
        if is_number and model.sizes:
            model = replace(model, label="number")
        if model.label == "number" and label.spread:
            mean, std = (given if given is not None else own for given, own in zip((self.mean, self.std), label.spread))
            model = replace(model, mean=mean, std=std)
        return model

    def params(self) -> Tree:
        return {f"layer{i}": self._layer(i) for i in range(len(self.sizes) - 1)}

    def _layer(self, i: int) -> Tree:
        rows, columns = ("hidden", "embed") if i % 2 else ("embed", "hidden")
        if i == len(self.sizes) - 2:
            columns = "classes"
        return dense(self.sizes[i], self.sizes[i + 1], f"{rows} {columns}", gain=math.sqrt(2))

    def input_of(self, batch: Batch) -> jax.Array:
        return batch[FEATURES] if FEATURES in batch else batch[IMAGE]

    def loss(self, params: Tree, batch: Batch, ctx: Context) -> Loss:
        if self.label != "number":
            return super().loss(params, batch, ctx)
        assert self.std is not None
        value_B1 = self.outputs(params, batch, ctx)
        label_B = (batch[LABEL].astype(jnp.float32) - self.mean) / self.std
        loss = regress(value_B1, {**batch, LABEL: label_B}, ctx)
        return loss._replace(metrics={MAE.name: loss.metrics[MAE.name] * self.std})  # in the unit of the label

    def predict(self, params: Tree, batch: Batch, ctx: Context) -> dict[str, jax.Array]:
        if self.label != "number":
            return super().predict(params, batch, ctx)
        assert self.std is not None and self.mean is not None
        value_B1 = self.outputs(params, batch, ctx).astype(jnp.float32)
        return {VALUE: value_B1[:, 0] * self.std + self.mean}

    def logits(self, params: Tree, image_BHWC: jax.Array, ctx: Context, drop: Drop = kept) -> jax.Array:
        """Logits (batch, classes), from images or rows of a table."""
        x = image_BHWC.reshape(image_BHWC.shape[0], -1)
        for i in range(len(self.sizes) - 1):
            layer = ctx.gather(params[f"layer{i}"])
            x = matmul(x, layer["weight"])
            x = added(ctx.reduce(x, "hidden") if i % 2 else x, layer["bias"])
            if i < len(self.sizes) - 2:
                x = drop(ACTIVATIONS[self.activation](x), "embed" if i % 2 else "hidden", f"layer{i}")
        return x

    def flops(self, example: Example, examples: int, declared: Tree) -> Flops:
        forward = 2.0 * sum(a * b for a, b in zip(self.sizes, self.sizes[1:], strict=False))
        return three_times(self, forward, example, examples, declared)

    def mismatch(self, example: Example) -> str:
        what = _input(example)
        if not {what, LABEL} <= set(example) or example[LABEL].shape:
            found = ", ".join(f"{name} {list(of.shape)}" for name, of in sorted(example.items()))
            return f"the model takes images and labels, or rows of a table, one label for each; the data has {found}"
        shape, classes = example[what].shape, example[LABEL].values
        is_number = example[LABEL].dtype.startswith("float")
        if is_number != (self.label == "number"):
            expected, found = ("a class", "a number") if is_number else ("a number", "a class")
            return f"the model predicts {expected} (label: {expected[2:]}); the data's label is {found}"
        if self.left_out:
            missing = "number of classes" if "sizes" in self.left_out else "mean and deviation of the label"
            return f"the {missing} is not in the data: set model.{', model.'.join(self.left_out)}"
        if math.prod(shape) != self.sizes[0]:
            sizes = " x ".join(map(str, shape))
            of = f"rows have {sizes} columns" if what == FEATURES else f"images are {sizes} = {math.prod(shape)} values"
            return f"sizes begins with {self.sizes[0]}; the data's {of}"
        if not is_number and classes is not None and classes != self.sizes[-1]:
            return f"sizes ends with {self.sizes[-1]}; the data has {classes} classes"
        return ""
