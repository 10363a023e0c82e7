"""Checks before a launch. They leave nothing behind; all problems are reported, and what could not be checked."""

import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from dtrain.core.errors import EnvironmentFault
from dtrain.launch.commands import run

Check = Callable[[], list[str]]
"""Returns notes for the user; raises EnvironmentFault if the launch would fail."""


def run_checks(checks: Sequence[Check]) -> list[str]:
    """Run the checks in parallel and return their notes. EnvironmentFault with every problem that they raise."""
    notes: list[str] = []
    problems: list[EnvironmentFault] = []
    with ThreadPoolExecutor(len(checks)) as pool:
        for answer in [pool.submit(check) for check in checks]:
            try:
                notes += answer.result()
            except EnvironmentFault as error:
                problems.append(error)
    if len(problems) > 1:
        lines = [f"{error.message} ({error.hint})" if error.hint else error.message for error in problems]
        raise EnvironmentFault("\n  ".join([f"{len(problems)} problems:", *lines]))
    if problems:
        raise problems[0]
    return notes


def check_variables(names: Sequence[str]) -> list[str]:
    """Check that the environment variables that are passed to the run are set on this machine."""
    if missing := [name for name in names if name not in os.environ]:
        raise EnvironmentFault(
            f"environment variables not set here: {', '.join(missing)}",
            "export them, or remove them from launch.environment",
        )
    return []


def check_image(image: str) -> list[str]:
    """Check that a container image exists, with the credentials of this machine."""
    command = ["docker", "manifest", "inspect", image]
    if "-docker.pkg.dev/" in image:
        command = ["gcloud", "artifacts", "docker", "images", "describe", image, "--format=value(image_summary.digest)"]
    try:
        run(command, wait=60)
    except EnvironmentFault as error:
        if re.search("Image not found|no such manifest|manifest unknown", error.message):
            raise EnvironmentFault(f"image {image} does not exist", "build one with launch/Dockerfile") from error
        return [f"not checked: image {image}: {error.message}"]
    return []
