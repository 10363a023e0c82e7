"""What two sections must agree on, said with the arithmetic, before a device is touched."""

import math
from collections.abc import Iterator, Mapping

from dtrain.errors import FieldError
from dtrain.folder import NAME
from dtrain.models.custom import Custom
from dtrain.parallel.mesh import BATCH_AXES, visible
from dtrain.parallel.rules import Layout
from dtrain.recipe.recipe import Recipe

Problem = tuple[str, str, str]
"""Dotted path, message, hint."""


def problems_of(recipe: Recipe, devices: int | None) -> list[Problem]:
    """Everything that the sections disagree on, as far as it is known without devices and data."""
    return [
        *_name(recipe),
        *_mesh(recipe, devices),
        *_batch(recipe, devices),
        *_engine(recipe),
        *_model(recipe),
        *_schedule(recipe),
        *_best(recipe),
    ]


def _name(recipe: Recipe) -> Iterator[Problem]:
    if not NAME.fullmatch(recipe.name):
        yield "name", f"{recipe.name!r} is no run name", "use a to z, 0 to 9 and '-' inside, 63 characters at most"


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
    yield from divides("batch", recipe.batch, sizes, recipe.accumulate)
    if recipe.evaluate.batch:
        yield from divides("evaluate.batch", recipe.evaluate.batch, sizes, 1)


def divides(path: str, batch: int, sizes: Mapping[str, int], accumulate: int) -> Iterator[Problem]:
    """Whether a batch can be split over the mesh's batch axes and into microbatches.

    The devices of a pipeline share its microbatches; elsewhere each device takes all of its own.
    """
    groups = math.prod(sizes[axis] for axis in BATCH_AXES if axis != "pipeline")
    stages = sizes["pipeline"]
    unit = groups * (math.lcm(stages, accumulate) if stages > 1 else accumulate)
    if batch % unit:
        lower, upper = batch // unit * unit, (batch // unit + 1) * unit
        factors = [f"{axis} {size}" for axis, size in visible(sizes).items() if axis in BATCH_AXES and size > 1]
        factors += [f"{accumulate} microbatches"] if accumulate > 1 else []
        hint = f"use {lower} or {upper}" if lower else f"use {upper}"
        yield path, f"{batch} examples do not divide by {unit}, which {' x '.join(factors)} asks for", hint


def _engine(recipe: Recipe) -> Iterator[Problem]:
    layout = Layout(recipe.mesh.given, recipe.mesh.table(), {})
    refusal = recipe.engine.refusal(layout, processes=1)
    if refusal:
        yield "engine", refusal, "use engine: shard_map or jit"


def _model(recipe: Recipe) -> Iterator[Problem]:
    if isinstance(recipe.model, Custom):
        return  # building it would run the user's code
    example = recipe.data.example()
    mismatch = recipe.model.mismatch(example) if example else ""
    if mismatch:
        yield "model", mismatch, ""
    layout = Layout(recipe.mesh.given, recipe.mesh.table(), recipe.model.params(), example=example or {})
    stages, turn = recipe.mesh.given["pipeline"], getattr(recipe.model, "global_every", 0)
    layers = getattr(recipe.model, "layers", stages)
    if turn and layers % stages == 0 and layers // stages % turn:
        held = f"{layers // stages} layers to a stage, no multiple of model.global_every = {turn}"
        yield "mesh.pipeline", f"pipeline = {stages} leaves {held}", ""
    for axis, message in layout.problems():
        yield f"mesh.{axis}", message, ""


def _schedule(recipe: Recipe) -> Iterator[Problem]:
    if recipe.steps is not None and recipe.optimizer.schedule.warmup >= recipe.steps:
        warmup = recipe.optimizer.schedule.warmup
        yield "optimizer.schedule.warmup", f"{warmup} warm-up steps in a run of {recipe.steps}", ""


def _best(recipe: Recipe) -> Iterator[Problem]:
    best = recipe.checkpoint.best
    known = {"eval/loss", "eval/perplexity" if recipe.model.kind == "decoder" else "eval/accuracy"}
    if best is not None and best not in known:
        yield "checkpoint.best", f"no metric {best!r}", f"one of {', '.join(sorted(known))}"
