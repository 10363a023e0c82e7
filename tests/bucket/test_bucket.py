"""A run folder on a bucket: uploads only on close, no rename of folders, machines lost at any time."""

import errno
import os
import shutil
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import jax.numpy as jnp
import pytest

from dtrain.checkpoint import manifest
from dtrain.checkpoint.policy import Checkpoint
from dtrain.checkpoint.store import BAD, Store
from dtrain.core.run_dir import INCOMPLETE, MANIFEST, Folder, is_fuse, on_this_host, saved_steps
from dtrain.track.appender import Appender
from tests.bucket.mount import Mount, mounted
from tests.bucket.objects import apply, operations
from tests.checkpoint.test_store import flip, largest, newest, shapes
from tests.conftest import Dtrain
from tests.train.test_faults import OFTEN
from tests.train.test_run import numbers, saved
from tests.waiting import until

NO_RENAMES = "--no-folder-renames"


def state(step: int) -> dict[str, jnp.ndarray]:
    return {"a": jnp.arange(6.0) * step, "n": jnp.int32(step)}


def test_the_file_system_uploads_on_close_and_renames_object_by_object(tmp_path: Path) -> None:
    with mounted(tmp_path) as bucket:
        (bucket.point / "a").mkdir()
        with (bucket.point / "a" / "x").open("w") as file:
            file.write("first")
            file.flush()
            assert bucket.uploads("a/x") == 0
            os.fsync(file.fileno())
            assert bucket.uploads("a/x") == 1
        (bucket.point / "a").rename(bucket.point / "b")
        done = [(one["do"], one["path"]) for one in operations(bucket.journal)][-4:]
        assert done == [("mkdir", "b"), ("put", "b/x"), ("delete", "a/x"), ("rmdir", "a")]
        handle = os.open(bucket.point / "b" / "y", os.O_WRONLY | os.O_CREAT)
        os.write(handle, b"never")
        bucket.lose()
        with pytest.raises(OSError, match="not connected"):
            os.fsync(handle)
        with suppress(OSError):
            os.close(handle)
    with mounted(tmp_path, NO_RENAMES) as bucket:
        assert {path.name: path.read_text() for path in (bucket.point / "b").iterdir()} == {"x": "first"}
        with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
            (bucket.point / "b").rename(bucket.point / "c")


@pytest.mark.slow
def test_after_each_operation_on_the_bucket_every_step_that_counts_is_intact(tmp_path: Path) -> None:
    """Four saves of which two are kept: at whichever operation the machine is lost, the next start says nothing."""
    with mounted(tmp_path, NO_RENAMES) as bucket:
        with Store(bucket.point / "c", Checkpoint(keep=2)) as store:
            for step in (1, 2, 3, 4):
                store.save(step, state(step), {"seed": step}, {})
            store.wait()
        assert saved_steps(bucket.point / "c") == [4, 3]
    plain, last, done = tmp_path / "plain", None, operations(tmp_path / "journal")
    plain.mkdir()
    committed = [one for one in done if one["do"] == "put" and one["path"].endswith(MANIFEST)]
    assert len(committed) == 4
    for operation in done:
        apply(operation, plain)
        steps = saved_steps(plain / "c")
        for step in steps:
            manifest.check(plain / "c" / str(step), 0, 1)
        assert max(steps, default=0) >= (last or 0)
        last = max(steps, default=None)
        shutil.copytree(plain, tmp_path / "lost")
        with Store(tmp_path / "lost" / "c", Checkpoint()) as store:
            found = store.newest(pytest.fail)
            assert (found.step if found else None) == last
            if found and operation in committed:
                restored = store.restore(found.step, shapes(state(found.step)))
                assert {k: v.tolist() for k, v in restored.items()} == {
                    k: v.tolist() for k, v in state(found.step).items()
                }
        assert {path.name for path in (tmp_path / "lost" / "c").iterdir()} == {str(step) for step in steps}
        shutil.rmtree(tmp_path / "lost")
    assert last == 4


def test_a_damaged_step_is_set_aside_on_a_mount_without_folder_renames(tmp_path: Path) -> None:
    with mounted(tmp_path, NO_RENAMES) as bucket:
        folder = bucket.point / "c"
        with Store(folder, Checkpoint()) as store:
            for step in (1, 2):
                store.save(step, state(step), {}, {})
            store.wait()
        flip(largest(folder / "2" / "state"), 5)
        assert newest(folder)[0] == 1
        (aside,) = folder.glob(f"{BAD}2-*")
        assert (aside / MANIFEST).exists()
        assert newest(folder) == (1, [])


def test_synced_rows_survive_the_loss_of_the_machine(tmp_path: Path) -> None:
    warnings: list[str] = []
    with mounted(tmp_path) as bucket, closing(Appender(bucket.point / "rows", warnings.append, every=0.05)) as file:
        file.write("one\n")
        until(lambda: bucket.uploads("rows") > 0)
        assert not warnings
        bucket.lose()
    assert "could not sync" in warnings[-1]
    with mounted(tmp_path) as bucket:
        assert (bucket.point / "rows").read_text() == "one\n"


def test_heartbeats_of_a_run_on_a_bucket_are_kept_on_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert on_this_host(tmp_path / "run") == tmp_path / "run"
    with mounted(tmp_path) as bucket:
        run = bucket.point / "runs" / "small"
        assert is_fuse(run)
        assert (tmp_path / "cache") in Folder(run).heartbeat(3).parents
        monkeypatch.setenv("XDG_CACHE_HOME", str(bucket.point))
        assert Folder(run).heartbeat(3) != Folder(run.with_name("other")).heartbeat(3)


def moment(journal: Path, point: str) -> int:
    """The number of operations after which the bucket is in this state."""
    done = [(one["do"], one["path"].rpartition("checkpoints/")[2]) for one in operations(journal)]
    manifests = [number for number, (do, path) in enumerate(done) if do == "put" and path.endswith(f"/{MANIFEST}")]
    return {
        "while the first is saved": manifests[0] - 4,
        "while a step is saved": next(n for n, (do, path) in enumerate(done) if do == "put" and "12/state/d/" in path),
        "before the manifest": manifests[2],
        "before the marker is gone": manifests[2] + 1,
        "between two saves": done.index(("delete", f"{INCOMPLETE}12")) + 1,
        "while a step is deleted": done.index(("delete", f"4/{MANIFEST}")) + 3,
    }[point]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The journal of a run on a bucket without faults."""
    return tmp_path_factory.mktemp("bucket") / "journal"


def run_on(bucket: Mount, dtrain: Dtrain, recipe: Path) -> Path:
    dtrain("run", recipe, *OFTEN, "--runs-dir", bucket.point / "runs")
    return bucket.point / "runs" / "small"


@pytest.mark.slow
@pytest.mark.parametrize("point", ["while a step is saved", *(pytest.param(p, marks=pytest.mark.nightly) for p in (
    "while the first is saved", "before the manifest", "before the marker is gone", "between two saves",
    "while a step is deleted",
))])  # fmt: skip
def test_a_run_on_a_bucket_lost_at_any_operation_ends_with_the_same_bits(
    dtrain: Dtrain,
    recipe: Path,
    tmp_path: Path,
    undisturbed: Callable[..., Path],
    whole: Path,
    point: str,
) -> None:
    straight = undisturbed(*OFTEN)
    if not whole.exists():
        with mounted(whole.parent, NO_RENAMES) as bucket:
            run = run_on(bucket, dtrain, recipe)
            assert saved(run, 24) == saved(straight, 24)
            assert numbers(run) == numbers(straight)
            saves = sum(one["path"].endswith(MANIFEST) for one in operations(whole) if one["do"] == "put")
            assert saves == 6
            assert bucket.uploads("runs/small/metrics.jsonl") <= saves + 3
            assert bucket.uploads("runs/small/log.txt") <= 3
            assert not any("beat" in one["path"] for one in operations(whole))
    (tmp_path / "journal").write_bytes(b"".join(whole.read_bytes().splitlines(keepends=True)[: moment(whole, point)]))
    with mounted(tmp_path, NO_RENAMES) as bucket:
        run = run_on(bucket, dtrain, recipe)
        assert saved(run, 24) == saved(straight, 24)
        assert numbers(run) == numbers(straight)
        assert not list((run / "checkpoints").glob(".*"))


@pytest.mark.nightly
def test_two_processes_on_a_lost_machine_with_a_bucket_resume_to_the_same_bits(
    dtrain: Dtrain,
    recipe: Path,
    tmp_path: Path,
    undisturbed: Callable[..., Path],
) -> None:
    two = [*OFTEN, "--devices", "4", "--processes", "2", "mesh.fsdp=2"]
    with mounted(tmp_path, NO_RENAMES) as bucket:
        runs = bucket.point / "runs"

        def lose() -> None:
            until(lambda: 12 in saved_steps(runs / "small" / "checkpoints"), seconds=150)
            bucket.lose()

        watching = threading.Thread(target=lose)
        watching.start()
        dtrain("run", recipe, *two, "--restarts", "0", "--runs-dir", runs, code=3, DTRAIN_FAULT="sleep@step:13")
        watching.join()
    with mounted(tmp_path, NO_RENAMES) as bucket:
        dtrain("run", recipe, *two, "--runs-dir", bucket.point / "runs")
        run, straight = bucket.point / "runs" / "small", undisturbed(*two)
        assert saved(run, 24) == saved(straight, 24)
        assert numbers(run) == numbers(straight)
