"""Two tiny models in narrow formats, and the logits of `transformers` with their weights made wide again.

Run by that library's Python: `hf_narrow.py PUBLISHED OUT`, with the models that hf_reference.py made in PUBLISHED. OUT
gets gpt-oss with experts in MXFP4 and deepseek-v3 with matrices in FP8, each with logits.npy.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
VALUES = np.concatenate([E2M1, -E2M1])


def mxfp4(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The nearest values of four bits, for groups of 32 inputs."""
    turned = np.swapaxes(tensor.numpy(), -1, -2)
    groups = turned.reshape(*turned.shape[:-1], -1, 32)
    exponents = np.ceil(np.log2(np.abs(groups).max(-1) / 6))
    scaled = groups / 2.0 ** exponents[..., None]
    bits = np.abs(scaled[..., None] - VALUES).argmin(-1).astype(np.uint8).reshape(*groups.shape[:-1], 16, 2)
    blocks, scales = bits[..., 0] | (bits[..., 1] << 4), (exponents + 127).astype(np.uint8)
    parts = {f"{name}_blocks": blocks, f"{name}_scales": scales}
    return {part: torch.tensor(np.ascontiguousarray(array)) for part, array in parts.items()}


def fp8(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """Values of eight bits, and a factor for each block of 128 x 128."""
    factor = float(tensor.abs().max()) / 448
    factors = torch.full([-(-size // 128) for size in tensor.shape], factor)
    return {name: (tensor / factor).to(torch.float8_e4m3fn), f"{name}_scale_inv": factors}


NARROW = {
    "gpt-oss": (mxfp4, ("gate_up_proj", "down_proj"), {"quant_method": "mxfp4"}, Mxfp4Config(dequantize=True)),
    "deepseek-v3": (
        fp8,
        ("_proj.weight", "_with_mqa.weight"),
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
        FineGrainedFP8Config(dequantize=True),
    ),
}


def main() -> None:
    published, out = map(Path, sys.argv[1:])
    tokens = torch.tensor(np.load(published / "tokens.npy"), dtype=torch.long)
    for name, (narrowed, ends, about, wide) in NARROW.items():
        folder, tensors = out / name, dict[str, torch.Tensor]()
        folder.mkdir(parents=True)
        for tensor, values in load_file(published / name / "model.safetensors").items():
            tensors |= narrowed(tensor, values) if tensor.endswith(ends) else {tensor: values}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((published / name / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"quantization_config": about}))
        how = {"quantization_config": wide, "dtype": torch.float32, "attn_implementation": "eager"}
        model = AutoModelForCausalLM.from_pretrained(folder, **how).eval()
        with torch.no_grad():
            np.save(folder / "logits.npy", model(tokens).logits.float().numpy())


main()
