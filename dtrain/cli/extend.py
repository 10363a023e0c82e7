"""`dtrain run --extend`: the length of a finished run plus some steps or epochs."""

import re
from collections.abc import Sequence
from pathlib import Path

from dtrain.core.errors import RecipeError

LENGTH = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(steps?|epochs?)", re.IGNORECASE)


def longer(recipe: str, overrides: Sequence[str], runs: Path, extend: str) -> int:
    """The steps of a finished run after it is extended by `extend`: "500steps" or "20epochs".

    Raises RecipeError if there is no such run, or it has not finished.
    """
    from dtrain.core.run_dir import folder
    from dtrain.core.shipped import find
    from dtrain.recipe.compose import name_of_run  # without JAX: fake devices are set up before it is imported

    found = LENGTH.fullmatch(extend.strip())
    if not found or not float(found[1]) > 0:
        raise RecipeError(f"--extend {extend}: not a length", "write for example 500steps or 20epochs")
    place = folder(runs, name_of_run(find(recipe), overrides))
    record = place.read_record()
    if not record or not record.get("steps"):
        raise RecipeError(f"--extend: there is no run in {place.path}", "train it first, without --extend")
    if record["state"] != "finished":
        message = f"--extend: {place.path} has not finished: it is at step {record['step']} of {record['steps']}"
        raise RecipeError(message, f"resume it first; a run that was extended resumes with steps={record['steps']}")
    amount, epochs = float(found[1]), (record.get("data") or {}).get("epochs")
    if found[2].lower().startswith("step"):
        return record["steps"] + round(amount)
    if not epochs:
        raise RecipeError("--extend: the run did not record its epochs", "give a number of steps: 500steps")
    return record["steps"] + max(round(amount * record["steps"] / epochs), 1)


def with_length(arguments: Sequence[str], steps: int) -> list[str]:
    """A command line with the new length in place of --extend and of the length that it had."""
    kept, skip = [], False
    for word in arguments:
        if not skip and not word.startswith(("--extend=", "steps=", "epochs=")):
            kept.append(word)
        skip = word == "--extend" and not skip
    return [*(word for word in kept if word != "--extend"), f"steps={steps}"]
