"""Checkpoints of one run, by orbax: asynchronous, each device writing its own part."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from dtrain.errors import CheckpointError, DtrainError, EnvironmentFault
from dtrain.fields import Natural, Positive
from dtrain.params import dotted

TRASH = ".trash"
"""Steps are moved here before they are deleted, so that no half-deleted step looks whole."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """When state is saved and which of it is kept. It is always saved at the end and when stopped."""

    every: Natural = 0
    """Steps between saves; 0 saves only at the end and when stopped."""
    keep: Positive = 2
    """The newest so many are kept."""
    best: str | None = None
    """Keep the best by this metric too: `eval/accuracy`. Lower is better for loss and perplexity."""

    @property
    def lower_is_better(self) -> bool:
        """Whether the best is the smallest."""
        return (self.best or "").endswith(("loss", "perplexity"))


class Store:
    """The checkpoints under one folder. Use as a context manager: leaving waits for saves under way."""

    def __init__(self, path: Path, policy: Checkpoint, *, reading: bool = False) -> None:
        """`reading` leaves everything as it is: another process may be saving."""
        import orbax.checkpoint as ocp
        from orbax.checkpoint.checkpoint_managers import preservation_policy as preserve

        policies: list[Any] = [preserve.LatestN(policy.keep)]
        if policy.best:
            name = policy.best
            policies.append(
                preserve.BestN(
                    get_metric_fn=lambda metrics: metrics[name],
                    reverse=policy.lower_is_better,
                    n=1,
                    keep_checkpoints_without_metrics=False,
                )
            )
        self._path, self._best = path, policy.best
        if not reading:
            _empty(path / TRASH)
        try:
            self._manager = ocp.CheckpointManager(
                path,
                item_handlers={"state": ocp.StandardCheckpointHandler(), "about": ocp.JsonCheckpointHandler()},
                options=ocp.CheckpointManagerOptions(
                    preservation_policy=None if reading else preserve.AnyPreservationPolicy(policies),
                    todelete_subdir=TRASH,
                    cleanup_tmp_directories=not reading,
                    read_only=reading,
                ),
            )
        except OSError as error:
            raise EnvironmentFault(f"cannot keep checkpoints in {path}: {error}") from error

    def __enter__(self) -> "Store":
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()

    def newest(self) -> int | None:
        """The newest step that was saved to its end, or None."""
        whole = (step for step in self._manager.all_steps() if (self._path / str(step) / "state").is_dir())
        return max(whole, default=None)

    def save(self, step: int, state: Any, about: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Begin to save; the state may be given away as soon as this returns."""
        import orbax.checkpoint as ocp

        if step in self._manager.all_steps():
            return
        ranked = {name: value for name, value in metrics.items() if name == self._best} or None
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), about=ocp.args.JsonSave(dict(about)))
        try:
            self._manager.save(step, args=items, metrics=ranked, force=True)
        except (OSError, ValueError) as error:
            raise EnvironmentFault(f"could not save step {step} to {self._path}: {_first_line(error)}") from error

    def wait(self) -> None:
        """Until every save under way is on disk."""
        try:
            self._manager.wait_until_finished()
        except (OSError, ValueError) as error:
            raise EnvironmentFault(f"could not finish saving to {self._path}: {_first_line(error)}") from error

    def about(self, step: int) -> dict[str, Any]:
        """What was noted beside the state of that step."""
        import orbax.checkpoint as ocp

        with self._reading(step):
            return self._manager.restore(step, args=ocp.args.Composite(about=ocp.args.JsonRestore()))["about"]

    def restore(self, step: int, shapes: Any) -> Any:
        """The state of that step, laid out as `shapes` says, whatever layout it was saved from.

        CheckpointError lists what differs where the state is of another model, optimizer or dtype.
        """
        import orbax.checkpoint as ocp

        with self._reading(step):
            differences = _differences(self._manager.item_metadata(step)["state"], shapes)
        if differences:
            head = f"checkpoint {self._path / str(step)} is not of this recipe's model and optimizer:"
            raise CheckpointError("\n  ".join([head, *differences[:8]]), "give this run another name: name=...")
        with self._reading(step):
            return self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(shapes)))["state"]

    @contextmanager
    def _reading(self, step: int) -> Iterator[None]:
        try:
            yield
        except DtrainError:
            raise
        except Exception as error:  # orbax raises bare Exception, and much else, for damaged data
            message = f"checkpoint {self._path / str(step)} cannot be read: {_first_line(error)}"
            raise CheckpointError(
                message, f"move {self._path / str(step)} away to go on from the one before"
            ) from error


def _differences(stored: Any, shapes: Any) -> list[str]:
    """Where stored arrays and wanted ones differ: missing, too many, or of other shape or dtype."""
    have = {_name(path): (tuple(x.shape), str(x.dtype)) for path, x in _leaves(stored.tree)}
    want = {_name(path): (tuple(x.shape), str(x.dtype)) for path, x in _leaves(shapes)}
    found = [f"{name}: saved, but not in the recipe" for name in sorted(have.keys() - want.keys())]
    found += [f"{name}: in the recipe, but not saved" for name in sorted(want.keys() - have.keys())]
    return found + [
        f"{name}: saved as {have[name][1]}{list(have[name][0])}, the recipe has {want[name][1]}{list(want[name][0])}"
        for name in sorted(have.keys() & want.keys())
        if have[name] != want[name]
    ]


def _leaves(tree: Any) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda leaf: hasattr(leaf, "dtype"))[0]


def _name(path: tuple[Any, ...]) -> str:
    return dotted(path)


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]


def _empty(trash: Path) -> None:
    if trash.is_dir() and not trash.is_symlink():
        shutil.rmtree(trash, ignore_errors=True)
