"""Number formats of parameters, activations, losses and gradient sums."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from dtrain.core.errors import FieldError
from dtrain.core.types import DType
from dtrain.data.batch import LABEL, SHARE, SMOOTHING, WEIGHT
from dtrain.models.nn.matmul import products
from dtrain.models.nn.narrow_products import FORMATS
from dtrain.models.nn.param import Param, Tree

EXACT = (LABEL, WEIGHT, SHARE, SMOOTHING)
"""Arrays of a batch that the loss compares or multiplies with, whatever dtype the layers compute in."""


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Dtypes: parameters are stored in float32; compute, losses and reductions have dtypes of their own."""

    params: DType = "float32"
    """Dtype of parameters and optimizer state; bfloat16 is refused, since small updates would be rounded away."""
    compute: DType = "float32"
    """Dtype of activations and of the parameters that they are multiplied with. Labels keep their own."""
    loss: DType = "float32"
    """Dtype of the logits and of what follows from them. The product with the output head is rounded to it, or to the
    compute dtype if that is wider."""
    reduce: Literal["float32", "compute"] = "float32"
    """Dtype in which gradients are summed over devices. `compute`: the compute dtype for matrices, with half the
    traffic: under jit in every sum, under shard_map where fsdp splits them. Under jit the compiler sums the result of a
    product: that of a custom model's plain `@` is in the compute dtype with either value."""
    matmul: Literal["default", "high", "highest", "int8", "fp8"] = "default"
    """Precision of matrix products. Of float32 on TPUs and GPUs: `default`: one pass of bfloat16 or TF32; `high`: three
    passes; `highest`: float32. `int8`, `fp8` (e4m3): products of activations with matrices, and their gradients, in 8
    bits with a scale for each row and column; not the output head of a decoder, experts' and attention's products, nor
    a plain `@` of a model of your own: its `layers.linear`. int8 is faster on v5e, v5p, v6e and GPUs, fp8 on TPU7x,
    H100, H200 and B200."""

    def __post_init__(self) -> None:
        if self.params != "float32":
            message = "bfloat16 parameters do not train: updates smaller than 1/256 of a value are rounded away"
            raise FieldError("params", message, "use precision.compute: bfloat16, and leave params in float32")

    @property
    def narrow(self) -> str:
        """The format of 8 bits that products are computed in; empty if none."""
        return self.matmul if self.matmul in FORMATS else ""

    def cast(self, params: Tree, declared: Tree) -> Tree:
        """Parameters in the compute dtype, except those declared `exact`; `ctx.gather` casts those not yet gathered."""

        def cast_one(param: Param, x: Any) -> Any:
            if param.exact:
                return x
            if not hasattr(x, "computed_in"):
                return x.astype(self.compute)
            # a row of an embedding sums the gradients of all its tokens: always in float32
            return x.computed_in(self.compute, "float32" if _has_rows(param) else self.reduce)

        return jax.tree.map(cast_one, declared, params)

    def cast_batch(self, batch: Tree, exact: Sequence[str] = ()) -> Tree:
        """Cast floating-point arrays to the compute dtype, except those named in EXACT and in `exact`."""

        def cast_one(name: str, x: jax.Array) -> jax.Array:
            kept = name in EXACT or name in exact or not jnp.issubdtype(x.dtype, jnp.floating)
            return x if kept else x.astype(self.compute)

        return {name: cast_one(name, x) for name, x in batch.items()}

    @contextmanager
    def tracing(self, flat: bool = False, on_tpu: bool = False) -> Iterator[None]:
        """Within this context, steps are traced with `matmul` and `reduce` applied to their products.

        `flat`, `on_tpu`: see `matmul.products`.
        """
        plain = self.matmul == "default" or self.narrow
        exact = nullcontext() if plain else jax.default_matmul_precision(self.matmul)
        with products(self.reduce == "float32", flat, on_tpu, self.narrow), exact:
            yield


def _has_rows(param: Param) -> bool:
    """Whether the parameter is an embedding, or one value for each word; an output head has its words last."""
    return "vocab" in param.names[:-1] or param.names == ("vocab",)
