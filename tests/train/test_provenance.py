"""Every difference between two starts is reported, and no more is promised than that allows."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from dtrain.models.settings import LATER
from dtrain.recipe.load import load
from dtrain.recipe.recipe import Guard, Recipe
from dtrain.train.provenance import WATCHING, recorded_settings, resume_guarantee

RECIPE = """
model: {kind: mlp, sizes: [64, 16, 10]}
data: digits
optimizer: {kind: sgd, lr: 0.1, schedule: {kind: cosine}}
batch: 64
epochs: 3
track: {every: 1}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Any:
    (tmp_path / "small.yaml").write_text(RECIPE)
    return lambda *overrides: load(tmp_path / "small.yaml", overrides)


def now(recipe: Recipe, **changes: Any) -> dict[str, Any]:
    settings = recorded_settings(recipe, next(iter(recipe.engine.choices.values())))
    found = {
        "settings": settings, "steps": 60, "mesh": {"data": 1}, "processes": 1,
        "versions": {"jax": "1"}, "hardware": {"device": "a"}, "compiler": {"XLA_FLAGS": ""},
        "code": {"my_net.py": "1"},
    }  # fmt: skip
    return found | changes


def test_what_bears_on_no_number_keeps_the_bits(recipe: Any) -> None:
    saved = now(recipe())
    for other in ("track.every=5", "checkpoint.every=7", "guard.patience=9", "name=other", "evaluate.every=3"):
        assert resume_guarantee(saved, now(recipe(other)), recipe(other), 10) == [
            "same recipe, code, software, devices and mesh: the same bits"
        ]


def test_the_engine_that_auto_is_counts(recipe: Any) -> None:
    """The same recipe may have another engine on other hardware, and `auto` another name for the same one."""
    explicit = recipe().engine.choices["shard_map"]
    saved = now(recipe())
    here = now(recipe()) | {"settings": recorded_settings(recipe(), explicit)}
    assert resume_guarantee(saved, here, recipe(), 10)[1:] == ["  engine.kind: was jit, now shard_map"]
    named = recipe("engine=jit")
    assert "the same bits" in resume_guarantee(saved, now(named), named, 10)[0]


@pytest.mark.parametrize("rope", [True, False])
def test_settings_that_an_earlier_version_did_not_have_are_no_changes(tmp_path: Path, rope: bool) -> None:
    model = "{kind: decoder, vocab: 256, layers: 2, width: 16, heads: 2, experts: {count: 4, active: 2, hidden: 8}"
    model += "}" if rope else ", position: {kind: learned}}"
    text = RECIPE.replace("{kind: mlp, sizes: [64, 16, 10]}", model)
    text = text.replace("data: digits", 'data: {kind: text, files: ["{dtrain}/data/alice.txt"], length: 32}')
    (tmp_path / "decoder.yaml").write_text(text)
    here = load(tmp_path / "decoder.yaml")
    was = now(here)
    later = [f"model.{name}" for name in LATER]
    was["settings"] = {name: value for name, value in was["settings"].items() if name not in later}
    assert len(was["settings"]) < len(now(here)["settings"]) - 10
    assert "the same bits" in resume_guarantee(was, now(here), here, 10)[0]
    other = load(tmp_path / "decoder.yaml", ["model.parallel=true"])
    assert resume_guarantee(was, now(other), other, 10)[1:] == ["  model.parallel: was False, now True"]


@pytest.mark.parametrize("weight", [1.0, 2.0])
def test_of_a_list_of_sections_what_changed_is_named(recipe: Any, weight: float) -> None:
    """Where a mixture's source is cached changes no number; manifests of earlier versions have the list as a whole."""
    old = now(recipe()) | {"settings": {"data.sources": [{"name": "a", "weight": 1.0, "data": {"cache": "x"}}]}}
    new = now(recipe()) | {"settings": {"data.sources.0.name": "a", "data.sources.0.weight": weight}}
    lines = resume_guarantee(old, new, recipe(), 10)
    assert lines[1:] == ([] if weight == 1 else ["  data.sources.0.weight: was 1.0, now 2.0"])


@pytest.mark.parametrize(
    ("overrides", "changes", "lines"),
    [
        (["accumulate=2"], {}, ["accumulate: was 1, now 2"]),
        (["engine=shard_map"], {}, ["engine.kind: was jit, now shard_map"]),
        (["engine.xla={xla_cpu_x: true}"], {}, ["engine.xla.xla_cpu_x: was not set, now True"]),
        ([], {"mesh": {"data": 4}}, ["mesh data: was not set, now 4"]),
        ([], {"processes": 2}, ["processes: was 1, now 2"]),
        ([], {"hardware": {"device": "b"}}, ["hardware device: was a, now b"]),
    ],
)  # fmt: skip
def test_another_order_of_sums_keeps_the_numbers_but_for_rounding(
    recipe: Any, overrides: list[str], changes: dict[str, Any], lines: list[str]
) -> None:
    here = recipe(*overrides)
    kept = resume_guarantee(now(recipe()), now(here, **changes), here, 10)
    assert kept == ["the same numbers except for rounding:", *(f"  {line}" for line in lines)]


@pytest.mark.parametrize(
    ("overrides", "changes", "line"),
    [
        (["batch=32"], {}, "batch: was 64, now 32"),
        (["seed=1"], {}, "seed: was 0, now 1"),
        (["guard.not_finite=skip"], {}, "guard.not_finite: was stop, now skip"),
        ([], {"versions": {"jax": "2"}}, "jax: was 1, now 2"),
        ([], {"compiler": {"XLA_FLAGS": "--x"}}, "compiler XLA_FLAGS: was , now --x"),
        ([], {"code": {"my_net.py": "2"}}, "code my_net.py: was 1, now 2"),
    ],
)
def test_anything_else_may_change_the_numbers(
    recipe: Any, overrides: list[str], changes: dict[str, Any], line: str
) -> None:
    here = recipe(*overrides)
    kept = resume_guarantee(now(recipe()), now(here, **changes), here, 10)
    assert kept == ["the numbers may differ from those of an unchanged run:", f"  {line}"]


def test_a_stretched_schedule_is_named_with_the_jump_of_the_learning_rate(recipe: Any) -> None:
    saved, here = now(recipe()) | {"lr": 1e-5}, recipe("epochs=30")
    assert resume_guarantee(saved, now(here, steps=600), here, 60)[1:] == [
        "  learning rate: was 1e-05 at this step, now 0.0976",
        "  steps: was 60, now 600",
    ]
    flat = recipe("optimizer.schedule=constant")
    assert "the same bits" in resume_guarantee(now(flat) | {"lr": 0.1}, now(flat, steps=600), flat, 60)[0]


def test_a_checkpoint_of_an_older_dtrain_promises_nothing_that_it_did_not_record(recipe: Any) -> None:
    saved = {key: value for key, value in now(recipe()).items() if key in ("mesh", "processes", "versions")}
    assert resume_guarantee(saved, now(recipe()), recipe(), 10) == [
        "the numbers may differ from those of an unchanged run:",
        "  not recorded in the checkpoint: settings, steps, hardware, compiler, code",
    ]


def test_every_key_of_guard_is_known_to_change_numbers_or_not() -> None:
    """A key that only configures a check must not change the promise of the same bits."""
    watching = {key.partition(".")[2] for key in WATCHING}
    acting = {"not_finite", "spike", "on_spike"}
    assert watching | acting == {field.name for field in dataclasses.fields(Guard)}
