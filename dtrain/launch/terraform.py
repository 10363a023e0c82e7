"""Terraform in a folder of its own: what `up --terraform` makes before the launch, and `down` destroys after it."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtrain.errors import EnvironmentFault, RecipeError
from dtrain.launch.job import Say
from dtrain.launch.tool import run

LONG = 3600.0
"""Seconds in which a cloud has made what is asked for."""
KEPT = "google_storage_bucket"
"""What is never destroyed: buckets, and who may write to them."""
FILE = ".dtrain.tfplan"


@dataclass(frozen=True)
class Ground:
    """A folder of Terraform, with the variables it is run with."""

    folder: str
    variables: tuple[str, ...] = ()
    """As NAME=VALUE."""

    def __post_init__(self) -> None:
        if not list(Path(self.folder).glob("*.tf")):
            raise RecipeError(f"{self.folder} holds no Terraform", "such a folder is terraform/examples/tpu")
        for one in self.variables:
            if "=" not in one:
                raise RecipeError(f"--var {one}: NAME=VALUE is expected")

    def make(self, agreed: Callable[[str], None], say: Say) -> dict[str, Any]:
        """Init, plan, ask by way of `agreed`, apply; the output `launch`.

        EnvironmentFault where Terraform fails; what a first apply had made by then is destroyed again."""
        before = self._init_and_list(say)
        try:
            agreed(self._terraform("plan", "-input=false", f"-out={FILE}", *self._given))
            say("terraform apply")
            self._terraform("apply", "-input=false", FILE)
            found = json.loads(self._terraform("output", "-json"))
        except (EnvironmentFault, KeyboardInterrupt) as error:
            left = [] if before else self.holds()
            if left:
                say(f"terraform destroy: {len(left)} that were made")
                self._destroy(left)
            if isinstance(error, KeyboardInterrupt):
                raise
            hint = f"{len(before)} resources of {self.folder} were there before, and are left" if before else error.hint
            raise EnvironmentFault(error.message, hint) from error
        finally:
            Path(self.folder, FILE).unlink(missing_ok=True)
        if "launch" not in found:
            raise RecipeError(f"{self.folder} has no output called launch", "its value is the recipe's launch section")
        return found["launch"]["value"]

    def holds(self) -> list[str]:
        """The addresses of all that `destroy` takes away."""
        try:
            listed = run(["terraform", f"-chdir={self.folder}", "state", "list"])
        except EnvironmentFault as error:
            if "No state file" in error.message:
                return []
            raise
        return [address for address in listed.splitlines() if KEPT not in address]

    def destroy(self, say: Say) -> None:
        """Take all away but buckets."""
        self._destroy(self.holds())
        say(f"terraform: {self.folder} is destroyed, but for buckets")

    def _init_and_list(self, say: Say) -> list[str]:
        say(f"terraform init, in {self.folder}")
        self._terraform("init", "-input=false")
        return self.holds()

    def _destroy(self, addresses: Sequence[str]) -> None:
        if addresses:
            targets = [f"-target={address}" for address in addresses]
            self._terraform("destroy", "-input=false", "-auto-approve", *targets, *self._given)

    @property
    def _given(self) -> list[str]:
        return [f"-var={one}" for one in self.variables]

    def _terraform(self, verb: str, *words: str) -> str:
        return run(["terraform", f"-chdir={self.folder}", verb, "-no-color", *words], wait=LONG, patient=True)
