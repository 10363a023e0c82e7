"""The model card beside exported weights: what they come from, what they were trained on, and how they score."""

import json
import re
from pathlib import Path
from typing import Any

import yaml

from dtrain import __version__
from dtrain.core.errors import DtrainError
from dtrain.core.files import overwrite, read_object
from dtrain.core.run_dir import Folder
from dtrain.core.types import JsonObject
from dtrain.models.image_configs import CONFIG

CARD = "README.md"
MARK = "<!-- Written by dtrain export, which leaves a file without this line as it is. -->"
BASE = "base.json"
"""In the folder of an imported run: the name, the licence and the `model_type` of the published weights."""
UNKNOWN = "unknown: look it up before you publish these weights"


def record_base(run_dir: Path, source: Path) -> None:
    """Keep the name of a published folder, its type of model, and the licence that its card states."""
    overwrite(run_dir / BASE, json.dumps(_about(source)) + "\n")


def _about(source: Path) -> JsonObject:
    config = source / CONFIG
    kind = read_object(config, "the configuration of a model").get("model_type") if config.is_file() else None
    return {"name": source.resolve().name, "license": _license(source / CARD), "model_type": kind}


def base_kind(run_dir: Folder) -> str:
    """The `model_type` of the published weights that a run began with; empty if that is not known."""
    recipe = yaml.safe_load(run_dir.recipe.read_text(encoding="utf-8"))
    return str(_base(recipe, run_dir).get("model_type") or "")


def _license(card: Path) -> str:
    """`license` of the front matter of a model card; empty if there is none."""
    try:
        found = re.match(r"---\n(.*?)\n---\n", card.read_text(encoding="utf-8"), re.DOTALL)
        values = yaml.safe_load(found[1]) if found else None
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return ""
    return str(values.get("license") or "") if isinstance(values, dict) else ""


def write_card(folder: Path, run_dir: Folder, step: int, dtype: str) -> str:
    """Write README.md of an export; what was done, as a sentence. One that dtrain did not write stays."""
    path = folder / CARD
    if path.exists() and MARK not in path.read_text(encoding="utf-8", errors="replace"):
        return f"{path} was not written by dtrain, and stays"
    recipe = yaml.safe_load(run_dir.recipe.read_text(encoding="utf-8"))
    base = _base(recipe, run_dir)
    front: JsonObject = {"library_name": "transformers", "pipeline_tag": "text-generation"}
    front |= {"base_model": base["name"], "license": base.get("license") or "other"} if base else {}
    origin = f"{base['name']}; licence: {base.get('license') or UNKNOWN}" if base else "none: trained from the start"
    facts = {
        "base": origin,
        "data": _data(recipe.get("data") or {}) if step else "",
        "objective": (_text(recipe.get("objective")) or "the next token") if step else "",
        "adapters": f"{_text(recipe['lora'])}; added to the weights" if recipe.get("lora") else "",
        "scores": _scores(run_dir.metrics, step),
    }
    rows = "\n".join(f"| {name} | {value} |" for name, value in facts.items() if value)
    trained = f"Step {step:,} of a training" if step else "Weights that were not trained further,"
    shown = yaml.safe_dump(_shortened(recipe), sort_keys=False, allow_unicode=True)
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---\n{MARK}\n# {recipe['name']}",
        f"{trained} with dtrain {__version__}, exported in {dtype}.",
        f"| | |\n|---|---|\n{rows}",
        f"## Recipe\n\n```yaml\n{shown}```",
    ]
    overwrite(path, "\n\n".join(parts) + "\n")
    return f"{path}: a model card, to be completed"


def _shortened(value: Any) -> Any:
    """The recipe without the folders of this machine: of absolute paths the names alone."""
    if isinstance(value, dict):
        return {name: _shortened(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_shortened(one) for one in value]
    return Path(value).name if isinstance(value, str) and Path(value).is_absolute() else value


def _base(recipe: JsonObject, run_dir: Folder) -> JsonObject:
    """The published weights that a run, or the one that it began with, was imported from; or the run or files that it
    began with; empty for none."""
    try:
        return _found(recipe, run_dir)
    except (OSError, ValueError, AttributeError, yaml.YAMLError, DtrainError):
        return {"name": "unknown"}  # there is one, which a damaged file does not tell


def _found(recipe: JsonObject, run_dir: Folder) -> JsonObject:
    init = recipe.get("init") or {}
    if (own := run_dir.path / BASE).is_file():
        return {**read_object(own, "the base of a run")}
    if init.get("weights"):
        return _about(Path(init["weights"]))
    if not init.get("run"):
        return {}
    places = (Path(init["run"]), run_dir.path.parent / Path(init["run"]).name)
    found = next((one for one in places if (one / "recipe.yaml").is_file()), None)
    if found is None:
        return {"name": Path(init["run"]).name}
    before = _base(yaml.safe_load((found / "recipe.yaml").read_text(encoding="utf-8")), Folder(found))
    return before or {"name": found.name}


def _data(data: JsonObject) -> str:
    names = [Path(str(name)).name for name in data.get("files") or []]
    return ", ".join([str(data.get("kind", "")), *names])


def _text(section: object) -> str:
    return yaml.safe_dump(section, default_flow_style=True, sort_keys=False, width=10_000).strip() if section else ""


def _scores(metrics: Path, step: int) -> str:
    """The last evaluation up to that step."""
    found = ""
    for line in metrics.read_text(encoding="utf-8").splitlines() if metrics.is_file() else []:
        try:
            row = json.loads(line)
        except ValueError:  # the last line of a run that was killed
            continue
        own = {name: value for name, value in row.items() if name.startswith("eval/")}
        if own and row.get("step", step + 1) <= step:
            shown = ", ".join(f"{name.removeprefix('eval/')} {value:.4g}" for name, value in own.items())
            found = f"{shown} on held-out data at step {row['step']:,}"
    return found
