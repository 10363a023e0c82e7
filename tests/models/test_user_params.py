"""Parameters that a user's `init` makes: declared from their shapes, sharded, drawn once; patterns of their paths."""

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dtrain.core.errors import RecipeError
from dtrain.models.custom import Custom, from_init, with_dims, with_statistics
from dtrain.models.nn.count_flops import product_flops
from dtrain.models.nn.param import Param, initial
from dtrain.models.nn.patterns import matched
from dtrain.parallel.rules import with_default_dims

EXAMPLE = {"image": jax.ShapeDtypeStruct((1, 8, 8, 1), jnp.float32)}


@dataclass(frozen=True)
class Net:
    leaf: Any = None
    calls: Any = None

    def init(self, key: jax.Array, example: Any) -> Any:
        if self.calls is not None:
            self.calls.append(1)
        pixels = example["image"].size
        tree = {"in": jax.random.normal(key, (pixels, 24)), "deep": [jnp.ones(24), jax.random.normal(key, (24, 10))]}
        return tree | ({} if self.leaf is None else {"extra": self.leaf})


def test_the_declared_shapes_and_values_are_those_of_init() -> None:
    tree = from_init(Net(), EXAMPLE)
    assert [param.shape for param in jax.tree.leaves(tree)] == [(24,), (24, 10), (64, 24)]
    assert [param.decay for param in jax.tree.leaves(tree)] == [False, True, True]
    values = jax.jit(lambda: initial(tree, jax.random.key(3), "float32"))()
    assert values["in"].shape == (64, 24)
    again, other = (initial(tree, jax.random.key(seed), "float32") for seed in (3, 4))
    np.testing.assert_array_equal(values["in"], again["in"])
    assert not np.array_equal(values["in"], other["in"])


def test_init_is_traced_once_for_all_values() -> None:
    calls: list[int] = []
    tree = from_init(Net(calls=calls), EXAMPLE)
    assert len(calls) == 1
    jax.eval_shape(lambda: initial(tree, jax.random.key(0), "float32"))
    assert len(calls) == 2


@pytest.mark.parametrize("leaf", [np.zeros(3, np.int32), np.zeros(3, np.complex64), jax.random.key(0)])
def test_what_is_not_floating_point_is_refused(leaf: Any) -> None:
    with pytest.raises(RecipeError, match=r"init\(\) returns extra of type .*; parameters are floating-point"):
        from_init(Net(leaf), EXAMPLE)


def test_the_largest_dim_that_fsdp_divides_is_split() -> None:
    tree = {
        "wide": Param((30, 4096), "? ?", jnp.zeros),  # type: ignore[arg-type]
        "odd": Param((4095, 64), "? ?", jnp.zeros),  # type: ignore[arg-type]
        "prime": Param((1031, 7), "? ?", jnp.zeros),  # type: ignore[arg-type]
        "small": Param((8, 8), "? ?", jnp.zeros),  # type: ignore[arg-type]
        "named": Param((512, 512), "hidden ?", jnp.zeros),  # type: ignore[arg-type]
        "scalar": Param((), "", jnp.zeros),  # type: ignore[arg-type]
    }
    names = {name: param.dims for name, param in with_default_dims(tree, {"fsdp": 8}).items()}
    assert names == {
        "wide": "_ embed", "odd": "_ embed", "prime": "_ _", "small": "_ _", "named": "hidden embed", "scalar": "",
    }  # fmt: skip


def test_dims_are_named_by_patterns() -> None:
    tree = from_init(Net(), EXAMPLE)
    named = with_dims(tree, {"i*": "_ hidden", "deep.1": "hidden classes"}, "dims")
    assert [param.dims for param in jax.tree.leaves(named)] == ["?", "hidden classes", "_ hidden"]


def test_a_pattern_matches_something_and_a_path_one_pattern() -> None:
    tree = from_init(Net(), EXAMPLE)
    with pytest.raises(RecipeError, match=r"parameter deep\.1 matches 'deep\.\*' and 'deep\.1'"):
        with_dims(tree, {"deep.*": "_", "deep.1": "_ _"}, "dims")
    with pytest.raises(RecipeError, match="'inn' matches no parameter") as caught:
        with_dims(tree, {"inn": "_ _"}, "dims")
    assert "did you mean in?" in caught.value.hint
    with pytest.raises(RecipeError, match=r"'_' names 1 dims; parameter in has shape \(64, 24\)"):
        with_dims(tree, {"in": "_"}, "dims")
    assert matched(["deep.*"], ["deep.0", "deep.1", "in"], "x") == {"deep.0": "deep.*", "deep.1": "deep.*"}


def test_statistics_are_not_trained_and_stay_in_float32() -> None:
    tree = with_statistics(from_init(Net(), EXAMPLE), ("deep.0",), "statistics")
    kept, trained = tree["deep"][0], tree["in"]
    assert (kept.trained, kept.exact, trained.trained, trained.exact) == (False, True, True, False)


def test_products_and_convolutions_are_counted_through_loops_and_branches() -> None:
    def function(x: jax.Array, w: jax.Array, k: jax.Array) -> jax.Array:
        x, _ = jax.lax.scan(lambda c, _: (jax.checkpoint(jax.jit(lambda c: c @ w))(c), None), x, None, length=5)
        x = jax.lax.cond(x.sum() > 0, lambda x: x @ w @ w, lambda x: x @ w, x)
        image = jax.lax.conv_general_dilated(
            jnp.ones((2, 8, 8, 4)), k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=2
        )
        return x.sum() + image.sum()

    jaxpr = jax.make_jaxpr(function)(jnp.ones((3, 16)), jnp.ones((16, 16)), jnp.ones((3, 3, 2, 6)))
    assert product_flops(jaxpr.jaxpr) == (5 + 2) * 2 * 3 * 16 * 16 + 2 * (2 * 6) * 2 * (8 * 3 - 2) ** 2


def test_a_model_is_sent_to_another_process_without_what_was_built_from_it(tmp_path: Path) -> None:
    (tmp_path / "sent_net.py").write_text(
        "import jax.numpy as jnp\nclass Net:\n    def init(self, key, example): return {'w': jnp.ones((3, 4))}\n"
        "    def loss(self, params, batch, ctx): ...\n"
    )
    model = Custom(target="sent_net:Net", folder=str(tmp_path)).for_example(EXAMPLE)
    assert jax.tree.leaves(model.params())[0].shape == (3, 4)
    assert pickle.loads(pickle.dumps(model)) == Custom(target="sent_net:Net", folder=str(tmp_path))
