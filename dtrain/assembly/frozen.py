"""The models whose frozen parameters an objective takes from elsewhere."""

from pathlib import Path
from typing import Any

from dtrain.core.errors import DataError, RecipeError
from dtrain.core.run_dir import Folder
from dtrain.core.weights_source import WeightsSource
from dtrain.models.agreement import described
from dtrain.models.decoder import Decoder
from dtrain.recipe.load import load
from dtrain.recipe.recipe import Recipe


def frozen_models(recipe: Recipe) -> dict[str, Any]:
    """For each of its objective's `sources`, the model whose parameters come from there: a run's recipe is read, or a
    config.json. RecipeError or DataError if one is not there, or is not such a model."""
    return {part: _described(f"objective.{part}", origin) for part, origin in recipe.minimised.sources().items()}


def _described(key: str, origin: WeightsSource) -> Any:
    """The decoder of a run, from its recipe, or of published weights, from their config.json. `key`: of the recipe."""
    if origin.weights:
        return _published(key, Path(origin.weights))
    if not Folder(Path(origin.run)).recipe.is_file():
        raise RecipeError(f"{key}: {origin.run} is not a run folder: recipe.yaml is missing")
    recipe = load(Folder(Path(origin.run)).recipe)
    if not recipe.model.generates or recipe.lora:
        what = "has adapters alone (lora)" if recipe.lora else f"has a model of kind {recipe.model.kind}"
        part = key.partition(".")[2]
        raise RecipeError(f"{key}: {origin.run} {what}", f"the {part} must be a decoder, trained in full")
    return recipe.model


def _published(key: str, source: Path) -> Decoder:
    if not source.exists():
        raise DataError(f"{key}.weights: {source} does not exist", "give a folder with a config.json")
    try:
        return described(source if source.is_dir() else source.parent).model
    except DataError as error:
        raise DataError(f"{key}.weights: {error.message}", "the config.json gives the model's sizes") from error
