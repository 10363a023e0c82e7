import dataclasses
import typing
from collections.abc import Callable
from pathlib import Path

import pytest

from dtrain.core.errors import RecipeError
from dtrain.core.shipped import find
from dtrain.models.cnn import CNN
from dtrain.optim.optimizer import SGD
from dtrain.recipe.load import differences, load, plain, text
from dtrain.recipe.recipe import Data, Recipe, Tracker

RECIPES = Path(__file__).parents[2] / "recipes"

GOOD = """
model: {kind: mlp, sizes: [64, 32, 10]}
data: digits
optimizer: {kind: adamw, lr: 1e-3, schedule: {kind: cosine, warmup: 5}}
batch: 32
steps: 100
"""

SHIPPED = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))


def write(folder: Path, body: str, name: str = "recipe.yaml") -> Path:
    path = folder / name
    path.write_text(body)
    return path


def complaints(folder: Path, body: str, *overrides: str, devices: int | None = None) -> str:
    with pytest.raises(RecipeError) as caught:
        load(write(folder, body), overrides, devices)
    return "\n".join(caught.value.problems).replace(f"{folder}/", "")


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_every_shipped_recipe_opens_with_its_command_and_what_to_expect(path: Path) -> None:
    recipe = load(path)
    assert recipe.name == path.stem.replace(".", "-")
    head = path.read_text().split("\n\n")[0]
    for part in (f"dtrain run {path.stem}", "Hardware:", "Time:", "Expected:"):
        assert part in head


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_resolved_recipe_loads_as_the_same(path: Path, tmp_path: Path) -> None:
    recipe = load(path)
    if getattr(recipe.model, "preset", None):  # its fields are written out
        recipe = dataclasses.replace(recipe, model=dataclasses.replace(recipe.model, preset=None))  # pyright: ignore[reportArgumentType, reportCallIssue]
    assert load(write(tmp_path, text(recipe))) == recipe


def test_every_mistake_is_reported_at_once_with_its_position(
    tmp_path: Path, golden: Callable[[str, str], None]
) -> None:
    body = """\
model: {kind: mlpp}
data: {kind: digits, pixls: {crop: 1}}
optmizer: adamw
optimizer: {kind: adamw, lr: -1, b1: "x", shedule: cosine, momentum: 1}
batch: 3.5
lr: 3
mesh: {data: 3, fsdp: true}
track: {to: [{kind: wandb, mode: offlin}]}
evaluate: often
seed: -1
"""
    golden("recipe_mistakes.txt", complaints(tmp_path, body) + "\n")


def test_sections_are_checked_against_each_other(tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    body = """\
model: {kind: mlp, sizes: [65, 31, 9]}
data: digits
optimizer: {kind: adamw, lr: 1e-3, schedule: {kind: cosine, warmup: 100}}
batch: 30
accumulate: 2
steps: 100
mesh: {data: 2, fsdp: 2, tensor: 4}
engine: pmap
name: Not A Name
checkpoint: {best: accuracy}
"""
    golden("recipe_crosschecks.txt", complaints(tmp_path, body, devices=8) + "\n")


@pytest.mark.parametrize(
    "line",
    [
        "track: {to: [{kind: wandb, api_key: canary123}]}",
        "model: {kind: custom, target: 'my:Model', args: {hub_token: canary123}}",
        "data: {kind: text, files: [hf_canary12345678901234567890123456]}",
        "data: {kind: idx, root: 'https://me:canary123@example.com/data'}",
        "name: AKIACANARY1234567890",
        "model: {kind: custom, target: 'my:Model', args: {wandbApiKey: canary123}}",
        "model: {kind: custom, target: 'my:Model', args: {api-key: canary123}}",
        "data: {kind: idx, root: 'https://canary1234567890123456@example.com/data'}",
        "seed: '-----BEGIN RSA PRIVATE KEY-----canary123'",
    ],
)
def test_a_secret_in_a_recipe_is_refused_and_not_shown(tmp_path: Path, line: str) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(f"{line}\nbatch: none\n")
    with pytest.raises(RecipeError) as caught:
        load(path)
    assert "contains a secret" in str(caught.value)
    assert "canary" not in str(caught.value).lower()
    assert len(caught.value.problems) == 1
    assert caught.value.problems[0].startswith(f"{path}:1:")


def test_a_token_of_a_text_is_no_secret(tmp_path: Path) -> None:
    path = tmp_path / "small.yaml"
    path.write_text("model: {kind: custom, target: 'my:Model', args: {end_token: '<eos>', token: 5}}\n")
    with pytest.raises(RecipeError) as caught:
        load(path)
    assert "contains a secret" not in str(caught.value)


def test_the_length_is_given_once(tmp_path: Path) -> None:
    assert "give either steps or epochs; found steps = 100 and epochs = 2" in complaints(tmp_path, GOOD + "epochs: 2\n")
    assert "either steps or epochs; found neither" in complaints(tmp_path, GOOD.replace("steps: 100", ""))


def test_an_override_replaces_the_alternative_of_its_key(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD + "init: {run: runs/first}\n")
    loaded = load(path, ["init.weights=published", "epochs=2"])
    assert loaded.init and (loaded.init.run, loaded.init.weights) == ("", "published")
    assert (loaded.steps, loaded.epochs) == (None, 2)
    for both, what in (("init={run: a, weights: b}", "run = a is given as well"), ("epochs=2", "give either steps")):
        with pytest.raises(RecipeError, match=what):
            load(path, [both, "steps=3"])


def test_overrides_take_precedence_over_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    recipe = load(path, ["optimizer.lr=3e-4", "model.sizes=[64, 16, 10]", "mesh.fsdp=2", "name=other"])
    assert (recipe.optimizer.lr, recipe.model.sizes, recipe.mesh.fsdp, recipe.name) == (3e-4, (64, 16, 10), 2, "other")


def test_another_kind_replaces_the_section(tmp_path: Path) -> None:
    recipe = load(write(tmp_path, GOOD), ["optimizer.kind=sgd", "optimizer.lr=0.1"])
    assert recipe.optimizer == SGD(lr=0.1)


def test_class_weights_of_a_recipe_are_replaced_by_numbers(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD + "class_weights: balanced\n")
    assert load(path, ["class_weights={'3': 4}"]).class_weights == {"3": 4.0}
    assert load(path, ["class_weights.dog=2"]).class_weights == {"dog": 2.0}
    assert load(path, ["class_weights=null"]).class_weights is None


def test_a_key_of_the_section_comes_before_what_another_tool_calls_it(tmp_path: Path) -> None:
    lora = "lora={rank: 2, targets: [layer0.weight], dtpe: bfloat16}"
    assert "lora.dtpe: unknown key; did you mean 'dtype'?" in complaints(tmp_path, GOOD, lora)
    other = complaints(tmp_path, GOOD, "optimizer.mixed_precision=bfloat16")
    assert "optimizer.mixed_precision: unknown key; did you mean precision.compute?" in other


def test_a_mistake_in_an_override_points_to_it(tmp_path: Path) -> None:
    assert complaints(tmp_path, GOOD, "optimizer.lrr=1") == (
        "argument 'optimizer.lrr=1'  optimizer.lrr: unknown key; did you mean 'lr'?"
    )
    for override, meant in (
        ("weight_decay=0.1", "optimizer.decay"),
        ("optimizer.weight_decay=0.1", "optimizer.decay"),
        ("lerning_rate=0.1", "optimizer.lr"),
        ("gradient_accumulation=2", "accumulate"),
    ):
        assert f"unknown key; did you mean {meant}?" in complaints(tmp_path, GOOD, override)
    assert "the keys of optimizer of kind lion" in complaints(tmp_path, GOOD, "optimizer={kind: lion, lr: 1, beta3: 1}")
    assert "an override is key=value" in complaints(tmp_path, GOOD, "lr")
    assert "argument 'batch=[1'" in complaints(tmp_path, GOOD, "batch=[1")


def test_recipes_include_recipes(tmp_path: Path) -> None:
    write(tmp_path, GOOD, "base.yaml")
    over = write(
        tmp_path, "include: base.yaml\nmodel: {kind: cnn, image: [8, 8, 1], classes: 10}\nbatch: 16\n", "over.yaml"
    )
    recipe = load(over)
    assert isinstance(recipe.model, CNN)
    assert (recipe.batch, recipe.steps, recipe.name) == (16, 100, "over")


def test_a_recipe_includes_one_that_comes_with_dtrain_by_its_name(tmp_path: Path) -> None:
    recipe = load(write(tmp_path, "include: mlp-digits\nsteps: 700\n", "own.yaml"))
    assert (recipe.steps, recipe.epochs, recipe.name, recipe.batch) == (
        700,
        None,
        "own",
        load(find("mlp-digits")).batch,
    )
    assert "No such file" in complaints(tmp_path, "include: mlp-digit")
    write(tmp_path, GOOD, "mlp-digits")  # a file of this name comes first
    assert load(tmp_path / "own.yaml").model == load(write(tmp_path, GOOD, "base.yaml")).model


def test_a_mistake_in_an_included_file_points_there(tmp_path: Path) -> None:
    write(tmp_path, GOOD.replace("batch: 32", "batch: no"), "base.yaml")
    assert complaints(tmp_path, "include: base.yaml").startswith("base.yaml:5:8  batch: ")


def test_cyclic_includes_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "include: recipe.yaml", "base.yaml")
    assert "include: a cycle" in complaints(tmp_path, "include: [base.yaml]")


def test_a_missing_file_names_those_that_are_there(tmp_path: Path) -> None:
    write(tmp_path, GOOD, "there.yaml")
    with pytest.raises(RecipeError) as caught:
        load(tmp_path / "here.yaml")
    assert "there.yaml" in caught.value.hint


def test_differences_are_those_that_affect_the_numbers(tmp_path: Path) -> None:
    one = load(write(tmp_path, GOOD))
    two = dataclasses.replace(one, batch=64, name="x", steps=200, track=dataclasses.replace(one.track, every=3))
    assert differences(plain(one), plain(two)) == ["batch: was 32, now 64", "steps: was 100, now 200"]


def test_a_run_at_a_constant_rate_may_grow_longer(tmp_path: Path) -> None:
    one = load(write(tmp_path, GOOD), ["optimizer.schedule=constant"])
    assert not differences(plain(one), plain(dataclasses.replace(one, steps=200)))
    older = plain(one)
    older["optimizer"].pop("groups")  # a run of a version without this key
    assert not differences(older, plain(one))


def test_every_field_is_explained() -> None:
    from dtrain.recipe.schema import schema

    made = schema()
    assert made["additionalProperties"] is False
    assert set(made["properties"]) == {field.name for field in dataclasses.fields(Recipe)} | {"include"}
    assert made["$defs"]["AdamW"]["properties"]["lr"]["description"] == "Peak learning rate."
    assert made["$defs"]["MLP"]["required"] == ["kind"]
    kinds = [member.kind for member in typing.get_args(Data)]
    assert {"enum": kinds} in made["properties"]["data"]["anyOf"]
    kinds = [member.kind for member in typing.get_args(Tracker)]
    assert {"enum": kinds} in made["$defs"]["Track"]["properties"]["to"]["items"]["anyOf"]


def test_overrides_are_one_tree_whatever_their_order(tmp_path: Path) -> None:
    for order in (("optimizer.lr=0.5", "optimizer.kind=sgd"), ("optimizer.kind=sgd", "optimizer.lr=0.5")):
        optimizer = load(RECIPES / "mlp-digits.yaml", order).optimizer
        assert (optimizer.kind, optimizer.lr) == ("sgd", 0.5)


def test_a_key_may_follow_a_kind_given_alone(tmp_path: Path) -> None:
    found = load(RECIPES / "mlp-digits.yaml", ["data=digits", "data.pixels.crop=1"])
    assert (found.data.kind, found.data.pixels.crop) == ("digits", 1)


def test_a_section_without_a_kind_is_of_its_default_kind(tmp_path: Path) -> None:
    found = load(RECIPES / "vit-synthetic-v5e-16.yaml", ["optimizer={kind: sgd, lr: 1.0, schedule: {warmup: 2}}"])
    assert (found.optimizer.schedule.kind, found.optimizer.schedule.warmup) == ("constant", 2)


@pytest.mark.parametrize(
    "override", ["optimizer.lr=.inf", "optimizer.lr=.nan", "batch=99999999999", f"seed={'9' * 5000}"]
)
def test_numbers_that_no_run_can_use_are_refused(override: str) -> None:
    with pytest.raises(RecipeError):
        load(RECIPES / "mlp-digits.yaml", [override])


def test_a_length_on_the_command_line_takes_the_place_of_the_recipes() -> None:
    mlp = Path(__file__).parents[2] / "recipes" / "mlp-digits.yaml"
    assert (load(mlp).steps, load(mlp).epochs) == (None, 60)
    assert (load(mlp, ["steps=200"]).steps, load(mlp, ["steps=200"]).epochs) == (200, None)
    with pytest.raises(RecipeError, match="either steps or epochs"):
        load(mlp, ["steps=200", "epochs=3"])


def test_a_key_of_another_kind_of_model_is_not_suggested() -> None:
    with pytest.raises(RecipeError) as refused:
        load(find("mlp-digits"), ["model.heads=[8]"])
    assert "the keys of model of kind mlp are" in str(refused.value) + refused.value.hint
