"""The core runs with nothing else installed; what needs a package that is missing says so with the command."""

import importlib.metadata
import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from dtrain.core import extras
from dtrain.core.errors import RecipeError, missing_package
from dtrain.core.user_code import user_errors
from tests.conftest import bare_environment

MOST = 40
"""Packages of the core, dtrain among them."""
MODULES = {"pillow": "PIL", "crc32c": None}  # the second is found by tensorboardX


def project() -> dict:
    return tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def core() -> set[str]:
    """The core's packages, and all that they require."""
    waiting = [Requirement(line) for line in project()["dependencies"]]
    found: set[str] = set()
    seen: set[str] = set()
    while waiting:
        requirement = waiting.pop()
        if str(requirement) in seen:
            continue
        seen.add(str(requirement))
        found.add(canonicalize_name(requirement.name))
        for line in importlib.metadata.requires(requirement.name) or []:
            needed = Requirement(line)
            extras_of = ("", *requirement.extras)
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras_of):
                waiting.append(needed)
    return found


# what only the core's packages have can be imported, as if nothing else were installed
ALONE = """
import importlib.abc, importlib.metadata, re, sys
CORE = {core!r}
def normal(name): return re.sub(r"[-_.]+", "-", name).lower()
owners = importlib.metadata.packages_distributions()
hidden = {{name for name, has in owners.items() if not any(normal(one) in CORE for one in has)}}
class Core(importlib.abc.MetaPathFinder):
    def __init__(self, finder): self.finder = finder
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in hidden else self.finder.find_spec(name, path, target)
    def __getattr__(self, name): return getattr(self.finder, name)
sys.meta_path[:] = map(Core, sys.meta_path)
sys.argv = ["dtrain", *sys.argv[1:]]
from dtrain.__main__ import main
main()
"""


def alone(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    program = ALONE.format(core=core() | {"dtrain", "pip", "setuptools"})
    environment = bare_environment() | {"JAX_PLATFORMS": "cpu"}  # a libtpu that is installed is hidden, too
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip


def test_the_core_has_few_packages() -> None:
    assert len(core()) + 1 <= MOST, sorted(core())


def test_every_extra_is_known_by_the_modules_that_it_brings() -> None:
    optional = project()["optional-dependencies"]
    known: dict[str, set[str]] = {}
    for module, (extra, _) in extras.PACKAGES.items():
        known.setdefault(extra, set()).add(module)
    for extra, lines in optional.items():
        if extra in ("all", "dev", "tpu", "cuda"):
            continue
        modules = {MODULES.get(package, package) for line in lines if (package := re.split(r"[>=]", line)[0])}
        assert known[extra] == modules - {None}
    everything = re.fullmatch(r"dtrain\[(.*)\]", optional["all"][0])
    assert everything and set(everything[1].split(",")) == known.keys() - {"remote"}
    assert optional["dev"][0] == "dtrain[all]"


SMALL = """
model: {kind: decoder, vocab: 256, context: 32, layers: 1, width: 16, heads: 2, hidden: 24}
data: {kind: text, files: ["{dtrain}/data/alice.txt"], length: 32, cache: cache}
optimizer: {kind: adamw, lr: 1e-3}
batch: 8
steps: 2
"""
NEEDS = """
include: small.yaml
data: {tokenizer: tokenizer.json}
init: {weights: published}
track: {to: [wandb, tensorboard]}
"""


FIRST = [
    ["run", "small.yaml"],
    ["check", "mlp-digits"],
    ["plan", "small.yaml", "--on", "v5e-4", "--quick"],
    ["launch", "plan", "small.yaml", "launch={kind: local, devices: 2}"],
]
MORE = [
    ["run", "mlp-digits", "epochs=1", "optimizer.schedule.warmup=5", "--devices", "2"],
    ["ls"],
    ["report", "mlp-digits"],
    ["evaluate", "mlp-digits"],
    ["explain", "small.yaml"],
    ["generate", "small", "--prompt", "Alice", "--tokens", "3"],
]


@pytest.mark.nightly
@pytest.mark.parametrize("more", [False, True])
def test_run_check_plan_and_launch_need_nothing_but_the_core(more: bool, tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(SMALL)
    (tmp_path / "needs.yaml").write_text(NEEDS)
    for command in [*FIRST, *(MORE if more else [])]:
        done = alone(tmp_path, *command)
        assert done.returncode == 0, f"{command}: {done.stdout}\n{done.stderr}"
    for command, words in {
        ("check", "needs.yaml"): "needs packages that are missing",
        ("run", "needs.yaml"): "needs packages that are missing",
    }.items():
        done = alone(tmp_path, *command)
        assert done.returncode == 3 and "Traceback" not in done.stderr
        assert words in done.stderr
        for part in ("tokenizers (data: it reads tok", "safetensors (init", "wandb (track.to.0", "tensorboardX (track"):
            assert part in done.stderr
        assert "pip install 'dtrain[tensorboard,text,wandb]'" in done.stderr
    assert not (tmp_path / "runs" / "needs").exists()
    reported = {("report", "mlp-digits", "--html", "page.html"): "report"} if more else {}
    for command, extra in {
        **reported,
        ("export", "small", "out"): "text",
        (
            "run",
            "small.yaml",
            "name=other",
            "init.weights=published",
            "data.files=['gs://bucket/a.txt']",
        ): "remote,text",
    }.items():
        done = alone(tmp_path, *command)
        assert (done.returncode, "Traceback" in done.stderr) == (3, False), f"{command}: {done.stderr}"
        assert f"pip install 'dtrain[{extra}]'" in done.stderr, f"{command}: {done.stderr}"
    # a recipe for other machines: what is missing here may be installed there
    done = alone(tmp_path, "check", "needs.yaml", "init=null", "launch={kind: ssh, hosts: [a]}")
    assert done.returncode == 0, done.stderr
    assert "not checked: the data (a package is missing)" in done.stderr
    assert textwrap.shorten("needs packages that are missing: tokenizers", 99) in done.stderr


def test_the_message_names_the_extra() -> None:
    error = missing_package(ModuleNotFoundError("No module named 'PIL.Image'", name="PIL.Image"))
    assert error.message == "the package PIL is missing: it reads image files"
    assert error.hint == "pip install 'dtrain[images]'"
    other = missing_package(ModuleNotFoundError("No module named 'torch'", name="torch"))
    assert (other.message, other.hint) == ("the package torch is missing", "pip install torch")


def test_code_of_a_recipe_that_lacks_an_extra_gets_its_command() -> None:
    with pytest.raises(RecipeError) as refused, user_errors("model.target: my_net:Net"):
        raise ModuleNotFoundError("No module named 'flax'", name="flax")
    assert refused.value.hint.endswith("pip install 'dtrain[flax]'")
