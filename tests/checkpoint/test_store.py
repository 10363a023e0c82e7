import gc
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dtrain.checkpoint.store import Checkpoint, Store
from dtrain.errors import CheckpointError

STATE = {"a": jnp.arange(6.0).reshape(2, 3), "n": jnp.int32(4)}


def shapes(state: object) -> object:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    with Store(tmp_path / "c", Checkpoint()) as store:
        store.save(3, STATE, {"seed": 1}, {})
        store.wait()
        assert store.newest() == 3
    with Store(tmp_path / "c", Checkpoint()) as store:
        jax.tree.map(np.testing.assert_array_equal, store.restore(3, shapes(STATE)), STATE)
        assert store.about(3) == {"seed": 1}


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    with Store(tmp_path / "c", Checkpoint(keep=1, best="eval/accuracy")) as store:
        for step, accuracy in enumerate([0.2, 0.9, 0.5, None, 0.1]):
            store.save(step, STATE, {}, {"eval/accuracy": accuracy} if accuracy else {})
        store.wait()
        kept = {path.name for path in (tmp_path / "c").iterdir() if path.name.isdigit()}
    assert kept == {"1", "4"}


def test_another_models_state_is_refused_with_the_differences(tmp_path: Path) -> None:
    with Store(tmp_path / "c", Checkpoint()) as store:
        store.save(1, STATE, {}, {})
        store.wait()
        other = {"a": jnp.zeros((2, 4)), "n": jnp.float32(0), "z": jnp.zeros(1)}
        with pytest.raises(CheckpointError) as caught:
            store.restore(1, shapes(other))
    assert caught.value.message.splitlines()[1:] == [
        "  z: in the recipe, but not saved",
        "  a: saved as float32[2, 3], the recipe has float32[2, 4]",
        "  n: saved as int32[], the recipe has float32[]",
    ]


def test_a_folder_without_state_is_no_checkpoint(tmp_path: Path) -> None:
    with Store(tmp_path / "c", Checkpoint()) as store:
        store.save(1, STATE, {}, {})
    (tmp_path / "c" / "999").mkdir()
    with Store(tmp_path / "c", Checkpoint()) as store:
        assert store.newest() == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # what orbax leaves open on failure
def test_damaged_data_is_an_error_not_a_traceback(tmp_path: Path) -> None:
    with Store(tmp_path / "c", Checkpoint()) as store:
        store.save(1, STATE, {}, {})
    for path in (tmp_path / "c" / "1" / "state").rglob("manifest.ocdbt"):
        path.write_bytes(b"")
    with Store(tmp_path / "c", Checkpoint()) as store, pytest.raises(CheckpointError, match="cannot be read"):
        store.restore(1, shapes(STATE))
    gc.collect()
