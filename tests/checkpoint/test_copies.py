"""Copies of the state in the memory of the hosts: complete or not there, and given back bit for bit."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from dtrain.checkpoint.copies import HEAD, Copies
from dtrain.checkpoint.policy import InMemory
from dtrain.core.errors import EnvironmentFault
from dtrain.core.run_dir import Folder


def state(seed: int) -> dict[str, jax.Array]:
    """Split over all axes, over one, over none; with a dtype that NumPy does not have, and a scalar."""
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    values = {
        "all": (jax.random.normal(jax.random.key(seed), (8, 4)), PartitionSpec(("data", "fsdp"))),
        "one": (jnp.arange(16, dtype=jnp.bfloat16).reshape(2, 8) + seed, PartitionSpec(None, "fsdp")),
        "none": (jnp.float32(seed) + jnp.arange(3.0), PartitionSpec()),
        "step": (jnp.int32(seed), PartitionSpec()),
    }
    return {name: jax.device_put(value, NamedSharding(mesh, spec)) for name, (value, spec) in values.items()}


def copies(tmp_path: Path, started: float = 1.5, shapes: object = None) -> Copies:
    given = state(0) if shapes is None else shapes
    return Copies(Folder(tmp_path / "runs" / "small"), started, InMemory(folder=str(tmp_path / "memory")), given)


def place(tmp_path: Path) -> Path:
    """The folder of the process's copies."""
    (found,) = (tmp_path / "memory").glob("*/*/*/0")
    return found


def test_the_newest_copy_has_the_same_bits_on_the_same_devices(tmp_path: Path) -> None:
    kept = copies(tmp_path)
    for step in (10, 20, 30):
        kept.save(step, state(step), {"batches_skipped": step}, (step, 7))
    assert kept.problem() == ""
    found = copies(tmp_path).newest(above=0)  # another process, later
    assert found
    assert (found.step, found.conditions, found.checksum) == (30, {"batches_skipped": 30}, [30, 7])
    for back, value in zip(copies(tmp_path).restore(30), jax.tree.leaves(state(30)), strict=True):
        assert back.sharding == value.sharding
        assert back.dtype == value.dtype
        np.testing.assert_array_equal(np.asarray(back), np.asarray(value))
    assert sorted(path.name for path in place(tmp_path).iterdir()) == ["20", "30"]
    assert kept.newest(above=30) is None
    assert list(place(tmp_path).iterdir()) == []  # a checkpoint is newer, and the steps are trained again
    kept.clear()
    assert list((tmp_path / "memory").glob("*/*")) == []


def test_each_part_is_kept_once(tmp_path: Path) -> None:
    kept = copies(tmp_path)
    # 32 floats in 8 parts, 16 bfloat16 in 4 parts although 8 devices hold them, 3 floats and a scalar on all devices
    assert kept.bytes == 32 * 4 + 16 * 2 + 3 * 4 + 4
    kept.save(1, state(1), {}, ())
    assert kept.problem() == ""
    assert (place(tmp_path) / "1" / "0").stat().st_size == kept.bytes


@pytest.mark.parametrize("damage", ["unfinished", "cut", "absent"])
def test_a_copy_that_is_not_complete_is_not_there(tmp_path: Path, damage: str) -> None:
    kept = copies(tmp_path)
    for step in (10, 20):
        kept.save(step, state(step), {}, ())
    assert kept.problem() == ""
    newest = place(tmp_path) / "20"
    if damage == "unfinished":
        (newest / HEAD).unlink()
    elif damage == "cut":
        (newest / HEAD).write_text((newest / HEAD).read_text()[:-9])
    else:
        shutil.rmtree(newest)
    found = copies(tmp_path).newest(above=0)
    assert found
    assert found.step == 10


def test_copies_of_another_run_model_or_mesh_are_not_used(tmp_path: Path) -> None:
    kept = copies(tmp_path)
    kept.save(10, state(10), {}, ())
    assert kept.problem() == ""
    assert copies(tmp_path, shapes=state(0) | {"more": state(0)["none"]}).newest(above=0) is None
    whole = NamedSharding(state(0)["all"].sharding.mesh, PartitionSpec())
    assert copies(tmp_path, shapes=state(0) | {"all": jax.device_put(state(0)["all"], whole)}).newest(above=0) is None
    assert copies(tmp_path, started=2.5).newest(above=0) is None  # the run folder was deleted, and the run begun again
    assert list((tmp_path / "memory").glob("*/*/*/0/10")) == []


def test_memory_that_is_too_small_is_refused_and_a_full_one_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = copies(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=500))
    with pytest.raises(EnvironmentFault, match=r"3 steps of the processes of a host take 0\.0 GB"):
        copies(tmp_path)
    monkeypatch.undo()
    with pytest.raises(EnvironmentFault, match="cannot keep copies in /proc/none"):
        Copies(Folder(tmp_path), 1.0, InMemory(folder="/proc/none"), state(0))
    run = place(tmp_path).parent
    shutil.rmtree(run)
    run.write_text("a file")
    kept.save(10, state(10), {}, ())
    assert "process 0 cannot copy to" in kept.problem()
