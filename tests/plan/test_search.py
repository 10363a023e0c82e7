"""What a search tries, and in which order. Stand-ins replace arithmetic and the compiler."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from dtrain.assembly.assemble import engine_on
from dtrain.core.slices import Target, target
from dtrain.models.nn.remat import ON_DEVICE
from dtrain.parallel.jit import Jit
from dtrain.plan import search as searching
from dtrain.plan.plan import Plan, quick
from dtrain.plan.search import SearchResult, overlay, search
from dtrain.plan.variants import Candidate, engine_variants, meshes, remat_variants
from dtrain.plan.workers import Outcome, PlanJob
from dtrain.recipe.load import load
from dtrain.recipe.recipe import Recipe
from tests.plan.test_plan import recipe

# seconds and the part of the memory that a recipe takes
Cost = Callable[[Recipe], tuple[float, float]]
Compiled = Callable[[Cost, int, str], tuple[SearchResult, list[Recipe]]]


def product(wanted: Recipe) -> tuple[float, float]:
    """A cost made of independent factors of remat, mesh and engine; remat none does not fit."""
    remat = {"none": (0.70, 1.5), "dots": (0.85, 0.8), "attention": (0.95, 0.6), "full": (1.0, 0.5)}
    lists = (policy for policy in ON_DEVICE if not isinstance(policy, str))
    costs = remat | dict(zip(lists, [(0.89, 0.7), (0.93, 0.65)], strict=True))
    seconds, memory = costs[wanted.model.remat]  # pyright: ignore[reportAttributeAccessIssue]
    if wanted.model.loss_chunks == 1:  # pyright: ignore[reportAttributeAccessIssue]
        seconds, memory = 0.99 * seconds, memory + 0.3
    seconds *= 1.05 ** (wanted.mesh.tensor - 1) * 1.1 ** (wanted.accumulate - 1)
    overlapped = 0.9 if wanted.engine.overlap == "products" else 1.0
    return seconds * overlapped * (0.99 if wanted.engine.kind == "jit" else 1.0), memory


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Compiled:
    """A search with `product` for arithmetic and `cost` for the compiler; returns its result and what it compiled."""
    template = quick(recipe(tmp_path, "llama3.2-1b", 2048, 16), target("v5e-4"))

    def searched(cost: Cost, tries: int, on: str) -> tuple[SearchResult, list[Recipe]]:
        wanted, attempts = recipe(tmp_path, "llama3.2-1b", 2048, 16), list[Recipe]()

        def planned(one: Recipe, cost: Cost) -> Plan:
            seconds, memory = cost(one)
            assert template.timing
            timing = dataclasses.replace(template.timing, seconds=seconds)
            held = dataclasses.replace(template.memory, peak=int(memory * template.memory.room), arena=0)
            return dataclasses.replace(template, recipe=one, memory=held, timing=timing)

        def remembered(wanted: Sequence[Recipe], _on: Target, _w: int, _p: object) -> Iterator[tuple[int, Outcome]]:
            attempts.extend(wanted)
            yield from enumerate(planned(one, cost) for one in wanted)

        monkeypatch.setattr(searching, "cached_outcomes", remembered)
        monkeypatch.setattr(PlanJob, "make", lambda job: planned(job.recipe, product))
        return search(wanted, target(on), tries, 1, None, lambda _: None), attempts

    return searched


CUSTOM = """
from dtrain import Flops, Mixture, Structure, layers

class Mine:
    def __init__(self, remat="full"):
        self.structure = Structure(mixture=Mixture(count=6, active=2), alternatives={"remat": (remat, "none")})

    def params(self):
        return {"out": layers.dense(64, 10, "embed classes")}

    def loss(self, params, batch, ctx):
        raise NotImplementedError

    def flops(self, example, examples):
        return Flops(1.0, "one")

    def mismatch(self, example):
        return ""
"""


def test_a_search_reads_what_a_custom_model_declares(tmp_path: Path) -> None:
    (tmp_path / "mine_moe.py").write_text(CUSTOM)
    path = tmp_path / "mine.yaml"
    path.write_text(
        "{model: {kind: custom, target: 'mine_moe:Mine'}, data: digits, optimizer: {kind: sgd, lr: 1},"
        " batch: 96, steps: 1}"
    )
    wanted, on = load(path), target("v5e-4")
    assert {one.recipe.mesh.expert for one in meshes(wanted, on)} == {1, 2}
    tried = list(remat_variants(Candidate(wanted, {}), on))
    assert {str(one.changes.get("model")) for one in tried} == {"None", "{'args': {'remat': 'none'}}"}
    for one in tried:
        (tmp_path / "better.yaml").write_text(overlay(path, tmp_path, [], one))
        assert load(tmp_path / "better.yaml").model == one.recipe.model


@pytest.mark.slow
def test_five_tries_find_the_best_of_the_space(compiled: Compiled, tmp_path: Path) -> None:
    """The best of every mesh, remat policy, number of microbatches, engine and set of options that fits."""
    found, attempts = compiled(product, 5, "v5e-4")
    base = Candidate(recipe(tmp_path, "llama3.2-1b", 2048, 16), {})
    shapes = [base, *meshes(base.recipe, target("v5e-4"))]
    shapes += [one for shape in shapes for one in remat_variants(shape, target("v5e-4"))]
    space = [*shapes, *(way for shape in shapes for way in engine_variants(shape, base.recipe, target("v5e-4")))]
    assert len(space) > 100
    best = min(product(one.recipe)[0] for one in space if product(one.recipe)[1] <= 1)
    assert found.winner
    assert product(found.winner[0].recipe)[0] == pytest.approx(best)
    assert len(attempts) == len({str(one) for one in attempts}) == 5


@pytest.mark.parametrize(("on", "auto"), [("v5p-8", "SparseCores"), ("v4-8", "kernels"), ("h100-8", "")])
def test_a_search_tries_each_program_once(tmp_path: Path, on: str, auto: str) -> None:
    """`auto` is one of the sets of options: that set is not compiled again."""
    given, hardware = recipe(tmp_path, "llama3.2-1b", 2048, 16), target(on)
    by_itself = engine_on(given, hardware.chip, hardware.devices, 1).kind
    assert by_itself not in {one.text for one in engine_variants(Candidate(given, {}), given, hardware)}
    base = dataclasses.replace(given, engine=Jit())
    found = list(engine_variants(Candidate(base, {}), base, hardware))
    engines = [base.engine, *(one.recipe.engine for one in found)]
    programs = [(engine.kind, engine.chosen(hardware.platform, hardware.chip)) for engine in engines]
    assert all(one not in programs[:number] for number, one in enumerate(programs))
    assert len(programs) == {"v5p-8": 10, "v4-8": 8, "h100-8": 2}[on]
    texts = [one.text for one in found]
    assert "shard_map" in texts
    assert not any(text.startswith("shard_map") and auto in text for text in texts if auto)
    assert "jit, collectives on the SparseCores" not in texts  # v5p's auto; the others have none
    assert ("jit, no collectives overlapped" in texts) == (on == "v5p-8")


def test_the_winner_keeps_the_other_keys_of_the_engine(tmp_path: Path) -> None:
    base = dataclasses.replace(
        recipe(tmp_path, "llama3.2-1b", 2048, 16), engine=Jit(overlap="kernels", steps_per_call=2)
    )
    found = {one.text: one for one in engine_variants(Candidate(base, {}), base, target("v5e-4"))}
    assert all(one.recipe.engine.steps_per_call == 2 for one in found.values())
    assert found["jit"].changes["engine"] == {"kind": "jit", "overlap": "auto", "steps_per_call": 2}


@pytest.mark.slow
def test_meshes_and_remat_come_before_compiler_options(compiled: Compiled) -> None:
    """The given recipe, another remat policy, another mesh; then options for the fastest of these."""
    found, attempts = compiled(product, 5, "v5e-4")
    base, remat, mesh, *rest = attempts
    assert base == found.tried[0].recipe
    assert (remat.mesh, remat.model.remat) == (base.mesh, "dots")  # pyright: ignore[reportAttributeAccessIssue]
    assert mesh.mesh != base.mesh
    assert all(one.engine == base.engine for one in (remat, mesh))
    fastest = min((base, remat, mesh), key=lambda one: product(one)[0])
    assert [dataclasses.replace(one, engine=base.engine) for one in rest] == [fastest, fastest]
    assert all(one.engine != base.engine for one in rest)


@pytest.mark.slow
def test_in_place_of_a_shape_that_does_not_fit_the_next_is_compiled(
    compiled: Compiled,
) -> None:
    """It fits by arithmetic, but not by the compiler."""

    def cost(wanted: Recipe) -> tuple[float, float]:
        seconds, memory = product(wanted)
        return seconds, 1.01 if wanted.model.remat == "dots" else memory  # pyright: ignore[reportAttributeAccessIssue]

    found, attempts = compiled(cost, 5, "v5e-4")
    first_list = next(policy for policy in ON_DEVICE if not isinstance(policy, str))
    assert [one.model.remat for one in attempts[1:4]] == ["dots", "dots", first_list]  # pyright: ignore[reportAttributeAccessIssue]
    assert found.winner
    assert found.winner[0].recipe == attempts[3]
    assert attempts[3].engine == attempts[0].engine


@pytest.mark.slow
def test_other_hardware_is_not_given_the_options_of_tpus(
    compiled: Compiled,
) -> None:
    """They would be ignored, and the same program would be compiled again."""
    _, attempts = compiled(product, 12, "h100-8")
    assert len(attempts) > 3
    assert not any(one.engine.xla for one in attempts)
