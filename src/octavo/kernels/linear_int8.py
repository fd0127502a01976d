"""The reference of products with activations in 8 bits: slow, readable, and equal to the kernels to the bit.

The law is in ``csrc/linear_int8.h``; weights are those of a checkpoint, by the formats' own layouts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from octavo.kernels.linear import StoredMatrix, int8_types, weight_formats

BLOCK = 32
#: Blocks whose largest value is below this are 0.
SMALLEST = 2.0**-118


class Quantized(NamedTuple):
    """``x`` is about ``scales * values``: values int64 ``[rows, blocks, 32]`` from -127 to 127, scales
    float32 ``[rows, blocks]``, NaN for a block with a value that is not finite."""

    values: Tensor
    scales: Tensor


class Fields(NamedTuple):
    """A weight is ``scale * value + offset``: values int64 ``[outputs, blocks, 32]``, scales float32
    ``[outputs, blocks, n]`` for n runs of 32 / n values, offsets ``[outputs, blocks]`` where there are."""

    values: Tensor
    scales: Tensor
    offsets: Tensor | None


def quantize(x: Tensor) -> Quantized:
    """float32 ``[rows, inputs]``, inputs a multiple of 32. A pure function of each block of 32."""
    blocks = x.reshape(x.shape[0], -1, BLOCK)
    finite = blocks.isfinite().all(-1)
    largest = blocks.abs().amax(-1).where(finite, 0)
    used = largest >= SMALLEST
    scales = (largest / 127).where(used, 0).where(finite, torch.nan)
    inverse = (127 / largest).where(used, 0)
    values = (blocks.where(finite[..., None], 0) * inverse[..., None]).round().long()
    return Quantized(values, scales)


def fields(stored: StoredMatrix) -> Fields:
    """The integers of a matrix, its scales and offsets. ValueError for a type that has no such kernel."""
    if stored.type not in int8_types():
        raise ValueError(f"activations in int8 need {', '.join(int8_types())}, got {stored.type}")
    form = weight_formats()[stored.type]
    blocks = stored.data.view(stored.outputs, -1, form.block_bytes)
    if stored.type == "q4_k":
        return _q4_k(blocks)
    if stored.type == "q6_k":
        return _q6_k(blocks)
    scales = _halves(blocks[..., 0:2])[..., None]
    if stored.type == "q8_0":
        return Fields(blocks[..., 2:].contiguous().view(torch.int8).long(), scales, None)
    if stored.type == "q4_1":
        return Fields(_nibbles(blocks[..., 4:]), scales, _halves(blocks[..., 2:4]))
    if stored.type == "q4_0":
        return Fields(_nibbles(blocks[..., 2:]) - 8, scales, None)
    fifth = blocks[..., 2:6].contiguous().view(torch.int32).long() >> torch.arange(32) & 1
    return Fields((_nibbles(blocks[..., 6:]) | fifth << 4) - 16, scales, None)


def _q4_k(blocks: Tensor) -> Fields:
    """Eight blocks with scales and minima of 6 bits; two of them share 32 bytes."""
    low, middle, high = (blocks[..., i : i + 4].int() for i in (4, 8, 12))
    scales = torch.cat([low & 63, high & 15 | low >> 6 << 4], -1)
    minima = torch.cat([middle & 63, high >> 4 | middle >> 6 << 4], -1)
    pairs = blocks[..., 16:].reshape(*blocks.shape[:2], 4, 1, 32).long()
    values = torch.cat([pairs & 15, pairs >> 4], -2)
    d, dmin = (_halves(blocks[..., i : i + 2])[..., None] for i in (0, 2))
    return Fields(values.flatten(1, 3), (d * scales).flatten(1)[..., None], (dmin * -minima).flatten(1))


def _q6_k(blocks: Tensor) -> Fields:
    """Two halves of four blocks: low nibbles of 64 bytes, the high ones, and upper bits at 0, 2, 4 and 6."""
    low = blocks[..., :128].reshape(*blocks.shape[:2], 2, 1, 2, 32).long()
    low = torch.cat([low & 15, low >> 4], -3).flatten(-3, -2)
    high = (
        blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, 32).long() >> torch.arange(0, 8, 2)[:, None] & 3
    )
    values = (low | high << 4).flatten(1, 3) - 32
    scales = _halves(blocks[..., 208:])[..., None] * blocks[..., 192:208].contiguous().view(torch.int8)
    return Fields(values, scales.reshape(len(scales), -1, 2), None)


def product(x: Tensor, stored: StoredMatrix) -> Tensor:
    """float32 ``[rows, inputs]`` times the matrix -> ``[rows, outputs]``: one chain over the blocks.

    Where the kernels round once (a fused multiply-add) this rounds to float64 and then to float32, which
    differs once in about 2^29 steps.
    """
    rows, weight = quantize(x), fields(stored)
    total = torch.zeros(x.shape[0], stored.outputs)
    for b in range(rows.scales.shape[1]):
        parts = weight.scales.shape[2]
        for part, run in enumerate(torch.arange(BLOCK).chunk(parts)):
            # Below 2^24: exact as float32.
            sums = (rows.values[:, b, run].double() @ weight.values[:, b, run].double().T).float()
            total = _fma(sums * weight.scales[:, b, part], rows.scales[:, b, None], total)
        if weight.offsets is not None:
            own = rows.scales[:, b] * rows.values[:, b].sum(-1).float()
            total = _fma(weight.offsets[:, b], own[:, None], total)
    return total


def _fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return (a.double() * b.double() + c.double()).float()


def _halves(data: Tensor) -> Tensor:
    return data.contiguous().view(torch.float16).squeeze(-1).float()


def _nibbles(data: Tensor) -> Tensor:
    """16 bytes: the low nibbles are values 0-15, the high ones 16-31."""
    return torch.cat([data & 15, data >> 4], -1).long()
