"""What the native kernels over the paged cache ask of their tensors."""

from __future__ import annotations

from typing import Any

import torch

from octavo.kernels.api import AttentionMeta, AttentionSpec, CompactKV, KVLayer, Recall
from octavo.kernels.native import _native

KV_DTYPES = (torch.float32, torch.float16)
RECORD_KEYS: int = _native.RECORD_KEYS
#: Bits that a compact value may have.
VALUE_BITS = (8, 4)
#: A history budget holds the window and a group of 16 blocks of 16 beside it.
BUDGET_MARGIN = 256
NO_COMPACT = _native.CompactLayer(planes=[0, 0, 0, 0], num_blocks=0, value_bits=0)


def why_not(spec: AttentionSpec) -> str | None:
    """One sentence why no native kernel serves ``spec``, or None."""
    if spec.device != "cpu":
        return f"fused runs on the CPU, not on {spec.device}"
    if not 32 <= spec.head_dim <= 256 or spec.head_dim % 8:
        return f"fused needs a head_dim from 32 to 256 that is a multiple of 8, got {spec.head_dim}"
    if not 1 <= spec.block_size <= _native.SPAN or spec.block_size & (spec.block_size - 1):
        return f"fused needs a block_size that is a power of two from 1 to 256, got {spec.block_size}"
    if spec.kv_dtype not in KV_DTYPES:
        return f"fused reads K and V as float32 or float16, not {spec.kv_dtype}"
    if spec.num_kv_heads < 1 or spec.num_heads < 1 or spec.num_heads % spec.num_kv_heads:
        return f"num_heads ({spec.num_heads}) must be a multiple of num_kv_heads ({spec.num_kv_heads})"
    if spec.value_bits is not None and spec.value_bits not in VALUE_BITS:
        return f"a compact value has 8 or 4 bits, got {spec.value_bits!r}"
    if spec.value_bits is not None and spec.block_size % RECORD_KEYS:
        return (
            f"compact history needs a block_size that is a multiple of {RECORD_KEYS}, got {spec.block_size}"
        )
    return None


def batch(meta: AttentionMeta, spec: AttentionSpec) -> _native.PagedBatch:
    """Check and copy the step's integers. Raises ValueError, in one sentence, for what cannot be right."""
    reason = why_not(spec)
    if reason is not None:
        raise ValueError(reason)
    num_seqs = meta.seq_lens.shape[0]
    check_ints("seq_lens", meta.seq_lens, (num_seqs,))
    check_ints("cu_seqlens_q", meta.cu_seqlens_q, (num_seqs + 1,))
    check_ints("block_table", meta.block_table, (num_seqs, meta.block_table.shape[-1]))
    return _native.PagedBatch(
        block_table=meta.block_table.data_ptr(),
        seq_lens=meta.seq_lens.data_ptr(),
        cu_seqlens_q=meta.cu_seqlens_q.data_ptr(),
        num_seqs=num_seqs,
        max_blocks=meta.block_table.shape[1],
        shape=shape_of(spec),
        history=_history(meta, spec, num_seqs),
    )


def _history(meta: AttentionMeta, spec: AttentionSpec, num_seqs: int) -> _native.History:
    table, window = meta.compact_table, meta.history_window
    if window is None:
        if meta.history_budget is not None:
            raise ValueError("a history_budget needs a history_window")
        return _native.History(table=0, max_blocks=0, window=0, summaries=0, max_summaries=0, budget=0)
    if spec.value_bits is None:
        raise ValueError("a history_window needs a spec with value_bits")
    if window < RECORD_KEYS or window % RECORD_KEYS:
        raise ValueError(f"history_window must be a multiple of 16, at least 16, got {window}")
    if table is None:
        raise ValueError("a history_window needs a compact_table")
    check_ints("compact_table", table, (num_seqs, table.shape[-1]))
    address, count, budget = _summaries(meta, window, spec, num_seqs)
    return _native.History(
        table=table.data_ptr(),
        max_blocks=table.shape[1],
        window=window,
        summaries=address,
        max_summaries=count,
        budget=budget,
    )


def _summaries(meta: AttentionMeta, window: int, spec: AttentionSpec, num_seqs: int) -> tuple[int, int, int]:
    table, budget = meta.summary_table, meta.history_budget
    if budget is None:
        return 0, 0, 0
    if spec.block_size != RECORD_KEYS:
        raise ValueError(f"a history_budget needs a block_size of 16, got {spec.block_size}")
    if budget % RECORD_KEYS or budget < window + BUDGET_MARGIN:
        raise ValueError(
            f"history_budget must be a multiple of 16, at least history_window + {BUDGET_MARGIN} "
            f"({window + BUDGET_MARGIN}), got {budget}"
        )
    if table is None:
        raise ValueError("a history_budget needs a summary_table")
    check_ints("summary_table", table, (num_seqs, table.shape[1], 3))
    return table.data_ptr(), table.shape[1], budget


def check_layer(q: torch.Tensor, kv: KVLayer, num_tokens: int, spec: AttentionSpec) -> None:
    """Raises ValueError for tensors that do not fit the plan.

    ``q`` may be a view whose tokens are apart (a slice of a joint projection); a token's heads must
    be contiguous.
    """
    check_rows("q", q, (num_tokens, spec.num_heads, spec.head_dim))
    check_kv(kv, spec)


def check_kv(kv: KVLayer, spec: AttentionSpec) -> None:
    """Raises ValueError for a layer's cache that does not fit ``spec``."""
    for name, cache in (("key", kv.key), ("value", kv.value)):
        check_cache(name, cache, (spec.num_kv_heads, spec.block_size, spec.head_dim), spec.kv_dtype)
    if kv.key.shape[0] != kv.value.shape[0]:
        raise ValueError(f"key has {kv.key.shape[0]} blocks but value has {kv.value.shape[0]}")
    if kv.window is not None and kv.window < 1:
        raise ValueError(f"window must be at least 1 or None, got {kv.window}")


def compact_of_step(kv: KVLayer, history_window: int | None, spec: AttentionSpec) -> _native.CompactLayer:
    """The layer's compact history for a native plan, checked where the step reads any."""
    return NO_COMPACT if history_window is None else compact_layer(kv, spec)


def compact_layer(kv: KVLayer, spec: AttentionSpec) -> _native.CompactLayer:
    """The layer's compact history. Raises ValueError where there is none, or one that does not fit."""
    if kv.compact is None or spec.value_bits is None:
        raise ValueError("the step has a history_window but the layer has no compact history")
    check_compact(
        kv.compact, (spec.num_kv_heads, spec.block_size // RECORD_KEYS), spec.head_dim, spec.value_bits
    )
    return _native.CompactLayer(
        planes=[0 if x is None else x.data_ptr() for x in kv.compact],
        num_blocks=kv.compact.key.shape[0],
        value_bits=spec.value_bits,
    )


def recall(recall: Recall, kv: KVLayer, num_seqs: int) -> _native.Recall:
    """What a layer may recall, for a native plan."""
    share, table, strides, report = recall
    if not 0.0 < share < 1.0:
        raise ValueError(f"recall_share must lie between 0 and 1, got {share}")
    blocks = table.shape[1] if table.dim() == 3 else 0
    for name, x in (("recall_table", table), ("recall_strides", strides)):
        if x.dtype != torch.int64 or x.shape != (num_seqs, blocks, 2) or not x.is_contiguous():
            raise ValueError(
                f"{name} must be [{num_seqs}, max_blocks, 2] int64, contiguous; got {describe(x)}"
            )
    if report is not None and (
        report.dtype != torch.float64 or report.shape != (num_seqs, 2) or not report.is_contiguous()
    ):
        raise ValueError(f"recall_report must be [{num_seqs}, 2] float64, contiguous; got {describe(report)}")
    return _native.Recall(
        share=share,
        table=table.data_ptr(),
        strides=strides.data_ptr(),
        max_blocks=blocks,
        layer=kv.layer,
        report=report.data_ptr() if report is not None else 0,
    )


def check_compact(compact: CompactKV, spans: tuple[int, int], head_dim: int, value_bits: int) -> None:
    """Raises ValueError for tensors that do not fit ``spans``, (num_kv_heads, block_size / 16)."""
    value_bytes = _native.value_record_bytes(head_dim, value_bits)
    for name, x, wanted, dtype in (
        ("compact key", compact.key, (_native.record_bytes(head_dim),), torch.uint8),
        ("compact value", compact.value, (value_bytes,), torch.uint8),
        ("compact mean_value", compact.mean_value, (head_dim,), torch.float16),
        ("compact bounds", compact.bounds, (_native.bounds_bytes(head_dim),), torch.uint8),
    ):
        if x is None:
            continue
        check_cache(name, x, (*spans, *wanted), dtype)
        if x.shape[0] != compact.key.shape[0]:
            raise ValueError(f"compact key has {compact.key.shape[0]} blocks but {name} has {x.shape[0]}")


def shape_of(spec: AttentionSpec) -> _native.Shape:
    return native_shape(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.block_size, spec.kv_dtype)


def native_shape(
    num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, kv_dtype: torch.dtype
) -> _native.Shape:
    return _native.Shape(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        half=kv_dtype == torch.float16,
    )


def check_ints(name: str, x: torch.Tensor, shape: tuple[int, ...]) -> None:
    if x.dtype != torch.int32 or x.device.type != "cpu" or x.shape != shape or not x.is_contiguous():
        raise ValueError(f"{name} must be {list(shape)} int32, contiguous, on the CPU; got {describe(x)}")


def check_rows(name: str, x: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Tokens may be apart; what belongs to one token must not be."""
    right = x.dtype == torch.float32 and x.is_cpu and x.shape == shape
    if not right or not (
        x.is_contiguous() or (x.stride(2) == 1 and (shape[1] == 1 or x.stride(1) == shape[2]))
    ):
        raise ValueError(
            f"{name} must be {list(shape)} float32 on the CPU, each token contiguous; got {describe(x)}"
        )


def check_cache(name: str, x: torch.Tensor, block: Any, dtype: torch.dtype) -> None:
    if x.dtype != dtype or not x.is_cpu or x.shape[1:] != block or not x.is_contiguous():
        wanted = ", ".join(str(n) for n in block)
        raise ValueError(
            f"{name} must be [num_blocks, {wanted}] {dtype}, contiguous, on the CPU; got {describe(x)}"
        )


def describe(x: torch.Tensor) -> str:
    return f"{list(x.shape)} {x.dtype}, strides {list(x.stride())}, on {x.device}"
