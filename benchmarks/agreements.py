"""Compares the training of every shipped recipe and example, of toy size, with that on one device: `dtrain agree` on
eight simulated devices, on six meshes and that of the recipe, with every engine.

Sizes are reduced, and what a recipe reads and this machine has not is replaced: published weights, photos, tokens. The
rest of the recipe is as it is: model, adapters, objective, optimizer, precision, accumulation, mesh and engine; but for
the residual network, whose batch statistics of bfloat16 values are too coarse for the comparison.

    python benchmarks/agreements.py [NAME ...]     about ten minutes on two cores
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jaxlib.version
import numpy as np

ROOT = Path(__file__).parent.parent
DECODER = (
    "model={preset: null, vocab: 256, context: 128, layers: 2, width: 96, heads: 4, kv_heads: 2, hidden: 256}",
    "model.loss_chunks=1",
    "batch=16",
)
CHAT = 'data={kind: chat, files: ["{dtrain}/data/sums.jsonl"], length: 64, template: plain, tokenizer: bytes}'
PAIRS = (
    'data={kind: preference, files: ["{dtrain}/data/preferences.jsonl"], length: 64, template: plain, tokenizer: bytes}'
)
BASE = "init.run=runs/base"
PHOTOS = "data={kind: synthetic, image: [32, 32, 3], classes: 8, examples: 512}"
MNIST = "data={kind: synthetic, image: [28, 28, 1], classes: 10, examples: 512}"
VIT = "model={kind: vit, image: [32, 32, 3], classes: 8, patch: 8, layers: 2, width: 64, heads: 4, hidden: 128}"
RESNET = "model={kind: cnn, image: [32, 32, 3], classes: 8, stages: [8, 16], blocks: [1, 1], stem: imagenet}"
"""Pieces of toy recipes."""
TOY: dict[str, tuple[str, ...]] = {
    "chat-tiny": ("batch=16",),
    "lora-tiny": (BASE, "batch=16"),
    "dpo-tiny": (BASE, "batch=16"),
    "cnn-mnist": (MNIST, "batch=32", "evaluate.batch=64", "optimizer.schedule.warmup=0"),
    "decoder-shakespeare": ('data.files=["{dtrain}/data/alice.txt"]',),
    "mlp-mnist": (MNIST, "batch=32", "optimizer.schedule.warmup=0"),
    "llama3-8b-pretrain-v5p-128": (
        *DECODER,
        "data.files=[tokens.bin]",
        "data.length=64",
        "engine.xla={}",
        "mesh.fsdp=8",
    ),
    "llama3-8b-sft-v5p-16": (*DECODER, BASE, CHAT),
    "llama3-8b-lora-v5e-8": (*DECODER, BASE, CHAT),
    "llama3-8b-dpo-v5e-8": (*DECODER, BASE, PAIRS),
    "qwen3-0.6b-lora-v5e-1": (*DECODER, BASE, CHAT),
    "resnet34-images": (RESNET, PHOTOS, "batch=32", "optimizer.schedule.warmup=0", "precision.compute=float32"),
    "own_data": ("batch=64",),
    "vit-s16-images": (VIT, PHOTOS, "batch=32", "optimizer.schedule.warmup=0"),
    "vit-synthetic-v5e-16": (VIT, PHOTOS, "batch=32"),
}
"""What is changed in recipes that are not of toy size, or that begin with weights of another run."""
FLAGS = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
FLAGS += " --xla_cpu_use_fusion_emitters=false" if jaxlib.version.__version_info__ < (0, 11, 1) else ""
"""With few optimisations, which change times and no result beyond rounding."""


def recipes() -> dict[str, str]:
    """The path of each by name: shipped ones, then examples."""
    paths = [*sorted((ROOT / "recipes").glob("*.yaml")), *sorted((ROOT / "examples").glob("*.yaml"))]
    return {path.stem: str(path) for path in paths}


def compared(name: str, path: str, folder: Path) -> tuple[str, bool]:
    """A line about one recipe, and whether all of it agrees."""
    out, began = folder / f"{name}.json", time.monotonic()
    command = [sys.executable, "-m", "dtrain", "agree", path, *TOY.get(name, ()), "--devices", "8", "--out", str(out)]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | {"XLA_FLAGS": FLAGS}, capture_output=True, text=True, check=False
    )
    seconds = time.monotonic() - began
    if not out.exists():
        return f"{name:<28} FAILED: {done.stderr[-1500:]}", False
    found = json.loads(out.read_text())
    ran = [one for one in found["comparisons"] if not one["refused"]]
    worst = {what: max((one[what]["difference"] for one in ran), default=0.0) for what in ("loss", "gradients")}
    shown = "agrees" if found["agrees"] else "DIFFERS"
    numbers = "  ".join(f"{what} {value:.1e}" for what, value in worst.items())
    lines = [f"{name:<28} {shown:<8}{len(ran):>3} of {len(found['comparisons']):<3} {numbers}  {seconds:4.0f} s"]
    lines += [line for line in done.stdout.splitlines() if not found["agrees"] and "differs by" in line]
    return "\n  ".join(lines), found["agrees"]


def main() -> None:
    chosen = {name: path for name, path in recipes().items() if not sys.argv[1:] or name in sys.argv[1:]}
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dtrain-agreements-") as name:
        folder = Path(name)
        np.random.default_rng(0).integers(0, 256, 1 << 16).astype(np.uint32).tofile(folder / "tokens.bin")
        base = [
            "run",
            "chat-tiny",
            "name=base",
            "steps=2",
            "batch=16",
            "optimizer.schedule=constant",
            "evaluate.every=0",
        ]
        subprocess.run([sys.executable, "-m", "dtrain", *base], cwd=folder, check=True, capture_output=True)
        with ThreadPoolExecutor(max(2, (os.cpu_count() or 1) // 4)) as pool:
            results = list(pool.map(lambda one: _shown(*one, folder), chosen.items()))
    agree = sum(results)
    print(f"{agree} of {len(results)} recipes agree, {(time.monotonic() - began) / 60:.1f} minutes", flush=True)
    sys.exit(agree != len(results))


def _shown(name: str, path: str, folder: Path) -> bool:
    line, agrees = compared(name, path, folder)
    print(line, flush=True)
    return agrees


if __name__ == "__main__":
    main()
