"""Text generated with dtrain and with `generate` of Hugging Face's transformers, from the same weights.

For each model a folder is written as a published one: the decoder of recipes/decoder-shakespeare.yaml and a Llama of
100 million parameters. Both libraries draw the most likely tokens after a prompt, in one process each, for one row and
for 16; the tokens must be equal. The two alternate; medians of tokens per second and their ratios are printed.

    RIVAL_PYTHON=python python benchmarks/generate.py      target: above 1.0x in every row
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

PROMPT, TOKENS, ROUNDS = 32, 96, 5
SHAKESPEARE = {
    "model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "vocab_size": 256, "n_positions": 128, "n_embd": 128,
    "n_layer": 4, "n_head": 4,
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 32000, "hidden_size": 640,
    "intermediate_size": 1728, "num_hidden_layers": 12, "num_attention_heads": 10, "num_key_value_heads": 5,
    "max_position_embeddings": 1024, "rms_norm_eps": 1e-6,
}  # fmt: skip
MODELS = {"shakespeare": SHAKESPEARE, "llama-100m": LLAMA}
ROWS = (1, 16)


def served(make: Callable[[int], list[list[int]]]) -> None:
    """Answer each number of rows on standard input with the seconds and the tokens."""
    for line in sys.stdin:
        start, cpu = time.perf_counter(), time.process_time()
        tokens = make(int(line))
        print(json.dumps([time.perf_counter() - start, time.process_time() - cpu, tokens]), flush=True)


def rival(folder: str) -> None:
    """`generate` of transformers, with its default implementation of attention and cache."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def make(rows: int) -> list[list[int]]:
        prompt = torch.arange(1, PROMPT + 1)[None].repeat(rows, 1)
        with torch.inference_mode():
            out = model.generate(prompt, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
        return out[:, PROMPT:].tolist()

    served(make)


def own(folder: str) -> None:
    """What `dtrain generate` runs, on the folder imported into a run."""
    from dtrain.cli.arguments import use_devices

    use_devices(None)
    import numpy as np

    from dtrain.core.run_dir import Folder
    from dtrain.train.generate import generator
    from dtrain.train.sampling import Sampling

    model = generator(Folder(Path(folder)), [], lambda _: None)

    def make(rows: int) -> list[list[int]]:
        prompts = [list(range(1, PROMPT + 1))] * rows
        return np.stack(list(model.continued(prompts, TOKENS, Sampling(temperature=0))), 1).tolist()

    served(make)


def written(python: str, config: dict, folder: Path) -> None:
    """A random model of that configuration, written by transformers."""
    code = (
        "import sys, json, torch; from transformers import AutoConfig, AutoModelForCausalLM; torch.manual_seed(0); "
        "c = json.loads(sys.argv[1]); c = AutoConfig.for_model(c.pop('model_type'), **c); "
        "m = AutoModelForCausalLM.from_config(c); "
        "[p.data.add_(0.02 * torch.randn_like(p)) for p in m.parameters()]; m.save_pretrained(sys.argv[2])"
    )
    subprocess.run([python, "-c", code, json.dumps(config), str(folder)], check=True, capture_output=True)


def main() -> None:
    """Write each model, import it, and let both programs generate in turn."""
    python = os.environ.get("RIVAL_PYTHON")
    if not python:
        sys.exit("RIVAL_PYTHON must name a Python that has torch and transformers")
    with tempfile.TemporaryDirectory() as temporary:
        for name, config in MODELS.items():
            folder = Path(temporary) / name
            written(python, config, folder)
            imported = [sys.executable, "-m", "dtrain", "import", str(folder), "--out", name]
            subprocess.run(imported, cwd=temporary, check=True, capture_output=True)
            compared(name, python, folder, Path(temporary) / "runs" / name)


def compared(name: str, python: str, published: Path, run: Path) -> None:
    """Print the tokens per second of both, for each number of rows."""
    commands = {
        "dtrain": [sys.executable, __file__, "own", str(run)],
        "transformers": [python, __file__, "rival", str(published)],
    }
    programs = {
        who: subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        for who, command in commands.items()
    }

    def ask(who: str, rows: int) -> tuple[float, float, list]:
        program = programs[who]
        assert program.stdin and program.stdout
        program.stdin.write(f"{rows}\n")
        program.stdin.flush()
        return json.loads(program.stdout.readline())

    for rows in ROWS:
        first = {who: ask(who, rows)[2] for who in programs}  # compiles
        same = first["dtrain"] == first["transformers"]
        taken = {who: [] for who in programs}
        for _ in range(ROUNDS):
            for who in programs:
                taken[who].append(ask(who, rows)[:2])
        ratios = [theirs[0] / ours[0] for ours, theirs in zip(taken["dtrain"], taken["transformers"], strict=True)]
        cpu = [theirs[1] / ours[1] for ours, theirs in zip(taken["dtrain"], taken["transformers"], strict=True)]
        speed = {who: rows * TOKENS / statistics.median(wall for wall, _ in times) for who, times in taken.items()}
        print(
            f"{name:<12} {rows:>2} rows   dtrain {speed['dtrain']:>8,.0f} tokens/s   transformers "
            f"{speed['transformers']:>7,.0f} tokens/s   {statistics.median(ratios):.2f}x, by CPU time "
            f"{statistics.median(cpu):.2f}x   tokens {'equal' if same else 'NOT EQUAL'}"
        )
    for program in programs.values():
        program.kill()


if __name__ == "__main__":
    {"own": own, "rival": rival}[sys.argv[1]](sys.argv[2]) if len(sys.argv) > 2 else main()
