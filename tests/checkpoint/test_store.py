"""A saved state is restored bit for bit, or detected as damaged; a partial write is never taken for a checkpoint."""

import asyncio
import hashlib
import itertools
import json
import logging
import math
import os
import random
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore
from jax.sharding import NamedSharding, PartitionSpec

from dtrain.assembly.state import state_initializer
from dtrain.checkpoint import incomplete, manifest
from dtrain.checkpoint.disk import report_once
from dtrain.checkpoint.manifest import CorruptCheckpoint
from dtrain.checkpoint.policy import Checkpoint
from dtrain.checkpoint.store import BAD, Store
from dtrain.core.errors import CheckpointError, EnvironmentFault, Locked, NotFinite
from dtrain.core.metrics import Metric
from dtrain.core.run_dir import INCOMPLETE, marker
from dtrain.models.mlp import MLP
from dtrain.optim.optimizer import Optimizer
from dtrain.optim.update import transformation
from dtrain.parallel.compile_cache import Counter

STATE = {"a": jnp.arange(6.0).reshape(2, 3), "n": jnp.int32(4)}


def shapes(state: object) -> object:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def saved(folder: Path, *steps: int, **options: Any) -> Path:
    """A folder with checkpoints of these steps."""
    with Store(folder / "c", Checkpoint(keep=9, **options)) as store:
        for step in steps:
            store.save(step, STATE, {"seed": step}, {})
        store.wait()
    return folder / "c"


def newest(folder: Path) -> tuple[int | None, list[str]]:
    """The newest undamaged step, and the messages on the way."""
    output: list[str] = []
    with Store(folder, Checkpoint()) as store:
        found = store.newest(output.append)
    return found.step if found else None, output


def test_a_manifest_of_format_1_is_read(tmp_path: Path) -> None:
    saved(tmp_path, 3)
    step = tmp_path / "c" / "3"
    values = asdict(manifest.read(step)) | {"format": 1, "about": {"seed": 3, "passed": 2, "owed": True, "seen": {}}}
    del values["conditions"]
    text = json.dumps(values, sort_keys=True).encode()
    (step / manifest.NAME).write_text(json.dumps(values | {"sha256": hashlib.sha256(text).hexdigest()}))
    found = manifest.read(step)
    expected = {"seed": 3, "batches_skipped": 2, "evaluation_pending": True, "guard_state": {}}
    assert (found.conditions, found.format) == (expected, manifest.FORMAT)
    with Store(tmp_path / "c", Checkpoint()) as store:
        assert (store.newest(pytest.fail) or found).conditions == expected


def largest(step: Path) -> Path:
    return max((path for path in step.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def flip(path: Path, bit: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[bit // 8] ^= 1 << bit % 8
    path.write_bytes(raw)


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    with Store(saved(tmp_path, 3), Checkpoint()) as store:
        jax.tree.map(np.testing.assert_array_equal, store.restore(3, shapes(STATE)), STATE)
        found = store.newest(pytest.fail)
        assert found
        assert (found.step, found.conditions) == (3, {"seed": 3})
        assert set(found.files) == {f"state/{path}" for path in manifest.files_of(tmp_path / "c" / "3" / "state")}


def test_arrays_are_not_compressed(tmp_path: Path) -> None:
    state = {"a": jnp.zeros((256, 256))}
    with Store(tmp_path / "c", Checkpoint()) as store:
        store.save(1, state, {}, {})
        store.wait()
    assert largest(tmp_path / "c" / "1").stat().st_size >= state["a"].nbytes


def test_a_save_of_arrays_with_replicas_compiles_nothing(tmp_path: Path) -> None:
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"))
    sizes = random.Random(0).sample(range(100, 10_000), 3)  # of no other test: nothing is compiled before
    state = {
        str(size): jax.device_put(np.arange(4.0 * size, dtype=np.float32), NamedSharding(mesh, PartitionSpec("fsdp")))
        for size in sizes
    }
    with Counter() as programs, Store(tmp_path / "c", Checkpoint()) as store:
        store.save(1, state, {}, {})
        store.wait()
        restored = store.restore(1, shapes(state))
    assert programs.needed == 0
    jax.tree.map(np.testing.assert_array_equal, restored, state)


def test_another_library_reads_it(tmp_path: Path) -> None:
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as orbax:
        found = orbax.restore(saved(tmp_path, 3) / "3" / "state", shapes(STATE))
    jax.tree.map(np.testing.assert_array_equal, found, STATE)


def test_a_checkpoint_that_was_renamed_into_place_is_read(tmp_path: Path) -> None:
    """Saved as by earlier versions: a manifest, but no commit file of orbax."""
    import orbax.checkpoint as ocp

    with ocp.StandardCheckpointer() as orbax:
        orbax.save(tmp_path / "c" / "3" / "state", STATE)
    (tmp_path / "c" / "3" / "state" / "commit_success.txt").unlink(missing_ok=True)
    digests = manifest.digests(tmp_path / "c" / "3", manifest.files_of(tmp_path / "c" / "3"))
    manifest.Manifest(3, {}, files=digests).write(tmp_path / "c" / "3")
    with Store(tmp_path / "c", Checkpoint()) as store:
        assert store.newest(pytest.fail)
        jax.tree.map(np.testing.assert_array_equal, store.restore(3, shapes(STATE)), STATE)


def test_a_step_whose_manifest_was_written_counts_though_its_marker_is_left(tmp_path: Path) -> None:
    folder = saved(tmp_path, 1, 2)
    for step in (1, 2):
        marker(folder, step).touch()
    (folder / "2" / manifest.NAME).unlink()
    assert newest(folder) == (1, [])
    assert {path.name for path in folder.iterdir()} == {"1"}


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    with Store(tmp_path / "c", Checkpoint(keep=1, best="eval/accuracy")) as store:
        for step, accuracy in enumerate([0.2, 0.9, 0.5, None, 0.1]):
            store.save(step, STATE, {}, {"eval/accuracy": accuracy} if accuracy else {})
        store.wait()
    assert {path.name for path in (tmp_path / "c").iterdir()} == {"1", "4"}


def test_another_models_state_is_refused_with_the_differences(tmp_path: Path) -> None:
    with Store(saved(tmp_path, 1), Checkpoint()) as store:
        other = {"a": jnp.zeros((2, 4)), "n": jnp.float32(0), "z": jnp.zeros(1)}
        with pytest.raises(CheckpointError) as caught:
            store.restore(1, shapes(other))
    assert caught.value.message.splitlines()[1:] == [
        "  z: in the recipe, but not saved",
        "  a: saved as float32[2, 3], the recipe has float32[2, 4]",
        "  n: saved as int32[], the recipe has float32[]",
    ]


def emptied(step: Path) -> None:
    shutil.rmtree(step)
    step.mkdir()


def without_manifest(step: Path) -> None:
    (step / manifest.NAME).unlink()


def another_seed(step: Path) -> None:
    reported = json.loads((step / manifest.NAME).read_text())
    reported["conditions"]["seed"] = 7
    (step / manifest.NAME).write_text(json.dumps(reported))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda step: flip(largest(step / "state"), 77), "was changed after it was written"),
        (lambda step: largest(step / "state").write_bytes(b""), r"has 0 bytes, [\d,]+ were written"),
        (lambda step: largest(step / "state").unlink(), "is missing"),
        (emptied, "no manifest"),
        (without_manifest, "its save was never finished"),
        (another_seed, "its manifest was changed after it was written"),
        (lambda step: (step / manifest.NAME).write_text("[]"), "its manifest cannot be read"),
        (lambda step: (step / manifest.NAME).write_bytes(b"\xff{"), "its manifest cannot be read"),
    ],
)
def test_a_damaged_step_is_set_aside_and_the_one_before_is_taken(
    tmp_path: Path, damage: Callable[[Path], None], reason: str
) -> None:
    folder = saved(tmp_path, 1, 2)
    damage(folder / "2")
    step, output = newest(folder)
    assert step == 1
    assert len(output) == 1
    assert re.search(reason, output[0]), output
    assert len(list(folder.glob(f"{BAD}2-*"))) == 1
    assert newest(folder) == (1, [])


def test_a_hundred_flipped_bits_are_found(tmp_path: Path) -> None:
    """Anywhere in a checkpoint, its manifest included; orbax without the manifest restores most of them silently."""
    step, chance = saved(tmp_path, 1) / "1", random.Random(0)
    files = [path for path in sorted(step.rglob("*")) if path.is_file() and path.stat().st_size]
    manifest.check(step, 0, 1)
    for _ in range(100):
        path = chance.choice(files)
        whole, bit = path.read_bytes(), chance.randrange(8 * path.stat().st_size)
        flip(path, bit)
        with pytest.raises(CorruptCheckpoint):
            manifest.check(step, 0, 1)
        path.write_bytes(whole)
    manifest.check(step, 0, 1)


def test_where_all_are_damaged_nothing_begins_anew(tmp_path: Path) -> None:
    folder = saved(tmp_path, 1, 2)
    for step in ("1", "2"):
        flip(largest(folder / step / "state"), 5)
    with Store(folder, Checkpoint()) as store, pytest.raises(CheckpointError, match=r"can be used: 2 set aside"):
        store.newest([].append)
    with Store(folder, Checkpoint()) as store, pytest.raises(CheckpointError, match="start a new run: name="):
        store.newest(pytest.fail)


def test_entries_that_are_no_steps_are_reported_and_never_restored(tmp_path: Path) -> None:
    folder = saved(tmp_path, 1)
    (folder / "3").write_text("a file")
    (folder / "4").symlink_to("4")
    (folder / "0099").mkdir()
    (folder / "7.orbax-checkpoint-tmp").mkdir()
    (folder / "5" / "state").mkdir(parents=True)
    marker(folder, 5).touch()
    marker(folder, 6).touch()
    for former in incomplete.FORMER:
        (folder / former / "4").mkdir(parents=True)
    step, output = newest(folder)
    assert step == 1
    assert [line.rpartition(" ")[2] for line in output] == ["ignored", "aside", "aside"]
    assert len(list(folder.glob(f"{BAD}[34]-*"))) == 2
    assert {path.name for path in folder.iterdir() if not path.name.startswith(BAD)} == {
        "1", "0099", "7.orbax-checkpoint-tmp",
    }  # fmt: skip


def deep(step: Path) -> None:
    (step / manifest.NAME).write_text("[" * 100_000)


def folder_in_place(path: Path) -> None:
    path.unlink()
    path.mkdir()


def fifo_in_place(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def loop_in_place(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def signed(step: Path) -> None:
    """Write a manifest with values of other types and a valid digest."""
    values = json.loads((step / manifest.NAME).read_text())
    del values["sha256"]
    values["files"] = {"state/_METADATA": 7}
    (step / manifest.NAME).write_text(json.dumps(values | {"sha256": manifest._digest_of(values)}))


@pytest.mark.parametrize("damage", [
    deep, signed,
    *(partial(lambda replace, name, step: replace(step / name), replace, name)
      for replace in (folder_in_place, fifo_in_place, loop_in_place) for name in (manifest.NAME, "state/_METADATA")),
])  # fmt: skip
def test_other_kinds_of_files_in_a_checkpoint_are_damage_and_block_nothing(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    folder = saved(tmp_path, 1, 2)
    damage(folder / "2")
    assert newest(folder)[0] == 1
    assert len(list(folder.glob(f"{BAD}2-*"))) == 1


def test_a_renamed_or_copied_checkpoint_is_never_taken_for_the_step_of_its_name(tmp_path: Path) -> None:
    folder = saved(tmp_path, 1, 2)
    (folder / "2").rename(folder / "30")
    shutil.copytree(folder / "1", folder / "31")
    step, output = newest(folder)
    assert step == 1
    assert "it has step 1, renamed or copied" in output[0]
    assert "it has step 2, renamed or copied; rename it to 2 to use it" in output[1]
    next(folder.glob(f"{BAD}30-*")).rename(folder / "2")
    assert newest(folder) == (2, [])


def test_the_best_of_a_metric_that_rises_and_of_one_that_falls_is_kept(tmp_path: Path) -> None:
    for name, up, kept in (("top1", True, {"1", "3"}), ("mse", False, {"0", "3"})):
        policy = Checkpoint(keep=1, best=f"eval/{name}")
        with Store(tmp_path / name, policy, metrics=[Metric(name, up)]) as store:
            for step, value in enumerate([0.2, 0.9, math.nan, 0.5]):
                store.save(step, STATE, {}, {f"eval/{name}": value})
            store.wait()
        assert {path.name for path in (tmp_path / name).iterdir()} == kept


def test_who_only_reads_changes_nothing(tmp_path: Path) -> None:
    folder, output = saved(tmp_path, 1, 2), []
    flip(largest(folder / "2" / "state"), 5)
    (folder / "5" / "state").mkdir(parents=True)
    marker(folder, 5).touch()
    with Store(folder, Checkpoint(), reading=True) as store:
        found = store.newest(output.append)
    assert found
    assert found.step == 1
    assert "skipped" in output[0]
    assert len(output) == 1
    assert {path.name for path in folder.iterdir()} == {"1", "2", "5", f"{INCOMPLETE}5"}


@pytest.mark.parametrize("point", ["save:begin", "save:digest", "save:commit"])
def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str) -> None:
    folder = saved(tmp_path, 1)
    with Store(folder, Checkpoint()) as store:
        monkeypatch.setenv("DTRAIN_FAULT", f"full@{point}")
        with pytest.raises(EnvironmentFault, match=r"could not save step 2 .*No space left"):
            store.save(2, STATE, {}, {})
            store.wait()
        assert {path.name for path in folder.iterdir()} == {"1"}
        monkeypatch.delenv("DTRAIN_FAULT")
        store.save(3, STATE, {}, {})
        store.wait()
    assert newest(folder) == (3, [])
    assert {path.name for path in folder.iterdir()} == {"1", "3"}


def test_what_must_not_be_kept_never_becomes_a_checkpoint(tmp_path: Path) -> None:
    def refuse() -> tuple[int, ...]:
        raise NotFinite("no")

    def lost_at(call: int) -> Callable[[], None]:
        calls = itertools.count(1)

        def holds() -> None:
            if next(calls) >= call:
                raise Locked("taken over")

        return holds

    with Store(tmp_path / "c", Checkpoint()) as store:
        store.save(1, STATE, {}, {}, refuse)
        with pytest.raises(NotFinite):
            store.wait()
        assert store.steps() == []
    for call in (1, 2):  # before anything is written, and before the commit
        with Store(tmp_path / "c", Checkpoint(), holds=lost_at(call)) as store, pytest.raises(Locked):
            store.save(1, STATE, {}, {})
            store.wait()
        left = {path.name for path in (tmp_path / "c").iterdir()}
        assert left == ({"1", f"{INCOMPLETE}1"} if call == 2 else set())  # the other run removes it
        with Store(tmp_path / "c", Checkpoint()) as store:
            assert store.untouched()
        assert not list((tmp_path / "c").iterdir())


def test_each_process_digests_about_as_much() -> None:
    files = {f"f{n}": 100 - n for n in range(10)}
    shares = [manifest.share(files, rank, 3) for rank in range(3)]
    assert sorted(path for one in shares for path in one) == sorted(files)
    sums = [sum(files[path] for path in one) for one in shares]
    assert max(sums) - min(sums) <= 100


def test_a_disk_too_small_is_refused_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=2**30)
    monkeypatch.setattr(shutil, "disk_usage", lambda *_: usage)
    with Store(tmp_path / "c", Checkpoint()) as store:
        store.refuse_without_room(2**29)
        with pytest.raises(EnvironmentFault, match=r"a checkpoint takes 2,147.5 MB; .* has 1,073.7 MB free"):
            store.refuse_without_room(2**31)


def test_transient_errors_of_a_file_system_are_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    monkeypatch.setenv("DTRAIN_FAULT_NOTES", str(notes))
    monkeypatch.setenv("DTRAIN_FAULT", "stale@save:commit")
    assert newest(saved(tmp_path, 1)) == (1, [])
    assert len(list(notes.iterdir())) == 1
    monkeypatch.delenv("DTRAIN_FAULT_NOTES")
    monkeypatch.setattr("dtrain.checkpoint.store.PAUSES", (0.0,))
    with Store(tmp_path / "c", Checkpoint()) as store, pytest.raises(EnvironmentFault, match="Stale file handle"):
        store.save(2, STATE, {}, {})
        store.wait()


@pytest.mark.parametrize(("file", "shown"), [("/x/orbax/metadata.py", False), ("/x/another.py", True)])
def test_an_error_of_the_disk_that_is_raised_is_not_logged_by_orbax_as_well(
    file: str, shown: bool, caplog: pytest.LogCaptureFixture
) -> None:
    failing = compile("raise OSError(28, 'No space left on device')", file, "exec")
    report_once()
    try:
        exec(failing)
    except OSError:
        logging.getLogger("absl").exception("Failed to write metadata")
    assert bool(caplog.records) == shown


def late(after: Callable[[], None]) -> None:
    """Call `after`, then let tensorstore report to an event loop that is closed."""
    promise, future = tensorstore.Promise.new()
    loop = asyncio.new_event_loop()

    async def wait() -> None:
        await future

    task = loop.create_task(wait())
    loop.run_until_complete(asyncio.sleep(0.01))
    task.cancel()
    loop.close()
    after()
    promise.set_result(None)


@pytest.mark.parametrize("stored", [False, True])
def test_a_thread_that_reports_to_a_closed_event_loop_after_the_store_is_closed_is_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], stored: bool
) -> None:
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)

    def save() -> None:
        for name in "ab" if stored else "":
            with Store(tmp_path / name, Checkpoint()):
                pass

    late(save)
    assert ("RuntimeError: Event loop is closed" in capfd.readouterr().err) == (not stored)


def test_another_error_of_a_thread_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[BaseException | None] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda failure: seen.append(failure.exc_value))
    report_once()
    report_once()
    raised = RuntimeError("another")
    sys.unraisablehook(SimpleNamespace(exc_type=RuntimeError, exc_value=raised))  # type: ignore[arg-type]
    assert seen == [raised]


@pytest.mark.slow
@pytest.mark.parametrize("kind", get_args(Optimizer), ids=lambda kind: kind.__name__)
def test_the_state_of_every_optimizer_is_read_back(tmp_path: Path, kind: type) -> None:
    declared = MLP(sizes=(8, 6, 4)).params()
    make = state_initializer(declared, transformation(kind(lr=0.1, ema=0.9), declared, 5), "float32", 0)
    state = jax.jit(make)()
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    with Store(tmp_path / "c", Checkpoint()) as store:
        store.save(1, state, {}, {})
        store.wait()
        found = store.restore(1, shapes)
    assert jax.tree.structure(found) == jax.tree.structure(state)
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), found, state)))
