"""Which number format serves what."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from dtrain.core.errors import FieldError
from dtrain.core.types import DType
from dtrain.models.nn.matmul import sums
from dtrain.models.nn.param import Param, Tree


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Parameters are kept in float32, computed with in another dtype, and losses summed in a third."""

    params: DType = "float32"
    """Of parameters and optimizer state; bfloat16 does not train, and is refused."""
    compute: DType = "float32"
    """Of activations and of the parameters that they are multiplied with."""
    loss: DType = "float32"
    reduce: Literal["float32", "compute"] = "float32"
    """In which gradients are summed over devices. `compute`: those of matrices in the compute dtype, at half the
    traffic, under jit wherever they are summed, under shard_map where fsdp splits them. Under jit the compiler sums
    what a product gives: that of a custom model's plain `@` is in the compute dtype either way."""
    matmul: Literal["default", "high", "highest"] = "default"
    """How exactly TPUs and GPUs multiply float32 matrices: by default in one pass of bfloat16 or TF32; `high` in
    three; `highest` in float32."""

    def __post_init__(self) -> None:
        if self.params != "float32":
            message = "bfloat16 parameters do not train: updates smaller than 1/256 of a value are rounded away"
            raise FieldError("params", message, "use precision.compute: bfloat16, and leave params in float32")

    def cast(self, params: Tree, declared: Tree) -> Tree:
        """Parameters in the compute dtype, those declared `exact` as they are; what is to be gathered is cast then."""

        def one(param: Param, x: Any) -> Any:
            if param.exact:
                return x
            if not hasattr(x, "computed_in"):
                return x.astype(self.compute)
            # rows of a vocabulary are looked up, and the tokens of a row add up their gradients: never in few bits
            return x.computed_in(self.compute, "float32" if "vocab" in param.names else self.reduce)

        return jax.tree.map(one, declared, params)

    def cast_batch(self, batch: Tree) -> Tree:
        """Floating-point arrays in the compute dtype, all others as they are; weights count examples and stay exact."""
        return {
            name: x.astype(self.compute) if name != "weight" and jnp.issubdtype(x.dtype, jnp.floating) else x
            for name, x in batch.items()
        }

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """While a step is traced inside, `matmul` and `reduce` hold for its products."""
        exact = nullcontext() if self.matmul == "default" else jax.default_matmul_precision(self.matmul)
        with sums(self.reduce == "float32"), exact:
            yield
