"""A frozen base in 8 or 4 bits: codes, products, every engine and mesh, reading, and runs of the command."""

import math
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file
from scipy.stats import norm

from dtrain.assembly.assemble import Assembly, assemble
from dtrain.assembly.state import create_state
from dtrain.checkpoint.tensors import InMemory
from dtrain.core.errors import RecipeError
from dtrain.core.run_dir import Folder
from dtrain.data.batches import TrainBatches
from dtrain.data.order import Order
from dtrain.models.lora import merged
from dtrain.models.nn.low_rank import LowRank
from dtrain.models.nn.matmul import matmul
from dtrain.models.nn.param import Param, normal, paths
from dtrain.models.nn.quantised import LEVELS, WIDTHS, Quantised, Width, declared, is_quantised, mapped, quantise
from dtrain.models.place import Whole
from dtrain.parallel.engine import Put
from dtrain.recipe.load import load
from dtrain.recipe.recipe import Init, Recipe
from dtrain.weights.initial import Origin, initial_from
from dtrain.weights.load import load_run
from dtrain.weights.read import Located, read
from tests.conftest import Dtrain
from tests.engines import worst

ROOT = Path(__file__).parents[2]
DECODER = "model={kind: decoder, vocab: 256, context: 16, layers: 4, width: 128, heads: 4, kv_heads: 2, hidden: 256}"
MOE = (
    "model={kind: decoder, vocab: 256, context: 16, layers: 2, width: 128, heads: 4, kv_heads: 2, hidden: 256, "
    "experts: {count: 4, active: 2, hidden: 64}}"
)
SETTINGS = ["data.length=16", "batch=16", "steps=4", "epochs=null", "optimizer={kind: sgd, lr: 0.1, momentum: 0.5}"]


def test_the_levels_are_quantiles_of_a_normal_distribution() -> None:
    """Dettmers et al. 2023, equation 4, with eight steps above zero and seven below it."""
    tail = 0.5 * (1 / 32 + 1 / 30)
    above, below = (norm.ppf(np.linspace(1 - tail, 0.5, n)[:-1]) for n in (9, 8))
    levels = np.sort([*above, 0, *-below]) / norm.ppf(1 - tail)
    assert np.abs(levels - np.array(LEVELS)).max() < 1e-6


def form(width: Width, shape: tuple[int, ...], dims: str, rows: int) -> Quantised:
    made = declared(Param(shape, dims, normal(0.1), fan_in=("embed", "heads", "_")), width, rows)
    assert made is not None
    return made


@pytest.mark.parametrize("width", WIDTHS)
def test_each_code_is_the_nearest_one_and_numpy_and_jax_agree(width: Width) -> None:
    like = form(width, (3, 96, 5), "layer embed _", 1)
    x = np.array(jax.random.normal(jax.random.key(0), (3, 96, 5)))
    x[0, :32] = 0  # a block without a value has the scale zero
    codes, scales = quantise(x, like)
    assert codes.shape == like.codes.shape
    assert scales.shape == like.scales.shape == (3, 6, 5)
    others = jax.jit(lambda x: quantise(x, like, jnp))(x)
    assert all(np.array_equal(own, other) for own, other in zip((codes, scales), others, strict=True))
    wide = np.asarray(replace(like, codes=jnp.asarray(codes), scales=jnp.asarray(scales)).wide(jnp.float32))
    steps = np.array(LEVELS) if width == "nf4" else np.arange(-127, 128)
    scale = np.repeat(scales.astype(np.float32), 16, 1)
    possible = (steps[:, None, None, None] * scale).astype(np.float32)
    assert np.array_equal(np.abs(wide - x), np.abs(possible - x).min(0))
    assert not wide[0, :32].any()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("shape", "contract"), [((128, 4, 8), 1), ((4, 32, 96), 2), ((48, 7), 1)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_and_gradients_are_those_of_the_values(
    width: Width, shape: tuple[int, ...], contract: int, dtype: str
) -> None:
    dims = " ".join(["embed", "_", "_"][: len(shape)] if contract == 1 else ["heads", "_", "embed"])
    like = form(width, shape, dims, contract - 1)
    codes, scales = quantise(np.asarray(jax.random.normal(jax.random.key(1), shape)), like)
    w = replace(like, codes=jnp.asarray(codes), scales=jnp.asarray(scales))
    x = jax.random.normal(jax.random.key(2), (3, 5, *shape[:contract]), dtype)
    a = jax.random.normal(jax.random.key(3), (*shape[:contract], 2), dtype)
    b = jax.random.normal(jax.random.key(4), (2, *shape[contract:]), dtype)

    def loss(x: jax.Array, a: jax.Array, b: jax.Array, base: Any) -> jax.Array:
        return jnp.sin(matmul(x, LowRank(base, a, b, 0.5), contract).astype(jnp.float32)).sum()

    of_codes = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(x, a, b, w)
    of_values = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))(x, a, b, w.wide(dtype))
    assert worst(of_codes, of_values) < (1e-6 if dtype == "float32" else 1e-2)


def recipe_of(model: str, lora: str, *overrides: str) -> Recipe:
    return load(ROOT / "recipes/decoder-tiny.yaml", [*SETTINGS, model, "init.run=none", lora, *overrides])


def assembled(recipe: Recipe, devices: int) -> Assembly:
    return assemble(recipe, jax.devices()[:devices], recipe.data.open("train").example, 4)


def values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Values of a parameter, the same on every mesh."""
    return 0.1 * np.sin(np.arange(np.prod(shape)) * 0.7 + len(name)).reshape(shape).astype(np.float32)


def quantised(like: Quantised, name: str) -> Quantised:
    codes, scales = quantise(values(name, like.shape), like)
    return replace(like, codes=jnp.asarray(codes), scales=jnp.asarray(scales))


def trained(model: str, width: Width, *overrides: str, devices: int = 8, narrow: bool = True) -> Any:
    """The losses of two steps and the gradients of the adapters in the first. Not `narrow`: with a base in float32
    which has the values that the codes stand for."""
    targets = "'blocks.*.weight'" if model == MOE else "'blocks.*.weight', 'blocks.mlp.gate', 'blocks.mlp.down'"
    recipe = recipe_of(model, f"lora={{rank: 2, targets: [{targets}], dtype: {width}}}", *overrides)
    forms = assembled(recipe, devices).shapes.params

    def made(path: tuple[object, ...], leaf: Any) -> Any:
        name = str(path)
        return quantised(leaf, name) if is_quantised(leaf) else jnp.asarray(values(name, leaf.shape), leaf.dtype)

    base = jax.tree.map_with_path(made, forms, is_leaf=is_quantised)
    if not narrow:
        assert recipe.lora is not None
        recipe = replace(recipe, lora=replace(recipe.lora, dtype=None))
        base = mapped(lambda leaf: leaf.wide(jnp.float32) if is_quantised(leaf) else leaf, base)
    assembly, source = assembled(recipe, devices), recipe.data.open("train")
    given = jax.tree.map(
        lambda value, like: jax.device_put(jnp.asarray(value, like.dtype), like.sharding), base, assembly.shapes.params
    )
    by_path = dict(zip(*map(jax.tree.leaves, (paths(given), given)), strict=True))
    state = create_state(assembly.make, assembly.shapes, by_path)
    put = Put(assembly.engine, assembly.layout, recipe.batch)
    order = Order(len(source), 0, None)
    batches = TrainBatches(source, order, recipe.batch, local=put.held, start=0, steps=2, keyed=False)
    step, losses, gradients = assembly.engine.compile(assembly.train(), "cpu"), list[float](), None
    for number in range(2):
        state, metrics = step(state, put(batches[number]))
        losses.append(float(jax.block_until_ready(metrics)["loss"]))
        gradients = gradients or jax.device_get(jax.tree.leaves(state.optimizer))
    return losses, gradients


@cache
def one_device(model: str, width: Width, parts: int) -> Any:
    return trained(model, width, "mesh={data: 1}", f"accumulate={parts}", devices=1, narrow=False)


MESHES = {
    "jit": ("engine=jit", "mesh={data: 2, fsdp: 2, tensor: 2}"),
    "shard_map": ("engine=shard_map", "mesh={data: 2, fsdp: 2, tensor: 2}"),
    "pmap": ("engine=pmap", "mesh={data: 8}"),
    "jit-pipeline": ("engine=jit", "mesh={fsdp: 4, pipeline: 2}", "accumulate=2"),
    "shard_map-pipeline": ("engine=shard_map", "mesh={data: 2, fsdp: 2, pipeline: 2}", "accumulate=2"),
    "shard_map-sequence": ("engine=shard_map", "mesh={fsdp: 4, sequence: 2}"),
    "jit-fsdp": ("engine=jit", "mesh={fsdp: 8}"),
    "shard_map-fsdp": ("engine=shard_map", "mesh={fsdp: 8}"),
}
BY_EXPERT = "mesh={data: 2, fsdp: 2, expert: 2}"
EXPERT = {"jit-expert": ("engine=jit", BY_EXPERT), "shard_map-expert": ("engine=shard_map", BY_EXPERT)}
CASES = [(DECODER, width, mesh) for width in WIDTHS for mesh in MESHES] + [(MOE, "nf4", mesh) for mesh in EXPERT]
IN_CI = [(DECODER, "nf4", "shard_map"), (DECODER, "int8", "jit-pipeline")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "width", "mesh"),
    [pytest.param(*case, marks=() if case in IN_CI else pytest.mark.nightly) for case in CASES],
)
def test_on_every_mesh_steps_are_those_of_the_values_on_one_device(model: str, width: Width, mesh: str) -> None:
    overrides = (MESHES | EXPERT)[mesh]
    assert worst(trained(model, width, *overrides), one_device(model, width, len(overrides) - 1)) < 2e-5


@pytest.mark.parametrize("width", [None, "int8"])
def test_between_the_passes_no_device_keeps_gathered_matrices_of_all_layers(width: Width | None) -> None:
    kept = f", dtype: {width}" if width else ""
    lora = f"lora={{rank: 2, targets: ['blocks.*.weight']{kept}}}"
    recipe = recipe_of(DECODER, lora, "engine=shard_map", "mesh={fsdp: 8}", "precision.compute=bfloat16")
    traced = assembled(recipe, 8).train()
    jaxpr = str(traced.jaxpr)
    assert "[4,16,256]{V:fsdp}" in jaxpr  # what a device holds of the gates
    assert "[4,128,256]{V:fsdp}" not in jaxpr


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["jit", "shard_map"])
def test_codes_travel_between_devices_not_their_values(engine: str) -> None:
    lora = "lora={rank: 2, targets: ['blocks.*.weight'], dtype: nf4}"
    recipe = recipe_of(DECODER, lora, f"engine={engine}", "mesh={fsdp: 8}", "precision.compute=bfloat16")
    on = assembled(recipe, 8)
    hlo = on.engine.compile(on.train(), "cpu").as_text()
    gathers = re.findall(r"= (\w+)\[([\d,]+)\]\S* all-gather\(", hlo)
    sizes = [(dtype, math.prod(map(int, shape.split(",")))) for dtype, shape in gathers]
    of_codes = [size for dtype, size in sizes if dtype == "u8"]
    assert len(of_codes) == 2 * 7  # each matrix of a layer, in both passes
    assert sum(of_codes) == 2 * (128 * (128 + 64 + 64 + 128) + 3 * 128 * 256) // 2
    # of what else is gathered only the table of bytes is as large
    assert sorted(size for dtype, size in sizes if dtype != "u8" and size >= 128 * 64) == [256 * 128]


@pytest.mark.nightly
def test_a_run_with_a_base_in_nf4_resumes_on_another_mesh_and_is_exported_in_float32(
    dtrain: Dtrain, tmp_path: Path
) -> None:
    small = [DECODER, *SETTINGS, "checkpoint.every=2", "evaluate.every=100"]
    shown = dtrain("run", str(ROOT / "recipes/decoder-tiny.yaml"), "name=base", *small).stderr
    of_base = re.findall(r"decoder: ([\d,]+) parameters", shown)
    dtrain("export", "base", "folder")
    lora = "lora={rank: 2, targets: ['blocks.*.weight', 'blocks.mlp.*'], dtype: nf4}"
    tune = [str(ROOT / "recipes/decoder-tiny.yaml"), "name=tuned", *small, "init.weights=folder", lora]
    shown = dtrain("run", *tune).stderr
    counts = re.findall(r"decoder: ([\d,]+) parameters, .* ([\d,]+) of them trained", shown)[0]
    whole, adapters, base = (int(text.replace(",", "")) for text in (*counts, *of_base))
    assert whole == base + adapters
    assert "MiB in bfloat16 and float32 and nf4" in shown
    shown = dtrain("run", *tune, "steps=6", "engine=shard_map", "mesh={fsdp: 4, tensor: 2}", "--devices", "8").stderr
    assert "step 6/6" in shown
    dtrain("export", "tuned", "whole.safetensors")
    given = load_run(Folder(tmp_path / "runs/tuned"), [f"init.weights={tmp_path / 'folder'}"], print, joined=False)
    assert given.recipe.lora is not None
    expected = merged(given.params, given.recipe.lora)
    written = load_file(tmp_path / "whole.safetensors")
    for path, value in jax.tree.leaves_with_path(expected):
        assert np.array_equal(written[jax.tree_util.keystr(path, simple=True, separator=".")], np.asarray(value)), path

    # read from files or from the run, on any mesh, the codes are the same; each is that of the nearest value
    found = []
    for origin, mesh in [
        ({"weights": str(tmp_path / "folder")}, ["mesh={data: 1}"]),
        ({"weights": str(tmp_path / "folder")}, ["mesh={fsdp: 4, tensor: 2}"]),
        ({"run": str(tmp_path / "runs/base")}, ["mesh={fsdp: 8}"]),
    ]:
        devices = 1 if "data" in mesh[0] else 8
        assembly = assembled(recipe_of(DECODER, lora, *mesh), devices)
        found.append(jax.device_get(initial_from(assembly, Origin(Init(**origin)), print).read()))
    assert all(found[0].keys() == other.keys() for other in found)
    assert all(np.array_equal(found[0][name], other[name]) for other in found[1:] for name in found[0])
    assert found[0]["base.blocks.mlp.gate.codes"].dtype == np.uint8


@pytest.mark.parametrize(("size", "block"), [(4096, 64), (896, 16), (11008, 32), (4864, 32), (48, 16), (24, None)])
def test_blocks_are_as_long_as_eight_parts_of_a_mesh_allow(size: int, block: int | None) -> None:
    made = declared(Param((size, 8), "embed _", normal(0.1), fan_in=("embed",)), "int8", 0)
    assert (made and made.block) == block


@pytest.mark.parametrize("engine", ["jit", "shard_map"])
def test_experts_of_one_layer_at_a_time_are_computed_in_full(engine: str) -> None:
    lora = "lora={rank: 2, targets: ['blocks.*.weight'], dtype: nf4}"
    recipe = recipe_of(
        MOE, lora, f"engine={engine}", "mesh={data: 1}", "model.remat=full", "precision.compute=bfloat16"
    )
    jaxpr = str(assembled(recipe, 1).train().jaxpr)
    assert "u8[2,4,64,64]" in jaxpr  # of both layers: experts, rows of two codes, hidden values
    assert "bf16[4,128,64]" in jaxpr
    assert "bf16[2,4,128,64]" not in jaxpr


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["precision.matmul=int8"], "precision.matmul: int8: products with matrices in nf4"),
        (["mesh={fsdp: 16}"], "does not divide embed = 8 of .*counted in blocks of lora.dtype, and bfloat16 has none"),
    ],
)
def test_what_does_not_go_with_codes_is_refused(overrides: list[str], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        recipe_of(DECODER, "lora={rank: 2, targets: ['blocks.*.weight'], dtype: nf4}", *overrides)


def test_devices_that_hold_parts_of_blocks_read_whole_blocks() -> None:
    """Dims that have no names may be split otherwise in codes than in scales."""
    like = form("int8", (64, 8), "embed _", 0)
    mesh = jax.make_mesh((8,), ("fsdp",))
    split, whole = NamedSharding(mesh, PartitionSpec("fsdp")), NamedSharding(mesh, PartitionSpec())
    assert like.block == 16  # two devices share each block
    shapes = replace(
        like,
        codes=jax.ShapeDtypeStruct((64, 8), jnp.int8, sharding=split),
        scales=jax.ShapeDtypeStruct((4, 8), jnp.bfloat16, sharding=whole),
    )
    x = values("w", (64, 8))
    param = Param((64, 8), "embed _", normal(0.1), fan_in=("embed",))
    found = read(InMemory({"w": x}, {}), Located({"w": Whole("w")}, ""), {"w": param}, {"w": shapes})["w"]
    codes, scales = quantise(x, like)
    assert np.array_equal(found.codes, codes)
    assert np.array_equal(found.scales, scales)
