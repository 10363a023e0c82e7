"""Formats of a few bits in which weights are published, read as floating-point numbers.

MXFP4 (gpt-oss): NAME_blocks (..., out, in / 32, 16) has two values of four bits in each byte, and NAME_scales (...,
out, in / 32) the exponent of each 32 values (Open Compute Project 2023, OCP Microscaling Formats, section 5); together
they are NAME (..., in, out). FP8 (DeepSeek V3): NAME (out, in) in float8_e4m3fn, and NAME_scale_inv with a factor for
each block of 128 x 128 values (DeepSeek-AI 2024, section 3.3.2).
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np

BLOCKS, SCALES, FACTORS = "_blocks", "_scales", "_scale_inv"
FP8, BYTES = "F8_E4M3", "U8"
"""Dtypes as safetensors names them."""
BLOCK = 128
"""Rows and columns that share a factor."""
GROUP = 32
"""Values that share an exponent."""
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
"""The values of three bits; a fourth is the sign."""
VALUES = np.concatenate([E2M1, -E2M1])
Index = tuple[slice, ...]
Read = Callable[[Index], np.ndarray]
"""Reads a part of a tensor: a slice with start and stop for each dim."""


def unpacked_shape(blocks: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the values of blocks in MXFP4."""
    *outer, out, groups, _ = blocks
    return (*outer, groups * GROUP, out)


def unpacked(read_blocks: Read, read_scales: Read, index: Index) -> np.ndarray:
    """A part of a tensor in MXFP4, float32."""
    *outer, inner, out = index
    groups = slice(inner.start // GROUP, -(-inner.stop // GROUP))  # whole groups, cut below
    blocks = read_blocks((*outer, out, groups, slice(0, GROUP // 2)))
    exponents = read_scales((*outer, out, groups)).astype(np.int32) - 127
    pairs = np.stack([blocks & 15, blocks >> 4], -1).reshape(*blocks.shape[:-1], GROUP)
    values = np.ldexp(VALUES[pairs], exponents[..., None]).reshape(*blocks.shape[:-2], -1)
    begin = inner.start - groups.start * GROUP
    return np.swapaxes(values[..., begin : begin + inner.stop - inner.start], -1, -2)


def mapped_fp8(path: Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    """The tensors of that dtype of a safetensors file, mapped into memory."""
    if not names:
        return {}
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    found = {}
    for name in names:
        shape, begin = tuple(header[name]["shape"]), 8 + size + header[name]["data_offsets"][0]
        found[name] = np.memmap(path, np.uint8, "r", begin, shape).view(ml_dtypes.float8_e4m3fn)
    return found


def has_factors(shape: tuple[int, ...], factors: tuple[int, ...]) -> bool:
    """Whether there is a factor for each block of a matrix."""
    return len(shape) == 2 and factors == tuple(-(-size // BLOCK) for size in shape)


def multiplied(read: Read, read_factors: Read, index: Index) -> np.ndarray:
    """A part of a matrix in FP8, float32."""
    blocks = tuple(slice(part.start // BLOCK, -(-part.stop // BLOCK)) for part in index)
    factors = read_factors(blocks).astype(np.float32)
    for axis, (part, some) in enumerate(zip(index, blocks, strict=True)):
        factors = np.take(factors, np.arange(part.start, part.stop) // BLOCK - some.start, axis)
    return read(index).astype(np.float32) * factors
