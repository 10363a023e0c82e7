"""The small character decoder (recipes/decoder-shakespeare.yaml): dtrain's step and PyTorch's.

Both train the same shape on the same batch: 4 layers of width 128, 4 heads, 64 tokens, batch 12,
AdamW, clipping by global norm. CPU time is compared, since load on the machine affects it least: the two alternate
in segments, and the median of the paired ratios is printed. dtrain's side is the step that `dtrain run` compiles.

    python benchmarks/decoder_cpu.py     target: at most 0.7x PyTorch's CPU time
"""

import statistics
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import torch
from timing import alternate, median_ratio, run_step
from torch import nn

from dtrain.data.windows import row_example
from dtrain.recipe.load import load
from dtrain.train.assembly import assemble

VOCAB, CONTEXT, LAYERS, WIDTH, HEADS, BATCH, SEGMENT, ROUNDS = 256, 64, 4, 128, 4, 12, 20, 15
RECIPE = Path(__file__).parents[1] / "recipes" / "decoder-shakespeare.yaml"
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (BATCH, CONTEXT + 1)).astype(np.int32)


def dtrain_step() -> Callable[[], None]:
    """The compiled step of `dtrain run`."""
    made = assemble(load(RECIPE), jax.devices()[:1], row_example(CONTEXT, packed=False), 2000)
    return run_step(made, {"token": TOKENS[:, :-1], "target": TOKENS[:, 1:]}, SEGMENT)


class Layer(nn.Module):
    """Attention and feed-forward, each added to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH, bias=False), nn.LayerNorm(WIDTH, bias=False)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            part.view(BATCH, CONTEXT, HEADS, WIDTH // HEADS).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).split(WIDTH, 2)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(BATCH, CONTEXT, WIDTH))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """The decoder, its head tied to its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCAB, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH, bias=False), nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.token.weight

    def forward(self, token: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = self.layers(self.token(token) + self.position(torch.arange(CONTEXT)))
        return nn.functional.cross_entropy(self.head(self.norm(x)).view(-1, VOCAB), target.reshape(-1))


def torch_step() -> Callable[[], None]:
    """PyTorch, eager, with its fastest optimizer."""
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1, fused=True)
    token, target = (torch.from_numpy(part.astype(np.int64)) for part in (TOKENS[:, :-1], TOKENS[:, 1:]))

    def segment() -> None:
        for _ in range(SEGMENT):
            optimizer.zero_grad(set_to_none=True)
            model(token, target).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

    return segment


def main() -> None:
    found = alternate({"dtrain": dtrain_step(), "PyTorch": torch_step()}, ROUNDS)
    for name, times in found.items():
        wall, cpu = (1e3 * statistics.median(part) / SEGMENT for part in zip(*times, strict=True))
        print(f"{name:<8} {wall:7.2f} ms per step, {cpu:7.2f} ms of CPU")
    wall, cpu = (median_ratio(found, "dtrain", "PyTorch", clock) for clock in (0, 1))
    print(
        f"dtrain / PyTorch {torch.__version__}: {cpu:.2f}x of the CPU time (target 0.7), {wall:.2f}x of the wall time"
    )


if __name__ == "__main__":
    main()
