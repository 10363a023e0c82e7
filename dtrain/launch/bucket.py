"""A run's launch folder in its bucket, as the laptop sees it: by gcloud, an object at a time."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dtrain.errors import EnvironmentFault
from dtrain.launch.tool import run

NOTHING = "matched no objects"


@dataclass(frozen=True)
class Place:
    """gs://BUCKET/NAME/launch: what hosts have mounted."""

    bucket: str
    name: str
    project: str

    @property
    def url(self) -> str:
        """Its address."""
        return f"gs://{self.bucket}/{self.name}/launch"

    def copying(self, files: Sequence[str]) -> list[str]:
        """The argv that puts files here."""
        return self._storage("cp", *files, f"{self.url}/")

    def noting(self, file: str) -> list[str]:
        """The argv that puts a file beside this folder, into that of the run."""
        return self._storage("cp", file, f"gs://{self.bucket}/{self.name}/")

    def put(self, name: str, folder: Path) -> None:
        """An empty object; its name says it all."""
        (folder / name).touch()
        run(self.copying([str(folder / name)]))

    def read(self, *names: str) -> str:
        """What objects hold, one after the other, found by name or pattern; empty where there are none."""
        return self._unless_nothing("cat", *(f"{self.url}/{name}" for name in names))

    def names(self, pattern: str) -> list[str]:
        """Which objects there are, in order."""
        found = self._unless_nothing("ls", f"{self.url}/{pattern}").split()
        return sorted(name.removeprefix(f"{self.url}/") for name in found)

    def drop(self, name: str) -> None:
        """Remove an object."""
        self._unless_nothing("rm", f"{self.url}/{name}")

    def clearing(self) -> list[str]:
        """The argv that removes all of it; the run itself stays."""
        return self._storage("rm", f"{self.url}/**")

    def _unless_nothing(self, *words: str) -> str:
        try:
            return run(self._storage(*words))
        except EnvironmentFault as error:
            if NOTHING in error.message or "404" in error.message:  # or it was replaced meanwhile
                return ""
            raise

    def _storage(self, *words: str) -> list[str]:
        return ["gcloud", "storage", *words, f"--project={self.project}"]
