"""The recipes that come with dtrain."""

from pathlib import Path


def shipped() -> dict[str, Path]:
    """The recipes that come with dtrain, by name."""
    inside = Path(__file__).parents[1] / "recipes"
    folder = inside if inside.is_dir() else Path(__file__).parents[2] / "recipes"
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def find(recipe: str) -> Path:
    """The path of a recipe that is given as a path, or as the name of a recipe that comes with dtrain.

    RecipeError if it is neither.
    """
    path = Path(recipe)
    if path.is_file() or path.parent != Path() or (path.suffix and recipe not in shipped()):
        return path
    return by_name(recipe)


def by_name(name: str) -> Path:
    """The path of a recipe that comes with dtrain. RecipeError if there is none of that name."""
    import difflib

    from dtrain.core.errors import RecipeError

    if name not in shipped():
        near = difflib.get_close_matches(name, shipped(), 1)
        hint = f"did you mean {near[0]!r}?" if near else "`dtrain recipes ls` lists them; a file's name ends in .yaml"
        raise RecipeError(f"no recipe {name!r} comes with dtrain", hint)
    return shipped()[name]
