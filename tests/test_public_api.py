"""What users import: the names and signatures, held by a golden, each found and documented."""

import dataclasses
import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import dtrain
from dtrain.core.errors import RecipeError
from dtrain.core.slices import target
from dtrain.models.dpo import DPO


def signature(name: str) -> str:
    """One line: the kind and signature, or the names of a module's functions."""
    found = getattr(dtrain, name)
    if inspect.ismodule(found):
        own = [key for key, value in vars(found).items() if getattr(value, "__module__", "") == found.__name__]
        return f"{name}: module with {', '.join(sorted(key for key in own if not key.startswith('_')))}"
    kind = (
        "class" if inspect.isclass(found) else "function" if callable(found) and inspect.isfunction(found) else "type"
    )
    try:
        shown = inspect.signature(found)
        # without types, which each version of Python and JAX prints in its own way
        bare = [one.replace(annotation=one.empty) for one in shown.parameters.values()]
        return f"{name}: {kind} {inspect.Signature(bare)}"
    except (TypeError, ValueError):
        return f"{name}: {kind}"


def test_the_names_and_signatures_are_those_of_the_golden(golden: Callable[[str, str], None]) -> None:
    golden("public_api.txt", "\n".join(signature(name) for name in dtrain.__all__) + "\n")


@pytest.mark.parametrize("name", dtrain.__all__)
def test_each_name_is_documented(name: str) -> None:
    assert inspect.getdoc(getattr(dtrain, name))


@pytest.mark.slow
def test_importing_dtrain_imports_nothing_heavy_and_an_unknown_name_is_an_attribute_error() -> None:
    code = (
        "import sys, dtrain; assert 'jax' not in sys.modules; dtrain.Param; assert 'jax' in sys.modules; dtrain.nothing"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip().endswith("AttributeError: module 'dtrain' has no attribute 'nothing'")


@pytest.mark.slow
@pytest.mark.newest
def test_a_script_trains_by_the_public_names(tmp_path: Path) -> None:
    code = "import dtrain; dtrain.run(dtrain.load('r.yaml', ['steps=3'])); "
    code += "dtrain.run(dtrain.load('mlp-digits', ['epochs=1', 'optimizer.schedule.warmup=5']), 'others')"
    (tmp_path / "r.yaml").write_text(RECIPE)
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, timeout=200)
    assert (tmp_path / "runs" / "r" / "run.json").exists()
    assert (tmp_path / "others" / "mlp-digits" / "run.json").exists()


def test_sections_that_do_not_agree_are_refused_in_python_too(tmp_path: Path) -> None:
    """A recipe that was changed after it was loaded, where the objective would be ignored."""
    recipe = dataclasses.replace(dtrain.load("mlp-digits"), objective=DPO())
    with pytest.raises(RecipeError, match="objective: dpo needs a decoder"):
        dtrain.run(recipe, tmp_path)
    with pytest.raises(RecipeError, match="objective: dpo needs a decoder"):
        dtrain.make_plan(recipe, target("cpu-1"))
    assert not list(tmp_path.iterdir())
    with pytest.raises(RecipeError, match="no recipe 'mlp-digit' comes with dtrain"):
        dtrain.load("mlp-digit")


RECIPE = """
model: {kind: mlp, sizes: [64, 16, 10]}
data: digits
optimizer: {kind: sgd, lr: 0.1}
batch: 32
steps: 5
"""
