"""dtrain: one recipe from a laptop to a TPU pod.

What a model, a dataset or a script of your own imports. Each name is imported when it is first used, so that
`import dtrain` is quick and touches no device.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dtrain.core import errors
    from dtrain.core.metrics import Metric
    from dtrain.data.batch import Batch, Example, Feature
    from dtrain.inference.open_run import OpenRun, open  # noqa: A004
    from dtrain.models.nn import layers
    from dtrain.models.nn.context import Context
    from dtrain.models.nn.model import Flops, Loss, Mixture, Model, Structure
    from dtrain.models.nn.param import Param
    from dtrain.models.nn.vma import axes_of, vary
    from dtrain.plan.plan import plan as make_plan
    from dtrain.recipe.load import load
    from dtrain.recipe.recipe import Recipe
    from dtrain.train.run import run_and_open as run

__version__ = "0.3.0"

__all__ = [
    "Batch",
    "Context",
    "Example",
    "Feature",
    "Flops",
    "Loss",
    "Metric",
    "Mixture",
    "Model",
    "OpenRun",
    "Param",
    "Recipe",
    "Structure",
    "axes_of",
    "errors",
    "layers",
    "load",
    "make_plan",
    "open",
    "run",
    "vary",
]

_SOURCES = {
    "core.metrics": ("Metric",),
    "data.batch": ("Batch", "Example", "Feature"),
    "models.nn.context": ("Context",),
    "models.nn.model": ("Flops", "Loss", "Mixture", "Model", "Structure"),
    "models.nn.param": ("Param",),
    "models.nn.vma": ("axes_of", "vary"),
    "recipe.load": ("load",),
    "recipe.recipe": ("Recipe",),
    "inference.open_run": ("OpenRun", "open"),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'dtrain' has no attribute {name!r}")
    from dtrain.parallel.devices import configure_environment

    configure_environment()  # before JAX is imported
    if name == "errors":
        return import_module("dtrain.core.errors")
    if name == "layers":
        return import_module("dtrain.models.nn.layers")
    if name == "make_plan":  # `dtrain.plan` is the package
        return import_module("dtrain.plan.plan").plan
    if name == "run":
        return import_module("dtrain.train.run").run_and_open
    source = next(module for module, names in _SOURCES.items() if name in names)
    return getattr(import_module(f"dtrain.{source}"), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
