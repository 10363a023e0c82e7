"""What the numbers of a checkpoint depend on, recorded in its manifest, and how a later start differs from that."""

import hashlib
import json
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from dtrain.assembly.assemble import Assembly
from dtrain.assembly.user_modules import user_modules
from dtrain.core.files import code_digest
from dtrain.core.types import JsonObject
from dtrain.data.batch import plain_example
from dtrain.data.source import Source
from dtrain.models.settings import later
from dtrain.optim.update import learning_rate
from dtrain.parallel.mesh import mesh_sizes
from dtrain.recipe.load import COMPUTING, IRRELEVANT, LOADING, flattened, lasting_text, plain, text
from dtrain.recipe.recipe import Engine, Recipe
from dtrain.train.record import versions

VERSIONS = ("python", "dtrain", "jax", "jaxlib", "numpy", "optax")
"""The recorded versions that can change the numbers of a step."""

FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
CONFIG = ("jax_enable_x64", "jax_default_matmul_precision", "jax_default_prng_impl", "jax_threefry_partitionable")

ROUNDING = {"engine", "accumulate", "mesh", "processes", "hardware", *COMPUTING}
"""Conditions that change only the order of floating-point sums, or the instructions that compute them."""

WATCHING = {"guard.budget", "guard.patience", "guard.constants_mb", "guard.purity", "guard.contract", "guard.nan"}
WITHOUT_EFFECT = (IRRELEVANT - {"engine", "accumulate", "guard"}) | LOADING | WATCHING
"""Keys of a recipe that change no number of a step. The resolved mesh and number of steps are compared separately."""

SAME_BITS = "same recipe, code, software, devices and mesh: the same bits"
"""What is said where no condition differs."""
SHOWN = 8
"""Differences that are listed."""


def conditions(assembly: Assembly) -> dict[str, object]:
    """Everything that the numbers of this start depend on, as JSON values.

    Call it soon after the model was imported: it reads the files of the imported code, which may change later.
    """
    devices = jax.devices()
    return {
        "settings": recorded_settings(assembly.recipe, assembly.engine),
        "steps": assembly.steps,
        "mesh": dict(mesh_sizes(assembly.layout.sizes)),
        "processes": jax.process_count(),
        "versions": versions(),
        "hardware": _hardware(devices[0]) | {"devices": len(devices)},
        "compiler": _compiler(devices[0]),
        "code": dict(_code(assembly.recipe)),
    }


def conditions_of(
    now: JsonObject,
    recipe: Recipe,
    source: Source,
    batches_skipped: int,
    step: int,
    eval_pending: bool,
    hooks_state: JsonObject,
    step_s: float,
) -> JsonObject:
    """The `conditions` of a manifest: settings and software, batches skipped so far, whether an evaluation is pending,
    the state of the loss guard and of what watches metrics, the seconds spent in steps, and the next learning rate."""
    return {
        **now,
        "step_s": step_s,
        "batches_skipped": batches_skipped,
        "evaluation_pending": eval_pending,
        **hooks_state,
        "examples": step * recipe.batch,
        "seed": recipe.seed,
        "recipe": hashlib.sha256(text(recipe).encode()).hexdigest()[:16],
        "recipe_yaml": lasting_text(recipe),
        "data": source.fingerprint,
        "example": plain_example(source.example),
        "lr": float(learning_rate(recipe.optimizer, now["steps"])(step)),
    }


def resume_guarantee(saved: JsonObject, now: JsonObject, recipe: Recipe, step: int) -> list[str]:
    """Lines for the user: what a restart guarantees, then each difference from the start that saved the checkpoint."""
    changed = list(_changes(saved, now))
    if not changed:
        return [SAME_BITS]
    rate = float(learning_rate(recipe.optimizer, now["steps"])(step))
    if "lr" in saved and abs(rate - saved["lr"]) > 1e-6 * max(rate, saved["lr"]):
        changed.insert(0, ("lr", f"learning rate: was {saved['lr']:.3g} at this step, now {rate:.3g}"))
    alike = all(any(key == known or key.startswith(f"{known}.") for known in ROUNDING) for key, _ in changed)
    head = "the same numbers except for rounding" if alike else "the numbers may differ from those of an unchanged run"
    more = [f"  and {len(changed) - SHOWN} more"] if len(changed) > SHOWN else []
    return [f"{head}:", *(f"  {line}" for _, line in changed[:SHOWN]), *more]


def _changes(saved: JsonObject, now: JsonObject) -> Iterator[tuple[str, str]]:
    """(key, line) for every difference."""
    unknown = [key for key in now if key not in saved]
    if unknown:
        yield "unknown", f"not recorded in the checkpoint: {', '.join(unknown)}"
    both = {key: (saved.get(key, value), value) for key, value in now.items()}
    was, here = (flattened(settings, WITHOUT_EFFECT) for settings in both["settings"])  # earlier versions kept lists
    was = _with_later(was)
    yield from _differing(was, here)
    if "constant" not in {settings.get("optimizer.schedule.kind") for settings in (was, here)}:
        yield from _differing({"steps": both["steps"][0]}, {"steps": both["steps"][1]})
    for group in ("mesh", "hardware", "compiler", "code"):
        was, here = both[group]
        if group == "mesh":
            was, here = ({axis: size for axis, size in sizes.items() if size > 1} for sizes in (was, here))
        yield from ((f"{group}.{key}", f"{group} {line}") for key, line in _differing(was, here))
    was, here = ({name: known.get(name) for name in VERSIONS} for known in both["versions"])
    yield from _differing(was, here)
    yield from _differing({"processes": both["processes"][0]}, {"processes": both["processes"][1]})


def _with_later(was: dict[str, object]) -> dict[str, object]:
    """What an earlier version recorded, with the settings of decoders that it did not have."""
    prefix = "model."
    own = {name.removeprefix(prefix): value for name, value in was.items() if name.startswith(prefix)}
    added = later(own) if own.get("kind") == "decoder" else {}
    return {f"{prefix}{name}": value for name, value in added.items() if value not in (None, [])} | was


def _differing(was: Mapping[str, object], now: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    for key in sorted(was.keys() | now.keys()):
        old, new = was.get(key, "not set"), now.get(key, "not set")
        if repr(old) != repr(new):  # repr, so that NaN equals NaN
            yield key, f"{key}: was {old}, now {new}"


def recorded_settings(recipe: Recipe, engine: Engine) -> dict[str, object]:
    """The recipe's values that can change the numbers, by dotted path, as they are after a round trip through JSON.
    `engine`: the one that `auto` is."""
    values = flattened(plain(replace(recipe, engine=engine)), WITHOUT_EFFECT)
    if recipe.optimizer.schedule.watch:  # then evaluations change the learning rate
        values |= flattened({"evaluate": plain(recipe)["evaluate"]}, frozenset())
    return json.loads(json.dumps(values, default=str))


def _hardware(device: Any) -> dict[str, object]:
    if device.platform != "cpu":
        return {"platform": device.platform, "device": device.device_kind}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"platform": "cpu", "device": _processor(), "cores": cores}


def _processor() -> str:
    """The model of this machine's CPU: compiled programs use the instructions that it supports."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _compiler(device: Any) -> dict[str, object]:
    flags = {name: " ".join(sorted(os.environ.get(name, "").split())) for name in FLAGS}
    config = {name: getattr(jax.config, name, None) for name in CONFIG}
    built = " ".join(str(getattr(device.client, "platform_version", "")).split())
    return {
        "version": built,
        **flags,
        **{name: value if value is None else str(value) for name, value in config.items()},
    }


def _code(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Digests of code that has no version number: dtrain's own files, and the user's modules with those imported from
    the same folder."""
    yield "dtrain", code_digest()
    yield from user_modules(recipe)
