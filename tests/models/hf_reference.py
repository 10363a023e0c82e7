"""Tiny random models of Hugging Face's `transformers`, and their logits; run by that library's Python, not by dtrain's.

`make FOLDER` saves each family with its logits. `logits FOLDER TOKENS` opens every model in the folder and writes its
logits beside it. `attempt FOLDER TOKENS OUT` writes the logits of every model in the folder into one file, and an error
in place of those of a model that cannot be opened. `peft BASE ADAPTER TOKENS OUT` writes the logits of a model with an
adapter of PEFT. `tokens FOLDER CHAT OUT` writes the tokens of conversations, and which the assistant wrote, by the
tokenizer of the folder.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

SMALL = {
    "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
FAMILIES = {
    "gpt2": ("gpt2", {"vocab_size": 96, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64}),
    "llama2": ("llama", {"rms_norm_eps": 1e-5}),
    "llama3": ("llama", {"rope_theta": 5e5, "rope_scaling": LLAMA3, "tie_word_embeddings": True}),
    "llama-yarn": ("llama", {"rope_scaling": YARN}),
    "mistral": ("mistral", {"sliding_window": 8, "head_dim": 24}),
    "mixtral": ("mixtral", {"num_experts_per_tok": 2, "num_local_experts": 4, "sliding_window": None}),
    "qwen2": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}),
    "qwen3": ("qwen3", {"head_dim": 24, "rope_theta": 1e6}),
    "qwen3-moe": ("qwen3_moe", {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
                                "moe_intermediate_size": 48, "norm_topk_prob": True}),
    "gemma": ("gemma", {"head_dim": 16}),
    "gemma2": ("gemma2", {"head_dim": 16, "query_pre_attn_scalar": 20, "sliding_window": 8}),
    "gemma3": ("gemma3_text", {"head_dim": 16, "query_pre_attn_scalar": 20, "sliding_window": 8,
                               "num_hidden_layers": 8, "sliding_window_pattern": 6}),
    "phi3": ("phi3", {"sliding_window": 16}),
    "olmo2": ("olmo2", {"rope_theta": 5e5}),
}  # fmt: skip


def opened(folder: str | Path) -> torch.nn.Module:
    """A saved model, in float32."""
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()


def logits(model: torch.nn.Module, tokens: np.ndarray) -> np.ndarray:
    """Float32 logits of each token (rows, length, vocabulary)."""
    with torch.no_grad():
        return model(torch.tensor(tokens, dtype=torch.long)).logits.float().numpy()


def make(folder: Path) -> None:
    """Save a model of random parameters, scales and biases included, of each family, with its logits."""
    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    tokens = np.random.default_rng(0).integers(3, 96, (2, 40))
    np.save(folder / "tokens.npy", tokens)
    for name, (kind, fields) in FAMILIES.items():
        config = AutoConfig.for_model(kind, **({} if kind == "gpt2" else SMALL) | fields)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
        for parameter in model.parameters():
            parameter.data += 0.1 * torch.randn_like(parameter)
        # small files: the larger ones of a family are split as published ones are
        model.save_pretrained(folder / name, max_shard_size="100KB" if name == "qwen3" else "5GB")
        np.save(folder / name / "logits.npy", logits(model, tokens))
    (folder / "families.json").write_text(json.dumps(list(FAMILIES)))


def attempted(folder: Path, tokens: np.ndarray) -> np.ndarray:
    """The logits of a saved model that has exactly the tensors of its architecture, or else a text: what is wrong."""
    how = {"attn_implementation": "eager", "dtype": torch.float32, "output_loading_info": True}
    try:
        model, info = AutoModelForCausalLM.from_pretrained(folder, **how)
        if unlike := {what: sorted(map(str, names)) for what, names in info.items() if names}:
            return np.array(str(unlike))
        return logits(model.eval(), tokens)
    except Exception as error:
        return np.array(f"{type(error).__name__}: {error}")


def main() -> None:
    transformers.logging.set_verbosity_error()
    verb, *names = sys.argv[1:]
    if verb == "make":
        make(Path(names[0]))
    elif verb == "logits":
        for config in sorted(Path(names[0]).glob("*/config.json")):
            np.save(config.with_name("logits.npy"), logits(opened(config.parent), np.load(names[1])))
    elif verb == "attempt":
        folders, tokens = sorted(path.parent for path in Path(names[0]).glob("*/config.json")), np.load(names[1])
        np.savez(names[2], **{folder.name: attempted(folder, tokens) for folder in folders})
    elif verb == "peft":
        from peft import PeftModel

        base, adapter, tokens, out = names
        np.save(out, logits(PeftModel.from_pretrained(opened(base), adapter).eval(), np.load(tokens)))
    else:
        folder, chat, out = names
        tokenizer = AutoTokenizer.from_pretrained(folder)
        rows = []
        for messages in json.loads(Path(chat).read_text()):
            how = {"tokenize": True, "return_dict": True, "return_assistant_tokens_mask": True}
            row = tokenizer.apply_chat_template(messages, **how)
            rows.append([list(row["input_ids"]), list(row["assistant_masks"])])
        Path(out).write_text(json.dumps(rows))


main()
