"""The attention contract that every backend honours, and the explicit choice of a backend.

This package knows tensors only: no requests, no scheduler, no configuration of ours.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

import torch

from octavo.kernels.native import ThreadPool

#: Every row is computed as partials over fixed spans of this many absolute positions, merged in
#: the order of position, so that a result never depends on chunks, batch or threads.
SPAN = 256

#: Bumped by hand whenever any kernel's results change: what was cached before is then not used.
KERNEL_VERSION = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """What a backend must be able to serve; ``why_not`` answers it before anything runs."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    kv_dtype: torch.dtype
    device: str
    need_lse: bool = False
    #: Bits of a value in compact history, 8 or 4; None where no step has any.
    value_bits: int | None = None


class AttentionMeta(NamedTuple):
    """The integer tensors of one step, as in ``ForwardBatch`` (see there for an example).

    ``block_table`` [num_seqs, max_blocks] int32; ``seq_lens`` [num_seqs] int32, keys including this
    step's; ``cu_seqlens_q`` [num_seqs + 1] int32.

    With ``history_window`` (a multiple of 16, at least 16) a query at position p reads its first
    :func:`num_compact_blocks` blocks in compact form, through ``compact_table`` [num_seqs, max_compact] int32
    (ids of compact blocks, rows padded with 0), and the others as stored. What ``block_table`` holds for
    blocks that every query of a sequence reads in compact form is never read.

    With a ``history_budget`` too (tokens, a multiple of 16, at least history_window + 256; blocks of 16) a
    query in block i reads block 0 in compact form, then the summaries of ``layout(num_summarised(i,
    history_budget // 16))``, of a group that is summarised in part the first entries alone, and then the
    blocks from ``first_kept`` on, as above: see ``octavo.kernels.history_layout``. A summary is a compact
    block whose entry e is read as one key, with log(tokens_of(level)) added to its scaled score.
    ``summary_table`` [num_seqs, max_summaries, 3] int32 holds rows (level, unit, compact block), of level -1
    where they are not used: each summary that some query of the sequence reads. ``compact_table`` of blocks
    that every query of a sequence reads as summaries, block 0 aside, is never read. A layer whose window is
    at most history_budget - 256 sees no summarised key and ignores summaries; one whose window hides some of
    them and not all is a ValueError.
    """

    block_table: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    compact_table: torch.Tensor | None = None
    history_window: int | None = None
    summary_table: torch.Tensor | None = None
    history_budget: int | None = None


def num_compact_blocks(position: int, history_window: int, block_size: int) -> int:
    """How many blocks a query reads in compact form: those that lie wholly before position - window."""
    return max(0, (position - history_window) // block_size)


class TopkPlanes(NamedTuple):
    """What top-k attention keeps of every span of 16 keys beside one layer's K and V.

    ``scan`` [num_blocks, num_kv_heads, block_size / 16, record bytes] uint8 holds the keys in int8 around
    their middle, or with ``mean_value`` their mean; ``mean_value`` [num_blocks, num_kv_heads, block_size /
    16, head_dim] float16 the mean of the values, None where no sequence may ask for the tail; ``bounds``
    [num_blocks, num_kv_heads, block_size / 16, bounds bytes] uint8 the least and the greatest of the keys in
    int8, and what a code stands for in float32, None where no sequence may ask for the fast mode.
    """

    scan: torch.Tensor
    mean_value: torch.Tensor | None = None
    bounds: torch.Tensor | None = None


class CompactKV(NamedTuple):
    """One layer's compact history: blocks in 8 bits or fewer, with ids of their own.

    ``key`` and ``value`` are [num_compact, num_kv_heads, block_size / 16, record bytes] uint8. A record of
    keys is as in the scan plane: key j of its 16 is middle (or mean) + scale_j code_j. A value with 8 bits is
    scale_j code_j, with 4 bits minimum_j + scale_j code_j; see ``octavo.kernels.compact``.
    ``mean_value`` [..., head_dim] float16 and ``bounds`` [..., bounds bytes] uint8 are as in ``TopkPlanes``,
    None where the layer's planes have none.
    """

    key: torch.Tensor
    value: torch.Tensor
    mean_value: torch.Tensor | None = None
    bounds: torch.Tensor | None = None


class Recall(NamedTuple):
    """Tokens behind summaries that a step may read again.

    An entry of a summary whose share of a row's softmax is above ``share`` is read as the compact blocks that
    it stands for, where all of them are there. ``table`` [num_seqs, max_blocks, 2] int64 holds addresses of
    layer 0's key records and value records of each block, [num_kv_heads, record bytes] each, 0 where a block
    is not there; ``strides`` the bytes from one layer to the next. Entries that were recalled, and entries
    above the share that were not there, are added to ``report`` [num_seqs, 2] float64. A row's decision is
    that of its own scores with all summaries, and its result is merged in the order: what is left of the
    summaries, the recalled keys in order of position, everything else.
    """

    share: float
    table: torch.Tensor
    strides: torch.Tensor
    report: torch.Tensor | None = None


class KVLayer(NamedTuple):
    """One layer's cache and constants.

    ``key`` and ``value`` are each [num_blocks, num_kv_heads, block_size, head_dim], float32 or
    float16; ``scale`` multiplies q.k; ``window`` is the sliding window in tokens (a query at p sees
    max(0, p - window + 1) .. p) or None. ``planes`` is what top-k attention keeps beside K and V
    (see ``octavo.kernels.topk_paged``), None in a layer that is dense for everybody.
    ``compact`` is its compact history, None where there is none. ``turns`` are those of
    ``octavo.kernels.compact.summarise``. ``layer`` is its number, for ``Recall``.
    """

    key: torch.Tensor
    value: torch.Tensor
    scale: float
    window: int | None = None
    planes: TopkPlanes | None = None
    compact: CompactKV | None = None
    turns: torch.Tensor | None = None
    layer: int = 0


class Kernel(Protocol):
    """What a backend module provides.

    It may also have ``write_kv(key, value, k, v, slot_mapping)``, which stores a step's rows in one layer's
    cache in place of ``KVCache.write``.
    """

    def why_not(self, spec: AttentionSpec) -> str | None:
        """One sentence why this backend cannot serve ``spec``, or None when it can."""
        ...

    def plan(self, meta: AttentionMeta, spec: AttentionSpec, pool: ThreadPool) -> Any:
        """Whatever is worth computing once a step and reusing in every layer."""
        ...

    def attend(
        self,
        q: torch.Tensor,
        kv: KVLayer,
        plan: Any,
        *,
        mass: torch.Tensor | None = None,
        recall: Recall | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Causal attention by absolute position through the block table.

        ``q`` is [num_tokens, num_heads, head_dim] float32. Returns ``out`` of the same shape and, if
        the spec asked for it, ``lse`` [num_tokens, num_heads] float32: the log-sum-exp of the scaled
        scores over the visible keys (else None). To ``mass`` [num_tokens, num_heads] float32 is added the
        share of each row's softmax that fell on summaries (that were not recalled). Only kernels that read
        compact history take ``mass`` and ``recall``.
        """
        ...


#: The interchangeable backends, slowest first, and "reference", the oracle they are tested against.
BACKENDS = ("reference", "loop", "bmm", "sdpa", "fused")


def get(name: str) -> Kernel:
    """The backend called ``name``. Raises ValueError for an unknown name."""
    if name not in BACKENDS:
        raise ValueError(f"attention must be one of {', '.join(BACKENDS)}, got {name!r}")
    return cast(Kernel, importlib.import_module(f"octavo.kernels.{name}"))
