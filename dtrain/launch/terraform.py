"""Terraform's outputs. dtrain reads them, and neither applies nor destroys anything."""

import json
from pathlib import Path
from typing import Any

from dtrain.core.errors import EnvironmentFault, RecipeError
from dtrain.launch.commands import run

OUTPUT = "launch"


def launch_section(folder: Path) -> dict[str, Any]:
    """The output `launch` of an applied configuration: the recipe's launch section.

    RecipeError where the folder has no such configuration or output, EnvironmentFault where terraform fails."""
    if not list(folder.glob("*.tf")):
        raise RecipeError(f"{folder} holds no Terraform configuration", "such a folder is terraform/examples/tpu")
    command = ["terraform", f"-chdir={folder}", "output", "-no-color", "-json"]
    try:
        found = json.loads(run(command))
    except ValueError as error:
        raise EnvironmentFault(f"{' '.join(command)} printed no JSON") from error
    if not found:
        hint = f"terraform -chdir={folder} init && terraform -chdir={folder} apply; dtrain does not apply it"
        raise EnvironmentFault(f"{folder} has no outputs: it is not applied yet", hint)
    value = found.get(OUTPUT, {}).get("value")
    if not isinstance(value, dict):
        message = f"{folder} has no output {OUTPUT!r} that is a map"
        raise RecipeError(message, "its value is the recipe's launch section")
    return value
