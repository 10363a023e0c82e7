"""Check a traced step before it is compiled: large constants in the program, and tracing that is not pure."""

import difflib
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import jax
import numpy as np

from dtrain.core.errors import RecipeError
from dtrain.data.batch import ROW, SHARE, SMOOTHING
from dtrain.models.nn.model import PROBABILITY
from dtrain.models.nn.single_device import SingleDeviceContext
from dtrain.parallel.engine import Traced

LINE = 160
ADDRESS = re.compile(r"\b0x[0-9a-f]+")


def baked_constants(traced: Traced, megabytes: float) -> list[str]:
    """A warning for each constant of the program that is larger than this."""
    warnings = []
    for constant in _constants(traced.jaxpr):
        size = getattr(constant, "nbytes", 0)
        if size > megabytes * 1e6:
            what = f"{constant.dtype}{list(constant.shape)}"
            warnings.append(f"the step has {what}, {size / 1e6:.1f} MB, as a constant; pass it in as an argument")
    return warnings


def callbacks(traced: Traced) -> list[str]:
    """A warning for each place where the step calls Python, for which the devices wait at every step."""
    places = dict.fromkeys(
        f"{name.partition('_')[0]} at {line}"
        for name, line in _operations(traced.jaxpr)
        if name.endswith("callback") or name == "debug_print"
    )
    return [f"the step calls Python ({place}): the devices wait for it at every step" for place in places]


def _operations(jaxpr: Any) -> Iterator[tuple[str, str]]:
    """(name, line) of every operation of a jaxpr, and of every jaxpr inside it."""
    from jax._src import source_info_util  # JAX has no public name for it

    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        name = equation.primitive.name
        yield name, source_info_util.summarize(equation.source_info) if "callback" in name or "debug" in name else ""
        for inner in _inner(equation):
            yield from _operations(inner)


def _inner(equation: Any) -> Iterator[Any]:
    for value in equation.params.values():
        for inner in value if isinstance(value, tuple | list) else (value,):
            if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                yield inner


def fingerprint(traced: Traced) -> str:
    """A digest of the program without the addresses of objects, so that it is the same in every process."""
    return hashlib.sha256(ADDRESS.sub("", str(traced.jaxpr)).encode()).hexdigest()[:16]


def trace_differences(trace: Callable[[], Traced], first: Traced) -> list[str]:
    """Warnings if a second trace of the step differs from the first.

    A value that the code reads from a clock, NumPy's random numbers or a global variable while it is traced becomes a
    constant for the whole run.
    """
    second = trace()
    before, after = str(first.jaxpr).splitlines(), str(second.jaxpr).splitlines()
    head = "tracing the step twice gave two different programs: it depends on something other than its arguments"
    if before == after:
        pairs = zip(_constants(first.jaxpr), _constants(second.jaxpr), strict=False)
        changed = next((one for one, two in pairs if not _equal(one, two)), None)
        return [] if changed is None else [head, f"  the values of a constant, {changed.dtype}{list(changed.shape)}"]
    changed = [line[2:].strip()[:LINE] for line in difflib.ndiff(before, after) if line[:2] in ("- ", "+ ")]
    return [head, *(f"  {line}" for line in changed[:4])]


def _equal(one: Any, other: Any) -> bool:
    """Whether two constants have the same values; those that are no arrays of numbers are not compared."""
    try:
        return np.array_equal(np.asarray(one), np.asarray(other), equal_nan=np.asarray(one).dtype.kind == "f")
    except (TypeError, ValueError):
        return True


def refuse_ignored_labels(model: Any, params: Any, batch: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    """Raise RecipeError if the loss of a user's model ignores the shares of mixed labels, or the smoothing of labels.

    `batch`: shapes of prepared examples.
    """
    if not {SHARE, SMOOTHING} & batch.keys():
        return
    batch = dict(batch) | {ROW: jax.ShapeDtypeStruct((1,), "uint32")}
    traced = jax.make_jaxpr(lambda p, b: model.loss(p, b, SingleDeviceContext(train=True)))(params, dict(batch))
    leaves: Any = jax.tree_util.tree_leaves_with_path((params, dict(batch)))
    used = {id(value) for equation in traced.jaxpr.eqns for value in equation.invars}
    for (path, _), variable in zip(leaves, traced.jaxpr.invars, strict=True):
        name = getattr(path[-1], "key", "")
        if path[0].idx == 1 and name in (SHARE, SMOOTHING) and id(variable) not in used:
            what = "mixes labels (mixup, cutmix)" if name == SHARE else "smooths labels"
            message = f"{model.user_code}: data.pixels {what}, and the loss does not use batch[{name!r}]"
            raise RecipeError(message, "compute the loss with dtrain.layers.classify, or leave the setting out")


def refuse_few_classes(model: Any, params: Any, batch: Mapping[str, jax.ShapeDtypeStruct], classes: int | None) -> None:
    """Raise RecipeError if a user's model predicts fewer classes than the data has: their loss would be NaN.

    `batch`: shapes of prepared examples. A model that cannot be traced here is refused where it is traced.
    """
    found: Any = {}
    if model.predicts and classes:
        with suppress(Exception):
            found = jax.eval_shape(
                lambda p, b: model.predict(p, b, SingleDeviceContext(train=False)), params, dict(batch)
            )
    if PROBABILITY in found and found[PROBABILITY].shape[-1] < classes:
        outputs = found[PROBABILITY].shape[-1]
        message = f"{model.user_code}: the model has {outputs} outputs, and the data has {classes} classes"
        raise RecipeError(message, f"give it {classes} outputs")


def _constants(jaxpr: Any) -> Iterator[Any]:
    """The constants of a jaxpr, closed or open, and of every jaxpr inside it."""
    yield from getattr(jaxpr, "consts", ())
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        for inner in _inner(equation):
            yield from _constants(inner)
