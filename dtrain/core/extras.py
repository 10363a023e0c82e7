"""Packages that only some recipes and commands need, and the extra of dtrain that installs each."""

import importlib.util
from collections.abc import Iterable

PACKAGES = {
    "tokenizers": ("text", "reads tokenizer.json"),
    "sentencepiece": ("text", "reads SentencePiece tokenizers"),
    "jinja2": ("text", "renders chat templates"),
    "safetensors": ("text", "reads and writes published parameters"),
    "PIL": ("images", "reads image files"),
    "pyarrow": ("tables", "reads tables: CSV, Parquet, Arrow"),
    "markupsafe": ("report", "draws the page of a report"),
    "matplotlib": ("report", "draws pictures of curves"),
    "flatbuffers": ("program", "writes programs: dtrain export RUN NAME.stablehlo"),
    "wandb": ("wandb", "sends metrics to Weights & Biases"),
    "tensorboardX": ("tensorboard", "writes event files for TensorBoard"),
    "gcsfs": ("remote", "reads gs://"),
    "s3fs": ("remote", "reads s3://"),
    "flax": ("flax", "has the models that dtrain.flax wraps"),
    "equinox": ("equinox", "has the models that dtrain.equinox wraps"),
}
"""By the name with which they are imported: the extra, and what the package does."""
ELSEWHERE = {"adlfs": "reads az://", "huggingface_hub": "reads hf://"}
"""Packages in no extra."""


def missing(modules: Iterable[str]) -> list[str]:
    """Those of the modules that are not installed."""
    return [name for name in dict.fromkeys(modules) if not installed(name)]


def use_of(module: str) -> str:
    """What the package does; empty if it is none of these."""
    return PACKAGES[module][1] if module in PACKAGES else ELSEWHERE.get(module, "")


def of(modules: Iterable[str]) -> tuple[str, ...]:
    """The extras that have the packages."""
    return tuple(sorted({PACKAGES[name][0] for name in modules if name in PACKAGES}))


def command(modules: Iterable[str]) -> str:
    """The command that installs the packages."""
    names = list(modules)
    own = [f"'dtrain[{','.join(of(names))}]'"] if of(names) else []
    return " ".join(["pip install", *own, *(name for name in names if name not in PACKAGES)])


def installed(module: str) -> bool:
    """Whether the module can be imported, as far as that is known without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # a module that another one has put in its place
        return False
