"""Every engine on every mesh gives the one-device losses and gradients, on every model."""

from functools import cache
from typing import Any

import pytest

from dtrain.optim.optimizer import SGD, Adafactor, AdamW, Lion, Muon
from dtrain.parallel.jit import Jit
from dtrain.parallel.mesh import LAID, Mesh
from tests.engines import AXIS_MESHES, ENGINES, LANGUAGE_MODELS, MESHES, MODELS, gradients, place, train, worst

PAIRS = [(engine, mesh) for engine in ENGINES for mesh in MESHES if engine != "pmap" or mesh == "data8"]
CASES = [(model, engine, mesh, 1) for model in MODELS for engine, mesh in PAIRS]
CASES += [(model, engine, mesh, 2) for model in ("mlp", "vit") for engine, mesh in PAIRS]
QUICK = {case for case in CASES if case[3] == 1 and case[0] == "mlp"}
EVERY = MODELS | LANGUAGE_MODELS
EVERY_MESH = MESHES | AXIS_MESHES
OPTIMIZERS = {
    "adamw": AdamW(lr=1e-3, decay=0.1, clip=1.0, ema=0.9),
    "sgd": SGD(lr=0.1),
    "lion": Lion(lr=1e-3, decay=0.1),
    "adafactor": Adafactor(lr=1e-3, factor_from=8),
    "muon": Muon(lr=1e-3, decay=0.1),
}


EVERY_OTHER = [model for model in LANGUAGE_MODELS if model != "mixtral"]
LANGUAGE_CASES = [
    (model, engine, mesh, 1)
    for model, mesh in [
        *(("mixtral", mesh) for mesh in AXIS_MESHES),
        *((model, mesh) for model in EVERY_OTHER for mesh in ("data-fsdp-tensor", "sequence-tensor")),
    ]
    for engine in ("jit", "shard_map")
]
LANGUAGE_CASES += [("llama", "shard_map", mesh, 2) for mesh in ("fsdp-sequence", "pipeline-fsdp")]
LANGUAGE_CASES += [("deepseek", "shard_map", "data-expert", 1)]
QUICK |= {
    ("llama", "shard_map", "sequence-tensor", 1),
    ("llama", "shard_map", "pipeline-fsdp", 2),
}


@cache
def one_device(model: str) -> tuple[float, Any]:
    return gradients(place(EVERY[model], Jit(), Mesh(data=1)))


@pytest.mark.parametrize(
    ("model", "engine", "mesh", "parts"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES + LANGUAGE_CASES],
)
def test_losses_and_gradients_are_those_of_one_device(model: str, engine: str, mesh: str, parts: int) -> None:
    loss, found = gradients(place(EVERY[model], ENGINES[engine], EVERY_MESH[mesh], parts=parts))
    reference_loss, reference = one_device(model)
    assert loss == pytest.approx(reference_loss, rel=2e-6)
    assert worst(found, reference) < 1e-5


@cache
def steps_on_one_device(optimizer: str) -> tuple[list[float], Any]:
    chosen = OPTIMIZERS[optimizer]
    found = train(place(MODELS["mlp"], Jit(), Mesh(data=1), optimizer=chosen), chosen)
    return found.losses, found.params


@pytest.mark.parametrize("engine", ["jit", "shard_map"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_sees_whole_arrays(optimizer: str, engine: str) -> None:
    """Clipping and matrix optimizers outside the hand-placed region: the same parameters come out."""
    chosen, mesh = OPTIMIZERS[optimizer], MESHES["data2-fsdp2-tensor2"]
    found = train(place(MODELS["mlp"], ENGINES[engine], mesh, optimizer=chosen), chosen)
    losses, params = steps_on_one_device(optimizer)
    assert found.losses == pytest.approx(losses, rel=5e-6)
    assert worst(found.params, params) < 1e-4


@pytest.mark.parametrize("engine", ["jit", "shard_map"])
def test_parameters_are_split_where_the_rules_say(engine: str) -> None:
    state = train(place(MODELS["mlp"], ENGINES[engine], MESHES["data2-fsdp2-tensor2"])).state
    weight = state.params["layer0"]["weight"]
    assert weight.addressable_shards[0].data.shape == (32, 16)
    moments = state.optimizer[1].mu["layer0"]["weight"]
    assert moments.sharding == weight.sharding


def test_hand_placed_gradients_are_reduce_scattered() -> None:
    text = train(place(MODELS["mlp"], ENGINES["shard_map"], MESHES["fsdp8"])).compiled.as_text()
    assert text is not None
    assert "reduce-scatter(" in text
    assert "all-gather(" in text


def test_microbatches_cost_one_sum_over_devices() -> None:
    """Gradients of parameters that stand whole add up locally; only the total crosses the network."""
    text = train(place(MODELS["mlp"], ENGINES["shard_map"], MESHES["data8"], parts=2)).compiled.as_text() or ""
    sums = [line for line in text.splitlines() if "all-reduce(" in line]
    assert sums
    assert not [line for line in sums if "while/body" in line]


@pytest.mark.slow
def test_fsdp_laid_along_two_dimensions_of_a_network_is_the_same() -> None:
    """As on a TPU, whose sums go along one dimension after the other."""
    sizes = dict.fromkeys(LAID, 1) | {"fsdp": 2, "fsdp_y": 4}
    loss, found = gradients(place(LANGUAGE_MODELS["mixtral"], ENGINES["shard_map"], Mesh(data=1, fsdp=8), sizes=sizes))
    reference_loss, reference = one_device("mixtral")
    assert loss == pytest.approx(reference_loss, rel=2e-6)
    assert worst(found, reference) < 1e-5
