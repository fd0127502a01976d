"""The compact form of blocks that a query's window has left, and summaries of them (``csrc/compact.cpp``).

Keys are kept as the scan plane keeps them, values with 8 or 4 bits. A token's value of one KV head has a
scale in float16, with 4 bits also a minimum. This form is what a query reads: nothing else decides.

A key or a value that it cannot hold (not finite, or beyond float16's range) is NaN in it, so that it shows in
the result and cannot pass for a number.

A *summary* is a compact block whose entries are means: of the 16 tokens of a block each, or of 4 entries of
another summary each (``csrc/summarise.cpp``; which, tells ``octavo.kernels.history_layout``).
"""

from __future__ import annotations

import torch

from octavo.kernels import paged_checks as checks
from octavo.kernels.api import CompactKV, KVLayer
from octavo.kernels.native import ThreadPool, _native

#: Positions per record; a block holds a whole number of them.
RECORD_KEYS: int = checks.RECORD_KEYS


def key_record_bytes(head_dim: int) -> int:
    """Bytes of the keys of 16 positions of one KV head."""
    return _native.record_bytes(head_dim)


def value_record_bytes(head_dim: int, value_bits: int) -> int:
    """Bytes of the values of 16 positions of one KV head. Raises ValueError for other than 8 or 4 bits."""
    if value_bits not in checks.VALUE_BITS:
        raise ValueError(f"a compact value has 8 or 4 bits, got {value_bits!r}")
    return _native.value_record_bytes(head_dim, value_bits)


def value_bits_of(compact: CompactKV, head_dim: int) -> int:
    """8 or 4, from the size of a record. Raises ValueError for neither."""
    for bits in checks.VALUE_BITS:
        if compact.value.shape[-1] == value_record_bytes(head_dim, bits):
            return bits
    raise ValueError(f"a record of compact values has {compact.value.shape[-1]} bytes, which no form has")


def seal(kv: KVLayer, pairs: torch.Tensor, pool: ThreadPool, *, isa: str = "auto") -> None:
    """Fill compact blocks of a layer. ``pairs`` [n, 2] int32: (block, compact block), no compact block twice.

    The result depends on the block's K and V alone. Raises ValueError, in one sentence, before anything is
    written, for a block that there is not or tensors that do not fit.
    """
    num_blocks, num_kv_heads, block_size, head_dim = kv.key.shape
    if kv.compact is None:
        raise ValueError("the layer has no compact blocks to fill")
    for name, cache in (("key", kv.key), ("value", kv.value)):
        checks.check_cache(name, cache, kv.key.shape[1:], kv.key.dtype)
    bits = value_bits_of(kv.compact, head_dim)
    checks.check_compact(kv.compact, (num_kv_heads, block_size // RECORD_KEYS), head_dim, bits)
    checks.check_ints("pairs", pairs, (pairs.shape[0], 2))
    _native.seal_compact(
        key=kv.key.data_ptr(),
        value=kv.value.data_ptr(),
        num_blocks=num_blocks,
        compact=[0 if x is None else x.data_ptr() for x in kv.compact],
        num_compact=kv.compact.key.shape[0],
        value_bits=bits,
        pairs=pairs.data_ptr(),
        count=pairs.shape[0],
        shape=checks.native_shape(num_kv_heads, num_kv_heads, head_dim, block_size, kv.key.dtype),
        pool=pool,
        isa=isa,
    )


def summarise(
    kv: KVLayer,
    operations: torch.Tensor,
    turns: torch.Tensor | None,
    pool: ThreadPool,
    *,
    isa: str = "auto",
) -> None:
    """Fill compact blocks of a layer with summaries of others, in order.

    ``operations`` [n, 18] int32: (compact block, level, 16 source compact blocks; a level of 1 or more has 4,
    then -1). Entry e of level 0 is the mean key and the mean value of source e; of a higher level, the means
    of entries 4 (e % 4) to 4 (e % 4) + 3 of source e // 4. Blocks are of 16 positions.

    ``turns`` [levels, 16, 2, head_dim] float32, cos and sin as a row of ``RopeTable``: before the mean, key i
    of the 16 or 4 is turned by ``turns[level, i]``; None turns nothing. The result depends on the sources'
    bytes and the turns alone. A source's NaN makes the entry NaN. Raises ValueError, in one sentence, before
    anything is written, for a block or level that there is not or tensors that do not fit.
    """
    num_kv_heads, block_size, head_dim = kv.key.shape[1:]
    if kv.compact is None:
        raise ValueError("the layer has no compact blocks to summarise")
    if block_size != RECORD_KEYS:
        raise ValueError(f"summaries need a block_size of {RECORD_KEYS}, got {block_size}")
    bits = value_bits_of(kv.compact, head_dim)
    checks.check_compact(kv.compact, (num_kv_heads, 1), head_dim, bits)
    checks.check_ints("operations", operations, (operations.shape[0], _native.OPERATION_INTS))
    if turns is not None and (
        turns.dtype != torch.float32
        or turns.shape[1:] != (RECORD_KEYS, 2, head_dim)
        or not turns.is_contiguous()
    ):
        raise ValueError(f"turns must be [levels, 16, 2, {head_dim}] float32; got {checks.describe(turns)}")
    _native.summarise_compact(
        compact=[kv.compact.key.data_ptr(), kv.compact.value.data_ptr()],
        num_compact=kv.compact.key.shape[0],
        value_bits=bits,
        operations=operations.data_ptr(),
        count=operations.shape[0],
        turns=(0, 0) if turns is None else (turns.data_ptr(), turns.shape[0]),
        shape=checks.native_shape(num_kv_heads, num_kv_heads, head_dim, block_size, kv.key.dtype),
        pool=pool,
        isa=isa,
    )
