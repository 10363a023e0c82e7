"""`dtrain check`: find all that `run` would refuse before its first step, as far as it can be known here."""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from glob import glob
from pathlib import Path

from dtrain.core.counts import counted
from dtrain.core.errors import DataError, DtrainError, FieldError, RecipeError
from dtrain.core.extras import installed
from dtrain.core.limited import OverLimit, limited
from dtrain.core.process_info import process_info
from dtrain.core.weights_source import WeightsSource
from dtrain.data.batch import Example
from dtrain.data.data_check import DataCheck
from dtrain.data.lost_text import lost_text
from dtrain.data.paths import is_remote
from dtrain.data.questions import read_questions
from dtrain.data.source import Data
from dtrain.recipe.crosscheck import Problem, Unread, problems_of, warmup_problem
from dtrain.recipe.load import Draft, draft, load
from dtrain.recipe.packages import missing
from dtrain.recipe.recipe import Recipe
from dtrain.recipe.sizes import sized_model

FORCED = re.compile(r"--xla_force_host_platform_device_count=(\d+)")


def devices_here() -> int | None:
    """Number of devices that a run would have; None if only JAX could find out."""
    platforms = os.environ.get("JAX_PLATFORMS", "")
    accelerators = any(map(glob, ("/dev/accel*", "/dev/vfio/*", "/dev/nvidia[0-9]*", "/dev/kfd")))
    plugin = any(map(installed, ("libtpu", "jax_cuda12_plugin", "jax_cuda13_plugin", "jax_rocm60_plugin")))
    if process_info() or (platforms != "cpu" and accelerators and plugin):
        return None
    if platforms and "cpu" not in platforms.split(","):
        return None
    forced = FORCED.search(os.environ.get("XLA_FLAGS", ""))
    simulated = os.environ.get("JAX_NUM_CPU_DEVICES", "")
    return int(simulated) if simulated.isdecimal() else int(forced[1]) if forced else 1


@dataclass
class CheckReport:
    """A recipe in which no mistake was found, and what was checked."""

    recipe: Recipe
    checked: list[str] = field(default_factory=list)
    not_checked: list[str] = field(default_factory=list)
    """What was not checked, and why."""
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def verdict(self) -> str:
        """One line: what was checked, and by name what was not."""
        line = f"{self.recipe.name}: no mistake found in {', '.join(self.checked)}"
        return line + (f"; not checked: {'; '.join(self.not_checked)}" if self.not_checked else "")


def examine(
    path: Path,
    overrides: Sequence[str],
    devices: int | None,
    data: bool,
    inspect: Callable[[Data], DataCheck] | None = None,
) -> CheckReport:
    """Check a recipe. Raises RecipeError with every problem, DataError if only the data has problems, or
    EnvironmentFault if only packages are missing here.

    Runs no code that the recipe names, writes nothing, downloads nothing, touches no device. `data`: open the data, by
    `inspect`, which several recipes of the same data share; default: `inspect_data`.
    """
    parsed = draft(path, overrides)
    unavailable = None if parsed.problems.count else missing(parsed.recipe())
    skipped = "a package is missing" if unavailable else "--no-data"
    inspected = _data(parsed, data and not unavailable, skipped, inspect or inspect_data)
    for problem in _crosschecks(parsed, devices, inspected):
        parsed.add(problem)
    for problem in _length(parsed, inspected):
        parsed.add(problem)
    of_recipe = parsed.problems.count
    for where, error in inspected.problems:
        parsed.add((where, error.message, error.hint))
    for problem in _held_out(parsed, inspected):
        parsed.add(problem)
    if parsed.problems.count:
        raise (
            RecipeError(parsed.problems.lines, topic=parsed.problems.key)
            if of_recipe
            else DataError("\n".join(parsed.problems.lines))
        )
    result = CheckReport(parsed.recipe(), ["the recipe"], inspected.not_checked)
    if unavailable and not result.recipe.launch:
        raise unavailable
    if unavailable:  # elsewhere they may be installed
        result.not_checked += [unavailable.message.removeprefix(f"{result.recipe.name} ")]
    part = "part of its data" if inspected.partly else "one example of its data"
    result.checked += [part] if data and inspected.opened else []
    result.notes += [f"{key}: {taken}, relative to the recipe" for key, taken in parsed.beside.items()]
    result.notes += inspected.notes
    result.warnings += inspected.warnings
    result.warnings += _long_intervals(result.recipe, inspected)
    _model(result, inspected)
    _init(result)
    _devices(result, devices)
    return result


def inspect_data(data: Data) -> DataCheck:
    """Inspect the data: its examples, its problems, and what was not inspected.

    Data, templates and tokenizers may come from others, and may be made to take all of a machine's time or memory.
    """
    try:
        return limited(_inspected, data)
    except OverLimit as error:
        hint = "a file may be made to cost this much; if it is right, `--no-data` leaves the data out of the check"
        return DataCheck(problems=[("data", DataError(f"cannot be inspected: {error}", hint))])


def inspect_once() -> Callable[[Data], DataCheck]:
    """`inspect_data` for several recipes: equal data is inspected once."""
    seen: list[tuple[Data, DataCheck]] = []

    def inspect(data: Data) -> DataCheck:
        found = next((found for known, found in seen if known == data), None)
        if found is None:
            found = inspect_data(data)
            seen.append((data, found))
        return replace(
            found,
            problems=[*found.problems],
            not_checked=[*found.not_checked],
            notes=[*found.notes],
            warnings=[*found.warnings],
        )

    return inspect


def _inspected(data: Data) -> DataCheck:
    result = DataCheck()
    try:
        data.inspect(result)
    except DataError as error:
        result.problems.append(("data", error))
    except (OSError, ValueError, MemoryError) as error:
        result.problems.append(("data", DataError(f"cannot be read: {error or 'it needs more memory than there is'}")))
    result.partly = bool(result.not_checked)
    result.warnings += [] if result.problems else lost_text(data, copied=False)
    return result


def _data(parsed: Draft, opened: bool, skipped: str, inspect: Callable[[Data], DataCheck]) -> DataCheck:
    try:
        data, names, model = parsed.parts.data, parsed.parts.evaluate.questions, parsed.parts.model
    except Unread:
        return DataCheck()
    if not opened:
        return DataCheck(not_checked=[f"the data ({skipped})"])
    check = inspect(data)
    try:
        if names and not model.generates:
            message = f"a model of kind {model.kind} generates no text, and so answers no questions"
            raise DataError(message, "leave evaluate.questions out")
        here = tuple(name for name in names if not is_remote(name))
        check.not_checked += [f"evaluate.questions: {name}" for name in names if name not in here]
        if here:
            read_questions(here)
    except DataError as error:
        check.problems.append(("evaluate.questions", error))
    return check


def _crosschecks(parsed: Draft, devices: int | None, inspected: DataCheck) -> list[Problem]:
    """Conflicts between sections, with the data's own example if it was opened."""
    example = inspected.examples.get("train")
    with suppress(Unread):  # without its section, what needs an example is not checked
        nothing: Example = {}
        example = nothing if example is None and parsed.parts.data.example_from_files else example
    return problems_of(parsed.parts, devices, example)


def _length(parsed: Draft, inspected: DataCheck) -> Iterator[Problem]:
    """Problems of a length given in epochs: too many steps, or fewer than the warm-up."""
    if parsed.problems.count or inspected.rows is None or parsed.recipe().epochs is None:
        return
    try:
        yield from warmup_problem(parsed.recipe(), parsed.recipe().total_steps(inspected.rows))
    except RecipeError as error:
        yield "epochs", error.message.removeprefix("epochs: "), error.hint


def _held_out(parsed: Draft, inspected: DataCheck) -> Iterator[Problem]:
    """A problem if the model does not accept the held-out examples."""
    if not parsed.problems.count and "test" in inspected.examples and not _custom(parsed.recipe()):
        train = inspected.examples.get("train", {})
        model = sized_model(parsed.recipe(), train)
        unfit = "" if model.left_out else model.mismatch(inspected.examples["test"])
        if unfit:
            yield "data", f"held-out examples: {unfit}", "change the model's sizes, or the data"


def _custom(recipe: Recipe) -> bool:
    """Whether building the model would run code that the recipe names."""
    return bool(recipe.model.user_code)


def _steps(recipe: Recipe, inspected: DataCheck) -> int | None:
    """The steps of the run, if they are known."""
    return recipe.steps if recipe.steps is not None or inspected.rows is None else recipe.total_steps(inspected.rows)


def _long_intervals(recipe: Recipe, inspected: DataCheck) -> Iterator[str]:
    """Warnings of intervals that are longer than the run."""
    steps = _steps(recipe, inspected)
    for key, every in (("evaluate.every", recipe.evaluate.every), ("checkpoint.every", recipe.checkpoint.every)):
        if steps is not None and isinstance(every, int) and every > steps:
            yield f"{key} = {every:,}: the run has only {steps:,} steps, so this happens only at its end"


def _model(found: CheckReport, inspected: DataCheck) -> None:
    """Record what a custom model and unopened data leave unchecked: the first is not built, epochs have no length."""
    if _custom(found.recipe):
        found.not_checked.append("the model, whose module is imported only when the run starts")
    trackers = [tracker.user_code for tracker in found.recipe.track.to if tracker.user_code]
    measures = [measure.user_code for measure in found.recipe.evaluate.measures if measure.user_code]
    for what, names in (("tracker", trackers), ("measure", measures)):
        found.not_checked += [f"the {what} {name}, whose module is imported only when the run starts" for name in names]
    if found.recipe.epochs is not None and inspected.rows is None and found.recipe.optimizer.schedule.warmup:
        found.not_checked.append("whether the warm-up is shorter than the run")


REFUSED = ", so `run` would refuse it here"


def _init(found: CheckReport) -> None:
    """Record that parameters from elsewhere are not compared; warn if there is no such run or file here."""
    sources: dict[str, WeightsSource] = {"init": found.recipe.init} if found.recipe.init else {}
    sources |= {f"objective.{part}": origin for part, origin in found.recipe.minimised.sources().items()}
    sources |= {f"parts.{name}": part for name, part in found.recipe.parts.items()}
    for place, origin in sources.items():
        found.not_checked.append(f"which parameters{' and sizes' * (place != 'init')} {origin.text} has")
        if origin.run and not (Path(origin.run) / "recipe.yaml").exists():
            found.warnings.append(f"{place}.run: {origin.run} is no run folder on this machine{REFUSED}")
        elif origin.run and _has_adapters(Path(origin.run)):
            whole = f"dtrain export {origin.run} {Path(origin.run).name}-whole"
            found.warnings.append(f"{place}.run: {origin.run} has adapters alone (lora){REFUSED}; join them: {whole}")
        if origin.weights and not Path(origin.weights).exists():
            found.warnings.append(f"{place}.weights: {origin.weights} does not exist on this machine{REFUSED}")


def _has_adapters(folder: Path) -> bool:
    """Whether a run trains adapters, which are no whole model; false for a recipe that cannot be read."""
    try:
        return load(folder / "recipe.yaml").lora is not None
    except DtrainError:
        return False


def _devices(found: CheckReport, devices: int | None) -> None:
    """Check the mesh against the given devices, or those of this machine if they are known."""
    mesh = found.recipe.mesh
    needed = counted(mesh.least, "device") + ("" if mesh.exact else " or a multiple")
    if devices is not None:
        found.checked.append(f"its mesh on {devices} devices")
        return
    here = None if found.recipe.launch else devices_here()
    if here is None:
        found.not_checked.append(f"the devices (the mesh needs {needed})")
        return
    try:
        mesh.sizes(here)
    except FieldError:
        hint = f"`--devices {mesh.least}` simulates them on the CPU"
        found.warnings.append(f"the mesh needs {needed}; this machine has {here}, so `run` would refuse it: {hint}")
        found.not_checked.append("the mesh on other machines")
        return
    found.checked.append(f"its mesh on {counted(here, 'device')}")
