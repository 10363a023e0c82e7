"""Optimizers of optax, and of a user's file, follow the recipe's schedule and are sharded like any other."""

import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dtrain.assembly import state as states
from dtrain.assembly.assemble import assemble
from dtrain.checkpoint import manifest
from dtrain.core.errors import FieldError, RecipeError
from dtrain.models.nn.param import Param, normal, zeros
from dtrain.optim import custom
from dtrain.optim.custom import CustomOptimizer
from dtrain.optim.groups import Group, grouped
from dtrain.optim.optimizer import SGD, AdamW, Optimizer
from dtrain.optim.shared import Cosine
from dtrain.optim.update import learning_rate, transformation
from dtrain.parallel.mesh import Mesh
from dtrain.parallel.rules import Layout
from dtrain.recipe.load import load
from tests.conftest import Dtrain
from tests.engines import initial_values
from tests.optim import my_optimizers

DECLARED = {
    "w": Param((256, 128), "embed hidden", normal(0.1), fan_in=("embed",)),
    "b": Param((128,), "hidden", zeros, decay=False),
}
MODULE = "tests.optim.my_optimizers"
KEY = jax.random.key(0)


def trained(optimizer: Optimizer, steps: int = 5, declared: Any = DECLARED) -> Any:
    """The parameters after some steps on gradients that differ by step."""
    update = transformation(optimizer, declared, steps)
    params = initial_values(declared)
    state = update.init(params)

    @jax.jit
    def step(params: Any, state: Any, number: jax.Array) -> Any:
        gradients = jax.tree.map(lambda p: jnp.cos(p + number.astype(jnp.float32)), params)
        updates, state = update.update(gradients, state, params, step=number)
        return optax.apply_updates(params, updates), state

    for number in range(steps):
        params, state = step(params, state, jnp.int32(number))
    return params


def worst(a: Any, b: Any) -> float:
    return max(float(jnp.abs(x - y).max()) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_optax_with_the_schedule_of_the_recipe_is_dtrains_own(decay: float) -> None:
    schedule = Cosine(warmup=2, final=0.1)
    own = SGD(lr=0.1, schedule=schedule, momentum=0.9, decay=decay, clip=1.0)
    same = CustomOptimizer(lr=0.1, schedule=schedule, target="optax:sgd", args={"momentum": 0.9}, decay=decay, clip=1.0)
    assert worst(trained(own), trained(same)) < 1e-6
    adam = CustomOptimizer(lr=0.1, schedule=schedule, decay=decay)
    assert worst(trained(AdamW(lr=0.1, schedule=schedule, decay=decay)), trained(adam)) < 1e-5
    assert worst(trained(own), trained(CustomOptimizer(lr=0.1, target="optax:sgd"))) > 1e-3


@pytest.mark.slow
def test_a_users_function_gets_its_arguments_and_the_learning_rate() -> None:
    schedule = Cosine(warmup=2)
    one = CustomOptimizer(lr=0.3, schedule=schedule, target=f"{MODULE}:clipped", args={"b1": 0.5})
    rate = learning_rate(one, 5)
    by_hand = my_optimizers.clipped(rate, b1=0.5)
    params = initial_values(DECLARED)
    state = by_hand.init(params)
    for number in range(5):
        gradients = jax.tree.map(lambda p, k=number: jnp.cos(p + k), params)
        updates, state = by_hand.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
    assert worst(params, trained(one)) < 1e-5


def test_groups_and_frozen_parameters_hold_for_it() -> None:
    groups = (Group(match="b", frozen=True), Group(match="w", lr=0.0))
    declared = grouped(DECLARED, groups[:1])
    moved = trained(CustomOptimizer(lr=0.1), declared={"w": declared["w"]})
    assert moved.keys() == {"w"}
    still = trained(CustomOptimizer(lr=0.1), declared=grouped(DECLARED, groups[1:]))
    np.testing.assert_array_equal(still["w"], initial_values(DECLARED)["w"])
    assert float(jnp.abs(still["b"]).max()) > 0.1


def test_the_state_of_a_factored_optimizer_is_split_like_its_parameters() -> None:
    args = {"min_dim_size_to_factor": 16}
    one = CustomOptimizer(lr=0.1, target="optax:adafactor", args=args)
    mesh = Mesh(data=1, fsdp=4, tensor=2)
    sizes = mesh.sizes(8)
    layout = Layout(sizes, mesh.table(), DECLARED, mesh.build(sizes, jax.devices()))
    update = transformation(one, DECLARED, 10)
    shapes = states.abstract(
        states.state_initializer(DECLARED, update, "float32", 0), layout, one.state_dims, one.apart
    )
    leaves = [leaf for leaf in jax.tree.leaves(shapes.optimizer) if leaf.size > 1]
    found = {leaf.shape: tuple(leaf.sharding.spec) for leaf in leaves}
    assert found == {(128,): ("tensor",), (256,): ("fsdp",)}


def test_a_state_whose_dims_cannot_be_told_apart_is_refused() -> None:
    square = {"w": Param((8192, 8192), "embed hidden", zeros)}
    one = CustomOptimizer(lr=0.1, target="optax:adafactor")
    mesh = Mesh(data=1, fsdp=8)
    sizes = mesh.sizes(8)
    layout = Layout(sizes, mesh.table(), square, mesh.build(sizes, jax.devices()))
    update = transformation(one, square, 10)
    with pytest.raises(RecipeError, match=r"optimizer state .* \(8192,\) does not have the shape of a parameter"):
        states.abstract(states.state_initializer(square, update, "float32", 0), layout, one.state_dims, one.apart)


STACK = {"blocks": Param((3, 2, 16, 8), "layer experts embed hidden", zeros), "b": Param((8,), "hidden", zeros)}


@pytest.mark.slow
@pytest.mark.parametrize("target", ["optax:lamb", "optax:lars", "optax:adafactor", "optax:novograd", "optax:fromage"])
def test_each_layer_and_expert_of_a_stack_is_a_parameter_of_its_own(target: str) -> None:
    args = {"min_dim_size_to_factor": 4} if target == "optax:adafactor" else {}
    one = CustomOptimizer(lr=0.1, target=target, args=args)
    values = jax.random.normal(jax.random.key(0), (3, 2, 16, 8)) * jnp.array([1.0, 100.0, 0.01])[:, None, None, None]
    alone = {str(i): Param((16, 8), "embed hidden", zeros) for i in range(6)} | {"b": STACK["b"]}
    params: Any = {"blocks": values, "b": jnp.ones(8)}
    each: Any = {str(i): value for i, value in enumerate(values.reshape(6, 16, 8))} | {"b": jnp.ones(8)}
    whole, apart = transformation(one, STACK, 10), transformation(one, alone, 10)
    state, own = whole.init(params), apart.init(each)
    for step in range(3):
        updates, state = whole.update(jax.tree.map(jnp.cos, params), state, params, step=step)
        others, own = apart.update(jax.tree.map(jnp.cos, each), own, each, step=step)
        params, each = optax.apply_updates(params, updates), optax.apply_updates(each, others)
    for i in range(6):
        np.testing.assert_allclose(params["blocks"][divmod(i, 2)], each[str(i)], rtol=1e-6)
    np.testing.assert_allclose(params["b"], each["b"], rtol=1e-6)


@pytest.mark.slow
def test_functions_that_treat_every_value_alone_get_stacks_as_they_are() -> None:
    state = transformation(CustomOptimizer(lr=0.1, target="optax:adam"), STACK, 10).init(initial_values(STACK))
    assert (3, 2, 16, 8) in {leaf.shape for leaf in jax.tree.leaves(state)}
    for name in sorted(custom.VALUE_BY_VALUE):  # a stack of two, and each half alone
        values = jax.random.normal(KEY, (2, 5, 4))
        update = getattr(optax, name)(0.1)

        def moved(p: jax.Array, update: Any = update) -> jax.Array:
            state = update.init(p)
            for _ in range(3):
                change, state = update.update(jnp.cos(p), state, p)
                p = optax.apply_updates(p, change)
            return p

        together, apart = moved(values), jnp.stack([moved(half) for half in values])
        np.testing.assert_allclose(together, apart, rtol=1e-5, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["adamw", "nadamw", "adamaxw", "lion"])
def test_weight_decay_of_optax_is_off_unless_it_is_asked_for(target: str) -> None:
    declared = {"b": Param((4,), "hidden", zeros, decay=False)}
    params = {"b": jnp.full(4, 10.0)}

    def moved(**more: Any) -> float:
        update = transformation(CustomOptimizer(lr=1.0, target=f"optax:{target}", **more), declared, 10)
        updates, _ = update.update({"b": jnp.zeros(4)}, update.init(params), params, step=0)
        return float(updates["b"][0])

    assert moved() == 0
    assert moved(args={"weight_decay": 0.1}) == pytest.approx(-1.0)
    assert moved(decay=0.1, decay_all=True) == pytest.approx(-1.0)


def placed(one: CustomOptimizer, mesh: Mesh, declared: Any = DECLARED) -> Any:
    sizes = mesh.sizes(8)
    layout = Layout(sizes, mesh.table(), declared, mesh.build(sizes, jax.devices()))
    make = states.state_initializer(declared, transformation(one, declared, 10), "float32", 0)
    return states.abstract(make, layout, one.state_dims, one.apart).optimizer


def test_state_in_a_container_for_each_parameter_is_replicated_or_refused() -> None:
    shampoo = CustomOptimizer(lr=0.1, target=f"{MODULE}:shampoo")
    found = placed(shampoo, Mesh(data=8))
    assert {leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(found)} == {True}
    with pytest.raises(RecipeError, match=r"optimizer state .*stats.w.left \(256, 256\)"):
        placed(shampoo, Mesh(data=1, fsdp=8))
    assert worst(trained(shampoo), initial_values(DECLARED)) > 1e-3


def test_labels_may_be_a_function_of_the_parameters() -> None:
    found = placed(CustomOptimizer(lr=0.1, target=f"{MODULE}:by_label"), Mesh(data=1, fsdp=4, tensor=2))
    specs = {leaf.shape: tuple(leaf.sharding.spec) for leaf in jax.tree.leaves(found) if leaf.size > 1}
    assert specs == {(256, 128): ("fsdp", "tensor")}


@pytest.mark.parametrize(
    ("target", "args", "message"),
    [
        (f"{MODULE}:nothing", {}, "returns a int, no optax transformation"),
        (f"{MODULE}:broken", {}, r"my_optimizers\.py:\d+: ValueError: no such thing"),
        (f"{MODULE}:rateless", {}, "unexpected keyword argument 'learning_rate'"),
        (f"{MODULE}:clipped", {"b9": 1}, "unexpected keyword argument 'b9'"),
        (f"{MODULE}:none", {}, "has no attribute 'none'"),
        ("optax:adamm", {}, "has no attribute 'adamm'"),
    ],
)
def test_what_is_no_optimizer_is_refused(target: str, args: dict[str, object], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        transformation(CustomOptimizer(lr=0.1, target=target, args=args), DECLARED, 10)


@pytest.mark.parametrize(("name", "near"), [("Adamw", "adamw"), ("adammw", "adamw")])
def test_a_misspelt_function_gets_the_nearest(name: str, near: str) -> None:
    with pytest.raises(RecipeError) as error:
        transformation(CustomOptimizer(lr=0.1, target=f"optax:{name}"), DECLARED, 10)
    assert error.value.hint == f"did you mean optax:{near}?"


def test_one_that_needs_more_than_gradients_is_refused_with_the_reason() -> None:
    recipe = load(
        Path(__file__).parents[2] / "recipes" / "mlp-digits.yaml",
        ["optimizer=null", f"optimizer={{kind: custom, lr: 0.1, target: '{MODULE}:needs_value'}}"],
    )
    with pytest.raises(RecipeError, match=r"optimizer\.target: .*:needs_value: TypeError"):
        assemble(recipe, jax.devices()[:1], recipe.data.open("train").example, 10).train()


def test_for_a_function_of_optax_no_folder_is_searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans and explanations run such recipes without asking: nothing beside the recipe may be imported by it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    transformation(CustomOptimizer(lr=0.1, target="optax:lamb", folder=str(tmp_path)), DECLARED, 10)
    assert str(tmp_path) not in sys.path
    transformation(CustomOptimizer(lr=0.1, target=f"{MODULE}:clipped", folder=str(tmp_path)), DECLARED, 10)
    assert str(tmp_path) in sys.path


def test_a_target_of_another_form_is_refused() -> None:
    with pytest.raises(FieldError, match=re.escape("'optax.adam' is not of the form package.module:name")):
        CustomOptimizer(lr=0.1, target="optax.adam")


@pytest.mark.nightly
def test_a_run_with_it_resumes_to_the_same_bits_and_plans_ask_first(dtrain: Dtrain, tmp_path: Path) -> None:
    (tmp_path / "my_opt.py").write_text(
        "import optax\n\n\ndef make(learning_rate, b1):\n    return optax.nadam(learning_rate, b1=b1)\n"
    )
    own = ["optimizer={kind: custom, target: 'my_opt:make', args: {b1: 0.8}, lr: 0.003, schedule: constant}"]
    run = ["run", "mlp-digits", *own, "epochs=null", "--devices", "4", "mesh={fsdp: 4}"]
    dtrain(*run, "steps=40", "name=straight")
    dtrain(*run, "steps=15", "name=halves")
    assert "resumed from step 15" in dtrain(*run, "steps=40", "name=halves").stderr
    straight, halves = (
        manifest.read(tmp_path / "runs" / name / "checkpoints" / "40").checksum for name in ("straight", "halves")
    )
    assert straight == halves
    refused = dtrain("plan", "mlp-digits", *own, "--on", "v5e-4", "--quick", code=2)
    assert "my_opt:make: custom code, which this command must run" in refused.stderr
