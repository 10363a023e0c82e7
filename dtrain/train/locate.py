"""Find the operation of a training step that first gives a value that is not a number.

The step is deterministic: it is repeated from the newest checkpoint up to the step that failed. Loss and gradients of
that step are then computed one operation at a time, on one device, and the result of each operation is examined.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dtrain.assembly.assemble import Assembly
from dtrain.assembly.state import State
from dtrain.assembly.step import divisor, loss_of
from dtrain.core.errors import DtrainError
from dtrain.data.batch import Batch
from dtrain.models.nn.param import Tree
from dtrain.models.nn.single_device import SingleDeviceContext

CALLS = {
    "jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "checkpoint": "jaxpr", "remat2": "jaxpr",
    "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr", "core_call": "call_jaxpr",
}  # fmt: skip
"""Primitives that only apply another jaxpr, and the parameter that holds it."""


@dataclass(frozen=True)
class Origin:
    """An operation whose result is not finite although its inputs are."""

    operation: str
    value: str
    """nan or inf."""
    line: str
    """file:line (function) of the code that it was traced from."""
    inputs: str
    backward: bool
    layer: int | None

    def text(self) -> str:
        """One line of text."""
        where = "in the backward pass of " if self.backward else "in "
        layer = f", layer {self.layer}" if self.layer is not None else ""
        return f"{self.value} comes from `{self.operation}` {where}{self.line}{layer}; its inputs: {self.inputs}"


class _Found(Exception):
    """Ends the evaluation once a NaN is found."""


@dataclass
class _Search:
    """Evaluates a jaxpr operation by operation."""

    infinite: Origin | None = None
    nan: Origin | None = None
    iterations: list[int] = field(default_factory=list)
    """Of the scans that are being evaluated, the outermost first."""

    def evaluate(self, jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
        """The results of an open jaxpr."""
        variables = getattr(jaxpr, "all_invars", None) or [*jaxpr.constvars, *jaxpr.invars]  # newer and older JAX
        values: dict[Any, Any] = dict(zip(variables, [*consts, *arguments], strict=True))

        def read(variable: Any) -> Any:
            return variable.val if hasattr(variable, "val") else values[variable]

        for equation in jaxpr.eqns:
            inputs = [read(variable) for variable in equation.invars]
            results = self._apply(equation, inputs)
            values |= dict(zip(equation.outvars, results, strict=True))
        return [read(variable) for variable in jaxpr.outvars]

    def _closed(self, jaxpr: Any, arguments: Sequence[Any]) -> list[Any]:
        return self.evaluate(getattr(jaxpr, "jaxpr", jaxpr), getattr(jaxpr, "consts", ()), arguments)

    def _apply(self, equation: Any, inputs: list[Any]) -> list[Any]:
        name, params = equation.primitive.name, equation.params
        if name in CALLS and CALLS[name] in params:
            return self._closed(params[CALLS[name]], inputs)
        if name == "scan":
            return self._scan(params, inputs)
        if name == "while":
            return self._while(params, inputs)
        if name == "cond":
            return self._closed(params["branches"][int(inputs[0])], inputs[1:])
        results = equation.primitive.bind(*inputs, **equation.primitive.get_bind_params(params))
        results = list(results) if equation.primitive.multiple_results else [results]
        self._examine(equation, inputs, results)
        return results

    def _scan(self, params: Any, inputs: list[Any]) -> list[Any]:
        consts = inputs[: params["num_consts"]]
        carry = inputs[params["num_consts"] :][: params["num_carry"]]
        rows = inputs[params["num_consts"] + params["num_carry"] :]
        order = range(params["length"])
        collected: list[list[Any]] = []
        for index in reversed(order) if params["reverse"] else order:
            self.iterations.append(index)
            out = self._closed(params["jaxpr"], [*consts, *carry, *(row[index] for row in rows)])
            self.iterations.pop()
            carry = out[: params["num_carry"]]
            collected.append(out[params["num_carry"] :])
        if params["reverse"]:
            collected.reverse()
        return [*carry, *(jnp.stack(column) for column in zip(*collected, strict=True))]

    def _while(self, params: Any, inputs: list[Any]) -> list[Any]:
        first = params["cond_nconsts"]
        of_condition, of_body = inputs[:first], inputs[first : first + params["body_nconsts"]]
        carry = inputs[first + params["body_nconsts"] :]
        while bool(self._closed(params["cond_jaxpr"], [*of_condition, *carry])[0]):
            carry = self._closed(params["body_jaxpr"], [*of_body, *carry])
        return carry

    def _examine(self, equation: Any, inputs: list[Any], results: list[Any]) -> None:
        floats = [value for value in results if jnp.issubdtype(jnp.result_type(value), jnp.inexact)]
        if all(bool(jnp.isfinite(value).all()) for value in floats):
            return
        known = [value for value in inputs if jnp.issubdtype(jnp.result_type(value), jnp.inexact)]
        if any(bool(jnp.isnan(value).any()) for value in known):
            return
        if any(bool(jnp.isnan(value).any()) for value in floats):
            self.nan = self._origin(equation, "nan", known)
            raise _Found
        if self.infinite is None and all(bool(jnp.isfinite(value).all()) for value in known):
            self.infinite = self._origin(equation, "inf", known)

    def _origin(self, equation: Any, value: str, inputs: list[Any]) -> Origin:
        ranges = [f"{np.min(x):.4g} to {np.max(x):.4g}" for x in (np.asarray(x, np.float64) for x in inputs) if x.size]
        return Origin(
            equation.primitive.name,
            value,
            _line(equation),
            ", ".join(ranges) or "none",
            backward="transpose" in str(equation.source_info.name_stack),
            layer=self.iterations[0] if self.iterations else None,
        )


def _line(equation: Any) -> str:
    """Where in the user's code, or else in dtrain, the operation was traced."""
    from jax._src import source_info_util  # JAX has no public name for it

    return source_info_util.summarize(equation.source_info)


def origins(assembly: Assembly, params: Tree, batch: Batch) -> list[Origin]:
    """The first operation with an infinite result and the first with a NaN, in loss and gradients; empty if none."""
    recipe = assembly.recipe

    def prepare(rows: Batch) -> Batch:
        return recipe.data.prepare(rows, jax.random.key(recipe.seed), True)

    loss = loss_of(assembly.model, prepare, recipe.precision, seed=recipe.seed)

    def mean(values: Tree, rows: Batch) -> jax.Array:
        result = loss(values, rows, SingleDeviceContext(train=True))
        return result.sum / divisor(result.weight)

    here = jax.devices()[0]
    values, rows = jax.device_put(jax.device_get((params, batch)), here)
    search = _Search()
    with recipe.precision.tracing(), jax.transfer_guard("allow"):
        program = jax.make_jaxpr(jax.value_and_grad(mean, allow_int=True))(values, rows)
        with suppress(_Found):
            search.evaluate(program.jaxpr, program.consts, jax.tree.leaves((values, rows)))
    return [origin for origin in (search.infinite, search.nan) if origin]


def located(
    assembly: Assembly,
    step: Callable[[State, Batch], tuple[State, dict[str, Any]]],
    state: State,
    batches: Any,
    span: range,
) -> list[str]:
    """Repeat the steps of `span` until one is not finite, and name the operation. Lines for the user."""
    losses: list[str] = []
    for number in span:
        batch = next(batches)
        before = jax.tree.map(jnp.copy, state.params)
        state, metrics = step(state, batch)
        if bool(jax.device_get(metrics["finite"])):
            losses = [*losses[-2:], f"{float(jax.device_get(metrics['loss'])):.4g}"]
            continue
        try:
            found = origins(assembly, before, batch)
        except DtrainError:
            raise
        except Exception as error:
            return [f"the operation could not be located: {type(error).__name__}: {str(error).splitlines()[0]}"]
        rate = f"learning rate {float(jax.device_get(metrics['lr'])):.3g}"
        before_it = f"losses before it {', '.join(losses)}, " if losses else ""
        head = f"step {number} is the first that is not finite ({before_it}{rate})"
        if not found:
            none = "on one device no operation makes NaN or infinity of finite numbers"
            return [f"{head}; {none}: look for a constant that is not finite, bad values in the batch, or the split"]
        return [f"{head}:", *(f"  {origin.text()}" for origin in found)]
    return ["the steps since the newest checkpoint, repeated, are all finite: the fault was not reproducible"]
