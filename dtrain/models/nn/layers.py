"""Layers that the models share: declarations, normalisations, the classification loss.

Dims: B batch, H height, W width, C channels, E embed, K classes.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from dtrain.core.errors import RecipeError
from dtrain.core.metrics import ACCURACY, MAE, NLL, Metric
from dtrain.core.types import Share
from dtrain.data.batch import IMAGE, LABEL, OTHER_LABEL, SHARE, SMOOTHING, TARGET, WEIGHT, Batch, Example
from dtrain.models.nn import param as declare
from dtrain.models.nn.context import Context
from dtrain.models.nn.count_flops import gradient_flops
from dtrain.models.nn.matmul import matmul
from dtrain.models.nn.model import PROBABILITY, TOKENS, Declared, Flops, Loss, Model
from dtrain.models.nn.param import Param, Tree

Drop = Callable[[jax.Array, str, str], jax.Array]
"""Dropout: (values (B, F), the name of their last dim, a name of its own) → the values, of which some are zero."""


def kept(x_BF: jax.Array, dim: str, name: str) -> jax.Array:
    """No dropout."""
    del dim, name
    return x_BF


def dropped(batch: Batch, ctx: Context, share: float, x_BF: jax.Array, dim: str, name: str) -> jax.Array:
    """x (B, F) with that share of its values set to zero and the others divided by 1 - share (Srivastava et al. 2014).

    Each example has random numbers of its own for all F values of the dim, of which a device takes its share.
    """
    size = x_BF.shape[1]
    shape = (size * ctx.parts(dim),)
    keep_BF = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - share, shape))(ctx.keys(batch, name))
    keep_BF = jax.lax.dynamic_slice_in_dim(keep_BF, ctx.first(dim, size), size, axis=1)
    return jnp.where(keep_BF, x_BF / (1 - share), 0).astype(x_BF.dtype)


@dataclass(frozen=True, kw_only=True)
class ImageClassifier(Declared, ABC):
    """What a model declares whose loss is `classify`."""

    kind: Any = ""
    """The kind of model."""
    dropout: Share = 0.0
    """Share of the values before the last layer, and of each hidden layer of an mlp, that a training step sets to zero
    (Srivastava et al. 2014)."""

    @property
    def metrics(self) -> tuple[Metric, ...]:
        return (ACCURACY,)

    @property
    def needs_keys(self) -> bool:
        return self.dropout > 0

    @abstractmethod
    def logits(self, params: Tree, image_BHWC: jax.Array, ctx: Context, drop: Drop = kept) -> jax.Array:
        """Logits (batch, classes). `drop` is applied to the values that dropout sets to zero."""

    def input_of(self, batch: Batch) -> jax.Array:
        """The array of a batch that `logits` takes."""
        return batch[IMAGE]

    def outputs(self, params: Tree, batch: Batch, ctx: Context) -> jax.Array:
        """The logits of a batch, with dropout in training. Pixels that the data leaves as bytes are divided by 255."""
        x = self.input_of(batch)
        if jnp.issubdtype(x.dtype, jnp.integer):
            x = (x.astype(jnp.float32) / 255).astype(jax.tree.leaves(params)[0].dtype)
        drop = partial(dropped, batch, ctx, self.dropout) if self.dropout and ctx.train else kept
        return self.logits(params, x, ctx, drop)

    def loss(self, params: Tree, batch: Batch, ctx: Context) -> Loss:
        return classify(self.outputs(params, batch, ctx), batch, ctx)

    def predict(self, params: Tree, batch: Batch, ctx: Context) -> dict[str, jax.Array]:
        return probabilities(self.outputs(params, batch, ctx))


def weight(shape: tuple[int, ...], dims: str, fan_in: str, gain: float = 1.0) -> Param:
    """A matrix or kernel with standard deviation gain / sqrt(fan-in), so that it scales variance by gain squared."""
    rows = tuple(fan_in.split())
    fan = math.prod(size for size, name in zip(shape, dims.split(), strict=True) if name in rows)
    return Param(shape, dims, declare.normal(gain / math.sqrt(fan)), fan_in=rows)


def bias(shape: tuple[int, ...], dims: str) -> Param:
    """A bias: initial value zero, no weight decay."""
    return Param(shape, dims, declare.zeros, decay=False)


def scale(shape: tuple[int, ...], dims: str) -> Param:
    """A scale: initial value one, no weight decay."""
    return Param(shape, dims, declare.ones, decay=False)


def dense(inputs: int, outputs: int, dims: str, gain: float = 1.0) -> Tree:
    """Weight and bias of a linear layer; `dims` names its rows and columns."""
    rows, columns = dims.split()
    std = gain / math.sqrt(inputs)
    matrix = Param((inputs, outputs), dims, declare.normal(std), fan_in=(rows,) if rows != columns else ())
    return {"weight": matrix, "bias": bias((outputs,), columns)}


def norm(size: int, dim: str) -> Tree:
    """Scale and bias of a normalisation over `dim`."""
    return {"scale": scale((size,), dim), "bias": bias((size,), dim)}


def grouped_norm(size: int, group: int, dim: str) -> Tree:
    """Scale and bias as (groups, channels per group), so that the mesh splits `dim` only between groups."""
    shape, dims = (size // group, group), f"{dim} _"
    return {"scale": scale(shape, dims), "bias": bias(shape, dims)}


def layer_norm(params: Tree, x: jax.Array, epsilon: float = 1e-6) -> jax.Array:
    """x (..., width), normalised over its last dim in float32: (x - mean) / deviation (Ba et al. 2016)."""
    return affine(params, standardise(x.astype(jnp.float32), epsilon).astype(x.dtype))


def group_norm(params: Tree, x_BHWC: jax.Array, group: int, epsilon: float = 1e-6) -> jax.Array:
    """Group normalisation, `group` channels to a group (Wu & He 2018).

    The number of groups is computed from the channels of x, so that it is right for a shard of the channels, too.
    """
    batch, height, width, channels = x_BHWC.shape
    grouped = x_BHWC.astype(jnp.float32).reshape(batch, height * width, -1, group)
    flat = jnp.swapaxes(grouped, 1, 2).reshape(batch, channels // group, -1)
    normal = standardise(flat, epsilon).reshape(batch, channels // group, height * width, group)
    x = jnp.swapaxes(normal, 1, 2).reshape(x_BHWC.shape).astype(x_BHWC.dtype)
    return affine(jax.tree.map(jnp.ravel, params), x)


def affine(params: Tree, x: jax.Array) -> jax.Array:
    """x (..., width) times a scale (width,) plus a bias (width,); in float32, as are the sums of their gradients."""
    scale, offset = (params[name].astype(jnp.float32) for name in ("scale", "bias"))
    return (x * lift(scale, x) + lift(offset, x)).astype(x.dtype)


def linear(params: Tree, x: jax.Array) -> jax.Array:
    """x (..., inner) times a weight (inner, outer) plus a bias (outer,): (..., outer)."""
    return added(matmul(x, params["weight"]), params["bias"])


def added(x: jax.Array, bias: jax.Array) -> jax.Array:
    """x (..., *dims) plus a bias (*dims); in float32, and so is the sum over examples in its gradient."""
    return (x + lift(bias.astype(jnp.float32), x)).astype(x.dtype)


def lift(value: jax.Array, like: jax.Array) -> jax.Array:
    """The value (*dims) with leading dims of size one, (1, ..., *dims), to as many as `like` has: rank promotion is an
    error."""
    return jnp.expand_dims(value, tuple(range(like.ndim - value.ndim)))


def standardise(x: jax.Array, epsilon: float) -> jax.Array:
    """x (..., width) with zero mean and unit variance over its last dim."""
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + epsilon)


def normalised(params: Tree, x: jax.Array, kind: str, epsilon: float, offset: bool) -> jax.Array:
    """x (..., width), normalised over its last dim in float32 (Ba et al. 2016; "rms": Zhang & Sennrich 2019).

    `offset`: the scale is stored as its difference from one. Without "scale" nothing is multiplied.
    """
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + epsilon) if kind == "rms" else standardise(y, epsilon)
    y = y * lift(params["scale"].astype(jnp.float32) + (1 if offset else 0), y) if "scale" in params else y
    return (y + lift(params["bias"].astype(jnp.float32), y) if "bias" in params else y).astype(x.dtype)


def classify(logits_BK: jax.Array, batch: Batch, ctx: Context) -> Loss:
    """Cross-entropy and accuracy against the labels (B,), summed over examples with their weights (B,).

    Where images were mixed, against both labels with their shares; smoothed labels count in the loss alone.
    """
    logits_BK = logits_BK.astype(ctx.loss_dtype)
    label_B = batch[LABEL]
    if jnp.issubdtype(label_B.dtype, jnp.floating):
        hint = "predict numbers with loss_of = layers.regress, or make the labels whole numbers"
        raise RecipeError(f"the loss is of classes, and the labels are numbers ({label_B.dtype})", hint)
    weight_B = batch[WEIGHT] if WEIGHT in batch else jnp.ones_like(label_B, jnp.float32)
    logp_BK = jax.nn.log_softmax(logits_BK)

    def against(label_B: jax.Array) -> tuple[jax.Array, jax.Array]:
        nll_B = -jnp.take_along_axis(logp_BK, label_B[:, None], axis=1)[:, 0].astype(jnp.float32)
        return nll_B, (logits_BK.argmax(-1) == label_B).astype(jnp.float32)

    nll_B, hit_B = against(label_B)
    if SHARE in batch:
        share_B, (other_nll_B, other_hit_B) = batch[SHARE], against(batch[OTHER_LABEL])
        nll_B = share_B * nll_B + (1 - share_B) * other_nll_B
        hit_B = share_B * hit_B + (1 - share_B) * other_hit_B
    if SMOOTHING in batch:
        spread_B = -logp_BK.astype(jnp.float32).mean(-1)
        nll_B = (1 - batch[SMOOTHING]) * nll_B + batch[SMOOTHING] * spread_B
    return Loss((nll_B * weight_B).sum(), weight_B.sum(), {ACCURACY.name: (hit_B * weight_B).sum()})


def regress(outputs: jax.Array, batch: Batch, _ctx: Context) -> Loss:
    """Half the squared error against the labels, numbers (B,) or (B, ...), and `mae`, the mean absolute error.

    Both are means over the values of an example, summed over examples with their weights.
    """
    label = batch[LABEL].astype(jnp.float32)
    error_BN = (outputs.astype(jnp.float32).reshape(label.shape) - label).reshape(len(label), -1)
    weight_B = batch[WEIGHT] if WEIGHT in batch else jnp.ones(len(label), jnp.float32)
    squared_B, absolute_B = jnp.square(error_BN).mean(1) / 2, jnp.abs(error_BN).mean(1)
    return Loss((squared_B * weight_B).sum(), weight_B.sum(), {MAE.name: (absolute_B * weight_B).sum()})


def probabilities(logits_BK: jax.Array) -> dict[str, jax.Array]:
    """The outputs of a classifier: the probability of each class, in float32."""
    return {PROBABILITY: jax.nn.softmax(logits_BK.astype(jnp.float32))}


def next_token(logits_BTV: jax.Array, batch: Batch, ctx: Context) -> Loss:
    """Cross-entropy of the next token over tokens with a target (-1: none), summed with the weights of their rows."""
    nll_BT, weight_BT = _token_losses(logits_BTV, batch, ctx)
    if WEIGHT in batch:
        weight_BT = weight_BT * batch[WEIGHT][:, None]
    return Loss((nll_BT * weight_BT).sum(), weight_BT.sum(), {})


def row_losses(logits_BTV: jax.Array, batch: Batch, ctx: Context) -> dict[str, jax.Array]:
    """The outputs of a model of tokens: the sum of the cross-entropies of each row, and its number of targets."""
    nll_BT, weight_BT = _token_losses(logits_BTV, batch, ctx)
    return {NLL.name: (nll_BT * weight_BT).sum(1), TOKENS: weight_BT.sum(1)}


def _token_losses(logits_BTV: jax.Array, batch: Batch, ctx: Context) -> tuple[jax.Array, jax.Array]:
    """The cross-entropy of each token, and 1 where it has a target (B, T)."""
    logp_BTV = jax.nn.log_softmax(logits_BTV.astype(ctx.loss_dtype))
    target_BT = batch[TARGET]
    nll_BT = -jnp.take_along_axis(logp_BTV, jnp.maximum(target_BT, 0)[..., None], axis=-1)[..., 0].astype(jnp.float32)
    return nll_BT, (target_BT >= 0).astype(jnp.float32)


def three_times(model: Model, forward: float, example: Example, examples: int, declared: Tree) -> Flops:
    """A training step counted as three forward passes: the backward pass has two products for each forward one.

    With frozen matrices, the products of the gradient are counted.
    """
    if all(param.trained or not param.fan_in for param in jax.tree.leaves(declared)):
        return Flops(3 * forward * examples, "3 x forward matrix products")
    return gradient_flops(model, example, examples, declared)
