"""Read the outputs of Terraform. dtrain neither applies nor destroys a configuration."""

import json
from pathlib import Path

from dtrain.core.errors import EnvironmentFault, RecipeError
from dtrain.launch.commands import run

OUTPUT = "launch"


def launch_section(folder: Path) -> dict[str, object]:
    """The output `launch` of an applied configuration: the recipe's launch section.

    RecipeError if the folder has no such configuration or output, EnvironmentFault if terraform fails."""
    if not list(folder.glob("*.tf")):
        raise RecipeError(f"{folder} contains no Terraform configuration", "an example is terraform/examples/tpu")
    command = ["terraform", f"-chdir={folder}", "output", "-no-color", "-json"]
    try:
        outputs = json.loads(run(command))
    except ValueError as error:
        raise EnvironmentFault(f"{' '.join(command)} printed no JSON") from error
    if not outputs:
        hint = f"terraform -chdir={folder} init && terraform -chdir={folder} apply; dtrain does not apply it"
        raise EnvironmentFault(f"{folder} has no outputs: it is not applied yet", hint)
    value = outputs.get(OUTPUT, {}).get("value")
    if not isinstance(value, dict):
        message = f"{folder} has no output {OUTPUT!r} that is a map"
        raise RecipeError(message, "its value must be the recipe's launch section")
    return value
