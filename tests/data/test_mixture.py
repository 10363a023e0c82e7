"""Mixtures: shares of the rows, exact for any batch and start, weights that change, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dtrain.core.errors import DataError, FieldError
from dtrain.core.metrics import SOURCES
from dtrain.data.batches import TrainBatches
from dtrain.data.chat import Chat
from dtrain.data.data_check import SPLITS, DataCheck
from dtrain.data.mixture import BLOCK, Change, Mixture, Weighted, shares
from dtrain.data.source import Load
from dtrain.data.templates import NAMED
from dtrain.data.text import Text
from dtrain.models.decoder import Decoder
from dtrain.models.nn.param import initial
from dtrain.recipe.load import differences, load, plain
from tests.conftest import Dtrain
from tests.engines import loss_alone


def mixture(folder: Path, weights: tuple[float, float] = (3, 1), changes: Any = (), **how: Any) -> Mixture:
    (folder / "book.txt").write_text("abcdefghij" * 200)
    (folder / "chat.jsonl").write_text(
        "".join(json.dumps({"prompt": "x" * i, "response": "y"}) + "\n" for i in range(1, 20))
    )
    cache = {"cache": str(folder / "cache")}
    book = Text(files=(str(folder / "book.txt"),), length=32, **cache, **how)
    chat = Chat(files=(str(folder / "chat.jsonl"),), length=32, template="plain", **cache)
    sources = (Weighted(name="book", weight=weights[0], data=book), Weighted(name="chat", weight=weights[1], data=chat))
    return Mixture(sources=sources, changes=changes)


def batches(data: Mixture, batch: int, start: int, steps: int, local: Any = None) -> list[dict[str, Any]]:
    source = data.open("train")
    held = np.arange(batch) if local is None else local
    return list(TrainBatches(source, source.order(7, batch), batch, held, start, steps, keyed=False))


def test_every_source_has_its_share_of_the_rows(tmp_path: Path) -> None:
    order = mixture(tmp_path).open("train").order(0, 8)
    drawn, _ = order.drawn(np.arange(3 * BLOCK))
    for first in range(0, 3 * BLOCK, BLOCK):
        assert np.bincount(drawn[first : first + BLOCK]).tolist() == [750, 250]
    assert list(order.rows_of_parts(1234).values()) == np.bincount(drawn[:1234], minlength=2).tolist()
    # the rows of a source follow each other without a gap
    _, numbers = order.drawn(np.arange(3000))
    for source in (0, 1):
        assert numbers[drawn == source].tolist() == list(range((drawn == source).sum()))


def test_batches_do_not_depend_on_where_a_run_starts_or_how_many_processes_read(tmp_path: Path) -> None:
    data = mixture(tmp_path, changes=(Change(step=3, weights={"book": 0, "chat": 1}),))
    whole = batches(data, 8, 0, 10)
    again = batches(data, 8, 4, 10)
    for one, other in zip(whole[4:], again, strict=True):
        assert all(np.array_equal(one[name], other[name]) for name in one)
    halves = [batches(data, 8, 0, 10, np.arange(first, first + 4)) for first in (0, 4)]
    for one, left, right in zip(whole, *halves, strict=True):
        assert all(np.array_equal(one[name], np.concatenate([left[name], right[name]])) for name in one)
    assert whole[0].keys() == {"token", "target", "document", "position", "source"}


def test_weights_change_at_their_step(tmp_path: Path) -> None:
    data = mixture(tmp_path, (1, 0), (Change(step=3, weights={"book": 0, "chat": 1}),))
    from_chat = [bool((batch["token"] == ord("x")).any(1).all()) for batch in batches(data, 8, 0, 6)]
    assert from_chat == [False, False, False, True, True, True]
    order = data.open("train").order(0, 8)
    assert list(order.rows_of_parts(24).values()) == [24, 0]
    assert list(order.rows_of_parts(40).values()) == [24, 16]


def test_rows_are_those_of_the_sources(tmp_path: Path) -> None:
    data = mixture(tmp_path)
    mixed, book = data.open("test"), data.sources[0].data.open("test")
    rows = mixed.rows(np.arange(len(book)))
    assert np.array_equal(rows["token"], book.rows(np.arange(len(book)))["token"])
    assert (rows["document"] == 0).all()
    assert rows["position"][0].tolist() == list(range(32))
    assert len(mixed) == len(book) + len(data.sources[1].data.open("test"))
    assert mixed.fingerprint != mixture(tmp_path, test=0.3).open("test").fingerprint
    assert mixed.example["token"].values == ord("y") + 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sources": ()}, "needs at least two sources"),
        ({"changes": (Change(step=3, weights={"book": 1.0}),)}, "needs a weight for each of book, chat"),
        ({"changes": (Change(step=3, weights={"book": 0, "chat": 0}),)}, "all weights are 0"),
    ],
)
def test_what_is_no_mixture_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    made = mixture(tmp_path)
    with pytest.raises(FieldError, match=message):
        Mixture(**{"sources": made.sources, **change})


def test_its_tokenizer_and_template_are_those_of_its_sources(tmp_path: Path) -> None:
    made = mixture(tmp_path)
    assert made.tokenizer == made.open_tokenizer().key == "bytes"
    assert made.main is made.sources[1].data
    assert made.main.own_template() == NAMED["plain"]
    book, chat = made.sources
    other = replace(made, sources=(book, replace(chat, data=replace(chat.data, tokenizer="other.json"))))
    assert other.tokenizer is None


def test_shares_are_rounded_to_a_thousandth() -> None:
    assert shares([1, 1, 1], ["a", "b", "c"]).tolist() == [334, 333, 333]
    assert shares([0, 2], ["a", "b"]).tolist() == [0, 1000]
    with pytest.raises(FieldError, match="b has less than a thousandth"):
        shares([1, 1e-5], ["a", "b"])


def test_a_source_without_examples_is_named(tmp_path: Path) -> None:
    data = mixture(tmp_path)
    (tmp_path / "chat.jsonl").write_text("\n")
    with pytest.raises(DataError, match=r"source chat: .*no record"):
        data.open("train")


@pytest.mark.slow
def test_the_loss_of_each_source_is_that_of_its_rows(tmp_path: Path) -> None:
    source = mixture(tmp_path).open("train")
    model = Decoder(vocab=256, context=32, layers=1, width=16, heads=2, init=0.3, loss_chunks=2)
    params = initial(model.params(), jax.random.key(0), "float32")
    rows = source.rows(source.order(7, 8)(np.arange(8)))
    batch = {name: jnp.asarray(value) for name, value in rows.items()} | {"weight": jnp.asarray([1.0] * 7 + [0.5])}
    sums = loss_alone(model, params, batch, train=True).metrics[SOURCES]
    assert rows["source"].sum(0).min() > 0
    for number in (0, 1):
        mine = np.nonzero(rows["source"][:, number])[0]
        own = {name: value[mine] for name, value in batch.items() if name != "source"}
        loss = loss_alone(model, params, own, train=True)
        np.testing.assert_allclose(sums[:, number], [loss.sum, loss.weight], rtol=1e-6)
    assert SOURCES not in loss_alone(model, params, batch, train=False).metrics


def recipe_of(tmp_path: Path) -> None:
    mixture(tmp_path)
    recipe = "model: {kind: decoder, vocab: 256, context: 32, layers: 1, width: 16, heads: 2}\n"
    recipe += "data:\n  kind: mixture\n  sources:\n"
    recipe += "    - {name: book, weight: 3, data: {kind: text, files: [book.txt], length: 32, cache: cache}}\n"
    recipe += "    - {name: chat, data: {kind: chat, files: [chat.jsonl], length: 32, template: plain, cache: cache}}\n"
    recipe += "optimizer: {kind: adamw, lr: 1e-3}\nbatch: 8\nsteps: 12\ntrack: {every: 4}\ncheckpoint: {every: 6}\n"
    (tmp_path / "mix.yaml").write_text(recipe)


@pytest.mark.nightly
def test_losses_of_sources_are_the_same_on_every_engine(dtrain: Dtrain, tmp_path: Path) -> None:
    recipe_of(tmp_path)
    found = []
    cases = {"one": []}
    for engine in ("jit", "shard_map"):
        for number, mesh in enumerate(("{data: 2, fsdp: 2}", "{sequence: 2, tensor: 2}")):
            cases[f"{engine[:3]}{number}"] = [f"engine={engine}", f"mesh={mesh}", "--devices", "4"]
    for name, how in cases.items():
        dtrain("run", "mix.yaml", f"name={name}", "steps=4", "track.every=1", "accumulate=2", *how)
        path = tmp_path / "runs" / name / "metrics.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        found.append([[row.get(f"train/loss/{part}", 0.0) for part in ("book", "chat")] for row in rows])
        assert any(both > 0 for row in found[-1] for both in [min(row)])
        np.testing.assert_allclose(found[-1], found[0], rtol=2e-5)


@pytest.mark.slow
def test_a_run_resumes_and_reports_each_source(dtrain: Dtrain, tmp_path: Path) -> None:
    recipe_of(tmp_path)
    dtrain("run", "mix.yaml", "name=straight")
    dtrain("run", "mix.yaml", "name=stopped", DTRAIN_FAULT="kill@step:8", code=-9)
    dtrain("run", "mix.yaml", "name=stopped")

    def rows(name: str) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()]

    one, other = rows("straight"), rows("stopped")
    last = {name: value for name, value in one[-1].items() if name.startswith("eval/")}
    assert last.keys() >= {"eval/loss", "eval/loss/book", "eval/loss/chat", "eval/bits_per_byte/book"}
    assert last["eval/bits_per_byte/book"] == pytest.approx(last["eval/loss/book"] / np.log(2))
    assert last == {name: value for name, value in other[-1].items() if name.startswith("eval/")}
    counts = next(row for row in one if row["step"] == 12 and "rows/book" in row)
    assert counts["rows/book"] + counts["rows/chat"] == 96
    assert "the sources of a mixture have epochs" in dtrain("check", "mix.yaml", "epochs=1", code=2).stderr
    asked = dtrain("generate", "straight", "--chat", "--prompt", "x", "--tokens", "3")
    assert asked.stdout


def test_a_check_knows_what_its_sources_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe_of(tmp_path)
    monkeypatch.chdir(tmp_path)  # where its cache is
    data, check = load(tmp_path / "mix.yaml").data, DataCheck()
    data.inspect(check)
    for split in SPLITS:
        opened = data.open(split).example
        assert check.examples[split] == opened
        assert opened["token"].values is not None


def test_where_a_source_is_and_how_it_is_read_may_change_when_a_run_resumes(tmp_path: Path) -> None:
    recipe_of(tmp_path)
    recipe = load(tmp_path / "mix.yaml")
    first, *rest = recipe.data.sources
    moved = replace(first, data=replace(first.data, cache="/elsewhere"))
    other = replace(first, weight=first.weight + 1)

    def changed(source: Any) -> list[str]:
        return differences(plain(recipe), plain(replace(recipe, data=replace(recipe.data, sources=(source, *rest)))))

    assert changed(moved) == []
    assert [line.partition(":")[0] for line in changed(other)] == ["data.sources.0.weight"]


def test_settings_that_a_source_would_ignore_are_refused(tmp_path: Path) -> None:
    data = mixture(tmp_path)
    first, *rest = data.sources
    first = replace(first, data=replace(first.data, load=Load(workers=2)))
    with pytest.raises(FieldError) as refused:
        replace(data, sources=(first, *rest))
    assert refused.value.field == "sources.0.data.load"
    assert "of the mixture" in refused.value.hint


def test_a_change_of_weights_is_named_where_it_is_wrong(tmp_path: Path) -> None:
    names = [source.name for source in mixture(tmp_path).sources]
    with pytest.raises(FieldError) as refused:
        mixture(tmp_path, changes=(Change(step=3, weights=dict.fromkeys(names, 0.0)),))
    assert refused.value.field == "changes.0.weights"
