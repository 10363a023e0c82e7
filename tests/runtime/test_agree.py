"""A recipe on meshes, with engines and settings, is compared with one device; what differs is named."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dtrain.core.errors import DataError
from dtrain.core.shipped import find
from dtrain.parallel.mesh import Mesh
from dtrain.recipe.load import load
from dtrain.runtime.agree import MESHES, Worst, meshes_of
from dtrain.runtime.trajectory import Differences, Reference, Trajectory, compare, read_reference
from tests.conftest import Dtrain

WEIGHT = np.arange(1.0, 7.0, dtype=np.float32).reshape(2, 3)
TRAJECTORY = Trajectory(
    losses=np.asarray([2.0, 1.0]),
    gradients={"blocks.query": WEIGHT, "head": np.ones(4, np.float32)},
    before={"blocks.query": WEIGHT, "head": np.zeros(4, np.float32)},
    after={"blocks.query": WEIGHT + 0.1, "head": np.full(4, 0.5, np.float32)},
    stacks=frozenset({"blocks.query"}),
)
MEANS = '''
import jax
import jax.numpy as jnp


class Net:
    """Its inputs are centred by the mean of the examples that a device has: under shard_map that is not the batch."""

    def init(self, key, example):
        return {"inner": jax.random.normal(key, (64, 16)) * 0.1, "outer": jnp.zeros((16, 10))}

    def outputs(self, params, batch, ctx):
        x = batch["image"].reshape(-1, 64)
        x = jax.nn.relu((x - x.mean(0, keepdims=True)) @ params["inner"])
        return x @ params["outer"]
'''


def test_differences_are_relative_and_by_layer() -> None:
    gradients = TRAJECTORY.gradients | {"blocks.query": WEIGHT * np.asarray([[1.0], [1.1]], np.float32)}
    after = TRAJECTORY.after | {"head": np.full(4, 0.6, np.float32)}
    found = compare(TRAJECTORY, replace(TRAJECTORY, losses=np.asarray([2.0, 1.5]), gradients=gradients, after=after))
    assert found.loss == {"step 1": 0, "step 2": 0.5}
    assert found.gradients == pytest.approx({"blocks.query/0": 0, "blocks.query/1": 0.1, "head": 0}, rel=1e-5)
    assert found.parameters == pytest.approx({"blocks.query/0": 0, "blocks.query/1": 0, "head": 0.2}, rel=1e-5)
    assert not Worst("head", float("nan"), 1.0).agrees


def test_the_mesh_of_the_recipe_is_the_first_that_is_tried() -> None:
    recipe = load(find("mlp-digits"))
    own = Mesh(data=1, tensor=4, rules={"classes": "fsdp"})
    assert meshes_of(recipe) == MESHES
    assert meshes_of(replace(recipe, mesh=own)) == (Mesh(data=1, tensor=4), *MESHES)
    assert meshes_of(replace(recipe, mesh=MESHES[1])) == MESHES


def test_a_reference_is_read_as_it_was_written(tmp_path: Path) -> None:
    noise = Differences({"step 1": 1e-7}, {"head": 1e-6}, {"head": 1e-5})
    written = Reference({"batch": 4}, {"jax": "1"}, "cpu", TRAJECTORY, noise)
    written.save(tmp_path / "one.npz")
    found = read_reference(tmp_path / "one.npz")
    assert (found.recipe, found.noise, found.steps) == ({"batch": 4}, noise, 2)
    assert found.expected.stacks == TRAJECTORY.stacks
    np.testing.assert_array_equal(found.expected.after["head"], TRAJECTORY.after["head"])
    (tmp_path / "other.npz").write_text("{}")
    with pytest.raises(DataError, match="it is no file of"):
        read_reference(tmp_path / "other.npz")


@pytest.mark.slow
def test_a_recipe_agrees_with_one_device_and_with_what_was_saved(dtrain: Dtrain, tmp_path: Path) -> None:
    where = ("--mesh", "{fsdp: 2, tensor: 2}", "--devices", "4", "--engine", "shard_map")
    change = ("--change", "accumulate=2", "--change", "engine={kind: shard_map, steps_per_call: 2}")
    done = dtrain("agree", "mlp-digits", *where, *change, "--save", "one.npz", "--out", "certificate.json", seconds=250)
    lines = done.stdout.splitlines()
    assert lines[0].startswith("mlp-digits: 3 steps of 64 examples against one device, on 4 x cpu, jax ")
    assert lines[1] == "  changed: accumulate=2"
    assert lines[-1].split()[:6] == ["agrees", "fsdp", "2", "x", "tensor", "2"]
    certificate = json.loads((tmp_path / "certificate.json").read_text())
    assert certificate["agrees"]
    assert 0 < certificate["comparisons"][0]["gradients"]["difference"] < 1e-5
    other = dtrain("agree", "mlp-digits", "batch=128", *where, "--against", "one.npz", "--json", code=70, seconds=250)
    found = json.loads(other.stdout)
    assert found["changes"] == ["batch: was 64, now 128"]
    assert found["comparisons"][0]["gradients"]["name"]
    assert not found["agrees"]
    wider = dtrain(
        "agree", "mlp-digits", "model.sizes=[64, 32, 10]", *where, "--against", "one.npz", code=2, seconds=250
    )
    assert "layer0.bias is (32,) here, (256,) in the reference" in wider.stdout
    own = dtrain("agree", "mlp-digits", "--against", "one.npz", "--steps", "2", code=2).stderr
    assert "excludes --steps" in own
    assert "unknown key; did you mean 'tensor'?" in dtrain("agree", "mlp-digits", "--mesh", "{tensr: 2}", code=2).stderr
    nothing = dtrain("agree", "mlp-digits", "--mesh", "{sequence: 2}", "--engine", "jit", code=2, seconds=250)
    assert "sequence = 2 splits nothing" in nothing.stdout
    assert "nothing was compared" in nothing.stderr


@pytest.mark.slow
def test_a_model_that_depends_on_the_split_is_named_with_its_tensor(dtrain: Dtrain, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(MEANS)
    (tmp_path / "net.yaml").write_text(
        "model: {kind: custom, target: 'net:Net'}\ndata: digits\noptimizer: {kind: adamw, lr: 1e-3}\n"
        "batch: 64\nsteps: 20\n"
    )
    done = dtrain("agree", "net.yaml", "--mesh", "{data: 4}", "--devices", "4", "--steps", "2", code=70, seconds=250)
    verdicts = {line.split()[3]: line.split()[0] for line in done.stdout.splitlines() if " data 4 " in line}
    assert verdicts == {"jit": "agrees", "shard_map": "DIFFERS", "pmap": "DIFFERS"}
    assert "data 4, shard_map: the gradient of outer differs by" in done.stdout
