"""Text generated from a trained run, through the API and the command line."""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dtrain.core.errors import FieldError, RecipeError
from dtrain.data.tokenizer import Tokenizer, open_tokenizer
from dtrain.data.windows import row_example
from dtrain.inference.generate import ENDED, Generator, Sampling, generator
from dtrain.inference.texts import TextGenerator
from tests.conftest import Dtrain
from tests.weights.test_load import saved_run

TINY = [
    "model={kind: decoder, vocab: 256, context: 32, layers: 2, width: 16, heads: 2}",
    "data.length=16",
    "batch=8",
    "steps=4",
    "evaluate.every=0",
    "optimizer.schedule.warmup=0",
]


@pytest.fixture
def trained(dtrain: Dtrain, tmp_path: Path) -> Path:
    (tmp_path / "a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 20)
    data = ["data.files=[a.txt]", "data.cache=cache", "name=small"]
    dtrain("run", "decoder-tiny", *TINY, *data, "--devices", "4", "mesh={data: 2, tensor: 2}")
    return tmp_path / "runs" / "small"


@pytest.mark.nightly
def test_what_cannot_be_generated_is_refused(dtrain: Dtrain, trained: Path) -> None:
    long = dtrain("generate", trained, "--prompt", "x" * 40, "--devices", "4", code=2)
    assert "the prompt has 40 tokens; context = 32 allows 31" in long.stderr
    assert not long.stdout
    ask = ["generate", trained, "--prompt", "the ", "--tokens", "12", "--devices", "4"]
    assert len(dtrain(*ask, "--samples", "3").stdout.split("-" * 20)) == 4
    assert len(dtrain("generate", trained, "--prompt", "the ", "--tokens", "80", "--devices", "4").stdout) > 60
    assert "no run" in dtrain("generate", trained.parent / "other", code=2).stderr
    assert "top-p = 2.0" in dtrain("generate", trained, "--top-p", "2", "--devices", "4", code=2).stderr


def drawn(logits: Any, **how: Any) -> set[int]:
    sampling = Sampling(**how)
    draw = jax.jit(lambda number: sampling.draw(jnp.asarray([logits]), number)[0])
    return {int(draw(number)) for number in range(200)}


def test_sampling_keeps_to_what_it_may_draw() -> None:
    logits = np.log([0.5, 0.25, 0.15, 0.1])
    assert drawn(logits, temperature=1.0) == {0, 1, 2, 3}
    assert drawn(logits, temperature=0.0) == {0}
    assert drawn(logits, temperature=1.0, top_k=2) == {0, 1}
    assert drawn(logits, temperature=1.0, top_p=0.7) == {0, 1}
    assert drawn(logits, temperature=1.0, top_p=0.4) == {0}


def test_of_equally_likely_tokens_no_more_than_top_k_are_drawn() -> None:
    even = np.zeros(6)
    assert drawn(even, temperature=1.0, top_k=2) == {0, 1}
    assert drawn(even, temperature=1.0, top_p=0.5) == {0, 1, 2}
    assert drawn(even, temperature=1.0, top_k=4, top_p=0.5) == {0, 1}
    assert len(drawn(even, temperature=1.0, top_k=9)) == 6


@pytest.mark.parametrize("temperature", [-1.0, math.nan, math.inf, -math.inf])
def test_a_temperature_that_is_no_finite_number_from_zero_on_is_refused(temperature: float) -> None:
    with pytest.raises(FieldError, match=f"temperature = {temperature}"):
        Sampling(temperature=temperature)


TINY_DECODER = "{kind: decoder, vocab: 32, context: 16, layers: 1, width: 8, heads: 2, init: 0.5}"
DECODER = {
    "{kind: mlp, sizes: [64, 16, 10]}": TINY_DECODER,
    "kind: adamw, lr: 1e-3, ema: 0.9": "kind: adamw, lr: 1e-3",
    "{kind: images, root: nowhere, size: [8, 8], channels: 1}": "{kind: tokens, files: [gone.bin], length: 8}",
}


@pytest.mark.slow
def test_tokens_are_the_same_for_the_same_seed_and_any_devices(tmp_path: Path) -> None:
    place, _ = saved_run(tmp_path, {4: None}, DECODER, row_example(8, packed=False))

    one, spread = (generator(place, mesh, print) for mesh in ([], ["mesh={data: 2, tensor: 2}"]))

    def tokens(model: Generator, **how: Any) -> list[list[int]]:
        return [token_B.tolist() for token_B in model.tokens([1, 2], 20, 2, Sampling(**how))]  # past the context

    greedy = tokens(one, temperature=0)
    assert greedy == tokens(spread, temperature=0)
    assert len({token for row in greedy for token in row}) > 1
    assert tokens(one) == tokens(one) != tokens(one, seed=1)


@pytest.mark.slow
def test_parameters_are_cast_once_and_no_token_is_unknown(tmp_path: Path) -> None:
    changes = DECODER | {"batch: 64": "batch: 64\nprecision: {compute: bfloat16}"}
    place, _ = saved_run(tmp_path, {4: None}, changes, row_example(8, packed=False))
    model = generator(place, [], print)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(model.params)} == {"bfloat16"}
    assert all(0 <= token_B[0] < 32 for token_B in model.tokens([1, 2], 3, 1, Sampling()))
    for prompt, message in (
        ([1, 32], "token 32; the model's vocab is 32"),
        ([-1], "token -1"),
        ([], "prompt is empty"),
    ):
        with pytest.raises(RecipeError, match=message):
            model.tokens(prompt, 4, 1, Sampling())


@dataclass(frozen=True)
class Recited:
    """A model that says the same bytes after each prompt."""

    said: tuple[bytes, ...]
    drawn: list[int] = field(default_factory=list)
    """How many tokens of each call were drawn."""
    tokenizer: Tokenizer = field(default_factory=lambda: open_tokenizer("bytes"))
    recipe: Any = field(
        default_factory=lambda: SimpleNamespace(
            data=SimpleNamespace(
                main=SimpleNamespace(conversational=False, ends_texts=False, end_text="", template=None)
            )
        )
    )

    def continued(self, prompts: list[Any], count: int, *_: Any, **__: Any) -> Iterator[np.ndarray]:
        self.drawn.append(0)
        for place in range(count):
            self.drawn[-1] += 1
            yield np.array([text[place] if place < len(text) else ENDED for text in self.said[: len(prompts)]])


def test_a_text_ends_before_the_first_of_its_stop_texts() -> None:
    model = Recited((b"one; two. Q: three", b"Q; and a Q: at last"))

    def texts(*stop: str) -> tuple[str, list[str]]:
        made = TextGenerator(cast(Any, model), stop)
        pieces = list(made.stream([1], 18, Sampling()))
        assert not any(one in "".join(pieces) for one in stop)
        return "".join(pieces), list(made.completed([[1], [1]], 19, Sampling()))

    assert texts() == ("one; two. Q: three", ["one; two. Q: three", "Q; and a Q: at last"])
    assert texts("Q:") == ("one; two. ", ["one; two. ", "Q; and a "])
    assert model.drawn[-2:] == [12, 12]  # nothing is drawn after the last stop text
    assert texts("Q:", ".", "two") == ("one; ", ["one; ", "Q; and a "])
    assert texts("Q: t", "nowhere") == ("one; two. ", ["one; two. ", "Q; and a Q: at last"])
    assert texts("\n") == texts()


def test_prompts_that_are_too_long_are_named_by_where_they_are() -> None:
    texts = TextGenerator(cast(Any, SimpleNamespace(model=SimpleNamespace(context=8))))
    texts.refuse_long([[1] * 7, [2]], ["a", "b"])
    with pytest.raises(RecipeError) as refused:
        texts.refuse_long([[1] * 7, [2] * 8, [3] * 1000], ["q.jsonl:1", "q.jsonl:2", "q.jsonl:3"])
    first, *rest = refused.value.message.splitlines()
    assert first == "2 prompts are longer than the model's context allows, 7 tokens:"
    assert rest == ["  q.jsonl:2: 8 tokens", "  q.jsonl:3: 1,000 tokens"]


@pytest.mark.slow
def test_each_prompt_of_a_file_has_as_many_samples_as_are_asked_for(
    dtrain: Dtrain, trained: Path, tmp_path: Path
) -> None:
    (tmp_path / "p.txt").write_text("one\ntwo\n")
    shown = dtrain("generate", trained, "--prompts", "p.txt", "--samples", "3", "--tokens", "4").stdout
    assert [json.loads(line)["prompt"] for line in shown.splitlines()] == ["one"] * 3 + ["two"] * 3
    assert len({json.loads(line)["text"] for line in shown.splitlines()}) > 2  # drawn apart
