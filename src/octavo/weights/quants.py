"""From GGML's block formats to float32, over many blocks at once.

In numpy on one thread, because it is limited by memory anyway, and because the parallel loops of torch wait
for each other at every operation: ten times slower where other processes use the CPUs too.
Every formula multiplies first and adds second, each rounded to float32, as the formats define it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.weights.gguf import GGML_TYPES

# Blocks per call, so that the temporaries stay in the cache.
_CHUNK_BLOCKS = 4096
_TYPES = {kind.name: kind for kind in GGML_TYPES.values()}

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


def dequantize(kind: str, data: Bytes, shape: tuple[int, ...]) -> Floats:
    """The values of ``shape`` as float32, in memory of their own.

    ``kind`` is the type's name, in either case; ``data`` is uint8 [num_bytes], whole blocks.
    """
    kind = kind.upper()
    formula, storage = _FORMULAS[kind], _TYPES[kind]
    out = np.empty(shape, np.float32)
    # A type without blocks is cut into rows of no particular length: here, one row.
    plain = storage.block_size == 1
    blocks = data.reshape(1, -1) if plain else data.reshape(-1, storage.block_bytes)
    rows = out.reshape(1, -1) if plain else out.reshape(-1, storage.block_size)
    for start in range(0, len(blocks), _CHUNK_BLOCKS):
        formula(blocks[start : start + _CHUNK_BLOCKS], rows[start : start + _CHUNK_BLOCKS])
    return out


# Each formula takes blocks uint8 [n, block_bytes] and fills out float32 [n, block_size].


def _f32(blocks: Bytes, out: Floats) -> None:
    out[...] = blocks.view(np.float32)


def _f16(blocks: Bytes, out: Floats) -> None:
    out[...] = blocks.view(np.float16)


def _bf16(blocks: Bytes, out: Floats) -> None:
    np.left_shift(blocks.view(np.uint16), 16, out=out.view(np.uint32), dtype=np.uint32)


def _packed(blocks: Bytes, start: int, stop: int, dtype: Any = np.uint8) -> NDArray[Any]:
    """A range of bytes of every block as [n, items of dtype], contiguous."""
    return np.ascontiguousarray(blocks[:, start:stop]).view(dtype)


def _half(blocks: Bytes, byte: int) -> Floats:
    """The float16 at a byte of every block, as float32 [n, 1]."""
    return _packed(blocks, byte, byte + 2, np.float16).astype(np.float32)


def _nibbles(blocks: Bytes, start: int) -> Bytes:
    """16 bytes of every block -> [n, 32]: the low nibbles, then the high ones."""
    packed = _packed(blocks, start, start + 16, np.uint64)
    halves = np.empty((len(blocks), 2, 2), np.uint64)
    halves[:, 0] = packed
    np.right_shift(packed, 4, out=halves[:, 1])
    halves &= 0x0F0F0F0F0F0F0F0F
    return halves.view(np.uint8).reshape(-1, 32)


def _fifth_bits(blocks: Bytes, start: int) -> Bytes:
    """4 bytes of every block, bit j for value j -> [n, 32] of 0 or 16."""
    bits = np.unpackbits(_packed(blocks, start, start + 4), axis=1, bitorder="little")
    return np.left_shift(bits, 4, out=bits)


def _q4_0(blocks: Bytes, out: Floats) -> None:
    out[...] = _nibbles(blocks, 2)
    out -= 8
    out *= _half(blocks, 0)


def _q4_1(blocks: Bytes, out: Floats) -> None:
    out[...] = _nibbles(blocks, 4)
    out *= _half(blocks, 0)
    out += _half(blocks, 2)


def _q5_0(blocks: Bytes, out: Floats) -> None:
    out[...] = _nibbles(blocks, 6) | _fifth_bits(blocks, 2)
    out -= 16
    out *= _half(blocks, 0)


def _q5_1(blocks: Bytes, out: Floats) -> None:
    out[...] = _nibbles(blocks, 8) | _fifth_bits(blocks, 4)
    out *= _half(blocks, 0)
    out += _half(blocks, 2)


def _q8_0(blocks: Bytes, out: Floats) -> None:
    out[...] = blocks[:, 2:].view(np.int8)
    out *= _half(blocks, 0)


def _k_scales(packed: Bytes) -> tuple[Floats, Floats]:
    """The 6-bit scales and minima of 8 sub-blocks, packed uint8 [n, 12] -> two float32 [n, 8, 1].

    Bytes 0-3 hold scales 0-3, bytes 4-7 minima 0-3, in their low 6 bits; their top 2 bits are the top bits of
    scales and minima 4-7, whose low 4 bits are the low and the high nibbles of bytes 8-11.
    """
    first, second, rest = packed[:, 0:4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, (rest & 15) | ((first >> 6) << 4)], axis=1)
    minima = np.concatenate([second & 63, (rest >> 4) | ((second >> 6) << 4)], axis=1)
    return scales.astype(np.float32)[:, :, None], minima.astype(np.float32)[:, :, None]


def _k_nibbles(blocks: Bytes, start: int) -> Bytes:
    """128 bytes of every block -> [n, 8, 32]: each run of 32 bytes is two sub-blocks, low nibbles first."""
    packed = _packed(blocks, start, start + 128).reshape(-1, 4, 1, 32)
    return np.concatenate([packed & 15, packed >> 4], axis=2).reshape(-1, 8, 32)


def _k_affine(blocks: Bytes, values: Bytes, out: Floats) -> None:
    """values [n, 8, 32] by each sub-block's own scale and minimum, as in Q4_K and Q5_K."""
    scales, minima = _k_scales(_packed(blocks, 4, 16))
    scales *= _half(blocks, 0)[:, :, None]
    minima *= _half(blocks, 2)[:, :, None]
    rows = out.reshape(-1, 8, 32)
    np.multiply(values, scales, out=rows)
    rows -= minima


def _q4_k(blocks: Bytes, out: Floats) -> None:
    _k_affine(blocks, _k_nibbles(blocks, 16), out)


def _q5_k(blocks: Bytes, out: Floats) -> None:
    # Bit s of byte l belongs to value l of sub-block s.
    bits = _packed(blocks, 16, 48)[:, None, :] >> np.arange(8, dtype=np.uint8)[:, None]
    _k_affine(blocks, _k_nibbles(blocks, 48) | np.left_shift(bits & 1, 4, dtype=np.uint8), out)


def _q6_k(blocks: Bytes, out: Floats) -> None:
    """Two halves of 128; in each, values 0-63 are the low nibbles of 64 bytes, 64-127 the high ones."""
    packed = _packed(blocks, 0, 128).reshape(-1, 2, 1, 64)
    low = np.concatenate([packed & 15, packed >> 4], axis=2).reshape(-1, 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = (_packed(blocks, 128, 192).reshape(-1, 2, 1, 32) >> shifts) & 3
    values = low | (high << 4)
    scales = _packed(blocks, 192, 208, np.int8) * _half(blocks, 208)
    rows = out.reshape(-1, 16, 16)
    rows[...] = values.reshape(-1, 16, 16)
    rows -= 32
    rows *= scales[:, :, None]


_FORMULAS: dict[str, Callable[[Bytes, Floats], None]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
