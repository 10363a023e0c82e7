"""Choose a checkpoint of a run: its newest, its best, or that of a given step."""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress

import jax

from dtrain.checkpoint import manifest
from dtrain.checkpoint.manifest import CorruptCheckpoint, Manifest
from dtrain.checkpoint.store import Store
from dtrain.core.counts import counted
from dtrain.core.errors import CheckpointError, EnvironmentFault, RecipeError
from dtrain.core.leftovers import temporary_folder
from dtrain.core.metrics import higher_is_better, recorded
from dtrain.core.run_dir import Folder, saved_steps
from dtrain.recipe.load import differences, load, plain, recipe_digest
from dtrain.recipe.recipe import Recipe


def refuse_no_run(run_dir: Folder) -> None:
    """Raise RecipeError if this is no run folder, CheckpointError if it has no checkpoints."""
    run_dir.refuse_other_kinds()
    if not run_dir.recipe.exists():
        raise RecipeError(f"{run_dir.path} is not a run folder: recipe.yaml is missing", "give a run folder, runs/NAME")
    if not run_dir.checkpoints.is_dir():
        raise CheckpointError(f"{run_dir.path} has no checkpoint yet", "train it first: dtrain run")


def recipe_of(
    checkpoint: Manifest, run_dir: Folder, recipe: Recipe, say: Callable[[str], None], overrides: Sequence[str] = ()
) -> Recipe:
    """The recipe with which a checkpoint of a run was saved, with overrides.

    It is `recipe`, that of recipe.yaml, unless a start with another recipe followed (--allow-changes); `say` gets a
    line if that computes other numbers. A recipe.yaml that was edited by hand counts as it is.
    """
    written = run_dir.recipe.read_text()
    then = checkpoint.conditions.get("recipe_yaml")
    if then in (None, written) or run_dir.read_record().get("recipe") != recipe_digest(written):
        return recipe
    with temporary_folder("recipe") as folder:
        (folder / run_dir.recipe.name).write_text(then)
        own = load(folder / run_dir.recipe.name, overrides)
    if changed := differences(plain(own), plain(recipe)):
        say(f"the recipe was changed after step {checkpoint.step}, whose own is used: {'; '.join(changed)}"[:500])
    return own


def select_checkpoint(
    run_dir: Folder, recipe: Recipe, store: Store, say: Callable[[str], None], *, step: int | None, best: bool
) -> tuple[Manifest, str]:
    """A run's newest checkpoint, its best one, or that of a given step, checked; and a text that says which it is."""
    if step is None and not best:
        checkpoint = store.newest(say)
        if checkpoint is None and (damaged := saved_steps(run_dir.checkpoints)):
            message = f"{run_dir.path}: none of its {counted(len(damaged), 'checkpoint')} can be used, each is damaged"
            raise CheckpointError(message, f"copy an undamaged one to {run_dir.checkpoints}, or train it anew")
        if checkpoint is None:
            raise CheckpointError(f"{run_dir.path} has no checkpoint yet", "train it first: dtrain run")
        last = run_dir.read_record().get("step") or 0
        if last > checkpoint.step and last not in saved_steps(run_dir.checkpoints):
            say(
                f"warning: run.json records a checkpoint of step {last}, which is missing; `dtrain run` trains it again"
            )
        return checkpoint, f"step {checkpoint.step}, the newest"
    requested, chosen = _best(run_dir, recipe) if step is None else (step, f"step {step}")
    return _checked(run_dir, requested), chosen


def _best(run_dir: Folder, recipe: Recipe) -> tuple[int, str]:
    """The step with the best value of `checkpoint.best`, the newest of equal ones, and a text that explains it."""
    name, known = recipe.checkpoint.best, {}
    if name is None:
        hint = f"set checkpoint.best before training, or use --step; saved steps: {_saved(run_dir)}"
        raise RecipeError("--best: the recipe has no checkpoint.best, so checkpoints have no metric", hint)
    for step in saved_steps(run_dir.checkpoints):
        with suppress(CorruptCheckpoint, OSError):  # a damaged checkpoint is not a candidate
            known[step] = manifest.read(run_dir.checkpoints / str(step)).metrics.get(name, math.nan)
    known = {step: value for step, value in known.items() if math.isfinite(value)}
    if not known:
        hint = f"use --step; saved steps: {_saved(run_dir)}"
        raise CheckpointError(f"--best: no checkpoint of {run_dir.path} has a value of {name}", hint)
    up = higher_is_better(name, recorded(run_dir.read_record()))
    if up is None:
        raise RecipeError(f"--best: it is not known whether a higher or a lower {name} is better", "use --step")
    step = (max if up else min)(known, key=lambda step: known[step])
    return step, f"step {step}, the best of {len(known)} checkpoints by {name}: {known[step]:.6g}"


def _checked(run_dir: Folder, step: int) -> Manifest:
    """The manifest of that step, after every file was compared with its digest."""
    if step not in saved_steps(run_dir.checkpoints):
        raise CheckpointError(f"{run_dir.path} has no checkpoint of step {step}", f"saved steps: {_saved(run_dir)}")
    try:
        return manifest.check(run_dir.checkpoints / str(step), jax.process_index(), jax.process_count())
    except CorruptCheckpoint as error:
        raise CheckpointError(f"checkpoint {step} is damaged: {error}", f"saved steps: {_saved(run_dir)}") from error
    except OSError as error:
        raise EnvironmentFault(f"checkpoint {step} cannot be read: {error}") from error


def _saved(run_dir: Folder) -> str:
    return ", ".join(map(str, sorted(saved_steps(run_dir.checkpoints))))
