"""Plans for GPUs: by arithmetic, and compiled by JAX's CUDA plug-in, which needs no GPU."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from dtrain.core.slices import target
from dtrain.plan.plan import plan, quick
from dtrain.plan.report import lines, verdict
from tests.conftest import Dtrain
from tests.plan.test_plan import recipe

COMPILER = [
    pytest.mark.gpu_compiler,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("jax_cuda13_plugin") is None, reason="JAX's CUDA plug-in is missing"),
]
LENGTH, LAYERS, HEADS, DIM = 2048, 16, 32, 64


def attention(rows: int, products: int) -> float:
    """FLOPs of cuDNN's kernels on one device."""
    tiles = LENGTH // 128
    return 2 * products * rows * LAYERS * HEADS * LENGTH**2 * DIM * (tiles + 1) / (2 * tiles)


@pytest.mark.slow
@pytest.mark.parametrize(("remat", "products"), [("full", 9), ("attention", 7), ("none", 7)])
def test_cudnn_is_counted_without_a_gpu(tmp_path: Path, remat: str, products: int) -> None:
    """Two products forward, five backward in one kernel, and two more if the forward pass is recomputed."""
    found = quick(recipe(tmp_path, "llama3.2-1b", LENGTH, 32, f"model.remat={remat}"), target("h100-8"))
    assert found.timing
    assert found.timing.tally.kernel_flops == pytest.approx(attention(4, products))


@pytest.mark.slow
def test_a_published_step_of_a_gpu_lies_between_those_that_recompute_all_products_and_none(tmp_path: Path) -> None:
    """torchtitan with FSDP on 64 A100: 2,973 tokens per second and GPU, with some of the products recomputed."""
    on = target("a100-64")
    assert on.chip
    on = replace(on, chip=replace(on.chip, network_bandwidth=25e9))
    speeds = []
    for remat in ("full", "dots"):
        changes = (f"model.remat={remat}", "engine=shard_map")
        timing = quick(recipe(tmp_path, "llama3-8b", 8192, 64, *changes), on).timing
        assert timing
        speeds.append(timing.amount / timing.seconds / on.chips)
    assert speeds[0] < 2973 < speeds[1]


@pytest.mark.parametrize("engine", ["jit", "shard_map"])
@pytest.mark.parametrize(
    "on",
    [
        pytest.param("h100-8", marks=COMPILER),
        *(pytest.param(name, marks=[*COMPILER, pytest.mark.nightly]) for name in ("h100-16", "a100-8")),
    ],
)
def test_a_plan_compiled_for_gpus_agrees_with_arithmetic(tmp_path: Path, on: str, engine: str) -> None:
    wanted = recipe(tmp_path, "llama3.2-1b", LENGTH, 32, f"engine={engine}")
    found, ahead = plan(wanted, target(on)), quick(wanted, target(on))
    assert found.fits
    assert found.timing
    assert ahead.timing
    assert found.memory.peak == pytest.approx(ahead.memory.peak, rel=0.2)
    assert ahead.timing.seconds == pytest.approx(found.timing.seconds, rel=0.15)
    assert found.timing.tally.kernel_flops == pytest.approx(ahead.timing.tally.kernel_flops)
    assert found.timing.tally.flops == pytest.approx(ahead.timing.tally.flops, rel=0.02)
    moved = {kind: sum(t.bytes for (k, _), t in found.timing.tally.collectives.items() if k == kind) for kind in KINDS}
    assert moved["all-gather"] == pytest.approx(2 * GATHERED, rel=0.1)
    twice = EMBEDDING if engine == "shard_map" else 0  # tied: the gradients of the lookup and of the head
    assert moved["reduce-scatter"] == pytest.approx(GATHERED + twice, rel=0.1)
    assert any("decoder.py" in buffer.line for buffer in found.memory.largest)


def exposed(folder: Path, *changes: str) -> dict[str, float]:
    """The part of the collectives of each kind that the quick tier does not hide, for 8B on two hosts of H100."""
    timing = quick(recipe(folder, "llama3-8b", 8192, 16, *changes), target("h100-16")).timing
    assert timing
    found = {kind: cost for (kind, _), cost in timing.tally.collectives.items() if kind in KINDS}
    return {kind: cost.exposed / cost.seconds for kind, cost in found.items()}


@pytest.mark.slow
def test_what_collectives_on_gpus_wait_for(tmp_path: Path) -> None:
    """The compiled programs exposed 18% and 92% (jit), 15% and 3% (shard_map); without its scheduler all is exposed."""
    jit, ours = exposed(tmp_path), exposed(tmp_path, "engine=shard_map")
    assert jit["all-gather"] == pytest.approx(0.15, abs=0.05)
    assert ours["all-gather"] == jit["all-gather"]
    assert (jit["reduce-scatter"], ours["reduce-scatter"]) == (pytest.approx(1.0), pytest.approx(0.0, abs=0.05))
    option = "engine={kind: shard_map, xla: {xla_gpu_enable_latency_hiding_scheduler: false}}"
    assert exposed(tmp_path, option) == {kind: pytest.approx(1.0) for kind in KINDS}


@pytest.mark.slow
def test_experts_on_gpus_cost_a_product_of_all_rows_each(tmp_path: Path) -> None:
    """The compiler for GPUs has no grouped product: 8 experts cost 8 times as much as the rows need."""
    flops = {}
    for on in ("h100-64", "v5p-128"):
        timing = quick(recipe(tmp_path, "mixtral-8x7b", 4096, 64, "engine=shard_map"), target(on)).timing
        assert timing
        flops[on] = timing.tally
    dense = flops["h100-64"].flops - flops["v5p-128"].flops
    attention = flops["h100-64"].kernel_flops
    assert dense == pytest.approx(8 * (flops["v5p-128"].kernel_flops - attention), rel=0.1)


@pytest.mark.slow
def test_a_quick_plan_of_experts_on_gpus_does_not_say_that_it_fits(tmp_path: Path) -> None:
    dense = quick(recipe(tmp_path, "llama3.2-1b", 4096, 64), target("h100-64"))
    experts = quick(recipe(tmp_path, "mixtral-8x7b", 4096, 64), target("h100-64"))
    assert (verdict(dense), verdict(experts)) == ("fits", "may fit")
    assert "experts take memory that a quick plan does not count" in "\n".join(lines(experts))


KINDS = ("all-gather", "reduce-scatter")
GATHERED = 2 * 1_235_814_400
"""Bytes of the weights in bfloat16, which each pass over the layers gathers once."""
EMBEDDING = 2 * 128_256 * 2048


@pytest.mark.nightly
@pytest.mark.parametrize("batch", [pytest.param(512, marks=COMPILER)])
def test_what_a_gpu_has_no_room_for_does_not_fit(tmp_path: Path, batch: int) -> None:
    wanted = recipe(tmp_path, "llama3.2-1b", LENGTH, batch, "model.loss_chunks=1", "model.remat=none")
    found = plan(wanted, target("h100-8"))
    assert not found.fits
    assert found.memory.peak > 60e9


@pytest.mark.slow
def test_without_the_plug_in_the_quick_tier_still_works(dtrain: Dtrain, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u\nold = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if 'cuda' in name else old(name, *a)\n"
    )
    there = {"PYTHONPATH": str(tmp_path)}
    assert "pip install 'dtrain[cuda]'" in dtrain("plan", "decoder-tiny", "--on", "h100-8", code=3, **there).stderr
    assert "fits" in dtrain("plan", "decoder-tiny", "batch=32", "--on", "h100-8", "--quick", **there).stdout
