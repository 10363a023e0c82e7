"""Under `jit` with fsdp, parameters are gathered and the examples stay where they are, whatever the model."""

import re
from dataclasses import replace

import jax
import numpy as np
import pytest

from dtrain.assembly import step
from dtrain.assembly.assemble import assemble
from dtrain.parallel.mesh import Mesh
from dtrain.recipe.load import load
from tests.engines import ADAM, ENGINES, LANGUAGE_MODELS, MODELS, learning_rate, place
from tests.models.test_examples import EXAMPLES, NAMES, SETTINGS, library

MESH = Mesh(data=2, fsdp=4)
EVERY = MODELS | LANGUAGE_MODELS


def over_data(program: str) -> list[str]:
    """The all-gathers of a compiled program between devices of different places along `data`."""
    found = [line for line in program.splitlines() if re.search(r" all-gather(-start)?\(", line)]
    return [line for line in found if any(len({device // 4 for device in group}) > 1 for group in groups(line))]


def groups(line: str) -> list[list[int]]:
    """The devices that a collective joins, from any of the three spellings of XLA."""
    iota = r"\[([\d,]+)\](?:T\(([\d,]+)\))?"
    if named := re.search(rf"replica_groups=mesh\[(.*?)\](?:, device_ids=\({iota}\))? \{{(.*?)\}}", line):
        axes = re.findall(r"'(\w+)'=(\d+)", named[1])
        names, sizes = [name for name, _ in axes], [int(size) for _, size in axes]
        used = [names.index(name) for name in re.findall(r"'(\w+)'", named[4])]
        others = [axis for axis in range(len(names)) if axis not in used]
        ids = numbered(named[2] or ",".join(map(str, sizes)), named[3]).reshape(sizes)
        return ids.transpose(others + used).reshape(-1, int(np.prod([sizes[axis] for axis in used]))).tolist()
    if short := re.search(rf"replica_groups=\[(\d+),(\d+)\]<={iota}", line):
        return numbered(short[3], short[4]).reshape(int(short[1]), int(short[2])).tolist()
    listed = re.search(r"replica_groups=\{(\{.*?\})\}", line)
    assert listed, line
    return [[int(device) for device in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", listed[1])]


def numbered(sizes: str, order: str | None) -> np.ndarray:
    """The numbers of the devices in an array of these sizes, its dims then put into this order."""
    shape = [int(size) for size in sizes.split(",")]
    ids = np.arange(np.prod(shape)).reshape(shape)
    return ids.transpose([int(dim) for dim in order.split(",")]) if order else ids


def test_groups_are_read_from_every_spelling() -> None:
    assert groups("all-gather(%x), replica_groups={{0,1},{2,3}}, dimensions={0}") == [[0, 1], [2, 3]]
    assert groups("replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}") == [[0, 2], [1, 3]]
    assert groups("replica_groups=mesh['a'=2,'b'=2] {'a'}, dimensions") == [[0, 2], [1, 3]]
    assert groups("replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}, dim") == [[0, 1], [2, 3]]


def program_of(target: str | None, name: str = "plain_jax") -> str:
    own = [f"model.target={target}"] if target else []
    recipe = load(EXAMPLES / f"{name}.yaml", [*SETTINGS, "batch=256", *own, "engine=jit", "mesh={data: 2, fsdp: 4}"])
    assembly = assemble(recipe, jax.devices(), recipe.data.open("train").example, 10)
    return assembly.engine.compile(assembly.train(), "cpu").as_text()


def test_small_parameters_are_gathered_not_the_examples() -> None:
    program = program_of("tests.models.user_models:Quantised")
    assert " all-gather" in program
    assert not over_data(program)


@pytest.mark.nightly
@pytest.mark.parametrize("name", [name for name in NAMES if name != "clip_pairs"])  # it compares each with all others
def test_no_example_gathers_its_batch(name: str) -> None:
    library(name)
    assert not over_data(program_of(None, name))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [name if name in ("mlp", "llama") else pytest.param(name, marks=pytest.mark.nightly) for name in EVERY],
)
def test_no_model_gathers_its_batch(name: str) -> None:
    on = place(EVERY[name], ENGINES["jit"], MESH)
    one = step.train_step(on.grads, on.update, learning_rate(ADAM, 100), on.layout.declared)
    traced = on.engine.trace(on.layout, one, on.now, on.rows, out=None, donate=False)
    assert not over_data(on.engine.compile(traced, "cpu").as_text())


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["jit", "shard_map"])
def test_the_tables_of_layers_are_not_gathered(engine: str) -> None:
    """(vocab 96, inputs 20) each, of which fsdp has 5 columns on a device: tokens and their columns are exchanged, once
    for the layers of one shape and once for the table of the model, and so are their gradients."""
    model = replace(EVERY["gemma4_e2b"], layer_inputs=20, pad_vocab=96)
    on = place(model, ENGINES[engine], Mesh(data=2, fsdp=4))
    one = step.train_step(on.grads, on.update, learning_rate(ADAM, 100), on.layout.declared)
    program = on.engine.compile(on.engine.trace(on.layout, one, on.now, on.rows, out=None, donate=False), "cpu")
    assert program.as_text().count(" all-to-all(") == 2 * (len(model.stacks) + 1)
    sizes = {tuple(map(int, dims.split(","))) for dims in re.findall(r"f32\[([\d,]+)\]", program.as_text())}
    assert any(size[-2:] == (96, 5) for size in sizes)
    assert not [size for size in sizes if size[-2:] == (96, 20)]
