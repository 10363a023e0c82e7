"""Whether parameters are of the recipe's model in all that their shapes do not show."""

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dtrain.core.errors import DataError
from dtrain.models.decoder import Decoder
from dtrain.models.hf_config import Published, published_model
from dtrain.models.rope import Rope
from dtrain.models.settings import ABSENT, Settings, differing, settings

RECORD = "dtrain.settings"
"""The name under which a file's header holds the settings of its model."""
CONFIG = "config.json"

Say = Callable[[str], None]


def record(model: Any) -> dict[str, str]:
    """The settings of a model, for a file's header."""
    return {RECORD: json.dumps(settings(model), default=str)}


def agree(
    model: Any, metadata: Mapping[str, str], source: Path, say: Say, *, published: bool, allowed: bool = False
) -> None:
    """DataError with every setting that contradicts the model's, side by side; what cannot be checked is reported.

    The settings are those in the file's header, or for published names in a config.json beside it. `allowed`
    reports contradictions and accepts them.
    """
    if RECORD in metadata:
        problem = _against_record(model, metadata[RECORD], source, say)
    elif published:
        problem = _against_config(model, source, say)
    else:
        say(f"{source} does not record its model's settings: names and shapes alone were checked")
        return
    if problem and not allowed:
        raise problem
    if problem:
        say(f"imported all the same: {problem.message}")


def _against_record(model: Any, header: str, source: Path, say: Say) -> DataError | None:
    ours = json.loads(record(model)[RECORD])
    try:
        theirs = dict(json.loads(header))
        names = differing(ours, theirs, getattr(model, "context", 0))
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{source}: the settings in its header cannot be read: {error}") from error
    unknown = [name for name in names if name not in theirs and "." not in name]
    if unknown:
        say(f"{source} does not record {', '.join(unknown)}: not checked")
    names = [name for name in names if name not in unknown]
    return _contradiction(f"{source} was made from another model than the recipe's", ours, theirs, names, {})


def _against_config(model: Decoder, source: Path, say: Say) -> DataError | None:
    path = (source if source.is_dir() else source.parent) / CONFIG
    if not path.is_file():
        say(f"no {path}: {_unseen(model)} could not be checked")
        return None
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict) or "model_type" not in config:
        say(f"{path} names no model_type and was not used: {_unseen(model)} could not be checked")
        return None
    found = published_model(config, model.context, path)
    _report(found, model, path, say)
    ours, theirs = settings(model), settings(found.model)
    names = differing(ours, theirs, model.context)
    head = f"{path} ({config['model_type']}) is of another model than the recipe's"
    return _contradiction(head, ours, theirs, names, found.sources, found.unserved)


def _report(found: Published, model: Decoder, path: Path, say: Say) -> None:
    if found.unchecked:
        say(f"{path} has fields that dtrain does not know and did not check: {', '.join(found.unchecked)}")
    longest = found.positions
    if longest and model.context > longest and isinstance(model.position, Rope):
        say(f"model.context = {model.context} is longer than the {longest} positions that {path} gives")


def _unseen(model: Decoder) -> str:
    """What neither names nor shapes show."""
    rope = isinstance(model.position, Rope)
    found = ["the number of heads", "epsilon", *(["rope theta and scaling"] if rope else []), "activation"]
    found += ["window"] if rope else []
    found += ["the experts that are active and how their gates are scaled"] if model.experts else []
    return ", ".join([*found, "scales and soft caps"])


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
    rows += [(problem, "not possible in dtrain") for problem in unserved]
    rows.insert(0, ("the file", "the recipe"))
    wide = max(len(left) for left, _ in rows)
    lines = "\n".join(f"  {left:<{wide}}  {right}" for left, right in rows)
    if "kind" in names:
        return DataError(f"{head}:\n{lines}", "import into a recipe with a model of that kind")
    take = " ".join(shlex.quote(f"model.{name}={json.dumps(theirs[name])}") for name in names if name in theirs)
    hint = "--allow-changes imports the parameters all the same"
    return DataError(f"{head}:\n{lines}", f"to take the file's: {take}; {hint}" if take and not unserved else hint)


def _shown(name: str, found: Mapping[str, Any]) -> str:
    value = found.get(name)
    return f"{name}: {ABSENT if value is None else json.dumps(value)}"
