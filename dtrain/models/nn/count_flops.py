"""Count the floating-point operations of matrix products and convolutions in a traced function."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.interpreters.partial_eval import dce_jaxpr

from dtrain.data.batch import ROW, Example
from dtrain.models.nn.param import Tree, abstract, merged, trained
from dtrain.models.nn.single_device import SingleDeviceContext

MATRIX_PRODUCTS = ("dot_general", "conv_general_dilated")
RECOMPUTED = "remat"
"""Part of the names of the operations of `jax.checkpoint`."""


class Flops(NamedTuple):
    """Floating-point operations of one training step, and the convention by which they are counted."""

    step: float
    convention: str


def gradient_flops(model: Any, example: Example, examples: int, declared: Tree) -> Flops:
    """The products of the gradient of a model's training loss, by the parameters that `declared` trains.

    Counted on one example, in the program without what no gradient needs: those of frozen parameters, and parts of the
    loss behind `stop_gradient`. `example`: the features of a prepared example.
    """

    def dtype(name: str) -> Any:
        """That of the parameters here, also if the step computes in bfloat16: a convolution takes no two dtypes."""
        found = jnp.dtype(name)
        return jnp.float32 if jnp.issubdtype(found, jnp.floating) else found

    rows = {name: jax.ShapeDtypeStruct((1, *of.shape), dtype(of.dtype)) for name, of in example.items()}
    rows |= {ROW: jax.ShapeDtypeStruct((1,), "uint32")}

    def gradients(own: Tree, params: Tree, batch: Any) -> Tree:
        def loss(part: Tree) -> Any:
            return model.loss(merged(part, params, declared), batch, SingleDeviceContext(train=True)).sum

        return jax.value_and_grad(loss)(own)

    shapes = abstract(declared, "float32")
    traced = jax.make_jaxpr(gradients)(trained(shapes, declared), shapes, rows).jaxpr
    needed, _ = dce_jaxpr(traced, [True] * len(traced.outvars))
    more = ", recomputed ones included" if _recomputes(needed) else ""
    return Flops(product_flops(needed) * examples, f"matrix products of the gradient{more}")


def product_flops(jaxpr: Jaxpr) -> float:
    """FLOPs of all `dot_general` and convolutions: two for each multiplication with its addition.

    The body of a scan counts as often as it runs; of the branches of a `cond` the most expensive one counts, and the
    body of a `while` counts once, since its number of iterations is not known.
    """
    return sum(_equation_flops(equation) for equation in jaxpr.eqns)


def _equation_flops(equation: JaxprEqn) -> float:
    name, params = equation.primitive.name, equation.params
    if name in MATRIX_PRODUCTS:
        return one_product(name, params, [_shape(var) for var in equation.invars], _shape(equation.outvars[0]))
    inner = [product_flops(body) for body in _bodies(params)]
    if name == "cond":
        return max(inner, default=0.0)
    return sum(inner) * (params["length"] if name == "scan" else 1)


def one_product(name: str, params: Any, shapes: Sequence[tuple[int, ...]], result: tuple[int, ...]) -> float:
    """FLOPs of a `dot_general` or a convolution of operands of these shapes; padding and gaps do not count."""
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return 2.0 * math.prod(result) * math.prod(shapes[0][dim] for dim in contracted)
    numbers = params["dimension_numbers"]
    lhs, rhs, out = (
        [shape[dim] for dim in spec[2:]]
        for shape, spec in ((shapes[0], numbers.lhs_spec), (shapes[1], numbers.rhs_spec), (result, numbers.out_spec))
    )
    taps = math.prod(
        real_taps(extent, outputs, size, stride=stride, low=low, left=left, right=right)
        for extent, size, outputs, stride, (low, _), left, right in zip(
            lhs, rhs, out, params["window_strides"], params["padding"], params["lhs_dilation"], params["rhs_dilation"],
            strict=True,
        )
    )  # fmt: skip
    images, features = (result[dim] for dim in numbers.out_spec[:2])
    return 2.0 * images * features * shapes[1][numbers.rhs_spec[1]] * taps


def real_taps(extent: int, outputs: int, size: int, *, stride: int, low: int, left: int, right: int) -> int:
    """Number of (output, window position) pairs of one dim that fall on real input, not on padding or a dilation gap.

    `left` and `right` are the dilations of the input and of the window, `low` the padding before the input.
    """
    end = (extent - 1) * left
    return sum(
        1
        for output in range(outputs)
        for position in range(size)
        if 0 <= (at := output * stride + position * right - low) <= end and at % left == 0
    )


def _recomputes(jaxpr: Jaxpr) -> bool:
    return any(
        RECOMPUTED in equation.primitive.name or any(map(_recomputes, _bodies(equation.params)))
        for equation in jaxpr.eqns
    )


def _shape(var: object) -> tuple[int, ...]:
    return getattr(getattr(var, "aval", None), "shape", ())


def _bodies(params: dict[str, object]) -> Iterator[Jaxpr]:
    """The jaxprs among the parameters of an equation, such as the body of a loop or of a jitted function."""
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, ClosedJaxpr):
                yield item.jaxpr
            elif isinstance(item, Jaxpr):
                yield item
