"""The sizes of a model that a recipe leaves out, from its data."""

from dataclasses import replace
from typing import Any

from dtrain.core.errors import DataError, FieldError, RecipeError
from dtrain.data.batch import TOKEN, Example
from dtrain.recipe.recipe import Recipe


def sized_model(recipe: Recipe, example: Example) -> Any:
    """The recipe's model for training examples of these features; what they do not show stays left out.

    A vocabulary is that of the tokenizer: the data may not have all of its tokens. FieldError if the model cannot have
    such sizes.
    """
    model, data = recipe.model, recipe.data
    if not model.left_out:
        return model
    if TOKEN in example and "vocab" in model.left_out and data.tokenized:
        try:
            example = {**example, TOKEN: replace(example[TOKEN], values=data.open_tokenizer().size)}
        except (RecipeError, DataError) as error:
            hint = "set model.vocab to the number of tokens, or data.tokenizer"
            raise FieldError("vocab", f"it is left out, and {error.message}", hint) from error
    try:
        return model.sized(example)
    except FieldError as error:
        raise FieldError(error.field, f"{error.message}; the sizes are those of the data", error.hint) from error


def with_sizes(recipe: Recipe, example: Example | None = None) -> Recipe:
    """The recipe with every size of its model: those that it leaves out are the data's, which is opened unless the
    features of a training example are given.

    DataError if the data does not show them, RecipeError if the model cannot have such sizes.
    """
    if not recipe.model.left_out:
        return recipe
    if example is None:
        example = recipe.data.example()
    model = recipe.model
    try:
        model = model if example is None else sized_model(recipe, example)
        if model.left_out:  # not in the shapes alone
            example = recipe.data.open("train").example
            model = sized_model(recipe, example)
    except FieldError as error:
        raise RecipeError(f"model.{error.field}: {error.message}", error.hint) from error
    if recipe.init and {"mean", "std"} & set(recipe.model.left_out):
        hint = "set model.mean and model.std as the recipe.yaml of that run has them"
        raise RecipeError("model.mean, model.std: what init takes was trained for other numbers", hint)
    if model.left_out:
        missing = ", ".join(f"model.{name}" for name in model.left_out)
        message = model.mismatch(example or {}) or f"{missing} cannot be taken from the data"
        raise DataError(message, f"{missing}: what the recipe leaves out is taken from the data, which must show it")
    return replace(recipe, model=model)
