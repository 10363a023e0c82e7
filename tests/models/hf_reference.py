"""Tiny random models of Hugging Face's `transformers`, and their logits; run by that library's Python, not by dtrain's.

`make FOLDER [NAME]...` saves those models, or all, with their logits, losses and gradients. `logits FOLDER TOKENS`
opens every model in the folder and writes its logits beside it. `attempt FOLDER TOKENS OUT` writes the logits of every
model in the folder into one file, and an error in place of those of a model that cannot be opened. `peft BASE ADAPTER
TOKENS OUT` writes the logits of a model with an adapter of PEFT. `further FOLDER TOKENS WEIGHT OUT` writes the loss
with layers that predict further tokens, and gradients. `tokens FOLDER CHAT OUT` writes the tokens of
conversations, and which the assistant wrote, by the tokenizer of the folder.
"""

import copy
import json
import sys
from functools import partial
from pathlib import Path

import numpy as np
import torch
import transformers
from hf_families import FAMILIES, sized
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


def opened(folder: str | Path) -> torch.nn.Module:
    """A saved model, in float32."""
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()


def logits(model: torch.nn.Module, tokens: np.ndarray) -> np.ndarray:
    """Float32 logits of each token (rows, length, vocabulary)."""
    with torch.no_grad():
        return model(torch.tensor(tokens, dtype=torch.long)).logits.float().numpy()


def make(folder: Path, names: list[str]) -> None:
    """Save models of random parameters, scales and biases included, of these or all families, with what they compute.

    Each family has two sizes: NAME and NAME-other.
    """
    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    tokens = np.random.default_rng(0).integers(3, 96, (2, 40))
    np.save(folder / "tokens.npy", tokens)
    for name, (kind, fields) in sized().items():
        if names and name not in names:
            continue
        save(folder / name, kind, fields, tokens)
    (folder / "families.json").write_text(json.dumps({name: kind for name, (kind, _) in FAMILIES.items()}))


def save(folder: Path, kind: str, fields: dict[str, object], tokens: np.ndarray) -> None:
    """A random model with its logits, its loss (the mean over tokens) and the gradient of that for each tensor."""
    config = AutoConfig.for_model(kind, **copy.deepcopy(fields))
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    routing = [buffer for name, buffer in model.named_buffers() if name.endswith(("_correction_bias", "layer_scalar"))]
    for values in (*model.parameters(), *routing):
        values.data += 0.1 * torch.randn_like(values)
    # small files: the larger ones of a family are split as published ones are
    model.save_pretrained(folder, max_shard_size="100KB" if folder.name == "qwen3" else "5GB")
    np.save(folder / "logits.npy", logits(model, tokens))
    ids = torch.tensor(tokens, dtype=torch.long)
    found = model(ids).logits.float()
    loss = torch.nn.functional.cross_entropy(found[:, :-1].reshape(-1, found.shape[-1]), ids[:, 1:].reshape(-1))
    loss.backward()
    # saved as the parameters are, so that tensors that are joined in memory have the names of files
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for values in routing:
            values.zero_()
    model.save_pretrained(folder / "gradients")
    np.save(folder / "loss.npy", np.float64(loss.item()))


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


def further(folder: Path, tokens: np.ndarray, weight: float) -> dict[str, np.ndarray]:
    """The loss of a saved model with its layers that predict further tokens, and gradients of parameters by name.

    `weight` of the mean over these layers, whose sums over tokens are divided by as many tokens as that of the next
    token.
    """
    from transformers.modeling_layers import MtpModel

    model = opened(folder)
    first = model.config.num_hidden_layers
    # the numbers of their tensors are those of published models, whose layers are more
    model._keys_to_ignore_on_load_unexpected = [
        rf"model\.layers\.{first + i}\." for i in range(model.config.num_mtp_layers)
    ]
    layers = MtpModel.from_pretrained(model)
    ids, count = torch.tensor(tokens, dtype=torch.long), tokens[:, 1:].size
    summed = partial(torch.nn.functional.cross_entropy, reduction="sum")
    hidden = model.model(ids).last_hidden_state
    loss = summed(model.lm_head(hidden)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) / count
    for number in range(len(layers.layers)):
        ahead = number + 1
        later = torch.nn.functional.pad(ids[:, ahead:], (0, ahead))
        places = torch.arange(ids.shape[1])[None] + ahead
        hidden = layers.forward_layer(number, hidden, places, None, input_ids=later)
        lost = summed(layers._project_to_logits(hidden)[:, : -ahead - 1].flatten(0, 1), ids[:, ahead + 1 :].flatten())
        loss = loss + weight / len(layers.layers) * lost / count
    loss.backward()
    named = {**dict(model.named_parameters()), **{f"further.{n}": p for n, p in layers.named_parameters()}}
    found = {name: value.grad.numpy() for name, value in named.items() if value.grad is not None}
    return found | {"loss": np.float64(loss.item())}


def main() -> None:
    transformers.logging.set_verbosity_error()
    verb, *names = sys.argv[1:]
    if verb == "make":
        make(Path(names[0]), names[1:])
    elif verb == "logits":
        for config in sorted(Path(names[0]).glob("*/config.json")):
            np.save(config.with_name("logits.npy"), logits(opened(config.parent), np.load(names[1])))
    elif verb == "attempt":
        folders, tokens = sorted(path.parent for path in Path(names[0]).glob("*/config.json")), np.load(names[1])
        np.savez(names[2], **{folder.name: attempted(folder, tokens) for folder in folders})
    elif verb == "further":
        np.savez(names[3], **further(Path(names[0]), np.load(names[1]), float(names[2])))
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
