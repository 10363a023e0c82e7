from pathlib import Path

import pytest

from dtrain.core.errors import RecipeError
from dtrain.core.run_list import find_run, find_runs, runs_in


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("lr-1", "lr-2", "other"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "run.json").write_text("{}")
    (tmp_path / "runs" / "notes").mkdir()
    (tmp_path / "runs" / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "runs"


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["lr-1"], ["lr-1"]),
        (["runs/lr-2", "lr-2", "lr-1"], ["lr-2", "lr-1"]),
        (["lr-*"], ["lr-1", "lr-2"]),
        (["runs/*"], ["lr-1", "lr-2", "other"]),
        (["runs"], ["lr-1", "lr-2", "other"]),
    ],
)
def test_runs_are_found_by_name_folder_and_pattern(runs: Path, words: list[str], names: list[str]) -> None:
    assert [place.path.name for place in find_runs(words)] == names


def test_a_run_of_a_sweep_is_found_by_its_name_alone(runs: Path) -> None:
    for sweep in ("one", "two"):
        for name in ("x-1", f"only-{sweep}"):
            (runs / sweep / name).mkdir(parents=True)
            (runs / sweep / name / "run.json").write_text("{}")
        (runs / sweep / "sweep.json").write_text("{}")
    assert find_run("only-two").path == Path("runs/two/only-two")
    assert [place.path for place in find_runs(["only-one"])] == [Path("runs/one/only-one")]
    for find in (find_run, lambda word: find_runs([word])):
        with pytest.raises(RecipeError, match="is a run of several sweeps") as error:
            find("x-1")
    assert error.value.hint == "name one: one/x-1, two/x-1"


@pytest.mark.parametrize("word", ["lr-3", "runs/lr-9", "zzz*", "notes"])
def test_a_word_that_means_no_run_is_refused(runs: Path, word: str) -> None:
    with pytest.raises(RecipeError, match="no run"):
        find_runs([word])


def test_the_nearest_name_is_offered(runs: Path) -> None:
    with pytest.raises(RecipeError) as error:
        find_run("othr")
    assert error.value.hint == "did you mean 'other'?"
    assert find_run("other").path == Path("runs/other")


def test_what_is_no_run_is_not_listed(runs: Path) -> None:
    assert [place.path.name for place in runs_in(runs)] == ["lr-1", "lr-2", "other"]
    assert runs_in(runs / "nowhere") == []
