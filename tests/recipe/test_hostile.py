"""A recipe from an untrusted source: refused in a bounded time and memory, and none of its code runs."""

import os
from pathlib import Path

import pytest

from dtrain.core.errors import RecipeError
from dtrain.recipe.examine import examine, inspect_data
from dtrain.recipe.load import load
from tests.recipe.test_load import GOOD, write


def refusal(folder: Path, body: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        load(write(folder, body))
    return [line.replace(f"{folder}/", "") for line in caught.value.problems]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("include: /dev/zero", "/dev/zero: not a regular file"),
        ("include: pipe", "not a regular file"),
        ("include: .", "not a regular file"),
        ('include: "a\\0b"', "embedded null byte"),
        ('include: "\\uD800"', "surrogates not allowed"),
        ("data: {kind: idx, root: ~nosuchuser/x}", "recipe.yaml:1:25  data.root: no home folder for ~nosuchuser"),
        ('data: {kind: idx, root: "a\\0b"}', "recipe.yaml:1:25  data.root: contains a NUL character"),
        ('track: {"\\uD800": 1}', "recipe.yaml:1:8  track: contains a lone surrogate"),
        ("engine: {kind: {a: b}}", "engine.kind: expected one of auto, jit, shard_map, pmap; found a mapping with a"),
        ("model: {kind: vit, image: [8, 8], classes: 10}", "3 numbers (height, width, channels); found a list of 2"),
        ("data: {kind: images, root: x, size: [3]}", "a list of 2 numbers (height and width to which every image"),
        ("model: {kind: cnn, image: [8, 8, 1], classes: 2, blocks: 999}", "2997 blocks; at most 1000"),
        ("model: {kind: vit, image: [8, 8, 1], classes: 10, layers: 2147483647}", "a number of at most 10000"),
        ("optimizer: {kind: sgd, lr: 1e300}", "optimizer.lr: expected a number of at most 10,000; found 1e+300"),
        ("optimizer: {kind: sgd, lr: 1e-300}", "optimizer.lr: expected a number of at least 1e-30; found 1e-300"),
        ("optimizer: {kind: adamw, lr: 1, b2: 0.99999999999}", "optimizer.b2: expected a number of at most 0.9999999;"),
        (f"model: {{kind: mlp, sizes: {[8] * 1002}}}", "model.sizes: 1001 layers; at most 1000"),
        ("engine: {kind: jit, xla: {xla_dump_to: x}}", "engine.xla.xla_dump_to: an option that names a file"),
        ("engine: {kind: jit, xla: {xla_gpu_cuda_data_dir: x}}", "engine.xla.xla_gpu_cuda_data_dir: an option that"),
        ('"\\e[2J": 1', "\\x1b[2J: unknown key"),
    ],
)
def test_what_no_run_can_use_is_refused_in_one_line(tmp_path: Path, line: str, message: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    key = line.partition(":")[0]
    rest = [text for text in GOOD.strip().splitlines() if not text.startswith(f"{key}:")]
    lines = refusal(tmp_path, "\n".join([line, *rest]))
    assert len(lines) == 1
    assert message in lines[0]


@pytest.mark.slow
def test_only_the_first_of_many_problems_are_shown(tmp_path: Path) -> None:
    lines = refusal(tmp_path, GOOD + "".join(f"key{i}: 1\n" for i in range(4000)))
    assert len(lines) == 51
    assert lines[-1] == "and 3,950 more"
    long = refusal(tmp_path, GOOD.replace("[64, 32, 10]", str(["x" * 50] * 4000)))
    assert len(long) == 51


def test_files_are_counted_over_all_includes(tmp_path: Path) -> None:
    write(tmp_path, "{}", "leaf.yaml")
    write(tmp_path, f"include: {['leaf.yaml'] * 6}", "branch.yaml")
    (line,) = refusal(tmp_path, f"include: {['branch.yaml'] * 20}")
    assert line == "branch.yaml: a recipe has at most 64 files, with all that it includes" or "leaf.yaml" in line


@pytest.mark.slow
def test_bytes_and_values_are_counted_over_all_includes(tmp_path: Path) -> None:
    write(tmp_path, "#" * 100_000, "long.yaml")
    (line,) = refusal(tmp_path, f"include: {['long.yaml'] * 3}")
    assert line == "long.yaml: 100,000 bytes; a recipe has at most 262,144, with all that it includes"
    write(tmp_path, f"x: [{'1,' * 4000}]", "many.yaml")
    (line,) = refusal(tmp_path, f"include: {['many.yaml'] * 3}")
    assert "a recipe has at most 10,000 keys and values, with all that it includes" in line


def test_more_parameters_than_any_machine_holds_are_refused(tmp_path: Path) -> None:
    (line, *_) = refusal(tmp_path, GOOD.replace("[64, 32, 10]", "[64, 2000000000, 2000000000, 10]"))
    assert "model: 4.0e+18 parameters; at most 1e+15" in line


def test_patterns_that_do_not_fit_into_memory_are_refused(tmp_path: Path) -> None:
    body = GOOD.replace("[64, 32, 10]", "[64, 2000000000]").replace(
        "digits", "{kind: synthetic, image: [8, 8, 1], classes: 2000000000}"
    )
    (line,) = refusal(tmp_path, body)
    assert "data.classes: 2000000000 patterns of 64 values each" in line


def test_a_glob_over_the_whole_machine_is_not_searched(tmp_path: Path) -> None:
    recipe = load(
        write(
            tmp_path,
            GOOD.replace("digits", "{kind: tokens, files: ['/**/*.none', '/usr/**/*.none'], length: 8}").replace(
                "kind: mlp, sizes: [64, 32, 10]", "kind: decoder, vocab: 8, context: 8, layers: 1, width: 8, heads: 1"
            ),
        )
    )
    assert inspect_data(recipe.data).not_checked == ["data.files: more than 20,000 file names to search"]


def test_a_check_writes_nothing_and_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    (tmp_path / "words.txt").write_text("some words " * 100)
    body = """
model: {kind: custom, target: "evil:Net"}
data: {kind: text, files: [words.txt], length: 8, cache: cache}
optimizer: {kind: sgd, lr: 0.1}
batch: 2
steps: 3
"""
    path = write(tmp_path, body)
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir("/")
    found = examine(path, [], None, data=True)
    assert sorted(tmp_path.rglob("*")) == before
    assert "not checked: the model, whose module is imported only when the run starts" in found.verdict()
    assert found.notes == [
        f"data.files.0: {tmp_path}/words.txt, relative to the recipe",
        f"model.folder: {tmp_path}, relative to the recipe",
    ]
