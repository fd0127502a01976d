"""The compact form of blocks that a query's window has left, in C++ (``csrc/compact.cpp``).

Keys are kept as the scan plane keeps them, values with 8 or 4 bits. A token's value of one KV head has a
scale in float16, with 4 bits also a minimum. This form is what a query reads: nothing else decides.

A key or a value that it cannot hold (not finite, or beyond float16's range) is NaN in it, so that it shows in
the result and cannot pass for a number.
"""

from __future__ import annotations

import torch

from octavo.kernels.api import KVLayer
from octavo.kernels.native import ThreadPool, _native

#: Positions per record; a block holds a whole number of them.
RECORD_KEYS: int = _native.RECORD_KEYS
#: Bits that a value may have.
VALUE_BITS = (8, 4)


def key_record_bytes(head_dim: int) -> int:
    """Bytes of the keys of 16 positions of one KV head."""
    return _native.record_bytes(head_dim)


def value_record_bytes(head_dim: int, value_bits: int) -> int:
    """Bytes of the values of 16 positions of one KV head. Raises ValueError for other than 8 or 4 bits."""
    if value_bits not in VALUE_BITS:
        raise ValueError(f"a compact value has 8 or 4 bits, got {value_bits!r}")
    numbers = 1 if value_bits == 8 else 2
    return RECORD_KEYS * (head_dim * value_bits // 8 + 2 * numbers)


def seal(kv: KVLayer, pairs: torch.Tensor, pool: ThreadPool, *, isa: str = "auto") -> None:
    """Fill compact blocks of a layer. ``pairs`` [n, 2] int32: (block, compact block), no compact block twice.

    The result depends on the block's K and V alone. Raises ValueError, in one sentence, before anything is
    written, for a block that there is not or tensors that do not fit.
    """
    raise NotImplementedError
