"""LoRA around any model: as its definition on every engine and mesh; only adapters are trained and saved."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from dtrain.assembly.assemble import Assembly, assemble
from dtrain.assembly.state import create_state
from dtrain.checkpoint import manifest
from dtrain.core.errors import RecipeError
from dtrain.data.batches import TrainBatches
from dtrain.data.order import Order
from dtrain.models.lora import Lora, adapted, merged
from dtrain.models.nn.param import abstract, paths
from dtrain.models.nn.single_device import SingleDeviceContext
from dtrain.parallel.engine import Put
from dtrain.recipe.load import load
from dtrain.recipe.recipe import Recipe
from tests.conftest import Dtrain
from tests.engines import initial_values, worst

ROOT = Path(__file__).parents[2]
SETTINGS = ["batch=16", "steps=60", "epochs=null", "optimizer={kind: sgd, lr: 0.1, momentum: 0.5}", "init.run=none"]
DECODER = "model={kind: decoder, vocab: 256, context: 16, layers: 4, width: 16, heads: 4, kv_heads: 2, hidden: 32}"
MODELS: dict[str, tuple[str, list[str]]] = {
    "mlp": ("recipes/mlp-digits.yaml", ["lora={rank: 2, alpha: 3, targets: ['layer*.weight']}"]),
    "cnn": (
        "recipes/mlp-digits.yaml",
        [
            "model={kind: cnn, image: [8, 8, 1], classes: 10, stages: [16, 32]}",
            "lora={rank: 2, targets: ['*conv?', stem], train: ['head.*']}",
        ],
    ),
    "vit": (
        "recipes/mlp-digits.yaml",
        [
            "model={kind: vit, image: [8, 8, 1], classes: 10, width: 16}",
            "lora={rank: 2, targets: [blocks.query, blocks.value, 'blocks.*.weight'], train: ['head.*']}",
        ],
    ),
    "decoder": (
        "recipes/decoder-tiny.yaml",
        [DECODER, "data.length=16", "lora={rank: 2, targets: ['blocks.*.weight', 'blocks.mlp.*']}"],
    ),
    "plain_jax": ("examples/plain_jax.yaml", ["lora={rank: 2, targets: ['*.0']}"]),
    "equinox_mlp": ("examples/equinox_mlp.yaml", ["lora={rank: 2, targets: ['*.weight']}"]),
    "linen_cnn": ("examples/linen_cnn.yaml", ["lora={rank: 2, targets: ['*.kernel']}"]),
}
MESHES = {
    "jit": ["engine=jit", "mesh={data: 2, fsdp: 2, tensor: 2}"],
    "shard_map": ["engine=shard_map", "mesh={data: 2, fsdp: 2, tensor: 2}"],
    "pmap": ["engine=pmap", "mesh={data: 8}"],
    "jit-fsdp": ["engine=jit", "mesh={data: 2, fsdp: 4}"],
    "shard_map-fsdp": ["engine=shard_map", "mesh={data: 2, fsdp: 4}"],
    "shard_map-pipeline": ["engine=shard_map", "mesh={data: 2, fsdp: 2, pipeline: 2}"],
    "jit-pipeline": ["engine=jit", "mesh={data: 2, fsdp: 2, pipeline: 2}"],
    "shard_map-sequence": ["engine=shard_map", "mesh={data: 2, sequence: 2, tensor: 2}"],
}
OWN = {"plain_jax", "equinox_mlp", "linen_cnn"}
CASES = [
    (name, mesh)
    for name in MODELS
    for mesh in MESHES
    if (mesh in ("jit", "shard_map") and name not in OWN)
    or (name == "decoder" and mesh != "pmap")
    or mesh == "pmap"
    or (name in OWN and mesh.endswith("fsdp"))
]
IN_CI = {("mlp", "shard_map"), ("vit", "jit"), ("plain_jax", "shard_map-fsdp"), ("linen_cnn", "pmap")}
"""Each engine; the full product at night."""


def recipe_of(name: str, *overrides: str) -> Recipe:
    if library := {"equinox_mlp": "equinox", "linen_cnn": "flax"}.get(name):
        pytest.importorskip(library, reason=f"{library} is not installed")
    path, own = MODELS[name]
    return load(ROOT / path, [*SETTINGS, *own, *overrides])


def assembled(recipe: Recipe, devices: int) -> Assembly:
    return assemble(recipe, jax.devices()[:devices], recipe.data.open("train").example, 60)


def disturbed(tree: Any) -> Any:
    """The parameters with other values, so that no B is zero: the same on every mesh."""
    return jax.tree.map(
        lambda name, x: x + 0.05 * jnp.sin(jnp.arange(x.size, dtype=jnp.float32) + len(name)).reshape(x.shape),
        paths(tree),
        tree,
    )


def trained(name: str, *overrides: str, devices: int = 8) -> tuple[list[float], Any]:
    """The losses of two steps from disturbed parameters, and the momentum after the first: its gradients."""
    recipe = recipe_of(name, *overrides)
    assembly, source = assembled(recipe, devices), recipe.data.open("train")
    put = Put(assembly.engine, assembly.layout, recipe.batch)
    batches = TrainBatches(
        source,
        Order(len(source), 0, None),
        recipe.batch,
        local=put.held,
        start=0,
        steps=2,
        keyed="row" in assembly.batch,
    )
    state = create_state(assembly.make, assembly.shapes)
    leaves_by_path = dict(zip(*map(jax.tree.leaves, (paths(state.params), disturbed(state.params))), strict=True))
    shardings = dict(zip(*map(jax.tree.leaves, (paths(state.params), state.params)), strict=True))
    given = {path: jax.device_put(value, shardings[path].sharding) for path, value in leaves_by_path.items()}
    state = create_state(assembly.make, assembly.shapes, given)
    frozen = jax.device_get(state.params["base"])
    step, losses, gradients = assembly.engine.compile(assembly.train(), "cpu"), [], None
    for number in range(2):
        state, metrics = step(state, put(batches[number]))
        losses.append(float(jax.block_until_ready(metrics)["loss"]))
        gradients = gradients or jax.device_get(jax.tree.leaves(state.optimizer))
    unchanged = jax.tree.map(np.array_equal, frozen, jax.device_get(state.params["base"]))
    full = recipe.lora.train if recipe.lora else ()
    moving = bool(full) or name == "linen_cnn"  # its running means are updated and saved
    assert all(jax.tree.leaves(unchanged)) == (not moving)
    return losses, gradients


@cache
def one_device(name: str, parts: int) -> tuple[list[float], Any]:
    return trained(name, "mesh={data: 1}", f"accumulate={parts}", devices=1)


def when(case: tuple[str, str]) -> Any:
    """The mark of the set that a case belongs to: one on the newest JAX."""
    if case == ("plain_jax", "shard_map-fsdp"):
        return pytest.mark.newest
    return () if case in IN_CI else pytest.mark.nightly


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), [pytest.param(*case, marks=when(case)) for case in CASES])
def test_losses_and_gradients_are_those_of_one_device(name: str, mesh: str) -> None:
    parts = 1 if name in OWN else 2
    losses, gradients = trained(name, *MESHES[mesh], f"accumulate={parts}")
    reference_losses, reference_gradients = one_device(name, parts)
    assert losses == pytest.approx(reference_losses, rel=2e-6)
    assert worst(gradients, reference_gradients) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "vit", "decoder", "plain_jax"])
def test_the_gradients_are_those_of_the_definition(name: str) -> None:
    """Against the model itself with W + alpha / rank x A B computed outside, differentiated by JAX."""
    recipe = recipe_of(name, "mesh={data: 1}")
    assembly = assembled(recipe, 1)
    model, lora, ctx = assembly.recipe.model, recipe.lora, SingleDeviceContext(train=False)
    assert lora is not None
    whole = adapted(model, lora)
    params = disturbed(initial_values(whole.params()))
    batch = {key: jnp.asarray(value) for key, value in recipe.data.open("train").rows(np.arange(4)).items()}
    batch = recipe.data.prepare(batch, jax.random.key(0), False)

    def by_definition(adapters: Any) -> jax.Array:
        base = dict(zip(*map(jax.tree.leaves, (paths(params["base"]), params["base"])), strict=True))
        for path, pair in adapters.items():
            w, a, b = base[path], pair["a"], pair["b"]
            stacked = a.ndim + b.ndim - 2 > w.ndim
            flat = (len(w), -1) if stacked else (-1,)
            product = a.reshape(*flat, lora.rank) @ b.reshape(*flat[:-1], lora.rank, -1)
            base[path] = w + (lora.alpha or lora.rank) / lora.rank * product.reshape(w.shape)
        tree = jax.tree.unflatten(jax.tree.structure(params["base"]), list(base.values()))
        return model.loss(tree, batch, ctx).sum

    def own(adapters: Any) -> jax.Array:
        return whole.loss({**params, "lora": adapters}, batch, ctx).sum

    expected, theirs = jax.jit(jax.value_and_grad(by_definition))(params["lora"])
    value, gradients = jax.jit(jax.value_and_grad(own))(params["lora"])
    assert float(value) == pytest.approx(float(expected), rel=1e-5)
    assert worst(gradients, theirs) < 1e-4
    joined = jax.jit(lambda p: model.loss(merged(p, lora), batch, ctx).sum)(params)
    assert float(joined) == pytest.approx(float(expected), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "cnn", "decoder", "plain_jax"])
def test_at_step_0_the_loss_is_that_of_the_base_bit_for_bit(name: str) -> None:
    recipe = recipe_of(name, "mesh={data: 1}")
    assembly, ctx = assembled(recipe, 1), SingleDeviceContext(train=False)
    model, whole = assembly.recipe.model, adapted(assembly.recipe.model, recipe.lora)
    params = initial_values(whole.params())
    batch = {key: jnp.asarray(value) for key, value in recipe.data.open("train").rows(np.arange(8)).items()}
    batch = recipe.data.prepare(batch, jax.random.key(0), False)
    with_adapters = jax.jit(lambda p: whole.loss(p, batch, ctx).sum)(params)
    assert float(with_adapters) == float(jax.jit(lambda p: model.loss(p, batch, ctx).sum)(params["base"]))


def test_frozen_parameters_have_no_gradient_and_no_optimizer_state() -> None:
    recipe = recipe_of("decoder", "mesh={data: 1}", "optimizer={kind: adamw, lr: 1e-3}")
    shapes = assembled(recipe, 1).shapes
    adapters = sum(leaf.size for leaf in jax.tree.leaves(shapes.params["lora"]))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes.optimizer)) <= 2 * adapters + 1
    assert adapters < sum(leaf.size for leaf in jax.tree.leaves(shapes.params["base"])) / 4


def test_a_base_in_bfloat16_takes_half_the_memory_but_for_what_is_exact() -> None:
    experts = "model.experts={count: 4, active: 2, hidden: 8}"
    recipe = recipe_of("decoder", "mesh={data: 1}", experts, "lora={rank: 1, targets: [blocks.query.weight]}")
    assert recipe.lora
    narrow = assembled(replace(recipe, lora=replace(recipe.lora, dtype="bfloat16")), 1).shapes.params
    of_base = dict(zip(*map(jax.tree.leaves, (paths(narrow["base"]), narrow["base"])), strict=True))
    assert {name for name, leaf in of_base.items() if leaf.dtype == "float32"} == {"blocks.moe.router"}
    assert all(leaf.dtype == "float32" for leaf in jax.tree.leaves(narrow["lora"]))
    wide = assembled(recipe, 1).shapes.params
    assert all(leaf.dtype == "float32" for leaf in jax.tree.leaves(wide))


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (Lora(rank=2, targets=("layer0.bias",)), r"layer0\.bias has the shape \(256,\), which is no matrix"),
        (Lora(rank=2, targets=("layer7",)), "'layer7' matches no parameter"),
        (Lora(rank=2, targets=("layer0.weight",), train=("layer0.*",)), "layer0.weight is both in targets and in"),
    ],
)
def test_targets_that_cannot_have_adapters_are_refused(lora: Lora, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        adapted(load(ROOT / "recipes/mlp-digits.yaml").model, lora).params()


def test_tables_of_tokens_and_experts_are_refused() -> None:
    model = recipe_of("decoder").model
    with pytest.raises(RecipeError, match="embed is a table of tokens"):
        adapted(model, Lora(rank=2, targets=("embed",))).params()
    one = "lora={rank: 1, targets: [blocks.query.weight]}"
    experts = recipe_of("decoder", "model.experts={count: 4, active: 2, hidden: 8}", one).model
    with pytest.raises(RecipeError, match=r"blocks\.moe\.experts\.\w+ is a matrix of experts"):
        adapted(experts, Lora(rank=2, targets=("blocks.moe.experts.*",))).params()


def test_the_scale_is_alpha_by_rank() -> None:
    assert Lora(rank=4, targets=()).scale == 1
    assert Lora(rank=4, alpha=16, targets=()).scale == 4
    assert abstract({}, "float32") == {}


@pytest.mark.nightly
def test_a_run_with_adapters_resumes_and_is_used_like_any_other(dtrain: Dtrain, tmp_path: Path) -> None:
    model = "model.sizes=[64, 512, 256, 10]"
    dtrain("run", "mlp-digits", model, "steps=60", "name=base")
    lora = ["lora={rank: 2, targets: [layer0.weight, layer1.weight]}", "init.run=runs/base"]
    more = ["optimizer={kind: adamw, lr: 1e-3, schedule: constant}", "evaluate.every=40", "checkpoint.best=eval/loss"]
    start = ["run", "mlp-digits", model, *lora, *more]
    place = ["--devices", "4", "mesh={data: 2, fsdp: 2}"]
    straight = dtrain(*start, *place, "steps=80", "name=straight")
    assert "6 of 6 parameters" in straight.stderr
    assert "initialised at random" not in straight.stderr
    dtrain(*start, *place, "steps=15", "name=halves")
    dtrain("run", "mlp-digits", model, "steps=70", "name=base", "--allow-changes")  # the base now has a newer step
    assert "resumed from step 15" in dtrain(*start, *place, "steps=80", "name=halves").stderr
    first, second = (
        manifest.read(tmp_path / "runs" / run / "checkpoints" / "80").checksum for run in ("straight", "halves")
    )
    assert first == second

    def size(run: str, step: int) -> int:
        files = manifest.read(tmp_path / "runs" / run / "checkpoints" / str(step)).files
        return sum(count for count, _ in files.values())

    assert size("straight", 80) < size("base", 60) / 10
    evaluated = dtrain("evaluate", "runs/straight", "--best").stdout
    assert "accuracy" in evaluated
    dtrain("export", "runs/straight", "adapters.safetensors", "--adapters")
    dtrain("export", "runs/straight", "all.safetensors")
    assert (tmp_path / "adapters.safetensors").stat().st_size < (tmp_path / "all.safetensors").stat().st_size / 10
    dtrain("import", "mlp-digits", "all.safetensors", model, "name=joined")
    joined = dtrain("evaluate", "runs/joined").stdout
    assert joined == dtrain("evaluate", "runs/straight").stdout
    assert "has no adapters" in dtrain("export", "runs/base", "x.safetensors", "--adapters", code=2).stderr
    assert "has adapters alone" in dtrain(*start[:3], "init.run=runs/straight", "steps=60", "name=next", code=2).stderr
    assert "missing: lora adapts" in dtrain(*start[:3], lora[0], "steps=60", "name=next", code=2).stderr
    refused = dtrain("import", "mlp-digits", "all.safetensors", model, *lora, code=2)
    assert "saves no other parameters" in refused.stderr
    (tmp_path / "runs" / "base").rename(tmp_path / "gone")
    assert "base is not there; the frozen parameters" in dtrain("evaluate", "runs/straight", code=5).stderr


def test_a_pattern_takes_the_matrices_and_leaves_biases_and_scales() -> None:
    model = replace(recipe_of("decoder").model, bias=True, qkv_bias=True)
    for targets in (("blocks.mlp.*",), ("blocks.query*", "blocks.mlp.*"), ("blocks.*",)):
        params = adapted(model, Lora(rank=2, targets=targets)).params()
        named = set(params["lora"])
        assert {"blocks.mlp.up", "blocks.mlp.down"} <= named
        assert not any("bias" in name or "norm" in name for name in named), named
    with pytest.raises(RecipeError, match=r"up_bias has the shape .*, which is no matrix"):
        adapted(model, Lora(rank=2, targets=("blocks.mlp.up_bias",))).params()


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["shard_map", pytest.param("jit", marks=pytest.mark.nightly)])
@pytest.mark.nightly
def test_a_base_in_bfloat16_gives_the_same_bits(dtrain: Dtrain, tmp_path: Path, engine: str) -> None:
    dtrain("run", "decoder-tiny", "steps=2", "optimizer.schedule=constant")
    place = ["--devices", "2", "mesh={data: 1, fsdp: 2}", f"engine={engine}", "precision.compute=bfloat16"]
    short = ["epochs=null", "steps=3", "track.every=1", "evaluate={questions: []}"]
    narrow = {"plain": "null", "narrow": "bfloat16"}
    for name, dtype in narrow.items():
        dtrain("run", "lora-tiny", *place, *short, f"lora.dtype={dtype}", f"name={name}")
        dtrain("export", name, f"{name}-adapters.safetensors", "--adapters")
    plain, other = (load_file(tmp_path / f"{name}-adapters.safetensors") for name in narrow)
    assert plain and all(np.array_equal(plain[path], other[path]) for path in plain)
    if engine == "shard_map":  # what is summed is the same
        return
    for name in narrow:
        dtrain("export", name, f"{name}.safetensors")
    plain, other = (load_file(tmp_path / f"{name}.safetensors") for name in narrow)
    adapted = "blocks.query.weight"
    assert other[adapted].dtype == np.float32
    np.testing.assert_allclose(other[adapted], plain[adapted], atol=2**-8 * float(np.abs(plain[adapted]).max()))
    assert not np.array_equal(other[adapted].astype(jnp.bfloat16), other[adapted])  # the sums are not rounded
