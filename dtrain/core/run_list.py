"""Find runs by the words that a user types: folders, names, patterns, or folders that contain runs."""

import difflib
import glob
import shlex
from collections.abc import Sequence
from pathlib import Path

from dtrain.core.errors import RecipeError
from dtrain.core.run_dir import Folder

MARKS = ("run.json", "recipe.yaml", "metrics.jsonl")
"""Files that only a run folder has."""
SHOWN = 200
"""Most characters of a word that a message shows."""
SWEEP = "sweep.json"
"""The file that only the folder of a sweep has."""


def runs_in(runs: Path) -> list[Folder]:
    """The run folders inside a folder, and inside its folders of sweeps, by name; what is not a run is left out."""
    entries = sorted(runs.iterdir()) if runs.is_dir() else []
    inner = [path for folder in entries if (folder / SWEEP).exists() for path in sorted(folder.iterdir())]
    return [Folder(path) for path in [*entries, *inner] if is_run(path)]


def is_run(path: Path) -> bool:
    """Whether this is the folder of a run, be it damaged or only started to be written."""
    return any((path / mark).exists() for mark in MARKS)


def is_folder(word: str) -> bool:
    """Whether that path is a folder."""
    try:
        return Path(word).is_dir()
    except OSError:  # the name is too long
        return False


def name_of(path: Path, runs: Path, words: Sequence[str] = ()) -> str:
    """A run's name in a list: its path below the folder of runs, or below the folder that a word names."""
    given = [Path(word) for word in words if is_folder(word) and Path(word) != path]
    return str(path.relative_to(next((one for one in [runs, *given] if path.is_relative_to(one)), path.parent)))


def find_run(word: str | Path, runs: Path = Path("runs")) -> Folder:
    """The folder of the run with that path or name. RecipeError, with the nearest name, if there is none."""
    path, named = Path(word), runs / str(word)
    if is_run(path) or not is_run(named):
        if not is_run(path) and not path.is_dir():
            if inner := _in_one_sweep(str(word), runs):
                return inner[0]
            raise _unknown(str(word), runs)
        return Folder(path)
    return Folder(named)


def _in_sweeps(word: str, runs: Path) -> list[Folder]:
    """The runs of sweeps with that name."""
    return [run_dir for run_dir in runs_in(runs) if run_dir.path.name == word and run_dir.path.parent != runs]


def _in_one_sweep(word: str, runs: Path) -> list[Folder]:
    """The run of a sweep with that name; none if several sweeps have one."""
    found = _in_sweeps(word, runs)
    return found if len(found) == 1 else []


def find_runs(words: Sequence[str], runs: Path = Path("runs"), *, missing_ok: bool = False) -> list[Folder]:
    """The runs that are meant by each word: a run's folder or name, a pattern such as 'lr-*', or a folder of runs.

    RecipeError if a word means no run, unless `missing_ok`. Each run once, in the order of the words.
    """
    found: dict[Path, Folder] = {}
    for word in words:
        places = meant(word, runs)
        if not places and not missing_ok:
            raise _unknown(word, runs)
        found |= {run_dir.path.resolve(): run_dir for run_dir in places if run_dir.path.resolve() not in found}
    return list(found.values())


def meant(word: str, runs: Path = Path("runs")) -> list[Folder]:
    """The runs that a word means: a run's folder or name, a pattern, or a folder of runs; none if there is none."""
    try:
        return _meant(word, runs)
    except OSError:  # a name that is too long, or a folder that cannot be read
        return []


def _meant(word: str, runs: Path) -> list[Folder]:
    if is_run(Path(word)):
        return [Folder(Path(word))]
    if is_run(runs / word):
        return [Folder(runs / word)]
    if glob.has_magic(word):
        patterns = (word, str(runs / word), str(runs / "*" / word))
        paths = sorted({Path(path) for pattern in patterns for path in glob.glob(pattern)})  # noqa: PTH207 (absolute)
        return [Folder(path) for path in paths if is_run(path)]
    return runs_in(Path(word)) or runs_in(runs / word) or _in_one_sweep(word, runs)


def _unknown(word: str, runs: Path) -> RecipeError:
    known = [run_dir.path.name for run_dir in runs_in(runs)]
    shown = word if len(word) < SHOWN else f"{word[:SHOWN]}..."
    same = [name_of(run_dir.path, runs) for run_dir in _in_sweeps(word, runs)]
    if same:
        return RecipeError(f"{shown!r} is a run of several sweeps", f"name one: {', '.join(same[:4])}")
    near = difflib.get_close_matches(Path(word).name, known, 1) if len(word) < SHOWN else []
    if near:
        return RecipeError(f"no run {shown!r} is known", f"did you mean {near[0]!r}?")
    where = "" if runs == Path("runs") else f" --runs-dir {shlex.quote(str(runs))}"
    hint = (
        f"`dtrain ls{where}` lists those in {runs}" if known else f"{runs} holds no runs; `dtrain run RECIPE` makes one"
    )
    return RecipeError(f"no run {word!r} is known", hint)
