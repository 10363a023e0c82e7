import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from dtrain.data.digits import Digits
from dtrain.models.adapter import from_outputs
from dtrain.models.nn.layers import regress
from dtrain.models.nn.model import Loss
from dtrain.models.nn.single_device import SingleDeviceContext
from tests.conftest import Dtrain

MODULE = """
from dataclasses import dataclass
import jax
from dtrain.models.nn.model import Flops, Loss
from dtrain.models.nn.param import Param
from dtrain.models.nn.layers import classify, dense, linear

@dataclass(frozen=True)
class Net:
    classes: int
    noise: bool = False

    def params(self):
        return {"out": dense(64, self.classes, "embed classes")}

    def loss(self, params, batch, ctx):
        x = batch["image"].reshape(len(batch["image"]), -1)
        if self.noise:
            import numpy as np
            x = x + np.random.random()
        return classify(linear(ctx.gather(params["out"]), x), batch, ctx)

    def flops(self, example, examples):
        return Flops(6.0 * 64 * self.classes * examples, "6N")

    def mismatch(self, example):
        return ""

class Half:
    def __init__(self, **_): pass
    def params(self): return {}

class Mean(Net):
    def loss(self, params, batch, ctx):
        result = Net.loss(self, params, {k: v for k, v in batch.items() if k != "weight"}, ctx)
        return result._replace(weight=len(batch["label"]))

class Pairs(Net):
    def loss(self, params, batch, ctx):
        import jax.numpy as jnp
        x = linear(ctx.gather(params["out"]), batch["image"].reshape(len(batch["image"]), -1))
        weight = batch["weight"] if "weight" in batch else jnp.ones(len(x))
        return Loss((jnp.tanh(x @ x.T).mean(1) * weight).sum(), weight.sum(), {})

class Forgetful(Net):
    def loss(self, params, batch, ctx):
        return classify(batch["image"].reshape(len(batch["image"]), -1) @ params["out"]["weight"], batch, ctx)

class Averaged(Net):
    def loss(self, params, batch, ctx):
        result = Net.loss(self, params, batch, ctx)
        return result._replace(metrics={"accuracy": result.metrics["accuracy"] / len(batch["label"])})

class Scaled(Net):
    def loss(self, params, batch, ctx):
        result = Net.loss(self, params, batch, ctx)
        return result._replace(sum=result.sum / len(batch["label"]))

class Dropped(Net):
    def params(self):
        out = Param((32, 10), "hidden classes", lambda key, shape: jax.numpy.zeros(shape))
        return {"in": dense(64, 32, "embed hidden"), "out": out}

    def loss(self, params, batch, ctx):
        x = linear(ctx.gather(params["in"]), batch["image"].reshape(len(batch["image"]), -1))
        if ctx.train:  # the same key for every batch and place
            x = x * jax.random.bernoulli(jax.random.key(0), 0.8, x.shape)
        return classify(x @ ctx.gather(params["out"]), batch, ctx)

class Bare(Net):
    def loss(self, params, batch, ctx):
        result = Net.loss(self, params, batch, ctx)
        return result.sum / len(batch["label"])

class Unnamed(Net):
    def loss(self, params, batch, ctx):
        return batch["images"]

class Recurrent(Net):
    def loss(self, params, batch, ctx):
        import jax, jax.numpy as jnp
        x = batch["image"].reshape(len(batch["image"]), 8, 8)
        h, _ = jax.lax.scan(lambda h, t: (h + x[:, t], None), jnp.zeros((len(x), 8)), jnp.arange(8))
        return classify(linear(ctx.gather(params["out"]), jnp.tile(h, (1, 8))), batch, ctx)

@jax.tree_util.register_pytree_with_keys_class
class Node:
    def __init__(self, **parts): self.parts = parts
    def tree_flatten_with_keys(self):
        return [(jax.tree_util.GetAttrKey(k), v) for k, v in self.parts.items()], tuple(self.parts)
    @classmethod
    def tree_unflatten(cls, keys, parts): return cls(**dict(zip(keys, parts)))

class Noded(Net):
    def params(self):
        return Node(inner=Node(hidden=dense(64, 32, "embed hidden")), out=[dense(32, self.classes, "hidden classes")])

    def loss(self, params, batch, ctx):
        x = batch["image"].reshape(len(batch["image"]), -1)
        x = linear(ctx.gather(params.parts["inner"].parts["hidden"]), x)
        return classify(linear(ctx.gather(params.parts["out"][0]), x), batch, ctx)

class Whole(Net):
    def params(self):
        import numpy as np
        return {"out": dense(64, self.classes, "embed classes"), "count": np.zeros(3, np.int32)}
"""
RECIPE = """
model: {kind: custom, target: "my_net:Net", args: {classes: 10}}
data: digits
optimizer: {kind: sgd, lr: 0.05}
batch: 64
steps: 40
"""


@pytest.fixture(autouse=True)
def files(tmp_path: Path) -> None:
    (tmp_path / "my_net.py").write_text(MODULE)
    (tmp_path / "mine.yaml").write_text(RECIPE)


@pytest.mark.slow
def test_a_custom_model_trains_under_any_engine(dtrain: Dtrain) -> None:
    done = dtrain("run", "mine.yaml", "engine=shard_map", "mesh.fsdp=4", "--devices", "4")
    assert "model custom: 650 parameters" in done.stderr


@pytest.mark.slow
def test_a_missing_library_of_the_users_file_is_named_with_the_way_to_install_it(
    dtrain: Dtrain, tmp_path: Path
) -> None:
    (tmp_path / "my_net.py").write_text("import absent_library\n")
    refused = dtrain("run", "mine.yaml", code=2).stderr
    assert "my_net.py:1: ModuleNotFoundError: No module named 'absent_library'" in refused
    assert "-m pip install" in refused


@pytest.mark.slow
def test_checking_does_not_run_its_code(dtrain: Dtrain, tmp_path: Path) -> None:
    (tmp_path / "my_net.py").write_text("open('ran', 'w').close()")
    dtrain("check", "mine.yaml")
    assert not (tmp_path / "ran").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("Mean", (), "examples of weight 0 change the loss: its sum is"),
        ("Pairs", ("mesh.data=4", "--devices", "4"), "the loss is not a sum over examples: its sum is"),
        ("Forgetful", (), "a parameter is used before it is gathered"),
        ("Recurrent", ("engine=shard_map", "--devices", "2"), "dtrain.vary"),
        ("Averaged", (), "accuracy of the loss is no sum over examples"),
        ("Scaled", ("mesh.data=2", "--devices", "2"), "sum of the loss is no sum over examples"),
        ("Dropped", (), "in training, sum of the loss changes if examples change places in the batch"),
        ("Bare", (), "loss() returns one number in place of a Loss\nhint: return dtrain.Loss(sum, weight)"),
        ("Unnamed", (), "KeyError: 'images'\nhint: the batch has image, label; --debug"),
        ("Whole", (), "params() returns count: ndarray; every leaf must be a Param"),
    ],
)
def test_a_model_that_breaks_the_contract_is_refused_before_the_first_step(
    dtrain: Dtrain, tmp_path: Path, name: str, more: tuple[str, ...], message: str
) -> None:
    done = dtrain("run", "mine.yaml", f"model.target=my_net:{name}", *more, code=2)
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    if name in ("Forgetful", "Recurrent"):
        assert f"{tmp_path / 'my_net.py'}:" in done.stderr


@pytest.mark.slow
def test_the_check_of_the_contract_can_be_turned_off(dtrain: Dtrain) -> None:
    dtrain("run", "mine.yaml", "model.target=my_net:Pairs", "guard.contract=false")


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [pytest.param({}, marks=pytest.mark.nightly), {"kind": "muon"}])
def test_a_tree_of_registered_nodes_resumes(dtrain: Dtrain, tmp_path: Path, optimizer: dict[str, str]) -> None:
    changes = [f"optimizer={{kind: {optimizer['kind']}, lr: 0.01}}"] if optimizer else []
    dtrain("run", "mine.yaml", "model.target=my_net:Noded", *changes, "steps=20", "name=a")
    dtrain("run", "mine.yaml", "model.target=my_net:Noded", *changes, "steps=40", "name=a")
    dtrain("run", "mine.yaml", "model.target=my_net:Noded", *changes, "steps=40", "name=b")
    sums = [json.loads((tmp_path / f"runs/{n}/checkpoints/40/MANIFEST.json").read_text())["checksum"] for n in "ab"]
    assert sums[0] == sums[1]


LANGUAGE = """
model: {kind: custom, target: "my_net:Net", args: {classes: 10}}
data: {kind: text, files: ["words.txt"], length: 16}
optimizer: {kind: sgd, lr: 0.05}
batch: 8
steps: 4
mesh: {data: 1, sequence: 2}
"""


@pytest.mark.slow
def test_a_model_that_does_not_declare_split_rows_is_refused_on_sequence(dtrain: Dtrain, tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("to be or not to be " * 400)
    (tmp_path / "text.yaml").write_text(LANGUAGE)
    done = dtrain("run", "text.yaml", "--devices", "2", code=2)
    assert "mesh.sequence = 2 splits every row, and the model does not declare split_rows" in done.stderr


@pytest.mark.slow
def test_a_trace_that_is_not_pure_is_reported(dtrain: Dtrain) -> None:
    done = dtrain("run", "mine.yaml", "model.args.noise=true", "guard.contract=false")
    assert "warning: tracing the step twice gave two different programs" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.target=nowhere:Net", "nowhere:Net cannot be imported: no module named 'nowhere'"),
        ("model.target=my_net:Nett", "has no attribute 'Nett'"),
        ("model.args={klasses: 10}", "unexpected keyword argument 'klasses'\nhint: did you mean classes?"),
        ("model.target=my_net:Half", "lacks loss"),
        ("model.target=my_net", "is not of the form package.module:name"),
    ],
)
def test_a_target_that_cannot_be_used_is_refused_with_the_reason(dtrain: Dtrain, override: str, message: str) -> None:
    assert message in dtrain("run", "mine.yaml", override, code=2).stderr


SCALAR = """
import jax.numpy as jnp

class Net:
    def init(self, key, batch):
        return {"w": jnp.zeros((64, 10)), "scale": jnp.array(0.5)}
    def outputs(self, params, batch, ctx):
        x = batch["image"].reshape(len(batch["image"]), -1)
        return (x @ ctx.gather(params["w"])) * jnp.exp(ctx.gather(params["scale"]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("out", [pytest.param("weights.safetensors", marks=pytest.mark.nightly), "folder"])
def test_a_scalar_is_exported_and_another_run_begins_with_it(dtrain: Dtrain, tmp_path: Path, out: str) -> None:
    (tmp_path / "scalar.py").write_text(SCALAR)
    (tmp_path / "own.yaml").write_text(
        "model: {kind: custom, target: 'scalar:Net'}\ndata: digits\noptimizer: {kind: sgd, lr: 0.1}\nbatch: 64\n"
        "steps: 20\n"
    )
    dtrain("run", "own.yaml")
    dtrain("export", "own", out)
    path = tmp_path / out / "model.safetensors" if out == "folder" else tmp_path / out
    found = load_file(path)
    assert {name: value.shape for name, value in found.items()} == {"scale": (), "w": (64, 10)}
    assert float(found["scale"]) != 0.5
    more = dtrain("run", "own.yaml", "name=second", f"init={{weights: {out}}}", "optimizer.lr=1e-9")
    assert f"initialised from {out}: 2 of 2 parameters" in more.stderr + more.stdout
    result = [json.loads(dtrain("evaluate", name, "--json").stdout)["metrics"] for name in ("own", "second")]
    assert result[0] == pytest.approx(result[1], rel=1e-5)


OWN_PREDICTIONS = """
import jax, jax.numpy as jnp

class Net:
    def init(self, key, example):
        return {"w": jax.random.normal(key, (example["image"].size, 10)) * 0.03}

    def outputs(self, params, batch, ctx):
        return batch["image"].reshape(len(batch["image"]), -1) @ params["w"]

    def predict(self, params, batch, ctx):
        p = jax.nn.softmax(self.outputs(params, batch, ctx) / 5.0)
        return {"probability": p, "entropy": -(p * jnp.log(p)).sum(-1)}
"""


@pytest.mark.slow
def test_its_own_predictions_are_used_and_exported_as_a_program(dtrain: Dtrain, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN_PREDICTIONS)
    (tmp_path / "own.yaml").write_text(
        'model: {kind: custom, target: "own:Net"}\ndata: digits\noptimizer: {kind: adamw, lr: 3e-3}\n'
        "batch: 64\nsteps: 5\n"
    )
    dtrain("run", "own.yaml")
    dtrain("predict", "own", "--out", "p.npz")
    dtrain("export", "own", "net.stablehlo")
    with np.load(tmp_path / "p.npz") as file:
        found = dict(file)
    p = found["probability"]
    np.testing.assert_allclose(found["entropy"], -(p * np.log(p)).sum(-1), rtol=1e-5)
    program = jax.export.deserialize(bytearray((tmp_path / "net.stablehlo").read_bytes()))
    image = Digits().open("test").rows(np.arange(360))["image"]
    np.testing.assert_allclose(program.call(image), p, atol=1e-6)


def test_a_model_of_numbers_predicts_them_in_the_shape_of_its_labels() -> None:
    outputs = np.arange(6.0, dtype=np.float32).reshape(6, 1)
    model = from_outputs(SimpleNamespace(outputs=lambda *_: jnp.asarray(outputs), loss_of=regress))
    for batch, shape in (({}, (6,)), ({"label": np.zeros(6)}, (6,)), ({"label": np.zeros((6, 1))}, (6, 1))):
        found = model.predict({}, batch, SingleDeviceContext())
        assert {name: value.shape for name, value in found.items()} == {"value": shape}


def test_a_loss_of_outputs_may_be_a_method() -> None:
    class Own:
        scale = 3.0

        def outputs(self, *_: Any) -> jax.Array:
            return jnp.ones((2, 1))

        def loss_of(self, outputs: jax.Array, batch: Any, ctx: Any) -> Loss:
            del batch, ctx
            return Loss(self.scale * outputs.sum(), jnp.float32(2), {})

    class Plain(Own):
        loss_of = staticmethod(lambda outputs, *_: Loss(outputs.sum(), jnp.float32(2), {}))

    for kind, expected in ((Own, 6), (Plain, 2)):
        model = from_outputs(kind())
        assert float(model.loss({}, {}, SingleDeviceContext()).sum) == expected
        assert model.predict({}, {}, SingleDeviceContext())["output"].shape == (2, 1)
