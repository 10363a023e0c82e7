"""The cache of compiled programs: its size is bounded, and a run works without it."""

import json
import os
from pathlib import Path

import pytest

from dtrain.checkpoint import manifest
from dtrain.parallel import compile_cache
from tests.conftest import Dtrain
from tests.train.test_run import RECIPE


def test_unfinished_entries_and_the_oldest_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_cache, "ENTRIES", 2)
    for number, name in enumerate(("a", "b", "c", "torn", "empty")):
        (tmp_path / f"{name}-cache").write_text("" if name == "empty" else "program")
        if name != "torn":
            (tmp_path / f"{name}-atime").write_text("12345678")
            os.utime(tmp_path / f"{name}-atime", (number, number))
    compile_cache.tidy(tmp_path)
    assert {path.name for path in tmp_path.glob("*-*")} == {"b-cache", "b-atime", "c-cache", "c-atime"}


def test_each_cpu_has_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = compile_cache.folder()
    (tmp_path / "cpuinfo").write_text("model name: another\nflags: sse\n")
    monkeypatch.setattr(compile_cache, "CPU_INFO", tmp_path / "cpuinfo")
    assert compile_cache.folder().parent == here.parent
    assert compile_cache.folder() != here


@pytest.mark.nightly
def test_runs_are_identical_without_a_cache_with_an_empty_and_with_a_full_one(dtrain: Dtrain, tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(RECIPE)
    caches = {"none": "/dev/null/none", "empty": str(tmp_path / "cache"), "full": str(tmp_path / "cache")}
    shown = {name: dtrain("run", "small.yaml", f"name={name}", XDG_CACHE_HOME=place) for name, place in caches.items()}
    sums = {name: manifest.read(tmp_path / "runs" / name / "checkpoints" / "24").checksum for name in caches}
    assert sums["none"] == sums["empty"] == sums["full"]
    assert "warning: compiled programs are not cached in /dev/null/none" in shown["none"].stderr
    assert [", from the cache" in done.stderr for done in shown.values()] == [False, False, True]
    assert "(cached)" in shown["full"].stdout
    records = [json.loads((tmp_path / "runs" / name / "run.json").read_text()) for name in caches]
    assert [record["compiled_from_cache"] for record in records] == [False, False, True]
