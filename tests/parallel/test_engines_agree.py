"""Every engine on every mesh gives the losses and gradients of one device, for every model."""

import dataclasses
import math
import typing
from functools import cache, partial
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from dtrain.core.errors import RecipeError
from dtrain.data.batch import TOKEN
from dtrain.models.moe import Experts
from dtrain.models.nn.context import Layers
from dtrain.models.nn.param import Param, zeros
from dtrain.models.nn.vma import varied
from dtrain.optim.optimizer import Adafactor, AdamW, Optimizer
from dtrain.parallel.gather import wrap
from dtrain.parallel.jit import Jit, JitContext
from dtrain.parallel.manual import ShardMapContext
from dtrain.parallel.mesh import JAX_AXES, Mesh, Rule
from dtrain.parallel.rules import Layout
from tests.engines import (
    AXIS_MESHES,
    DECODER,
    ENGINES,
    LANGUAGE_MODELS,
    MESHES,
    MODELS,
    Placed,
    gradients,
    place,
    train,
    worst,
)
from tests.pairs import covering

PAIRS = [(engine, mesh) for engine in ENGINES for mesh in MESHES if engine != "pmap" or mesh == "data8"]
CASES = [(model, engine, mesh, 1) for model in MODELS for engine, mesh in PAIRS]
CASES += [(model, engine, mesh, 2) for model in MODELS for engine, mesh in PAIRS]
QUICK = {case for case in CASES if case[3] == 1 and case[0] == "mlp"}
EVERY = MODELS | LANGUAGE_MODELS
EVERY_MESH = MESHES | AXIS_MESHES
OPTIMIZERS = {member(lr=1e-3).kind: member(lr=1e-3, decay=0.1) for member in typing.get_args(Optimizer)}
OPTIMIZERS["adamw"] = AdamW(lr=1e-3, decay=0.1, clip=1.0, ema=0.9)
OPTIMIZERS["adafactor"] = Adafactor(lr=1e-3, decay=0.1, factor_from=8)


EVERY_OTHER = [model for model in LANGUAGE_MODELS if model != "mixtral"]
MESHES_OF = {
    "qwen3_5": ("data-fsdp-tensor", "pipeline-fsdp"),
    "lfm2_moe": ("data-fsdp-tensor", "fsdp-expert-tensor"),
    "granite_hybrid": ("data-fsdp-tensor", "pipeline-fsdp"),
    "mamba_groups": ("data-fsdp-tensor", "pipeline-fsdp"),
    "multi_token": ("data-fsdp-tensor", "fsdp-expert-tensor", "pipeline-fsdp"),
    "gemma3n": ("data-fsdp-tensor", "sequence-tensor", "pipeline-fsdp"),
    "gemma4_e2b": ("data-fsdp-tensor", "sequence-tensor", "pipeline-sequence-tensor", "pipeline-fsdp"),
}
"""Of models that need whole rows, and of one whose layers share what goes through a pipeline."""
LANGUAGE_CASES = [
    (model, engine, mesh, 1)
    for model, mesh in [
        *(("mixtral", mesh) for mesh in AXIS_MESHES),
        *(
            (model, mesh)
            for model in EVERY_OTHER
            for mesh in MESHES_OF.get(model, ("data-fsdp-tensor", "sequence-tensor"))
        ),
    ]
    for engine in ("jit", "shard_map")
]
LANGUAGE_CASES += [("llama", "shard_map", mesh, 2) for mesh in ("fsdp-sequence", "pipeline-fsdp")]
ALWAYS = [("llama", "shard_map", "sequence-tensor", 1), ("llama", "shard_map", "pipeline-fsdp", 2)]
ALWAYS += [
    (model, "shard_map", "data-fsdp-tensor", 1)
    for model in ("qwen3_5", "gemma4", "gemma4_e2b", "gemma3n", "granite_hybrid")
]
IN_CI = covering(CASES, also=QUICK) | covering(LANGUAGE_CASES, values=1, also=ALWAYS)
"""All pairs of a model for images, an engine, a mesh and a number of microbatches, and each model, engine and mesh for
tokens; the full products at night."""
LANGUAGE_CASES += [("deepseek", "shard_map", "data-expert", 1)]
MIXED = ("mixtral", "jit", "pipeline-sequence-tensor", 1)
ON_NEWEST = covering([case for case in CASES if case in IN_CI], values=1, also=QUICK) | {*ALWAYS, MIXED}
"""Each model for images, engine and mesh, and a mesh of the most axes together."""


def when(case: tuple[Any, ...]) -> Any:
    """The mark of the set that a case belongs to."""
    if case in QUICK:
        return ()
    marks = [pytest.mark.slow] if case in IN_CI else [pytest.mark.nightly]
    return [*marks, pytest.mark.newest] if case in ON_NEWEST else marks


@cache
def one_device(model: str) -> tuple[float, Any]:
    return gradients(place(EVERY[model], Jit(), Mesh(data=1)))


@pytest.mark.parametrize(
    ("model", "engine", "mesh", "parts"),
    [pytest.param(*case, marks=when(case)) for case in CASES + LANGUAGE_CASES],
)
def test_losses_and_gradients_are_those_of_one_device(model: str, engine: str, mesh: str, parts: int) -> None:
    loss, found = gradients(place(EVERY[model], ENGINES[engine], EVERY_MESH[mesh], parts=parts))
    reference_loss, reference = one_device(model)
    assert loss == pytest.approx(reference_loss, rel=2e-6)
    assert worst(found, reference) < 1e-5


SMALL = dataclasses.replace(DECODER, layers=2, window=None, global_every=0, vocab=45)
"""Its vocabulary is padded, since no axis divides it."""
SPLITS = {"tensor": {"tensor": 2}, "fsdp-tensor": {"fsdp": 2, "tensor": 2}, "tensor4": {"tensor": 4}}
DIMS = ("vocab", "embed", "heads", "kv_heads", "hidden")
DEFAULTS = {"embed": "fsdp"}
TABLES: list[dict[str, Any]] = [
    {dim: rule} for dim in DIMS for rule in typing.get_args(Rule) if rule != DEFAULTS.get(dim, "tensor")
]
TABLES += [{"heads": rule, "kv_heads": rule} for rule in ("fsdp", "replicated")]
TABLES += [{"embed": "replicated", dim: "fsdp"} for dim in ("vocab", "hidden", "kv_heads")]
WHERE = [("shard_map", "tensor"), ("shard_map", "fsdp-tensor"), ("jit", "fsdp-tensor")]
RULED = [(rules, engine, split) for rules in TABLES for engine, split in WHERE]
RULED += [({"kv_heads": "replicated"}, engine, "tensor4") for engine in ("jit", "shard_map")]
RULED_IN_CI = [*RULED[::8], ({"kv_heads": "replicated"}, "shard_map", "tensor4")]
"""Every eighth, which meets each of the places, and keys replicated over four devices; the full product at night."""


@cache
def small_on_one_device() -> tuple[float, Any]:
    return gradients(place(SMALL, Jit(), Mesh(data=1)))


@pytest.mark.parametrize(
    ("rules", "engine", "split"),
    [pytest.param(*case, marks=pytest.mark.slow if case in RULED_IN_CI else pytest.mark.nightly) for case in RULED],
)
def test_every_rule_is_refused_or_gives_the_numbers_of_one_device(
    rules: dict[str, Rule], engine: str, split: str
) -> None:
    try:
        placed = place(SMALL, ENGINES[engine], Mesh(data=1, **SPLITS[split], rules=rules))
        if ENGINES[engine].refusal(placed.layout):
            return
    except RecipeError:
        return
    loss, found = gradients(placed)
    reference_loss, reference = small_on_one_device()
    assert loss == pytest.approx(reference_loss, rel=2e-6)
    assert worst(found, reference) < 1e-5


KEYS: list[dict[str, Rule]] = [
    {"kv_heads": "replicated"}, {"heads": "replicated"}, {"heads": "replicated", "kv_heads": "replicated"}
]  # fmt: skip
LINEAR_RULED = [(rules, tensor, engine) for rules in KEYS for tensor in (2, 4) for engine in ("shard_map", "jit")]


@pytest.mark.parametrize(
    ("rules", "tensor", "engine"),
    [pytest.param(*case, marks=pytest.mark.nightly if number else pytest.mark.slow)
     for number, case in enumerate(LINEAR_RULED)],
)  # fmt: skip
def test_linear_attention_has_the_keys_of_its_values_where_they_are_replicated(
    rules: dict[str, Rule], tensor: int, engine: str
) -> None:
    try:
        placed = place(LANGUAGE_MODELS["qwen3_5"], ENGINES[engine], Mesh(data=1, tensor=tensor, rules=rules))
        if ENGINES[engine].refusal(placed.layout):
            return
    except RecipeError:
        return
    loss, found = gradients(placed)
    reference_loss, reference = one_device("qwen3_5")
    assert loss == pytest.approx(reference_loss, rel=2e-6)
    assert worst(found, reference) < 1e-5


@pytest.mark.parametrize(("heads", "kv_heads", "tensor"), [(12, 6, 4), (8, 4, 2), (8, 1, 8)])
@pytest.mark.nightly
def test_query_heads_use_their_groups_where_keys_are_replicated(heads: int, kv_heads: int, tensor: int) -> None:
    """Groups shared between devices, full groups per device, and one group for all heads."""
    model = dataclasses.replace(SMALL, heads=heads, kv_heads=kv_heads, width=48, context=48)
    mesh = Mesh(data=1, tensor=tensor, rules={"kv_heads": "replicated", "vocab": "replicated"})
    loss, found = gradients(place(model, ENGINES["shard_map"], mesh))
    reference_loss, reference = gradients(place(model, Jit(), Mesh(data=1)))
    assert loss == pytest.approx(reference_loss, rel=2e-6)
    assert worst(found, reference) < 1e-5


CROWDED = dataclasses.replace(
    LANGUAGE_MODELS["mixtral"], experts=Experts(count=8, active=2, hidden=16, capacity=0.8), remat="none"
)
SPREAD = {"expert": {"expert": 4}, "sequence": {"sequence": 2, "tensor": 2}, "pipeline": {"pipeline": 2, "expert": 2}}


def sums(placed: Placed) -> dict[str, float]:
    found = placed.engine.trace(placed.layout, placed.grads, placed.now.params, placed.rows, out=None, donate=False)
    loss, _ = jax.device_get(jax.block_until_ready(placed.engine.compile(found, "cpu")(placed.now.params, placed.rows)))
    return {name: float(value / loss.weight) for name, value in {"loss": loss.sum, **loss.metrics}.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "spread"),
    [
        pytest.param(engine, spread, marks=() if (engine, spread) == ("shard_map", "expert") else pytest.mark.nightly)
        for engine in ("jit", "shard_map")
        for spread in SPREAD
    ],
)
def test_experts_drop_the_same_tokens_on_every_mesh(engine: str, spread: str) -> None:
    whole = sums(place(CROWDED, Jit(), Mesh(data=1)))
    assert 0.1 < whole["dropped"] < 0.5
    assert sums(place(CROWDED, ENGINES[engine], Mesh(data=1, **SPREAD[spread]))) == pytest.approx(whole, rel=2e-6)


@cache
def steps_on_one_device(optimizer: str) -> tuple[list[float], Any]:
    chosen = OPTIMIZERS[optimizer]
    found = train(place(MODELS["mlp"], Jit(), Mesh(data=1), optimizer=chosen), chosen)
    return found.losses, found.params


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["jit", "shard_map"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_updates_full_arrays(optimizer: str, engine: str) -> None:
    """Clipping and matrix optimizers are outside the `shard_map` region and give the same parameters."""
    chosen, mesh = OPTIMIZERS[optimizer], MESHES["data2-fsdp2-tensor2"]
    found = train(place(MODELS["mlp"], ENGINES[engine], mesh, optimizer=chosen), chosen)
    losses, params = steps_on_one_device(optimizer)
    assert found.losses == pytest.approx(losses, rel=5e-6)
    assert worst(found.params, params) < 1e-4


@pytest.mark.parametrize("engine", ["jit", "shard_map"])
def test_parameters_are_split_by_the_rules(engine: str) -> None:
    state = train(place(MODELS["mlp"], ENGINES[engine], MESHES["data2-fsdp2-tensor2"])).state
    weight = state.params["layer0"]["weight"]
    assert weight.addressable_shards[0].data.shape == (32, 16)
    moments = state.optimizer[1].mu["layer0"]["weight"]
    assert moments.sharding == weight.sharding


def test_gradients_under_shard_map_are_reduce_scattered() -> None:
    text = train(place(MODELS["mlp"], ENGINES["shard_map"], MESHES["fsdp8"])).compiled.as_text()
    assert text is not None
    assert "reduce-scatter(" in text
    assert "all-gather(" in text


def test_microbatches_need_one_all_reduce() -> None:
    """Gradients of replicated parameters accumulate locally; only their total is all-reduced."""
    text = train(place(MODELS["mlp"], ENGINES["shard_map"], MESHES["data8"], parts=2)).compiled.as_text() or ""
    sums = [line for line in text.splitlines() if "all-reduce(" in line]
    assert sums
    assert not [line for line in sums if "while/body" in line]


@pytest.mark.slow
def test_under_jit_an_embedding_is_looked_up_by_columns() -> None:
    """The rows that are sent are a batch's: neither the whole table nor its whole gradient is."""
    model = dataclasses.replace(SMALL, tied=False, vocab=85)
    mesh = Mesh(data=2, fsdp=4)
    text = train(place(model, Jit(), mesh)).compiled.as_text() or ""
    table = f"f32[{model.padded_vocab},{model.width}]"
    assert "all-to-all(" in text
    assert table not in "".join(line for line in text.splitlines() if "all-reduce(" in line or "all-gather(" in line)
    loss, found = gradients(place(model, Jit(), mesh))
    reference_loss, reference = gradients(place(model, Jit(), Mesh(data=1)))
    assert loss == pytest.approx(reference_loss, rel=2e-6)
    assert worst(found, reference) < 1e-5


SHAPES = {"vocab embed": (16, 8), "embed _": (16, 8), "experts embed": (16, 8), "vocab _ embed": (16, 2, 8)}


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"data": 2, "fsdp": 4}, {"data": 1, "fsdp": 4, "expert": 2}])
@pytest.mark.parametrize("ids", [(8,), (8, 3), (8, 3, 2)])
@pytest.mark.parametrize("dims", SHAPES)
def test_every_table_is_looked_up_right_or_refused(dims: str, ids: tuple[int, ...], sizes: dict[str, int]) -> None:
    mesh = Mesh(**sizes)
    whole = mesh.sizes(8)
    layout = Layout(whole, mesh.table(), {"t": Param(SHAPES[dims], dims, zeros)}, mesh.build(whole, jax.devices()))
    specs, draw = layout.specs(), np.random.default_rng(0)
    table, chosen = draw.normal(size=SHAPES[dims]).astype("f4"), draw.integers(0, 16, ids).astype("i4")
    rows = [PartitionSpec(layout.axes("batch")), PartitionSpec()]

    def by_jit(params: Any, token: Any) -> Any:
        return JitContext(layout).lookup(wrap(params, specs)["t"], token)

    def by_hand(params: Any, token: Any) -> Any:
        params = jax.tree.map(lambda p: varied(p, layout.axes("batch")), params)
        return ShardMapContext(layout).lookup(wrap(params, specs)["t"], token)

    split = jax.shard_map(by_hand, mesh=layout.mesh, in_specs=(specs, rows[0]), out_specs=rows[0])
    for function, may_refuse in ((by_jit, False), (split, True)):
        params = {"t": jax.device_put(table, layout.sharding(specs["t"]))}
        try:
            found = jax.jit(function)(params, jax.device_put(chosen, layout.sharding(rows[0])))
        except RecipeError as error:
            assert may_refuse
            assert "needs a table of dims vocab and embed" in error.message
            assert dims != "vocab embed" or len(ids) != 2
            continue
        np.testing.assert_array_equal(found, table[chosen])


@pytest.mark.parametrize("columns", [20, 512])  # of which a device has fewer than TPUs keep together, and as many
@pytest.mark.parametrize("sizes", [{"data": 2, "fsdp": 4}, {"fsdp": 2, "tensor": 2}, {"data": 8}])
def test_tables_of_layers_are_looked_up_at_once(sizes: dict[str, int], columns: int) -> None:
    mesh = Mesh(**sizes)
    whole = mesh.sizes(math.prod(sizes.values()))
    declared = {"t": Param((3, 16, columns), "_ vocab embed", zeros)}
    layout = Layout(whole, mesh.table(), declared, mesh.build(whole, jax.devices()[: math.prod(whole.values())]))
    specs, draw = layout.specs(), np.random.default_rng(0)
    table, chosen = draw.normal(size=(3, 16, columns)).astype("f4"), draw.integers(0, 16, (8, 6)).astype("i4")

    def looked_up(ctx: Any, params: Any, token: Any) -> Any:
        found = Layers(tables=("t",)).looked_up(wrap(params, specs), {TOKEN: token}, ctx)["t"]
        return ctx.collect(found.reshape(-1, *found.shape[2:])).reshape(found.shape[0], -1, 6, columns)

    def by_hand(params: Any, token: Any) -> Any:
        params = jax.tree.map(lambda p: varied(p, layout.axes("batch")), params)
        return looked_up(ShardMapContext(layout), params, token)

    rows = PartitionSpec(layout.axes("batch"))
    out = PartitionSpec(None, layout.axes("batch"))
    split = jax.shard_map(by_hand, mesh=layout.mesh, in_specs=(specs, rows), out_specs=out, check_vma=False)
    params = {"t": jax.device_put(table, layout.sharding(specs["t"]))}
    for function in (partial(looked_up, JitContext(layout)), split):
        given = jax.device_put(chosen, layout.sharding(rows))
        np.testing.assert_array_equal(jax.jit(function)(params, given), table[:, chosen])


@pytest.mark.nightly
def test_fsdp_over_two_mesh_axes_is_the_same() -> None:
    """As on a TPU, where gathers run over all dims of the torus at once, reduce-scatters over the last one apart."""
    sizes = dict.fromkeys(JAX_AXES, 1) | {"fsdp": 2, "fsdp_y": 4}
    loss, found = gradients(place(LANGUAGE_MODELS["mixtral"], ENGINES["shard_map"], Mesh(data=1, fsdp=8), sizes=sizes))
    reference_loss, reference = one_device("mixtral")
    assert loss == pytest.approx(reference_loss, rel=2e-6)
    assert worst(found, reference) < 1e-5
