"""Check that imported parameters belong to the recipe's model, in the settings that their shapes do not show."""

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dtrain.core.errors import DataError
from dtrain.core.files import read_object
from dtrain.core.types import JsonObject
from dtrain.models.configs import described_model
from dtrain.models.decoder import Decoder
from dtrain.models.families.fields import Published
from dtrain.models.rope import Rope
from dtrain.models.settings import ABSENT, Settings, completed, differing, settings

RECORD = "dtrain.settings"
"""The key in a file's header that holds the settings of its model."""
CONFIG = "config.json"
ALLOW = "--allow-changes imports the parameters despite the differences"

Say = Callable[[str], None]


def record(model: object) -> dict[str, str]:
    """The settings of a model as an entry for a file's header."""
    return {RECORD: json.dumps(settings(model), default=str)}


def agree(
    model: Any,
    metadata: Mapping[str, str],
    source: Path,
    say: Say,
    *,
    published: bool,
    allowed: bool = False,
    override: bool = True,
) -> None:
    """Compare the file's settings with the model's; report through `say` what cannot be checked.

    The file's settings come from its header, or, for parameters under published names, from the config.json in its
    folder. Raises DataError with every difference, side by side; with `allowed`, differences are reported and accepted.
    `override`: whether the caller has an option for that.
    """
    if RECORD in metadata:
        problem = _against_record(model, metadata[RECORD], source, say)
    elif published:
        problem = _against_config(model, source, say)
    else:
        say(f"{source} does not record its model's settings: only names and shapes were checked")
        return
    if problem and not allowed:
        hint = problem.hint if override else problem.hint.removesuffix(ALLOW).removesuffix("; ")
        raise DataError(problem.message, hint, problem.topic)
    if problem:
        say(f"imported despite the differences: {problem.message}")


def _against_record(model: object, header: str, source: Path, say: Say) -> DataError | None:
    ours = json.loads(record(model)[RECORD])
    try:
        theirs = completed(dict(json.loads(header)))
        names = differing(ours, theirs, getattr(model, "context", 0))
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{source}: the settings in its header cannot be read: {error}") from error
    unknown = [name for name in names if name not in theirs and "." not in name]
    if unknown:
        say(f"{source} does not record {', '.join(unknown)}: not checked")
    names = [name for name in names if name not in unknown]
    return _contradiction(f"{source} comes from a different model than the recipe's", ours, theirs, names, {})


def _against_config(model: Any, source: Path, say: Say) -> DataError | None:
    path = (source if source.is_dir() else source.parent) / CONFIG
    if not path.is_file():
        say(f"no {path}: {_unchecked_settings(model)} was not checked")
        return None
    config = read_object(path)
    if not named(config):
        say(f"{path} has no model_type and was not used: {_unchecked_settings(model)} was not checked")
        return None
    context = getattr(model, "context", 0)
    published = described_model(config, context, path)
    _report_limits(published, model, path, say)
    ours, theirs = settings(model), settings(published.model)
    names = differing(ours, theirs, context)
    head = f"{path} ({named(config)}) describes a different model than the recipe's"
    return _contradiction(head, ours, theirs, names=names, sources=published.sources, unserved=published.unserved)


def named(config: JsonObject) -> str:
    """The kind of model of a config.json: transformers' model_type, or timm's architecture; empty if it has none."""
    name = config.get("model_type") or config.get("architecture")
    return name if isinstance(name, str) else ""


def _report_limits(published: Published, model: Any, path: Path, say: Say) -> None:
    if published.unchecked:
        say(f"{path} has fields that dtrain does not recognise and did not check: {', '.join(published.unchecked)}")
    longest = published.positions
    if longest and isinstance(model, Decoder) and model.context > longest and isinstance(model.position, Rope):
        say(f"model.context = {model.context} is more than the {longest} positions of {path}")


def _unchecked_settings(model: Any) -> str:
    """The settings that neither names nor shapes of parameters show, as a list for messages."""
    if not isinstance(model, Decoder):
        return "what neither names nor shapes of parameters show, such as heads, epsilon and activation,"
    rope = isinstance(model.position, Rope)
    names = ["the number of heads", "epsilon", *(["rope theta and scaling"] if rope else []), "activation"]
    names += ["window"] if rope else []
    names += ["the number of active experts and the scale of their gates"] if model.experts else []
    return ", ".join([*names, "scales and soft caps"])


def _contradiction(
    head: str,
    ours: Settings,
    theirs: Settings,
    names: Sequence[str],
    sources: Mapping[str, str],
    unserved: Sequence[str] = (),
) -> DataError | None:
    if not names and not unserved:
        return None
    rows = [(sources.get(name) or _shown(name, theirs), f"model.{_shown(name, ours)}") for name in names]
    rows += [(problem, "not supported by dtrain") for problem in unserved]
    rows.insert(0, ("the file", "the recipe"))
    wide = max(len(left) for left, _ in rows)
    lines = "\n".join(f"  {left:<{wide}}  {right}" for left, right in rows)
    if "kind" in names:
        return DataError(f"{head}:\n{lines}", "import into a recipe with a model of that kind", "E-WEIGHTS")
    overrides = " ".join(shlex.quote(f"model.{name}={json.dumps(theirs[name])}") for name in names if name in theirs)
    change = f"to use the file's settings: {overrides}; " if overrides and not unserved else ""
    return DataError(f"{head}:\n{lines}", change + ALLOW, "E-WEIGHTS")


def _shown(name: str, values: Mapping[str, object]) -> str:
    value = values.get(name)
    return f"{name}: {ABSENT if value is None else json.dumps(value)}"


def described(source: Path) -> Published:
    """The model that the config.json of a folder describes, a decoder with the longest context that it states.

    DataError if there is no such file, or if dtrain does not support the model.
    """
    config = _config(source)
    published = described_model(config, _positions(config), source / CONFIG)
    if published.unserved:
        lines = "".join(f"\n  {problem}" for problem in published.unserved)
        raise DataError(f"{source / CONFIG} describes a model that dtrain does not support:{lines}")
    return published


def _config(source: Path) -> JsonObject:
    path = source / CONFIG
    if not source.is_dir():
        what = "is a file" if source.is_file() else "does not exist"
        raise DataError(f"{source} {what}", f"name the folder that has the parameters and their {CONFIG}")
    if not path.is_file():
        hint = "name a recipe for these parameters: dtrain import RECIPE SOURCE"
        raise DataError(f"{source} has no {CONFIG}, from which the recipe would be made", hint)
    config = read_object(path)
    if not named(config):
        raise DataError(f"{path} has no model_type", "use the config.json that belongs to the parameters")
    return config


def _positions(config: JsonObject) -> int:
    """The longest context that the model was made for."""
    inner = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    found = inner.get("max_position_embeddings", inner.get("n_positions"))  # pyright: ignore[reportOptionalMemberAccess]
    return found if isinstance(found, int) and found > 0 else 2048
