"""Every kind of data, and the source that it opens, keeps the contract of `dtrain.data.source`."""

import dataclasses
import typing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtrain.data.batch import TOKEN
from dtrain.data.data_check import DataCheck
from dtrain.data.source import SourceDefaults
from dtrain.recipe import recipe
from dtrain.recipe.load import part
from tests.data.test_idx import write as write_idx

KINDS: dict[str, Any] = {typing.get_args(member.__annotations__["kind"])[0]: member for member in
                         typing.get_args(recipe.Data)}  # fmt: skip
GIVEN: dict[str, dict[str, object]] = {
    "idx": {"root": "idx", "download": False},
    "images": {"root": "images", "size": [6, 6], "channels": 1},
    "table": {"files": ["table.csv"], "label": "kind"},
    "npz": {"file": "rows.npz"},
    "records": {
        "files": ["images"],
        "columns": {"image": {"kind": "image", "size": [6, 6]}, "label": {"kind": "label", "field": "folder"}},
    },
    "text": {"files": ["text.txt"], "length": 8},
    "tokens": {"files": ["tokens.npy"], "length": 8},
    "chat": {"files": ["{dtrain}/data/sums.jsonl"], "length": 96, "template": "chatml"},
    "preference": {"files": ["{dtrain}/data/preferences.jsonl"], "length": 160, "template": "chatml"},
    "feedback": {"files": ["{dtrain}/data/preferences.jsonl"], "length": 192, "template": "chatml"},
    "custom": {"target": "tests.data.user_rows:Good"},
}
"""Fields of kinds that need some, with the files that `folder` writes."""
GIVEN["mixture"] = {
    "sources": [{"name": name, "data": {"kind": name, **GIVEN[name]}} for name in ("text", "tokens")]
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from PIL import Image

    place, draw = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    (place / "idx").mkdir()
    write_idx(place / "idx")
    for name in ("cat", "dog"):
        (place / "images" / name).mkdir(parents=True)
        for number in range(20):
            Image.fromarray(draw.integers(0, 256, (6, 6), np.uint8)).save(place / "images" / name / f"{number}.png")
    (place / "table.csv").write_text("size,kind\n" + "".join(f"{n},{'ab'[n % 2]}\n" for n in range(40)))
    np.savez(place / "rows.npz", image=draw.random((40, 4)), label=draw.integers(0, 3, 40))
    (place / "text.txt").write_text("Alice was beginning to get very tired. " * 40)
    np.save(place / "tokens.npy", draw.integers(0, 200, 2000).astype(np.uint16))
    return place


def made(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(folder)
    fields = [field for field in dataclasses.fields(KINDS[kind]) if field.default_factory is dataclasses.MISSING]
    needed = {field.name for field in fields if field.default is dataclasses.MISSING}
    if needed - GIVEN.get(kind, {}).keys():
        pytest.fail(f"{kind} needs {', '.join(sorted(needed))}: add an example of it to GIVEN")
    cache = {"cache": str(folder / "cache")} if "cache" in {f.name for f in dataclasses.fields(KINDS[kind])} else {}
    values: dict[str, Any] = {"kind": kind, **GIVEN.get(kind, {}), **cache}
    for source in values.get("sources", ()):
        source["data"] |= {"cache": str(folder / "cache")}
    return part(recipe.Data, values, "data")


@pytest.mark.parametrize("kind", KINDS)
def test_data_opens_sources_that_keep_the_contract(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = made(kind, folder, monkeypatch)
    for split in ("train", "test"):
        source, again = data.open(split), data.open(split)
        assert isinstance(source, SourceDefaults)
        assert source.fingerprint == again.fingerprint
        assert source.changed() == ""
        assert all(isinstance(note, str) for note in source.notes)
        order = source.order(3, 4)
        indices = order(np.arange(12))
        most = source.random_starts or len(source)
        assert indices.shape == (12,)
        assert source.parts() or (indices.min() >= 0 and indices.max() < most)
        np.testing.assert_array_equal(indices[4:8], source.order(3, 4)(np.arange(4, 8)))
        rows = source.rows(indices)
        assert {name: (value.shape[1:], str(value.dtype)) for name, value in rows.items()} == {
            name: (feature.shape, feature.dtype) for name, feature in source.example.items()
        }
        for name, value in source.rows(indices[::-1]).items():
            np.testing.assert_array_equal(value, rows[name][::-1])
        texts = TOKEN in source.example and not data.answers
        assert (source.bytes_per_token is not None) == texts
        assert sum(order.rows_of_parts(12).values()) == (12 if source.parts() else 0)
        for member in source.parts().values():
            assert member.example == source.example
    known = data.example()
    if known is not None:
        assert {name: feature.shape for name, feature in known.items()} == {
            name: feature.shape for name, feature in data.open("train").example.items()
        }


@pytest.mark.parametrize("kind", KINDS)
def test_data_in_order_has_each_example_once(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = made(kind, folder, monkeypatch).in_order().open("train")
    assert all(part.random_starts is None for part in (source, *source.parts().values()))


@pytest.mark.parametrize("kind", KINDS)
def test_a_check_opens_data_and_writes_nothing(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, check = made(kind, folder, monkeypatch), DataCheck()
    before = sorted(folder.rglob("*"))
    data.without_cache().inspect(check)
    assert not check.problems
    assert check.opened or check.not_checked
    assert sorted(folder.rglob("*")) == before
    recipe_of = recipe.Recipe.__dataclass_fields__
    assert {key.split(".")[0] for key, _, _ in data.problems(Epochs(), {})} <= recipe_of.keys()
    assert isinstance(data.packages, tuple)
    assert data.tokenized == hasattr(data, "tokenizer")


class Epochs:
    """A recipe whose length is given in epochs."""

    epochs = 1.0
