"""Text generated with dtrain, with `generate` of Hugging Face's transformers, and with a short JAX program.

For each model a folder is written as a published one: the decoder of recipes/decoder-shakespeare.yaml and a Llama of
100 million parameters. All draw the most likely tokens after a prompt, in one process each, for one row and for 16; the
tokens must be equal. They alternate; medians of tokens per second and their ratios are printed. The JAX program is
what a user writes for one model and one length: the whole generation in one compiled call.

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
    from dtrain.inference.generate import Sampling, generator

    model = generator(Folder(Path(folder)), [], lambda _: None)

    def make(rows: int) -> list[list[int]]:
        prompts = [list(range(1, PROMPT + 1))] * rows
        return np.stack(list(model.continued(prompts, TOKENS, Sampling(temperature=0))), 1).tolist()

    served(make)


def jax_by_hand(folder: str) -> None:
    """Prompt and loop in one jitted function, with caches of keys and values."""
    import jax
    import jax.numpy as jnp
    from safetensors.numpy import load_file

    config = json.loads((Path(folder) / "config.json").read_text())
    weights = {name.removeprefix("transformer."): jnp.asarray(x) for name, x in load_file(
        Path(folder) / "model.safetensors").items()}  # fmt: skip
    length = PROMPT + TOKENS
    llama = config["model_type"] == "llama"
    layers = config["num_hidden_layers"] if llama else config["n_layer"]
    heads = config["num_attention_heads"] if llama else config["n_head"]
    groups = config["num_key_value_heads"] if llama else heads
    dim = (config["hidden_size"] if llama else config["n_embd"]) // heads

    def norm(w: dict, name: str, x: jax.Array) -> jax.Array:
        if llama:
            return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * w[f"{name}.weight"]
        x = x - x.mean(-1, keepdims=True)
        return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5) * w[f"{name}.weight"] + w[f"{name}.bias"]

    def rotate(x: jax.Array, place: jax.Array) -> jax.Array:
        angle = place[:, None] / 10000.0 ** (jnp.arange(0, dim, 2) / dim)
        cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
        left, right = jnp.split(x, 2, -1)
        return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1)

    def forward(w: dict, caches: list, token: jax.Array, start: jax.Array) -> tuple[jax.Array, list]:
        rows, count = token.shape
        place, new = start + jnp.arange(count), []
        seen = jnp.arange(length)[None] <= place[:, None]
        x = w["model.embed_tokens.weight"][token] if llama else w["wte.weight"][token] + w["wpe.weight"][place]
        for number in range(layers):
            at = f"model.layers.{number}." if llama else f"h.{number}."
            y = norm(w, f"{at}input_layernorm" if llama else f"{at}ln_1", x)
            if llama:
                q, k, v = (y @ w[f"{at}self_attn.{name}_proj.weight"].T for name in "qkv")
            else:
                q, k, v = jnp.split(y @ w[f"{at}attn.c_attn.weight"] + w[f"{at}attn.c_attn.bias"], 3, -1)
            q, k, v = (part.reshape(rows, count, -1, dim) for part in (q, k, v))
            if llama:
                q, k = rotate(q, place), rotate(k, place)
            keys, values = (jax.lax.dynamic_update_slice(old, part, (0, start, 0, 0)) for old, part in
                            zip(caches[number], (k, v)))  # fmt: skip
            new.append((keys, values))
            q = q.reshape(rows, count, groups, heads // groups, dim)
            scores = jnp.where(seen, jnp.einsum("btgrd,bsgd->bgrts", q, keys) / dim**0.5, -jnp.inf)
            y = jnp.einsum("bgrts,bsgd->btgrd", jax.nn.softmax(scores), values).reshape(rows, count, -1)
            if llama:
                x = x + y @ w[f"{at}self_attn.o_proj.weight"].T
                y = norm(w, f"{at}post_attention_layernorm", x)
                y = jax.nn.silu(y @ w[f"{at}mlp.gate_proj.weight"].T) * (y @ w[f"{at}mlp.up_proj.weight"].T)
                x = x + y @ w[f"{at}mlp.down_proj.weight"].T
            else:
                x = x + y @ w[f"{at}attn.c_proj.weight"] + w[f"{at}attn.c_proj.bias"]
                y = norm(w, f"{at}ln_2", x) @ w[f"{at}mlp.c_fc.weight"] + w[f"{at}mlp.c_fc.bias"]
                x = x + jax.nn.gelu(y) @ w[f"{at}mlp.c_proj.weight"] + w[f"{at}mlp.c_proj.bias"]
        x = norm(w, "model.norm" if llama else "ln_f", x[:, -1])
        return (x @ (w["lm_head.weight"] if llama else w["wte.weight"]).T).argmax(-1).astype(jnp.int32), new

    @jax.jit
    def generate(w: dict, prompt: jax.Array) -> jax.Array:
        empty = jnp.zeros((len(prompt), length, groups, dim))
        first, caches = forward(w, [(empty, empty)] * layers, prompt, jnp.int32(0))

        def one(carry: tuple, number: jax.Array) -> tuple[tuple, jax.Array]:
            token, caches = carry
            token, caches = forward(w, caches, token[:, None], PROMPT + number)
            return (token, caches), token

        _, rest = jax.lax.scan(one, (first, caches), jnp.arange(TOKENS - 1))
        return jnp.concatenate([first[None], rest]).T

    served(lambda rows: generate(weights, jnp.tile(jnp.arange(1, PROMPT + 1), (rows, 1))).tolist())


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
        "JAX by hand": [sys.executable, __file__, "jax", str(published)],
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
        taken = {who: [] for who in programs}
        for _ in range(ROUNDS):
            for who in programs:
                taken[who].append(ask(who, rows)[:2])
        for who, times in taken.items():
            speed = rows * TOKENS / statistics.median(wall for wall, _ in times)
            pairs = list(zip(times, taken["dtrain"], strict=True))
            wall, cpu = (statistics.median(theirs[clock] / ours[clock] for theirs, ours in pairs) for clock in (0, 1))
            same = "equal" if first[who] == first["dtrain"] else "NOT EQUAL"
            against = f"   dtrain is {wall:.2f}x as fast, by CPU time {cpu:.2f}x   tokens {same}"
            print(
                f"{name:<12} {rows:>2} rows   {who:<12} {speed:>8,.0f} tokens/s{against * (who != 'dtrain')}",
                flush=True,
            )
    for program in programs.values():
        program.kill()


if __name__ == "__main__":
    {"own": own, "rival": rival, "jax": jax_by_hand}[sys.argv[1]](sys.argv[2]) if len(sys.argv) > 2 else main()
