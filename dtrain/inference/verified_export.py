"""Open an exported decoder in `transformers`, in a Python of the user's, and compare what it computes with dtrain's."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dtrain.core.counts import counted
from dtrain.core.errors import EnvironmentFault, RecipeError
from dtrain.core.files import overwrite
from dtrain.core.types import JsonObject
from dtrain.data.batch import TOKEN
from dtrain.inference.generate import Generator, Sampling, generator_of
from dtrain.models.nn.single_device import SingleDeviceContext
from dtrain.weights.export import VERIFICATION
from dtrain.weights.load import LoadedRun

PROMPTS = (
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Once upon a time, there was",
    "1 + 1 = 2, 2 + 2 = 4, 3 + 3 =",
)
"""Texts that are continued; without a tokenizer as many rows of random tokens are."""
NEW = 32
"""Most tokens of each continuation."""
ALLOWED = 1e-4
"""Largest difference between logits, relative to the largest one, at which they count as equal: both are computed in
float32, in another order."""
SCRIPT = Path(__file__).with_name("transformers_program.py")
SECONDS, SHOWN = 3600, 8


@dataclass(frozen=True)
class Verification:
    """What was compared, and how it differs."""

    transformers: str
    """The version."""
    dtype: str
    """That of the written parameters."""
    rows: int
    tokens: int
    """Tokens of the rows, prompts and continuations, whose logits were compared."""
    new: int
    """Tokens of continuations that are the same, up to the first that is as probable as another one."""
    logits: float
    """The largest difference between logits, relative to the largest one."""
    unlike: Sequence[str] = ()
    """Tensors that transformers missed or did not expect."""
    prompts: str = ""
    """Which prompts have other tokens there; empty if none, or if there is no tokenizer."""
    continued: str = ""
    """Where the most probable continuations differ; empty if they are equal."""
    checked_tokenizer: bool = True

    @property
    def agrees(self) -> bool:
        return not (self.unlike or self.prompts or self.continued) and self.logits <= ALLOWED

    def lines(self) -> list[str]:
        """The result as lines of text."""
        logits = "agree" if self.logits <= ALLOWED else "DIFFER"
        found = f"logits of {counted(self.tokens, 'token')} {logits}: {self.logits:.1e} of the largest"
        lines = [f"verified with transformers {self.transformers}: {found}"]
        lines += [f"tensors that do not match: {', '.join(self.unlike[:SHOWN])}"] if self.unlike else []
        same = f"the most probable continuations of {self.rows} prompts are the same: {counted(self.new, 'token')}"
        lines.append(self.continued or same)
        if self.checked_tokenizer:
            lines.append(self.prompts or "the tokenizer gives the prompts the same tokens")
        else:
            lines.append("not checked: the tokenizer, which has none of the prompts; they were random tokens")
        return lines


def python_with_transformers(named: Path | None) -> str:
    """A Python that has transformers and PyTorch: the named one, this one, or one on PATH. EnvironmentFault if none."""
    if named:
        if not _has_transformers(str(named)):
            raise EnvironmentFault(f"{named} cannot import transformers and torch: the export was not verified")
        return str(named)
    if all(importlib.util.find_spec(name) for name in ("transformers", "torch")):
        return sys.executable
    for name in ("python", "python3"):
        found = shutil.which(name)
        if found and _has_transformers(found):
            return found
    message = "no Python here has transformers and torch: the export was written, and not verified"
    raise EnvironmentFault(message, "name one: --python /path/to/env/bin/python")


def _has_transformers(python: str) -> bool:
    try:
        done = subprocess.run(
            [python, "-c", "import torch, transformers"], capture_output=True, timeout=300, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def refuse_unverifiable(loaded: LoadedRun) -> None:
    """RecipeError if the run's model is not one that transformers continues texts with."""
    if not loaded.recipe.model.generates:
        raise RecipeError("--verify continues texts: the model is not a decoder", "leave --verify out")


def verify(loaded: LoadedRun, folder: Path, dtype: str, python: str, say: Callable[[str], None]) -> Verification:
    """Compare, and write the result beside the weights.

    EnvironmentFault if that Python fails; RecipeError if the folder has no config.json, which transformers needs.
    """
    if not (folder / "config.json").is_file():
        raise RecipeError(f"{folder} has no config.json: transformers has no such model", "leave --verify out")
    rounded = jax.tree.map(lambda x: x.astype(dtype).astype(jnp.float32), loaded.params)
    exact = replace(loaded.recipe, precision=replace(loaded.recipe.precision, compute="float32", matmul="highest"))
    model = generator_of(replace(loaded, params=rounded, recipe=exact))
    texts, prompts = _prompts(model, tokenized=(folder / "tokenizer.json").is_file())
    say(f"continuing {len(prompts)} prompts with dtrain ...")
    with jax.default_matmul_precision("highest"):
        rows = [[*prompt, *_continued(model, prompt)] for prompt in prompts]
        logits = [_logits(model.model, rounded, row) for row in rows]
    say(f"opening {folder} with {python} ...")
    with tempfile.TemporaryDirectory(prefix="dtrain-verify-") as name:
        asked, answered = Path(name) / "asked.json", Path(name) / "answered"
        lengths = [len(prompt) for prompt in prompts]
        asked.write_text(json.dumps({"rows": rows, "prompts": lengths, "texts": texts, "new": NEW}))
        theirs = _ask(python, folder, asked, answered)
        with np.load(answered.with_suffix(".npz")) as arrays:
            others = [arrays[str(number)] for number in range(len(rows))]
    found = _compared(rows, prompts, logits, others, theirs) | {"dtype": dtype, "checked_tokenizer": bool(texts)}
    result = Verification(transformers=theirs["transformers"], unlike=theirs["unlike"], rows=len(rows), **found)
    overwrite(folder / VERIFICATION, json.dumps(asdict(result) | {"agrees": result.agrees}, indent=2) + "\n")
    return result


def _prompts(model: Generator, *, tokenized: bool) -> tuple[list[str], list[list[int]]]:
    """Texts and their tokens, of at most half the context; without a tokenizer no texts, and random tokens."""
    if tokenized:
        tokenizer = model.tokenizer
        found = [tokenizer.encode(text.encode()) for text in PROMPTS]
        most, words = model.model.context // 2, model.model.vocab
        fit = [number for number, tokens in enumerate(found) if 0 < len(tokens) <= most and max(tokens) < words]
        if fit:
            return [PROMPTS[number] for number in fit], [list(map(int, found[number])) for number in fit]
    rng, length = np.random.default_rng(0), max(1, min(8, model.model.context // 2))
    return [], rng.integers(0, model.model.vocab, (len(PROMPTS), length)).tolist()


def _continued(model: Generator, prompt: list[int]) -> list[int]:
    count = min(NEW, model.model.context - len(prompt))
    return [int(token[0]) for token in model.continued([prompt], count, Sampling(temperature=0.0))]


def _logits(model: Any, params: Any, row: list[int]) -> np.ndarray:
    """Float32 logits after each token of a row, by the whole pass."""

    @jax.jit
    def computed(params: Any, token_BT: jax.Array) -> jax.Array:
        x_BTE, _ = model.activations(params, {TOKEN: token_BT}, jnp.ones(token_BT.shape), SingleDeviceContext())
        return model.head.logits(x_BTE, model.unembedding(params), "float32")

    return np.asarray(computed(params, jnp.asarray([row], jnp.int32)))[0, :, : model.vocab]


def _ask(python: str, folder: Path, asked: Path, answered: Path) -> JsonObject:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("JAX", "XLA", "PYTHON"))}
    words = [python, str(SCRIPT), str(folder), str(asked), str(answered)]
    try:
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            env=environment | {"HF_HUB_OFFLINE": "1"},
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise EnvironmentFault(f"{python} took more than {SECONDS} s: the export was not verified") from error
    if done.returncode:
        last = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise EnvironmentFault(f"transformers does not open {folder}, or not in {python}:\n{last}")
    return json.loads(answered.with_suffix(".json").read_text())


def _compared(
    rows: list[list[int]],
    prompts: list[list[int]],
    ours: list[np.ndarray],
    theirs: list[np.ndarray],
    answers: JsonObject,
) -> JsonObject:
    most = max(float(np.abs(one).max()) for one in ours)
    worst = max(float(np.nan_to_num(np.abs(a - b).max(), nan=np.inf)) for a, b in zip(ours, theirs, strict=True)) / most
    other = [number for number, tokens in enumerate(answers["tokens"]) if tokens != prompts[number]]
    found = [_divergence(*one) for one in zip(rows, prompts, theirs, answers["continued"], strict=True)]
    return {
        "tokens": sum(map(len, rows)),
        "new": sum(same for same, _ in found),
        "logits": worst,
        "prompts": f"the tokenizer gives prompts {other} other tokens there" if other else "",
        "continued": next((why for _, why in found if why), ""),
    }


def _divergence(row: list[int], prompt: list[int], logits: np.ndarray, theirs: list[int]) -> tuple[int, str]:
    """How many tokens of two continuations are the same, and where they differ by more than the order of tokens that
    are equally probable; empty if nowhere."""
    own = row[len(prompt) :]
    for number, a in enumerate(own):
        if number >= len(theirs):
            return number, f"continuations DIFFER: {number} of {len(own)} tokens there"
        if a != (b := theirs[number]):
            at = logits[len(prompt) + number - 1]
            equal = abs(at[a] - at[b]) <= ALLOWED * np.abs(at).max()
            return number, "" if equal else f"continuations DIFFER from token {number + 1} on: {a} here, {b} there"
    return len(own), ""
