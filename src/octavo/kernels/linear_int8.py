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
    """A weight is ``scale * value + offset``: values int64 ``[outputs, blocks, 32]``, the others float32
    ``[outputs, blocks]``; ``offset`` None where a type has none."""

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
    first = _halves(blocks[..., 0:2])
    if stored.type == "q8_0":
        return Fields(blocks[..., 2:].contiguous().view(torch.int8).long(), first, None)
    if stored.type == "q4_0":
        return Fields(_nibbles(blocks[..., 2:]) - 8, first, None)
    if stored.type == "q4_1":
        return Fields(_nibbles(blocks[..., 4:]), first, _halves(blocks[..., 2:4]))
    # Q4_K: eight blocks with scales and minima of 6 bits; two blocks share 32 bytes.
    low, middle, high = (blocks[..., i : i + 4].int() for i in (4, 8, 12))
    scales = torch.cat([low & 63, high & 15 | low >> 6 << 4], -1)
    minima = torch.cat([middle & 63, high >> 4 | middle >> 6 << 4], -1)
    pairs = blocks[..., 16:].reshape(*blocks.shape[:-1], 4, 1, 32).long()
    values = torch.cat([pairs & 15, pairs >> 4], -2).reshape(stored.outputs, -1, BLOCK)
    second = _halves(blocks[..., 2:4])
    return Fields(
        values,
        (first[..., None] * scales).reshape(stored.outputs, -1),
        (second[..., None] * -minima).reshape(stored.outputs, -1),
    )


def product(x: Tensor, stored: StoredMatrix) -> Tensor:
    """float32 ``[rows, inputs]`` times the matrix -> ``[rows, outputs]``: one chain over the blocks.

    Where the kernels round once (a fused multiply-add) this rounds to float64 and then to float32, which
    differs once in about 2^29 steps.
    """
    rows, weight = quantize(x), fields(stored)
    total = torch.zeros(x.shape[0], stored.outputs)
    for b in range(rows.scales.shape[1]):
        # Below 2^24: exact as float32.
        sums = (rows.values[:, b].double() @ weight.values[:, b].double().T).float()
        total = _fma(sums * weight.scales[:, b], rows.scales[:, b, None], total)
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
