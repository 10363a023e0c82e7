"""Recipes of decoders for benchmarks of plans: bfloat16 compute, AdamW in float32, fsdp on all devices, engine jit."""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"

from dtrain.recipe.load import load
from dtrain.recipe.recipe import Recipe

TEXT = """
model: {model}
data: {{kind: tokens, files: [none.bin], length: {length}, dtype: uint32}}
optimizer: {{kind: adamw, lr: 1e-4, clip: 1.0, decay: 0.1}}
precision: {{compute: bfloat16, reduce: compute, loss: bfloat16}}
batch: {batch}
steps: 1000
mesh: {{data: 1, fsdp: -1}}
engine: jit
"""


def decoder(name: str, model: str, length: int, batch: int, changes: Sequence[str] = ()) -> Recipe:
    """The recipe of a decoder on rows of `length` tokens."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name.replace('.', '-')}.yaml"
        path.write_text(TEXT.format(model=model, length=length, batch=batch))
        return load(path, changes)
