"""Random decoders, exported and opened with `transformers`, whose logits are compared with dtrain's own.

As a program it counts, for the Pythons that DTRAIN_TEST_HF_PYTHON and DTRAIN_TEST_HF4_PYTHON name, how many draws were
exported, refused, right and wrong: `python -m tests.models.random_decoders --count 200 --seed 0`.
"""

import argparse
import json
import math
import os
import random
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from dtrain.core.errors import FieldError
from dtrain.data.source import DataDefaults
from dtrain.models.decoder import Decoder
from dtrain.models.decoder_layer import QueryGrowth
from dtrain.models.families.config import config_of
from dtrain.models.latent import Latent
from dtrain.models.layer_pattern import LayerKind
from dtrain.models.moe import Experts
from dtrain.models.nn.param import Param, Tree
from dtrain.models.nn.single_device import SingleDeviceContext
from dtrain.models.rope import Learned, LinearScaling, Llama3, NoPosition, Rope, Yarn
from dtrain.weights.export import export
from dtrain.weights.load import LoadedRun

SCRIPT = Path(__file__).with_name("hf_reference.py")
VARIABLES = ("DTRAIN_TEST_HF_PYTHON", "DTRAIN_TEST_HF4_PYTHON")
"""Environment variables that name a Python with the current major version of transformers, and with the one before."""
ROWS, LENGTH = 2, 40
TOLERANCE = 1e-4
"""The largest difference between logits, relative to the largest logit, at which they count as equal."""
NEWER = {
    "ministral3", "cwm", "solar_open", "exaone_moe", "minimax_m2", "youtu", "granite_swa", "granitemoe_swa", "jais2",
    "glm4_moe_lite", "hy_v3",
}  # fmt: skip
"""Families that version 4.57 of transformers does not have."""
QUICK = {"xla_backend_optimization_level": 0} | (
    {"xla_cpu_use_fusion_emitters": False} if jax.__version_info__ < (0, 12) else {}
)
"""Options of the compiler for programs that compute little, as in the tests."""

Values = dict[str, Any]
Drawn = Callable[[random.Random], Any]


def one_of(*values: object) -> Drawn:
    """A value of the list."""
    return lambda rng: rng.choice(values)


def scaling(rng: random.Random) -> LinearScaling | Llama3 | Yarn | None:
    """A scaling of rotary positions, for original contexts short enough that it shows in the first tokens, or none."""
    factor, original = rng.choice([1.0, 1.5, 4.0, 7.3]), rng.choice([4, 16, 32, 64, 100, 8192])
    low, high = rng.choice([(1.0, 4.0), (0.5, 2.25)])
    fast, slow = rng.choice([(32.0, 1.0), (4.0, 1.0), (2.5, 0.25), (64.0, 16.0), (1.0, 2.0)])
    kinds = (
        None,
        LinearScaling(factor=factor),
        Llama3(factor=factor, low=low, high=high, original=original),
        Yarn(factor=factor, original=original, fast=fast, slow=slow, truncate=rng.random() < 0.8,
             mscale_all_dim=rng.choice([0.0, 0.0, 0.0, 1.0, 0.7])),
    )  # fmt: skip
    return rng.choice(kinds)


def rope(rng: random.Random) -> Rope:
    """Rotary positions."""
    partial, interleaved = rng.choice([1.0, 1.0, 1.0, 0.5]), rng.random() < 0.2
    theta = rng.choice([10.0, 500.0, 10_000.0, 12_345.6, 1e6])
    return Rope(theta=theta, scaling=scaling(rng), partial=partial, interleaved=interleaved)


def pattern(rng: random.Random) -> tuple[LayerKind, ...]:
    """Up to four kinds of layers."""
    window, turned = rng.choice([None, 5, 8]), rng.choice([None, None, NoPosition(), Rope(theta=50.0)])
    kinds = (LayerKind(window=window), LayerKind(position=turned), LayerKind(window=window, position=turned))
    return tuple(replace(rng.choice(kinds), count=rng.randint(1, 3)) for _ in range(rng.randint(1, 4)))


def experts(rng: random.Random) -> Experts:
    """A mixture of experts; what few published models have is rare."""
    rare = {"shared": 1, "score": "sigmoid", "scale": 2.5, "bias_rate": 0.001, "capacity": 1.25, "z_loss": 0.001,
            "bias": True, "biases": True, "router_bias": True, "group_by": 1}  # fmt: skip
    count = rng.choice([2, 3, 4, 8])
    return Experts(
        count=count,
        active=rng.randint(1, count),
        hidden=rng.choice([16, 24, 56]),
        renormalise=rng.random() < 0.6,
        **{name: value for name, value in rare.items() if rng.random() < 0.05},
    )


TABLES = {"vocab embed", "_ embed"}
"""The dims of the embeddings of tokens and of positions."""
COMMON: dict[str, Drawn] = {
    "vocab": one_of(50, 64, 96, 97),
    "context": one_of(LENGTH, 64, 128, 1024),
    "layers": one_of(1, 2, 2, 3, 3, 4, 7),
    "width": one_of(16, 24, 32, 48),
    "heads": one_of(1, 2, 4, 8),
    "kv_heads": one_of(None, None, 1, 2),
    "head_dim": one_of(None, None, 6, 10, 16, 22),
    "hidden": one_of(None, 40, 96),
    "pad_vocab": one_of(1, 8, 64),
    "epsilon": one_of(1e-6, 0.001, 0.02, 0.07),
    "position": lambda rng: rope(rng) if rng.random() < 0.5 else Rope(),
    "tied": one_of(False, True),
}
"""Fields that every draw sets."""
FIELDS: dict[str, Drawn] = {
    "feed_forward": one_of("swiglu", "geglu", "gelu", "gelu_tanh", "relu", "relu2", "swiglu_clamped"),
    "latent": one_of(None, Latent(rank=12, query_rank=20, rotated=4, value_dim=6), Latent(rank=9, rotated=2)),
    "sinks": one_of(False, True),
    "head_bias": one_of(False, True),
    "parallel_norms": one_of(False, True),
    "experts": lambda rng: experts(rng) if rng.random() < 0.8 else None,
    "position": lambda rng: rope(rng) if rng.random() < 0.7 else Learned(),
    "norm": one_of("rms", "layer"),
    "norm_bias": one_of(False, True),
    "norm_offset": one_of(False, True),
    "norm_scale": one_of(True, False),
    "qk_norm_rotated": one_of(False, True),
    "qkv_clip": one_of(None, 0.5, 3.0),
    "parallel": one_of(False, True),
    "out_bias": one_of(False, True),
    "mlp_bias": one_of(False, True),
    "embed_multiplier": one_of(1.0, 2.5),
    "residual_multiplier": one_of(1.0, 0.3),
    "logit_multiplier": one_of(1.0, 0.25, 0.0625),
    "attention_multiplier": one_of(None, 0.1, 0.7),
    "query_growth": one_of(None, QueryGrowth(rate=0.3, original=8)),
    "pattern": pattern,
    "pre_norm": one_of(False, True),
    "post_norm": one_of(False, True),
    "qk_norm": one_of(False, True),
    "qk_norm_joint": one_of(False, True),
    "bias": one_of(False, True),
    "qkv_bias": one_of(False, True),
    "embed_scale": one_of(False, True),
    "window": one_of(None, 1, 5, 8, 33, 40, 1000),
    "global_every": one_of(0, 1, 2, 3, 6),
    "window_theta": one_of(None, 10_000.0, 50.0, 1e6, 777.7),
    "query_pre_attn_scalar": one_of(None, 9.0, 16.0, 20.0, 12.5, 0.7),
    "attention_softcap": one_of(None, 0.8, 2.0, 50.0),
    "logit_softcap": one_of(None, 1.0, 4.5, 30.0),
}
"""Fields that a draw may change."""
GEMMA: Values = {"feed_forward": "geglu", "norm_offset": True, "embed_scale": True}
FORMS: dict[str, Values] = {
    "llama": {},
    "llama-biased": {"bias": True},
    "mistral": {"window": 8},
    "qwen2": {"qkv_bias": True},
    "qwen2-windows": {"qkv_bias": True, "window": 8, "global_every": 2},
    "qwen3": {"qk_norm": True},
    "qwen3-windows": {"qk_norm": True, "window": 8},
    "gemma": GEMMA,
    "gemma2": {**GEMMA, "post_norm": True, "window": 8, "global_every": 2, "query_pre_attn_scalar": 20.0,
               "attention_softcap": 2.0, "logit_softcap": 4.5},
    "gemma3": {**GEMMA, "post_norm": True, "qk_norm": True, "window": 8, "global_every": 3, "window_theta": 10_000.0,
               "query_pre_attn_scalar": 20.0},
    "olmo2": {"pre_norm": False, "post_norm": True, "qk_norm": True, "qk_norm_joint": True},
    "mixtral": {"experts": Experts(count=4, active=2, hidden=24)},
    "mixtral-windows": {"experts": Experts(count=4, active=2, hidden=24), "window": 8, "global_every": 2},
    "qwen3-moe": {"qk_norm": True, "experts": Experts(count=4, active=2, hidden=24, renormalise=False)},
    "olmo": {"norm": "layer", "norm_scale": False, "epsilon": 1e-5},
    "olmo3": {"pre_norm": False, "post_norm": True, "qk_norm": True, "qk_norm_joint": True, "window": 8,
              "global_every": 4},
    "smollm3": {"pattern": (LayerKind(count=3), LayerKind(position=NoPosition()))},
    "granite": {"embed_multiplier": 2.5, "residual_multiplier": 0.3, "logit_multiplier": 0.25,
                "attention_multiplier": 0.1},
    "glm": {"position": Rope(partial=0.5, interleaved=True), "head_dim": 16, "qkv_bias": True},
    "glm4": {"position": Rope(partial=0.5, interleaved=True), "head_dim": 16, "qkv_bias": True, "post_norm": True},
    "cohere": {"norm": "layer", "parallel": True, "position": Rope(interleaved=True), "logit_multiplier": 0.0625},
    "cohere2": {"norm": "layer", "parallel": True, "position": Rope(interleaved=True), "head_dim": None,
                "pattern": (LayerKind(count=3, window=8), LayerKind(position=NoPosition()))},
    "exaone4": {"pre_norm": False, "post_norm": True, "qk_norm": True,
                "pattern": (LayerKind(count=3, window=8), LayerKind(position=NoPosition()))},
    "starcoder2": {"norm": "layer", "norm_bias": True, "bias": True, "feed_forward": "gelu_tanh"},
    "nemotron": {"norm": "layer", "norm_bias": True, "norm_offset": True, "position": Rope(partial=0.5),
                 "head_dim": 16, "feed_forward": "relu2"},
    "hunyuan": {"qk_norm": True, "qk_norm_rotated": True},
    "stablelm": {"norm": "layer", "norm_bias": True, "position": Rope(partial=0.25), "head_dim": None, "width": 32,
                 "heads": 2, "kv_heads": 1, "qkv_bias": True},
    "glm4-moe": {"position": Rope(partial=0.5), "head_dim": 16, "hidden": 40,
                 "pattern": (LayerKind(dense=True), LayerKind(count=8)),
                 "experts": Experts(count=4, active=2, hidden=24, shared=1, score="sigmoid", bias=True, scale=2.0)},
    "qwen2-moe": {"qkv_bias": True, "experts": Experts(count=4, active=2, hidden=24, shared=2, shared_gate=True)},
    "gpt2": {"feed_forward": "gelu_tanh", "position": Learned(), "norm": "layer", "norm_bias": True, "bias": True,
             "kv_heads": None, "head_dim": None},
    "gpt-bigcode": {"feed_forward": "gelu_tanh", "position": Learned(), "norm": "layer", "norm_bias": True,
                    "bias": True, "kv_heads": 1, "head_dim": None},
    "gpt-neox": {"feed_forward": "gelu", "norm": "layer", "norm_bias": True, "bias": True, "parallel": True,
                 "parallel_norms": True, "kv_heads": None, "head_dim": None, "position": Rope(partial=0.5),
                 "width": 32, "heads": 4},
    "phi": {"feed_forward": "gelu_tanh", "norm": "layer", "norm_bias": True, "bias": True, "parallel": True,
            "head_bias": True, "head_dim": None, "position": Rope(partial=0.5), "width": 32, "heads": 4},
    # one group: with several, version 4.57 of transformers takes experts outside the best ones before negative scores
    "deepseek-v3": {"kv_heads": None, "head_dim": 16, "hidden": 40, "position": Rope(interleaved=True),
                    "latent": Latent(rank=12, query_rank=20, rotated=6, value_dim=10),
                    "pattern": (LayerKind(dense=True), LayerKind(count=8)),
                    "experts": Experts(count=8, active=2, hidden=24, shared=1, score="sigmoid", bias=True)},
    "youtu": {"kv_heads": None, "head_dim": 10, "latent": Latent(rank=12, rotated=4, value_dim=6)},
    "gpt-oss": {"feed_forward": "swiglu_clamped", "sinks": True, "qkv_bias": True, "out_bias": True, "window": 8,
                "global_every": 2, "experts": Experts(count=4, active=2, hidden=24, biases=True, router_bias=True)},
    "granite-swa": {"sinks": True, "attention_multiplier": 0.1, "pattern": (LayerKind(), LayerKind(count=3, window=8))},
}  # fmt: skip
"""What the published families have in common, besides sizes."""
WINDOWS = ("window", "global_every")
SCALARS = ("query_pre_attn_scalar", "attention_softcap", "logit_softcap")
OWN: dict[str, tuple[str, ...]] = {
    "llama": ("feed_forward",),
    "mistral": WINDOWS,
    "qwen2-windows": WINDOWS,
    "qwen3-windows": WINDOWS,
    "gemma2": (*WINDOWS, *SCALARS),
    "gemma3": (*WINDOWS, *SCALARS, "window_theta"),
    "olmo2": ("feed_forward",),
    "mixtral": ("window", "experts"),
    "mixtral-windows": (*WINDOWS, "experts"),
    "qwen3-moe": ("window", "experts"),
    "olmo": ("qkv_clip", "tied"),
    "olmo3": ("tied", "epsilon"),
    "smollm3": ("pattern", "tied"),
    "granite": ("embed_multiplier", "residual_multiplier", "logit_multiplier", "attention_multiplier"),
    "glm": ("qkv_bias", "tied"),
    "glm4": ("qkv_bias", "tied"),
    "cohere": ("logit_multiplier", "tied"),
    "cohere2": ("logit_multiplier", "tied"),
    "exaone4": ("tied", "epsilon"),
    "starcoder2": ("window", "tied"),
    "nemotron": ("tied", "epsilon"),
    "hunyuan": ("tied", "epsilon"),
    "stablelm": ("parallel", "qkv_bias"),
    "glm4-moe": ("tied", "epsilon"),
    "qwen2-moe": ("tied", "epsilon"),
    "gpt2": ("feed_forward",),
    "gpt-bigcode": ("feed_forward", "tied"),
    "gpt-neox": ("tied", "epsilon"),
    "phi": ("tied", "epsilon"),
    "deepseek-v3": ("tied", "epsilon"),
    "youtu": ("tied", "feed_forward"),
    "gpt-oss": ("tied", "epsilon", "window"),
    "granite-swa": ("tied", "embed_multiplier", "logit_multiplier"),
}
"""Fields in which models of a family differ from each other, besides those that every draw sets."""


@dataclass(frozen=True)
class Draw:
    """One random decoder."""

    number: int
    start: str
    """The family that it was changed from, or `free`."""
    model: Decoder

    @property
    def name(self) -> str:
        """For folders and messages."""
        return f"{self.number:04}-{self.start}"

    def __str__(self) -> str:
        return f"{self.name}: {', '.join(f'{name}={value}' for name, value in changed(self.model).items())}"


def changed(model: Decoder) -> Values:
    """The fields that do not have their default."""
    values = {}
    for one in fields(model):
        default = one.default if one.default_factory is MISSING else one.default_factory()
        if getattr(model, one.name) != default:
            values[one.name] = getattr(model, one.name)
    return values


def draw(number: int, seed: int) -> Draw:
    """The decoder of that number: in turn a family with one or two other fields, and any fields at all."""
    rng = random.Random(f"{seed}-{number}")
    start = "free" if number % 2 else list(FORMS)[number // 2 % len(FORMS)]
    while True:
        values = {name: drawn(rng) for name, drawn in COMMON.items()}
        if start == "free":
            chosen = [name for name in FIELDS if rng.random() < 0.12]
        else:
            values |= FORMS[start]
            among = OWN.get(start, ()) if rng.random() < 0.75 else tuple(FIELDS)
            chosen = rng.sample(among, min(rng.randint(1, 2), len(among)))
        try:
            return Draw(number, start, Decoder(**values | {name: (FIELDS | COMMON)[name](rng) for name in chosen}))
        except FieldError:
            continue


def parameters(model: Decoder, seed: int) -> Tree:
    """Random values of every parameter, scales and biases included, large enough that every setting shows."""
    rng = np.random.default_rng(seed)

    def value(param: Param) -> np.ndarray:
        shape = param.unpadded or param.shape
        inputs = [size for size, name in zip(param.shape, param.names, strict=True) if name in param.fan_in]
        size = 1.2 / math.sqrt(math.prod(inputs)) if param.fan_in else 0.3 if param.dims in TABLES else 1.0
        padding = [(0, whole - part) for whole, part in zip(param.shape, shape, strict=True)]
        return np.pad(np.float32(size) * rng.standard_normal(shape, np.float32), padding)

    return jax.tree.map(value, model.params())


def logits(model: Decoder, params: Tree, tokens: np.ndarray) -> np.ndarray:
    """Float32 logits of each token, as in generation: no expert drops a token (rows, length, vocabulary)."""
    whole = replace(model, experts=replace(model.experts, capacity=None)) if model.experts else model

    @partial(jax.jit, compiler_options=QUICK)
    def computed(params: Tree, token_BT: jax.Array) -> jax.Array:
        weight_BT = jnp.ones(token_BT.shape, jnp.float32)
        x_BTE, _ = whole.activations(params, {"token": token_BT}, weight_BT, SingleDeviceContext())
        return whole.head.logits(x_BTE, whole.unembedding(params), "float32")

    return np.asarray(computed(params, jnp.asarray(tokens, jnp.int32)))[..., : model.vocab]


class NoData(DataDefaults):
    """Data without a tokenizer."""

    kind = "arrays"


def written(model: Decoder, params: Tree, folder: Path, **how: Any) -> list[str]:
    """Export the decoder as a run's export does, from parameters in memory; what the export says."""
    recipe = SimpleNamespace(name=folder.name, model=model, data=NoData())
    assembly = SimpleNamespace(layout=SimpleNamespace(declared=model.params()))
    return export(LoadedRun(cast(Any, recipe), cast(Any, assembly), params, 0, "step 0"), folder, **how)


@dataclass(frozen=True)
class Exported:
    """The exported decoders, in folders of their names, with dtrain's logits."""

    folder: Path
    draws: dict[str, Draw]
    wanted: dict[str, np.ndarray]
    kinds: dict[str, str]
    """The `model_type` of each."""
    failed: dict[str, str]
    """The errors of those whose export failed."""
    refused: tuple[Draw, ...]
    """Those that no supported architecture of transformers computes."""

    def reasons(self, python: str) -> dict[str, str]:
        """Why each wrong one is wrong, by name, in the transformers of that Python."""
        out = self.folder / "logits.npz"
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("JAX", "XLA"))}
        environment["HF_HUB_OFFLINE"] = "1"
        words = [python, SCRIPT, "attempt", self.folder, self.folder / "tokens.npy", out]
        done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        with np.load(out) as found:
            missing = {name: "the folder has no config.json" for name in self.wanted if name not in found}
            unlike = {name: _unlike(found[name], wanted) for name, wanted in self.wanted.items() if name in found}
        newer = {name for name, why in unlike.items() if self.kinds[name] in NEWER and "does not recognize" in why}
        return missing | self.failed | {name: why for name, why in unlike.items() if why and name not in newer}


def _unlike(found: np.ndarray, wanted: np.ndarray) -> str:
    """How the logits differ, or the error in place of them; empty if they are equal."""
    if found.dtype.kind == "U":
        return str(found)
    if found.shape != wanted.shape:
        return f"the logits have shape {found.shape}, not {wanted.shape}"
    difference = np.abs(found - wanted).max() / np.abs(wanted).max()
    return "" if difference < TOLERANCE else f"the logits differ by {difference:.1e} of the largest"


def exported(draws: Sequence[Draw], seed: int, folder: Path) -> Exported:
    """Export those that can be, each with random parameters and dtrain's logits of the same random tokens."""
    tokens = np.random.default_rng(seed).integers(3, 50, (ROWS, LENGTH))
    np.save(folder / "tokens.npy", tokens)
    kept: dict[str, Draw] = {}
    wanted, kinds, failed = {}, {}, {}
    for one in draws:
        if (config := config_of(one.model)) is None:
            continue
        params = parameters(one.model, seed)
        kept[one.name], kinds[one.name] = one, str(config["model_type"])
        wanted[one.name] = logits(one.model, params, tokens)
        try:
            written(one.model, params, folder / one.name)
        except Exception as error:
            failed[one.name] = f"the export fails: {type(error).__name__}: {error}"
    return Exported(folder, kept, wanted, kinds, failed, tuple(one for one in draws if one.name not in kept))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200, help="random decoders")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the decoder of this number alone")
    parser.add_argument("--keep", type=Path, help="leave the exported folders there")
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    numbers = range(options.count) if options.only is None else [options.only]
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        made = exported([draw(number, options.seed) for number in numbers], options.seed, folder)
        print(f"{len(made.draws)} exported, {len(made.refused)} refused")
        print(f"exported: {json.dumps(Counter(made.kinds.values()))}")
        for variable in VARIABLES:
            if not (python := os.environ.get(variable)):
                print(f"\n{variable} names no Python with transformers")
                continue
            wrong = made.reasons(python)
            print(f"\n{python}: {len(made.draws) - len(wrong)} right, {len(wrong)} wrong")
            for name, why in wrong.items():
                print(f"{made.kinds[name]}: {why}\n  {made.draws[name]}")


if __name__ == "__main__":
    main()
