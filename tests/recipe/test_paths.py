import glob
from pathlib import Path

import pytest

from dtrain.core.types import JsonObject
from dtrain.recipe.load import differences, load, plain, text
from dtrain.recipe.paths import absolute, unknown_homes, with_absolute_paths
from dtrain.recipe.yaml import parse, read
from tests.recipe.test_load import write

BODY = """
model: {kind: custom, target: "my_net:Net"}
data: {kind: text, files: [FILE], length: 8}
optimizer: {kind: sgd, lr: 0.1}
batch: 2
steps: 3
"""


@pytest.fixture
def beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a recipe and its files, next to the working folder."""
    folder = tmp_path / "recipes"
    for path in (folder / "books" / "a.txt", folder / "my_net.py", folder / "b.txt", tmp_path / "work" / "b.txt"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    monkeypatch.chdir(tmp_path / "work")
    return folder


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("books/*.txt", "{beside}/books/*.txt"),
        ("b.txt", "{beside}/b.txt"),
        ("./*.txt", "{beside}/*.txt"),
        ("../work/b.txt", "{beside}/../work/b.txt"),
        ("*.txt", "*.txt"),
        ("nowhere/*.txt", "nowhere/*.txt"),
        ("~/x.txt", "~/x.txt"),
        ("/x.txt", "/x.txt"),
        ("{dtrain}/**/*.py", "{dtrain}/**/*.py"),
    ],
)
def test_a_path_is_relative_to_its_file_where_it_is_there(beside: Path, written: str, meant: str) -> None:
    recipe = load(write(beside, BODY.replace("FILE", f"'{written}'")))
    assert recipe.data.files == (meant.replace("{beside}", str(beside)),)


def test_a_path_on_the_command_line_is_relative_to_the_working_folder(beside: Path) -> None:
    path = write(beside, BODY.replace("FILE", "books/a.txt"))
    assert load(path, ["data.files=b.txt"]).data.files == ("b.txt",)
    assert load(path).data.files == (f"{beside}/books/a.txt",)


def test_a_path_of_an_included_file_is_relative_to_that(beside: Path, tmp_path: Path) -> None:
    write(beside, BODY.replace("FILE", "books/a.txt"), "base.yaml")
    over = write(tmp_path, "include: recipes/base.yaml", "over.yaml")
    assert load(over).data.files == (f"{beside}/books/a.txt",)


def test_a_run_folders_copy_means_the_same(beside: Path, tmp_path: Path) -> None:
    for file in ("books/a.txt", "*.txt", "./*.txt"):
        made = load(write(beside, BODY.replace("FILE", f"'{file}'")))
        place = tmp_path / "work" / "runs" / "recipe"
        place.mkdir(parents=True, exist_ok=True)
        (place / "log.txt").write_text("of the run")
        assert load(write(place, text(made))) == made


def test_in_the_working_folder_paths_stay_as_they_are(beside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(beside)
    made = load(write(beside, BODY.replace("FILE", "./books/*.txt")))
    assert (made.data.files, made.model.folder) == (("books/*.txt",), None)


def test_where_files_are_is_no_difference_of_a_run(beside: Path) -> None:
    path = write(beside, BODY.replace("FILE", "b.txt"))
    assert not differences(plain(load(path)), plain(load(path, ["data.files=b.txt", "model.folder=x"])))


def test_a_model_is_imported_from_the_recipes_folder(beside: Path) -> None:
    (beside / "my_net.py").write_text("class Net:\n    params = loss = flops = mismatch = None\n    here = __file__\n")
    assert load(write(beside, BODY.replace("FILE", "b.txt"))).model.model.here == str(beside / "my_net.py")


def test_a_runs_copy_means_the_same_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also below a folder whose name has signs of globs, and beside a file that is named like a template."""
    here = tmp_path / "odd [1]"
    here.mkdir()
    monkeypatch.chdir(here)
    for name in ("a.jsonl", "plain", "my_net.py"):
        (here / name).write_text("")
    values = {
        "data": {"kind": "chat", "files": ["*.jsonl", "gs://b/c.jsonl", "gone.jsonl"], "template": "plain"},
        "model": {"target": "my_net:Net"},
        "track": {"to": [{"kind": "custom", "target": "absent:Tracker"}]},
    }
    made = absolute(values)
    assert [Path(found).name for found in glob.glob(made["data"]["files"][0])] == ["a.jsonl"]  # noqa: PTH207
    assert made["data"]["files"][1] == "gs://b/c.jsonl"
    assert made["data"]["files"][2] == f"{glob.escape(str(Path.cwd()))}/gone.jsonl"  # it may come, or have been here
    assert made["data"]["template"] == "plain"
    assert made["model"]["folder"] == str(here)
    assert made["track"] == values["track"]
    monkeypatch.chdir(tmp_path)
    assert absolute(made) == made


@pytest.mark.parametrize("one", [True, False])
def test_the_module_of_a_measure_or_tracker_is_found_beside_the_recipe(tmp_path: Path, one: bool) -> None:
    """Whether it is the one entry that stands for a list, or in a list."""
    (tmp_path / "mine.py").write_text("")
    entry = "{kind: custom, target: mine:Own}" if one else "[{kind: custom, target: mine:Own}]"
    text = "model: {kind: mlp, sizes: [64, 10]}\ndata: digits\noptimizer: {kind: sgd, lr: 1}\nbatch: 8\nsteps: 1\n"
    (tmp_path / "r.yaml").write_text(f"{text}track: {{to: {entry}}}\nevaluate: {{measures: {entry}}}\n")
    recipe = load(tmp_path / "r.yaml")
    folders = [getattr(part, "folder", None) for part in (*recipe.track.to, *recipe.evaluate.measures)]
    assert folders == [str(tmp_path), str(tmp_path)]


def test_paths_below_names_and_in_lists_are_those_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "recipes [old]"
    (folder / "own").mkdir(parents=True)
    for name in ("own/tokenizer.json", "a.jsonl", "t.txt"):
        (folder / name).write_text("")
    monkeypatch.chdir(tmp_path)
    records = """
model: mlp
data:
  kind: records
  files: [a.jsonl]
  columns: {text: {kind: tokens, length: 8, tokenizer: own/tokenizer.json}, n: number}
"""
    rest = "optimizer: {kind: sgd, lr: 0.1}\nbatch: 2\nsteps: 3\n"
    tree, taken = with_absolute_paths(read(write(folder, records + rest)))
    assert taken == {
        "data.columns.text.tokenizer": f"{folder}/own/tokenizer.json",
        "data.files.0": f"{glob.escape(str(folder))}/a.jsonl",
    }
    columns = tree.value["data"].value["columns"].value
    assert columns["text"].value["tokenizer"].value == f"{folder}/own/tokenizer.json"
    assert columns["n"].value == "number"
    mixed = "data: {kind: mixture, length: 8, sources: [{name: a, data: {kind: text, files: [t.txt], length: 8}}]}\n"
    _, taken = with_absolute_paths(read(write(folder, mixed)))
    assert taken == {"data.sources.0.data.files.0": f"{glob.escape(str(folder))}/t.txt"}


def test_an_unknown_home_is_found_wherever_a_path_is() -> None:
    home = "~no-such-user-of-dtrain/x"
    text = f"""
data: {{kind: records, columns: {{text: {{tokenizer: "{home}"}}}}, sources: [{{data: {{files: ["{home}"]}}}}]}}
parts: {{vq: {{run: "{home}"}}}}
"""
    assert {where for where, _ in unknown_homes(parse(text, ""))} == {
        "data.sources.0.data.files",
        "data.columns.text.tokenizer",
        "parts.vq.run",
    }


def test_another_path_of_a_tokenizer_is_no_other_recipe() -> None:
    def plain_recipe(tokenizer: str, files: str, length: int) -> JsonObject:
        column = {"kind": "tokens", "length": length, "tokenizer": tokenizer}
        return {"data": {"kind": "records", "files": [files], "columns": {"text": column}}}

    old = plain_recipe("/one", "a.jsonl", 8)
    assert differences(old, plain_recipe("/two", "b.jsonl", 8)) == []
    assert len(differences(old, plain_recipe("/one", "a.jsonl", 9))) == 1
