"""From GGML's block formats to float32, in torch operations over whole rows of blocks.

Every formula multiplies first and adds second, each rounded to float32, in the order that the formats
define, so the result does not depend on how the blocks are cut into chunks or shared among threads.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from octavo.weights.errors import WeightsError
from octavo.weights.gguf import GGML_TYPES, TensorInfo

# Blocks per call: bounds the temporaries (about 70 MB for the K types) without costing speed.
_CHUNK_BLOCKS = 1 << 16
_TYPES = {kind.name: kind for kind in GGML_TYPES.values()}


def dequantize(info: TensorInfo, data: Tensor) -> Tensor:
    """The tensor as float32 of ``info.shape``, in memory of its own.

    ``data`` is uint8 [info.num_bytes], the tensor's bytes. Raises WeightsError for a type without a formula.
    """
    out = torch.empty(info.shape, dtype=torch.float32)
    if info.ggml_type in _PLAIN:
        # The view needs an aligned start, which a small general.alignment does not promise.
        aligned = data if data.data_ptr() % 4 == 0 else data.clone()
        out.view(-1).copy_(aligned.view(_PLAIN[info.ggml_type]))
        return out
    formula = _FORMULAS.get(info.ggml_type)
    if formula is None:
        known = ", ".join([*_PLAIN, *_FORMULAS])
        raise WeightsError(f"tensor {info.name!r} has the type {info.ggml_type}, supported are {known}")
    kind = _TYPES[info.ggml_type]
    blocks = data.view(-1, kind.block_bytes)
    rows = out.view(-1, kind.block_size)
    for start in range(0, blocks.shape[0], _CHUNK_BLOCKS):
        formula(blocks[start : start + _CHUNK_BLOCKS], rows[start : start + _CHUNK_BLOCKS])
    return out


_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

# Each formula takes blocks uint8 [n, block_bytes] and fills out float32 [n, block_size].


def _half(blocks: Tensor, byte: int) -> Tensor:
    """The float16 at a byte of every block, as float32 [n, 1]."""
    return blocks[:, byte : byte + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor, out: Tensor) -> None:
    """packed uint8 [n, 16] -> out [n, 32]: the low nibbles, then the high ones."""
    halves = out.view(-1, 2, 16)
    halves[:, 0].copy_(packed & 15)
    halves[:, 1].copy_(packed >> 4)


def _fifth_bits(packed: Tensor) -> Tensor:
    """packed uint8 [n, 4], bit j for value j -> [n, 32] of 0 or 16."""
    bits = packed[:, :, None] >> torch.arange(8, dtype=torch.uint8)
    return (bits & 1).mul_(16).flatten(1)


def _q4_0(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 2:], out)
    out.sub_(8).mul_(_half(blocks, 0))


def _q4_1(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 4:], out)
    out.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q5_0(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 6:], out)
    out.add_(_fifth_bits(blocks[:, 2:6])).sub_(16).mul_(_half(blocks, 0))


def _q5_1(blocks: Tensor, out: Tensor) -> None:
    _nibbles(blocks[:, 8:], out)
    out.add_(_fifth_bits(blocks[:, 4:8])).mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q8_0(blocks: Tensor, out: Tensor) -> None:
    out.copy_(blocks[:, 2:].view(torch.int8)).mul_(_half(blocks, 0))


def _k_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The 6-bit scales and minima of 8 sub-blocks, packed uint8 [n, 12] -> two float32 [n, 8, 1].

    Bytes 0-3 hold scales 0-3, bytes 4-7 minima 0-3, in their low 6 bits; their top 2 bits are the top bits of
    scales and minima 4-7, whose low 4 bits are the low and the high nibbles of bytes 8-11.
    """
    first, second, rest = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = torch.cat([first & 63, (rest & 15) | ((first >> 6) << 4)], dim=1)
    minima = torch.cat([second & 63, (rest >> 4) | ((second >> 6) << 4)], dim=1)
    return scales.float()[:, :, None], minima.float()[:, :, None]


def _k_affine(blocks: Tensor, out: Tensor, high_bits: Tensor | None, first_byte: int) -> None:
    """Q4_K and Q5_K: 8 sub-blocks of 32, each with a scale and a minimum of its own."""
    packed = blocks[:, first_byte : first_byte + 128].reshape(-1, 4, 32)
    values = out.view(-1, 4, 2, 32)
    values[:, :, 0].copy_(packed & 15)
    values[:, :, 1].copy_(packed >> 4)
    values = out.view(-1, 8, 32)
    if high_bits is not None:
        values.add_(high_bits)
    scales, minima = _k_scales(blocks[:, 4:16])
    values.mul_(scales.mul_(_half(blocks, 0)[:, :, None])).sub_(minima.mul_(_half(blocks, 2)[:, :, None]))


def _q4_k(blocks: Tensor, out: Tensor) -> None:
    _k_affine(blocks, out, None, 16)


def _q5_k(blocks: Tensor, out: Tensor) -> None:
    # Bit s of byte l belongs to value l of sub-block s.
    bits = blocks[:, None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None]
    _k_affine(blocks, out, (bits & 1).mul_(16), 48)


def _q6_k(blocks: Tensor, out: Tensor) -> None:
    """Two halves of 128; in each, values 0-63 are the low nibbles of 64 bytes, 64-127 the high ones."""
    low = blocks[:, 0:128].reshape(-1, 2, 1, 2, 32)
    low = torch.cat([low & 15, low >> 4], dim=2).view(-1, 2, 4, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3
    out.view(-1, 2, 4, 32).copy_(low | (high << 4))
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float().mul_(_half(blocks, 208))
    out.sub_(32).view(-1, 16, 16).mul_(scales[:, :, None])


_FORMULAS: dict[str, Callable[[Tensor, Tensor], None]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
