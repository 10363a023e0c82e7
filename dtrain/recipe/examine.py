"""What `dtrain check` finds: all that `run` would refuse before the first step, as far as it can be known here."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dtrain.core.errors import DataError, FieldError, RecipeError
from dtrain.data.batch import Example
from dtrain.data.idx import IDX
from dtrain.models.custom import Custom
from dtrain.recipe.crosscheck import Problem, Unread, problems_of, warmup_problem
from dtrain.recipe.load import Draft, draft
from dtrain.recipe.look import Look, look
from dtrain.recipe.machine import devices_here
from dtrain.recipe.recipe import Recipe


@dataclass
class Examined:
    """A recipe in which no mistake was found, and how far that was looked at."""

    recipe: Recipe
    checked: list[str] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
    """What was not checked, and why."""
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def verdict(self) -> str:
        """One line: what was checked, and by name what was not."""
        line = f"{self.recipe.name}: no mistake found in {', '.join(self.checked)}"
        return line + (f"; not checked: {'; '.join(self.unseen)}" if self.unseen else "")


def examine(path: Path, overrides: Sequence[str], devices: int | None, data: bool) -> Examined:
    """The recipe, examined. RecipeError with every problem; DataError where only the data has any.

    Runs no code of the recipe, writes nothing, fetches nothing, touches no device. `data` opens the data.
    """
    made = draft(path, overrides)
    seen = _data(made, data)
    for problem in _crosschecks(made, devices, seen):
        made.add(problem)
    for problem in _length(made, seen):
        made.add(problem)
    of_recipe = made.problems.count
    for where, error in seen.problems:
        made.add((where, error.message, error.hint))
    for problem in _held_out(made, seen):
        made.add(problem)
    if made.problems.count:
        raise RecipeError(made.problems.lines) if of_recipe else DataError("\n".join(made.problems.lines))
    found = Examined(made.recipe(), ["the recipe"], seen.unseen)
    part = "part of its data" if any(text.startswith("data") for text in seen.unseen) else "its data"
    found.checked += [part] if data and seen.opened else []
    found.notes += [f"{key}: {taken}, beside the recipe" for key, taken in made.beside.items()]
    found.warnings += _never(found.recipe, seen)
    _model(found, seen)
    _devices(found, devices)
    return found


def _data(made: Draft, wanted: bool) -> Look:
    try:
        data = made.parts.data
    except Unread:
        return Look()
    return look(data) if wanted else Look(unseen=["the data (--no-data)"])


def _crosschecks(made: Draft, devices: int | None, seen: Look) -> list[Problem]:
    """What the sections disagree on, with the example that the data holds where it was opened."""
    nothing: Example = {}
    unread = isinstance(made.values.get("data"), IDX) and "train" not in seen.found
    return problems_of(made.parts, devices, nothing if unread else seen.found.get("train"))


def _length(made: Draft, seen: Look) -> Iterator[Problem]:
    """Whether the run, in steps, is of a length that it can have and that its warm-up fits into."""
    if made.problems.count or seen.examples is None or made.recipe().epochs is None:
        return
    try:
        yield from warmup_problem(made.recipe(), made.recipe().total_steps(seen.examples))
    except RecipeError as error:
        yield "epochs", error.message.removeprefix("epochs: "), error.hint


def _held_out(made: Draft, seen: Look) -> Iterator[Problem]:
    """Whether the model takes the examples that are held out."""
    if not made.problems.count and "test" in seen.found and not _foreign(made.recipe()):
        unfit = made.recipe().model.mismatch(seen.found["test"])
        if unfit:
            yield "data", f"held-out examples: {unfit}", "change the model's sizes, or the data"


def _foreign(recipe: Recipe) -> bool:
    """Whether building the model would run code of the recipe's author."""
    return isinstance(recipe.model, Custom)


def _steps(recipe: Recipe, seen: Look) -> int | None:
    """The steps of the run, where they are known."""
    return recipe.steps if recipe.steps is not None or seen.examples is None else recipe.total_steps(seen.examples)


def _never(recipe: Recipe, seen: Look) -> Iterator[str]:
    """What the recipe asks for and the run never comes to."""
    steps = _steps(recipe, seen)
    for key, every in (("evaluate.every", recipe.evaluate.every), ("checkpoint.every", recipe.checkpoint.every)):
        if steps is not None and isinstance(every, int) and every > steps:
            yield f"{key} = {every:,}: the run has {steps:,} steps, so that it is done only at the end"


def _model(found: Examined, seen: Look) -> None:
    """A model of the user's own is not built here, and without the data an epoch has no length."""
    if _foreign(found.recipe):
        found.unseen.append("the model, whose module is imported only when the run starts")
    if found.recipe.epochs is not None and seen.examples is None and found.recipe.optimizer.schedule.warmup:
        found.unseen.append("whether the warm-up is shorter than the run")


def _devices(found: Examined, devices: int | None) -> None:
    """Whether the mesh fits the devices of this machine, where they are known."""
    mesh = found.recipe.mesh
    needed = f"{mesh.least} device{'s' * (mesh.least > 1)}" + ("" if mesh.exact else " or a multiple")
    if devices is not None:
        found.checked.append(f"its mesh on {devices} devices")
        return
    here = None if found.recipe.launch else devices_here()
    if here is None:
        found.unseen.append(f"the devices (the mesh needs {needed})")
        return
    try:
        mesh.sizes(here)
    except FieldError:
        hint = f"`--devices {mesh.least}` runs it on simulated devices"
        found.warnings.append(f"the mesh needs {needed}; this machine has {here}, where `run` refuses it: {hint}")
        found.unseen.append("the mesh on other machines")
        return
    found.checked.append(f"its mesh on {here} device{'s' * (here > 1)}")
