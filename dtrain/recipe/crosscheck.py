"""Check that the sections of a recipe agree, with the arithmetic in the message, before a device is touched."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from dtrain.core.errors import DataError, FieldError, Problem, RecipeError
from dtrain.core.metrics import LOSS, SCORES
from dtrain.core.run_dir import NAME
from dtrain.data.batch import LABEL, Example
from dtrain.models.lora import adapted
from dtrain.models.nn.param import count
from dtrain.models.nn.quantised import WIDTHS
from dtrain.models.objective import minimised
from dtrain.models.parts import with_parts
from dtrain.optim.groups import grouped
from dtrain.optim.update import FITTING
from dtrain.parallel.auto import others
from dtrain.parallel.mesh import BATCH_AXES, PIPELINE, mesh_sizes
from dtrain.parallel.rules import Layout
from dtrain.recipe.compose import nearest_name
from dtrain.recipe.parse import problems_of_section
from dtrain.recipe.recipe import Recipe, length_problem, watched
from dtrain.recipe.sizes import sized_model
from dtrain.recipe.values import FAILED

MOST_PARAMETERS = 10**15
MOST_VALUES = 2**40
"""In one batch."""


class Unread(Exception):
    """A section that a check needs could not be parsed; its own problem is already reported."""


class Sections:
    """The parsed sections of a recipe as attributes; access to one that could not be parsed raises `Unread`.

    Anything else that a Recipe has is an AttributeError: a check that needs it must not pass in silence.
    """

    def __init__(self, values: Mapping[str, object]) -> None:
        self._values = values

    def __getattr__(self, name: str) -> Any:
        if name not in Recipe.__dataclass_fields__:
            raise AttributeError(name)
        if self._values.get(name, FAILED) is FAILED:
            raise Unread(name)
        return self._values[name]

    def with_model(self, model: object) -> "Sections":
        """The same sections with another model."""
        return Sections({**self._values, "model": model})


def problems_of(recipe: Recipe, devices: int | None, example: Example | None = None) -> list[Problem]:
    """Every conflict between sections that can be found without devices.

    `example`: arrays of one example, if the data was opened; else the data section's own answer is used.
    """
    problems: list[Problem] = []
    with suppress(Unread):
        recipe, problems = _with_sizes(recipe, example)
    on, with_data = {"devices": devices}, {"example": example}
    checks = (_length, _name, partial(_mesh, **on), partial(_batch, **on), _layout, _engine)
    of_model = partial(_model, **with_data)
    checks += (partial(_bytes, **with_data), of_model, _tokens, _groups, _schedule)
    checks += (partial(_data, **with_data), _metrics, _evaluations, _samples, _lora, _parts, _objective, _notify)
    checks += (partial(_class_weights, **with_data),)
    if problems:
        checks = tuple(check for check in checks if check is not of_model)  # its sizes are refused already
    return problems + [problem for check in checks for problem in _read(check, recipe)]


def _with_sizes(recipe: Recipe, example: Example | None) -> tuple[Recipe, list[Problem]]:
    """The recipe with the sizes that its model takes from the data, as far as they are known."""
    if not recipe.model.left_out:
        return recipe, []
    example = recipe.data.example() if example is None else example
    try:
        return _with_model(recipe, sized_model(recipe, example or {})), []
    except FieldError as error:
        return recipe, [(f"model.{error.field}", error.message, error.hint)]
    except DataError as error:
        return recipe, [("model", error.message, error.hint)]


def _with_model(recipe: Any, model: object) -> Any:
    return recipe.with_model(model) if isinstance(recipe, Sections) else replace(recipe, model=model)


def _read(check: Callable[[Recipe], Iterator[Problem]], recipe: Recipe) -> list[Problem]:
    """The problems that a check finds, up to the point where it needs a section that could not be parsed."""
    problems: list[Problem] = []
    with suppress(Unread):
        problems.extend(check(recipe))
    return problems


def _length(recipe: Recipe) -> Iterator[Problem]:
    problem = length_problem(recipe.steps, recipe.epochs)
    if problem:
        yield "steps", problem, ""


def _name(recipe: Recipe) -> Iterator[Problem]:
    if not NAME.fullmatch(recipe.name):
        near = nearest_name(recipe.name)
        rule = "use a to z, 0 to 9, and '-' inside; at most 63 characters"
        yield "name", f"{recipe.name!r} is not a run name", f"did you mean {near!r}? {rule}" if near else rule


def _mesh(recipe: Recipe, devices: int | None) -> Iterator[Problem]:
    if devices is None:
        return
    try:
        recipe.mesh.sizes(devices)
    except FieldError as error:
        yield "mesh", error.message, error.hint


def _batch(recipe: Recipe, devices: int | None) -> Iterator[Problem]:
    known = devices if devices is not None and devices % recipe.mesh.least == 0 else recipe.mesh.least
    try:
        sizes = recipe.mesh.sizes(known)
    except FieldError:
        return
    yield from divisibility_problems("batch", recipe.batch, sizes, recipe.accumulate)
    if recipe.evaluate.batch:
        yield from divisibility_problems("evaluate.batch", recipe.evaluate.batch, sizes, 1)


def divisibility_problems(path: str, batch: int, sizes: Mapping[str, int], accumulate: int) -> Iterator[Problem]:
    """Check that a batch divides over the mesh's batch axes and into microbatches.

    Along the pipeline axis the stages share one set of microbatches, hence the least common multiple; along the other
    axes each group of devices has microbatches of its own.
    """
    groups = math.prod(sizes[axis] for axis in BATCH_AXES if axis != PIPELINE)
    stages = sizes[PIPELINE]
    unit = groups * (math.lcm(stages, accumulate) if stages > 1 else accumulate)
    if batch % unit:
        lower, upper = batch // unit * unit, (batch // unit + 1) * unit
        axes = [f"{axis} {size}" for axis, size in mesh_sizes(sizes).items() if axis in BATCH_AXES and size > 1]
        factors = [f"mesh {' x '.join(axes)}"] if axes else []
        factors += [f"{accumulate} microbatches"] if accumulate > 1 else []
        hint = f"use {lower} or {upper}" if lower else f"use {upper}"
        yield path, f"{batch} examples are not divisible by {unit}, as {' x '.join(factors)} requires", hint


def _layout(recipe: Recipe) -> Iterator[Problem]:
    layout = Layout(recipe.mesh.given, recipe.mesh.table(), {})
    refusal = recipe.engine.refusal(layout)
    if refusal:
        yield "engine", refusal, others(layout)


def _engine(recipe: Recipe) -> Iterator[Problem]:
    yield from recipe.engine.problems(recipe)


def _model(recipe: Recipe, example: Example | None) -> Iterator[Problem]:
    if recipe.model.user_code:
        return  # building it would run the user's code
    example = recipe.data.example() if example is None else example
    model = recipe.model
    mismatch = model.mismatch(example) if example else ""
    if mismatch:
        yield "model", mismatch, ""
    if model.left_out:
        return  # the data was not opened, or does not show them
    parameters = count(model.params())
    if parameters > MOST_PARAMETERS:
        yield "model", f"{parameters:.1e} parameters; at most {MOST_PARAMETERS:.0e}", "make the sizes smaller"
    try:
        declared = adapted(model, recipe.lora).params()
    except RecipeError as error:
        where, _, message = error.message.partition(": ")
        yield where, message, error.hint
        return
    try:
        declared = with_parts(declared, recipe.parts)
    except RecipeError as error:
        where, _, message = error.message.partition(": ")
        yield where, message, error.hint
    try:
        grouped(declared, recipe.optimizer.groups)
    except RecipeError as error:
        yield "optimizer.groups", error.message.removeprefix("optimizer.groups: "), error.hint
    layout = Layout(recipe.mesh.given, recipe.mesh.table(), declared, example=example or {})
    stages, structure = recipe.mesh.given[PIPELINE], model.structure
    layers, period = structure.layers, structure.period
    if stages > 1 and layers % stages == 0 and layers // stages % period:
        per_stage = f"{layers // stages} layers per stage, not a multiple of {period}, after which their kinds repeat"
        yield "mesh.pipeline", f"pipeline = {stages} gives {per_stage}", ""
    for axis, message in layout.problems():
        yield f"mesh.{axis}", message, ""


def _bytes(recipe: Recipe, example: Example | None) -> Iterator[Problem]:
    example = (recipe.data.example() if example is None else example) or {}
    size = max((math.prod(feature.shape) for feature in example.values()), default=0)
    if recipe.batch * size > MOST_VALUES:
        yield "batch", f"{recipe.batch} examples of {size:,} values each; at most {MOST_VALUES:.1e} values", ""


def _data(recipe: Recipe, example: Example | None) -> Iterator[Problem]:
    yield from recipe.data.problems(recipe, (recipe.data.example() if example is None else example) or {})


def _tokens(recipe: Recipe) -> Iterator[Problem]:
    """A problem if the model's vocabulary has tokens that files of tokens of this width cannot hold."""
    for key, message in recipe.data.too_narrow(getattr(recipe.model, "vocab", 0)):
        yield f"data.{key}", message, f"data.{key}: uint32, if that is how the files were written"


def _groups(recipe: Recipe) -> Iterator[Problem]:
    """Problems of the settings that groups of parameters have for themselves."""
    optimizer = recipe.optimizer
    for number, group in enumerate(optimizer.groups):
        where = f"optimizer.groups.{number}.args"
        try:
            optimizer.of_group(group.match)
        except RecipeError as error:
            yield where, error.message.removeprefix("optimizer.groups: "), error.hint
            continue
        if group.args and not optimizer.has_user_args:
            given = {"kind": optimizer.kind, "lr": optimizer.lr} | group.args
            for line in problems_of_section(type(optimizer), given):
                yield where, line, ""


def _schedule(recipe: Recipe) -> Iterator[Problem]:
    if recipe.steps is not None:
        yield from warmup_problem(recipe, recipe.steps)


def warmup_problem(recipe: Recipe, steps: int) -> Iterator[Problem]:
    """A problem if the run ends before its warm-up does."""
    warmup = recipe.optimizer.schedule.warmup_steps(steps)
    if warmup >= steps:
        yield "optimizer.schedule.warmup", f"{warmup} warm-up steps in a run of {steps} steps; use fewer", FITTING


def _metrics(recipe: Recipe) -> Iterator[Problem]:
    """Problems of keys that name a metric of the evaluation."""
    named = {f"{key}.metric": watch.metric for key, watch in watched(recipe).items()}
    if recipe.checkpoint.best is not None:
        named["checkpoint.best"] = recipe.checkpoint.best
    known = evaluated_metrics(recipe)
    if known is None:
        for key, name in named.items():
            if not name.startswith("eval/"):
                yield key, f"no metric {name!r}", f"a metric of the evaluation: eval/{name.rpartition('/')[2]}"
        return
    for key, name in named.items():
        if name not in known:
            yield key, f"no metric {name!r}", f"one of {', '.join(sorted(known))}"


def evaluated_metrics(recipe: Recipe) -> set[str] | None:
    """The names of what an evaluation measures; None if only the run knows them."""
    measures = [measure.declared for measure in recipe.evaluate.measures]
    if recipe.model.user_code or recipe.model.left_out or None in measures:
        return None
    more = SCORES if recipe.evaluate.questions else ()
    more += tuple(metric for declared in measures for metric in declared or ())
    return {f"eval/{metric.name}" for metric in (LOSS, *recipe.model.metrics, *minimised(recipe).metrics, *more)}


def _evaluations(recipe: Recipe) -> Iterator[Problem]:
    """Problems of what needs evaluations while the run trains, and of measures that fall between two of them."""
    every = recipe.evaluate.every
    for key in watched(recipe) if every == 0 else ():
        yield "evaluate.every", f"0, so that there is no evaluation by which {key} could decide", "evaluate.every: 500"
    for number, measure in enumerate(recipe.evaluate.measures):
        where = f"evaluate.measures.{number}"
        if measure.every and (not every or measure.every % every):
            found = "evaluate.every, which is not set" if every is None else f"evaluate.every = {every}"
            yield f"{where}.every", f"{measure.every} is no multiple of {found}", "leave it out, or 0"
        needs = measure.needs
        known = not recipe.model.user_code and not recipe.model.left_out  # else by the data, or by the user's code
        if needs and known and needs.metric not in recipe.model.metrics:
            yield where, f"a model of kind {recipe.model.kind} predicts no {needs.of} here", "leave it out"
        if measure.purpose == "samples" and recipe.model.generates:
            yield f"{where}.of", f"a model of kind {recipe.model.kind} writes texts, and draws no samples", ""


def _samples(recipe: Recipe) -> Iterator[Problem]:
    if recipe.evaluate.samples and recipe.model.generates:
        hint = "evaluate.questions has it answer questions at each evaluation"
        yield "evaluate.samples", f"a model of kind {recipe.model.kind} writes texts, and draws no samples", hint


def _lora(recipe: Recipe) -> Iterator[Problem]:
    if recipe.lora and not recipe.init:
        yield "init", "missing: lora adapts the parameters of another run", "init: {run: runs/base}"
    if recipe.lora and recipe.lora.dtype in WIDTHS and recipe.precision.narrow:
        why = f"products with matrices in {recipe.lora.dtype} (lora.dtype) are computed in precision.compute"
        yield "precision.matmul", f"{recipe.precision.matmul}: {why}", "leave it out, or use lora.dtype: bfloat16"


def _parts(recipe: Recipe) -> Iterator[Problem]:
    if recipe.parts and (recipe.lora or recipe.objective):
        with_ = "lora" if recipe.lora else "objective"
        yield "parts", f"the parameters of a run with {with_} come from init and {with_} alone", "leave it out"


def _objective(recipe: Recipe) -> Iterator[Problem]:
    yield from minimised(recipe).problems(recipe)


def _class_weights(recipe: Recipe, example: Example | None) -> Iterator[Problem]:
    """Problems of weights of classes: of data without classes, or where an example has two of them."""
    example = (recipe.data.example() if example is None else example) or {}
    if not recipe.class_weights:
        return
    if example and (LABEL not in example or not example[LABEL].values):
        yield "class_weights", f"data of kind {recipe.data.kind} has no classes here", "leave it out"
    if recipe.data.needs_pairs:
        message = "data.pixels mixes two images, whose classes may have different weights"
        yield "class_weights", message, "leave out class_weights, or mixup and cutmix"


def _notify(recipe: Recipe) -> Iterator[Problem]:
    """A problem if launched machines would not get the webhook's URL; a `local` launch has this environment anyway."""
    notify, launch = recipe.track.notify, recipe.launch
    variable = notify.webhook if notify else None
    if variable and launch and not launch.keeps_environment and variable not in launch.environment:
        message = f"the launched run would not have {variable}, the variable that track.notify.webhook reads"
        yield "launch.environment", message, f"add it: launch.environment: [{variable}]"
