"""Count the floating-point operations of matrix products and convolutions in a traced function."""

import math
from collections.abc import Iterator

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn


def product_flops(jaxpr: Jaxpr) -> float:
    """FLOPs of all `dot_general` and convolutions: two for each multiplication with its addition.

    The body of a scan counts as often as it runs; of the branches of a `cond` the most expensive one counts, and the
    body of a `while` counts once, since its number of iterations is not known.
    """
    return sum(_equation_flops(equation) for equation in jaxpr.eqns)


def _equation_flops(equation: JaxprEqn) -> float:
    name, params = equation.primitive.name, equation.params
    shapes = [_shape(var) for var in equation.invars]
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return 2.0 * _size(equation.outvars[0]) * math.prod(shapes[0][dim] for dim in contracted)
    if name == "conv_general_dilated":
        out_features = shapes[1][params["dimension_numbers"].rhs_spec[0]]
        return 2.0 * _size(equation.outvars[0]) * math.prod(shapes[1]) / out_features
    inner = [product_flops(body) for body in _bodies(params)]
    if name == "cond":
        return max(inner, default=0.0)
    return sum(inner) * (params["length"] if name == "scan" else 1)


def _shape(var: object) -> tuple[int, ...]:
    return getattr(getattr(var, "aval", None), "shape", ())


def _size(var: object) -> int:
    return math.prod(_shape(var))


def _bodies(params: dict[str, object]) -> Iterator[Jaxpr]:
    """The jaxprs among the parameters of an equation, such as the body of a loop or of a jitted function."""
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, ClosedJaxpr):
                yield item.jaxpr
            elif isinstance(item, Jaxpr):
                yield item
