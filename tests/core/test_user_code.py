"""What a recipe names as package.module:name is its own, whatever the process imported before."""

import sys
from pathlib import Path
from typing import Any

import pytest

from dtrain import core
from dtrain.core.errors import RecipeError
from dtrain.core.user_code import build_target, user_errors


def folder(at: Path, text: str, name: str = "parts.py") -> str:
    (at / name).parent.mkdir(parents=True, exist_ok=True)
    (at / name).write_text(text)
    return str(at)


@pytest.mark.parametrize("name", ["parts.py", "parts/__init__.py"])
def test_a_module_of_the_same_name_in_another_recipes_folder_is_refused(tmp_path: Path, name: str) -> None:
    first = folder(tmp_path / "a", "def make(): return 1\n", name)
    second = folder(tmp_path / "b", "def make(): return 2\n", name)
    assert build_target("model", "parts:make", {}, first) == 1
    with pytest.raises(
        RecipeError, match=r"has imported .*/a/parts.*, and the recipe's parts is .*/b/parts"
    ) as refused:
        build_target("model", "parts:make", {}, second)
    assert "a process for each recipe" in refused.value.hint
    assert build_target("model", "parts:make", {}, first) == 1


def test_a_module_that_the_named_one_imports_counts_too(tmp_path: Path) -> None:
    first, second = (folder(tmp_path / name, f"SIZE = {len(name)}\n", "sizes.py") for name in ("a", "bb"))
    folder(tmp_path / "a", "import sizes\ndef make(): return sizes.SIZE\n", "one.py")
    folder(tmp_path / "bb", "import sizes\ndef make(): return sizes.SIZE\n", "two.py")
    assert build_target("model", "one:make", {}, first) == 1
    with pytest.raises(RecipeError, match="the recipe's sizes is"):
        build_target("model", "two:make", {}, second)


def test_the_folder_of_the_recipe_is_searched_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder(tmp_path / "here", "def make(): return 'here'\n"))
    recipe = folder(tmp_path / "recipe", "def make(): return 'recipe'\n")
    folder(tmp_path / "recipe", "", "json.py")  # as the standard library has it
    assert build_target("model", "parts:make", {}, recipe) == "recipe"
    assert build_target("model", "parts:make", {}, recipe) == "recipe"
    assert sys.path[:2] == [recipe, str(tmp_path / "here")]


def test_a_second_derivative_by_forward_mode_has_what_to_use_instead(tmp_path: Path) -> None:
    text = """
import jax, jax.numpy as jnp
from dtrain import layers
def make():
    params = {"weight": jnp.ones((2, 2)), "bias": jnp.ones(2)}
    def u(x): return layers.linear(params, x[None]).sum()
    jax.jacrev(jax.grad(u))(jnp.ones(2))
    jax.hessian(u)(jnp.ones(2))
"""
    with pytest.raises(RecipeError, match=r"physics\.py:6: TypeError: can't apply forward-mode") as refused:
        build_target("model", "physics:make", {}, folder(tmp_path, text, "physics.py"))
    assert "jax.jacrev(jax.grad(f)) in place of jax.hessian(f)" in refused.value.hint


OURS = """
from functools import cached_property
from dtrain.core.errors import RecipeError

class Model:
    @cached_property
    def size(self):
        raise RecipeError("the size is not known")

def read():
    return Model().size
"""


def test_an_error_of_ours_behind_pythons_own_files_is_at_no_line_of_the_users() -> None:
    names: dict[str, Any] = {}
    exec(compile(OURS, str(Path(core.__file__).with_name("ours.py")), "exec"), names)
    with pytest.raises(RecipeError) as refused, user_errors("model.target: net:Net"):
        names["read"]()
    assert "functools" not in refused.value.message
