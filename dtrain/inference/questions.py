"""Scores from questions: exact match of generated answers, and multiple choice by the probability of each choice."""

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dtrain.assembly.assemble import Assembly
from dtrain.assembly.state import State
from dtrain.core.errors import DataError, RecipeError
from dtrain.core.metrics import CHOICE, EXACT_MATCH, NLL
from dtrain.core.types import JsonObject
from dtrain.data.batch import POSITION, TOKEN
from dtrain.data.questions import Question
from dtrain.data.windows import NO_TARGET
from dtrain.inference.generate import Generator, Sampling, bucket, generator_of
from dtrain.inference.texts import ROWS, TextGenerator
from dtrain.models.decoder import Decoder
from dtrain.models.nn.kv_cache import CachedContext, KVCache
from dtrain.models.nn.param import Tree
from dtrain.optim.update import averaged
from dtrain.track.tracker import Sample
from dtrain.weights.load import Joiner, LoadedRun, joiner, without_adapters


@dataclass(frozen=True)
class Scores:
    """The results of questions."""

    metrics: dict[str, float]
    samples: list[JsonObject]
    """For each question: prompt, answer, and what the model answered."""


def scored(texts: TextGenerator, questions: Sequence[Question], tokens: int) -> Scores:
    """Answer the questions with the most likely tokens, at most `tokens` each, and choose the likeliest choices.

    An answer is right if it equals the expected one but for blanks around it. RecipeError if a prompt is too long.
    """
    prompts = [_prompt(texts, question) for question in questions]
    texts.refuse_long(prompts, [question.where for question in questions])
    metrics: dict[str, float] = {}
    answered: dict[int, str] = {}
    open_ones = [number for number, question in enumerate(questions) if not question.choices]
    chosen_ones = [number for number, question in enumerate(questions) if question.choices]
    if open_ones:
        given = texts.completed([prompts[number] for number in open_ones], tokens, Sampling(temperature=0))
        answered |= dict(zip(open_ones, given, strict=True))
        metrics[EXACT_MATCH.name] = _share(questions, answered, open_ones)
    if chosen_ones:
        for number in chosen_ones:
            rows = [(prompts[number], texts.tokens(choice)) for choice in questions[number].choices]
            answered[number] = questions[number].choices[int(np.argmin(losses(texts.model, rows)))]
        metrics[CHOICE.name] = _share(questions, answered, chosen_ones)
    samples = [
        {"prompt": str(question.messages[-1]["content"]), "answer": question.answer, "given": answered[number]}
        for number, question in enumerate(questions)
    ]
    return Scores(metrics, samples)


def score_names(questions: Sequence[Question]) -> set[str]:
    """The metrics that the questions give."""
    return {(CHOICE if question.choices else EXACT_MATCH).name for question in questions}


def _share(questions: Sequence[Question], answered: dict[int, str], numbers: Sequence[int]) -> float:
    return sum(answered[number].strip() == questions[number].answer.strip() for number in numbers) / len(numbers)


def _prompt(texts: TextGenerator, question: Question) -> list[int]:
    """The tokens before the answer: by the chat template of the run's data, or the plain text."""
    if texts.chats:
        return texts.chat(question.messages, question.where, question.context)
    if question.context:
        message = f"{question.where}: has {', '.join(question.context)}, and the run's data has no chat template"
        raise DataError(message, "leave it out, or write it into the prompt")
    return texts.prompt("".join(str(message["content"]) for message in question.messages))


def losses(model: Generator, rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> np.ndarray:
    """The sum of the cross-entropies of each row's continuation after its prompt, in nats: (rows,)."""
    length = bucket(max(len(prompt) + len(more) for prompt, more in rows))
    token_BT = np.zeros((-(-len(rows) // ROWS) * ROWS, length), np.int32)
    target_BT = np.full(token_BT.shape, NO_TARGET, np.int32)
    for row, (prompt, more) in enumerate(rows):
        whole = [*prompt, *more]
        token_BT[row, : len(whole) - 1] = whole[:-1]
        target_BT[row, len(prompt) - 1 : len(whole) - 1] = more
    whole = model.assembly.layout.sharding(jax.sharding.PartitionSpec())
    program = _row_losses(model.model, model.recipe.precision, whole)
    parts = []
    for first in range(0, len(token_BT), ROWS):
        part = slice(first, first + ROWS)
        parts.append(program(model.params, model.cache(ROWS, length), token_BT[part], target_BT[part]))
    return np.concatenate([np.asarray(part) for part in parts])[: len(rows)]


@functools.lru_cache(maxsize=4)
def _row_losses(model: Decoder, precision: Any, whole: jax.sharding.Sharding) -> Callable[..., jax.Array]:
    def program(params: Tree, cache: KVCache, token_BT: jax.Array, target_BT: jax.Array) -> jax.Array:
        ctx = CachedContext(cache, loss_dtype=precision.loss)
        weight_BT = (target_BT >= 0).astype(jnp.float32)
        with precision.tracing():
            batch = {TOKEN: token_BT, POSITION: ctx.positions(token_BT.shape[1])}
            x_BTE, _ = model.activations(params, batch, weight_BT, ctx)
            return model.head.row_losses(x_BTE, model.unembedding(params), target_BT, weight_BT, ctx)[NLL.name]

    return jax.jit(program, out_shardings=whole)


@dataclass
class Questioner:
    """Answers a recipe's questions with the state of a run, again and again."""

    assembly: Assembly
    questions: Sequence[Question]
    tokens: int
    path: Path
    """Where the answers are kept, as JSON lines."""
    report: Callable[[int, Sequence[Sample]], None] = lambda *_: None
    """Sends the answers to the trackers."""
    _texts: TextGenerator | None = field(default=None)
    _joiner: Joiner | None = field(default=None)

    def __call__(self, step: int, state: State) -> dict[str, float]:
        """The scores, as metrics of an evaluation; the answers are written to `path`."""
        recipe, params = self.assembly.recipe, averaged(state.optimizer, state.params)
        if recipe.minimised.sources():
            recipe, params = replace(recipe, objective=None), recipe.minimised.own(params)
        loaded = LoadedRun(recipe, self.assembly, params, step, "")
        if loaded.recipe.lora:
            self._joiner = self._joiner or joiner(self.assembly, self.assembly.layout.example)
            loaded = without_adapters(loaded, self._joiner)
        made = generator_of(loaded)
        if self._texts:  # with the programs that are compiled already
            made = replace(made, programs=self._texts.model.programs)
        self._texts = TextGenerator(made)
        scores = scored(self._texts, self.questions, self.tokens)
        self.report(step, scores.samples)
        if jax.process_index() == 0:
            with self.path.open("a") as file:
                for sample in scores.samples:
                    file.write(json.dumps({"step": step} | sample, ensure_ascii=False) + "\n")
        return {f"eval/{name}": value for name, value in scores.metrics.items()}


def refuse_without_texts(model: Any, kind: str) -> None:
    """RecipeError if a model cannot answer questions."""
    if not model.generates:
        raise RecipeError(f"evaluate.questions: a model of kind {kind} generates no text", "only a decoder does")
