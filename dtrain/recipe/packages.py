"""The optional packages that a recipe needs where it runs, found without opening what it names."""

from collections.abc import Iterator

from dtrain.core import extras
from dtrain.core.errors import EnvironmentFault
from dtrain.core.weights_source import WeightsSource
from dtrain.data.files import address_packages
from dtrain.recipe.recipe import Recipe


def packages(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Each section that needs a package, by its dotted path, and the name with which the package is imported."""
    yield from (("data", name) for name in recipe.data.packages)
    for number, tracker in enumerate(recipe.track.to):
        yield from ((f"track.to.{number}", name) for name in tracker.packages)
    yield from (("evaluate.questions", name) for name in address_packages(recipe.evaluate.questions))
    yield from (("evaluate.samples", "PIL") for _ in range(bool(recipe.evaluate.samples)))
    yield from (("init", name) for name in _of(recipe.init))
    for at, part in recipe.parts.items():
        yield from ((f"parts.{at}", name) for name in part.packages)
    yield from (("objective", name) for name in (recipe.objective.packages if recipe.objective else ()))


def _of(origin: WeightsSource | None) -> tuple[str, ...]:
    return origin.packages if origin else ()


def missing(recipe: Recipe) -> EnvironmentFault | None:
    """The packages that the recipe needs and that are not installed, as one error with one command."""
    needed: dict[str, str] = {}
    for path, name in packages(recipe):
        needed.setdefault(name, path)
    absent = extras.missing(needed)
    if not absent:
        return None
    several = len(absent) > 1
    listed = ", ".join(f"{name} ({needed[name]}: it {extras.use_of(name)})" for name in absent)
    message = f"{recipe.name} needs {'packages' if several else 'a package'} that {'are' if several else 'is'} missing"
    return EnvironmentFault(f"{message}: {listed}", extras.command(absent), "E-PACKAGE")
