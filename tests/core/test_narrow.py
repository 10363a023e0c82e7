"""Weights in MXFP4 and FP8 are read as the numbers that they stand for, whole and in parts."""

import json
import os
import subprocess
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from dtrain.checkpoint.tensors import opened
from dtrain.core.errors import DataError
from dtrain.models.families.config import published_model

PYTHON = os.environ.get("DTRAIN_TEST_HF_PYTHON", "")
DRAW = np.random.default_rng(0)
PACKED = {
    "e_blocks": DRAW.integers(0, 256, (4, 24, 2, 16)).astype(np.uint8),
    "e_scales": DRAW.integers(110, 140, (4, 24, 2)).astype(np.uint8),
}
"""Four experts, each with 64 inputs and 24 outputs."""


def test_four_bits_with_an_exponent_for_each_32_values(tmp_path: Path) -> None:
    save_file(PACKED, tmp_path / "model.safetensors")
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    with opened(tmp_path) as tensors:
        assert list(tensors) == ["e"]
        assert "e" in tensors
        assert "e_blocks" not in tensors
        assert tensors.shape("e") == (4, 64, 24)
        whole = tensors["e"]
        for expert, inner, out in [(0, 0, 0), (1, 1, 2), (3, 33, 23), (2, 63, 11)]:
            byte = int(PACKED["e_blocks"][expert, out, inner // 32, inner % 32 // 2])
            bits = byte >> 4 if inner % 2 else byte & 15
            sign = -1 if bits & 8 else 1
            exponent = int(PACKED["e_scales"][expert, out, inner // 32]) - 127
            assert whole[expert, inner, out] == sign * values[bits & 7] * 2.0**exponent
        part = tensors.part("e", (slice(1, 3), slice(5, 50), slice(3, 9)))
        assert np.array_equal(part, whole[1:3, 5:50, 3:9])


@pytest.mark.slow
@pytest.mark.skipif(not PYTHON, reason="DTRAIN_TEST_HF_PYTHON names no Python with transformers")
def test_four_bits_are_those_of_transformers(tmp_path: Path) -> None:
    save_file(PACKED, tmp_path / "model.safetensors")
    for name, array in PACKED.items():
        np.save(tmp_path / f"{name}.npy", array)
    code = """
import sys, numpy, torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
blocks, scales = (torch.tensor(numpy.load(f"{sys.argv[1]}/e_{name}.npy")) for name in ("blocks", "scales"))
numpy.save(f"{sys.argv[1]}/found.npy", convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).numpy())
"""
    subprocess.run([PYTHON, "-c", code, tmp_path], check=True, capture_output=True)
    with opened(tmp_path) as tensors:
        assert np.array_equal(tensors["e"], np.load(tmp_path / "found.npy"))


def fp8_file(path: Path, factors: tuple[int, int]) -> np.ndarray:
    """A matrix (300, 140) in FP8 with so many factors; safetensors' own writer for numpy has no FP8. Its values."""
    matrix = DRAW.normal(size=(300, 140)).astype(ml_dtypes.float8_e4m3fn)
    scales = DRAW.random(factors).astype(np.float32)
    header = {
        "w": {"dtype": "F8_E4M3", "shape": [300, 140], "data_offsets": [0, 42_000]},
        "w_scale_inv": {"dtype": "F32", "shape": factors, "data_offsets": [42_000, 42_000 + scales.nbytes]},
    }
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + matrix.tobytes() + scales.tobytes())
    return matrix.astype(np.float32) * np.repeat(np.repeat(scales, 128, 0)[:300], 128, 1)[:, :140]


def test_eight_bits_with_a_factor_for_each_block(tmp_path: Path) -> None:
    wanted = fp8_file(tmp_path / "model.safetensors", (3, 2))
    with opened(tmp_path) as tensors:
        assert list(tensors) == ["w"]
        assert np.array_equal(tensors["w"], wanted)
        assert np.array_equal(tensors.part("w", (slice(100, 290), slice(127, 129))), wanted[100:290, 127:129])


def test_factors_of_other_blocks_are_refused(tmp_path: Path) -> None:
    fp8_file(tmp_path / "model.safetensors", (5, 3))
    with opened(tmp_path) as tensors, pytest.raises(DataError, match=r"w_scale_inv has shape \(5, 3\)"):
        tensors["w"]


@pytest.mark.parametrize(
    ("given", "served"),
    [
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, True),
        ({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}, True),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, False),
        ({"quant_method": "gptq", "bits": 4}, False),
    ],
)
def test_only_formats_that_are_read_are_accepted(given: dict[str, object], served: bool) -> None:
    config = {"model_type": "llama", "vocab_size": 16, "hidden_size": 8, "num_attention_heads": 2,
              "num_hidden_layers": 1, "intermediate_size": 8, "quantization_config": given}  # fmt: skip
    published = published_model(config, 8, Path("config.json"))
    assert (published.unserved == ()) == served
