"""The tensors of one engine step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

#: Positions that reads are counted by.
SPAN = 16

HistoryMean = Literal["centre", "plain"]


@dataclass(slots=True)
class AttnReads:
    """Rows of a step whose reads are counted, and what each layer of attention adds.

    ``rows`` ``[n]`` int64 are rows of ``token_ids`` and ``num_keys`` the keys that each sees where no window
    hides any. ``layers``: (read, seen), each ``[n, spans of the longest]`` int64, pairs of a query head and a
    key.
    """

    rows: torch.Tensor
    num_keys: list[int]
    layers: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """Everything that the model needs for one step. Sequences lie packed, one after the other.

    Attributes:
        token_ids: ``[num_tokens]`` int64, the tokens to compute.
        positions: ``[num_tokens]`` int64, their absolute positions.
        slot_mapping: ``[num_tokens]`` int64, where each token's K and V go:
            ``block * block_size + offset``; -1 is padding, nothing is written.
        block_table: ``[num_seqs, max_blocks]`` int32, the blocks of each sequence in order of
            position; rows are padded with 0, which is never read past ``seq_lens``.
        seq_lens: ``[num_seqs]`` int32, keys of each sequence *including this step's*.
        cu_seqlens_q: ``[num_seqs + 1]`` int32, where each sequence's rows start in ``token_ids``.
        logits_rows: ``[num_logits]`` int64, the rows of ``token_ids`` whose logits are wanted.
        attn_topk: ``[num_seqs, 5]`` int32, which keys attention keeps (columns as
            ``octavo.kernels.topk_paged.Policy``); None where all are dense.
        attn_report: ``[num_seqs, 8]`` float64, to which each layer of attention adds what became of the
            rows of the sequences that are not dense (columns as ``octavo.kernels.topk_paged.Report``); None
            likewise.
        attn_reads: to which each layer adds the keys it read, None where nobody asks.
        rows_read: ``[num_seqs]`` int32, how many of each sequence's last rows of the result are read; None
            for all. A model may leave the others as they are before the last layer has finished.
        compact_table: ``[num_seqs, max_compact]`` int32, the compact ids of each sequence's first blocks in
            order of position, rows padded with 0: as many as its last query of the step reads in compact
            form. None without ``history_window``.
        history_window: a query at position p reads its first ``max(0, (p - history_window) // block_size)``
            blocks in compact form. What ``block_table`` holds for blocks that all queries of a sequence read
            so is never read. None: everything is read as stored.
        compactions: ``[n, 2]`` int32, pairs (block, compact block): each layer makes the compact form of
            these blocks, after the step's K and V are written and before it attends. None for none.
        history_budget: tokens of compact and stored history; what is older is read as summaries, which
            ``octavo.kernels.history_layout`` names. None: there are none.
        summary_table: ``[num_seqs, max_summaries, 3]`` int32, rows (level, unit, compact block) of all
            summaries that a sequence's queries of the step read; of level -1 where they are not used. None
            without ``history_budget``.
        summaries: ``[n, 18]`` int32, operations (compact block, level, 16 source compact blocks) as
            ``octavo.kernels.compact.summarise`` takes them: each layer makes these summaries in order, after
            the step's compactions. None for none.
        summary_mass: ``[num_tokens, num_heads]`` float32, to which each layer adds the share of each row's
            softmax that fell on summaries. None where nobody asks.
        recall_share: entries of summaries with more than this share of a row's softmax are read again as
            the compact blocks that they stand for, where these are there: see ``octavo.kernels.api.Recall``.
            None: none are.
        recall_table: ``[num_seqs, max_blocks, 2]`` int64, addresses of layer 0's key records and value
            records of each block's compact form, 0 where it is not there. Only those of blocks that a query
            reads as summaries are looked at.
        recall_strides: ``[num_seqs, max_blocks, 2]`` int64, bytes from one layer to the next.
        recall_report: ``[num_seqs, 2]`` float64, to which each layer adds the entries that its rows recalled
            and those above the share that were not there. None where nobody asks.
        history_mean: "centre": keys are turned to the centre of their span before their mean is taken;
            "plain": they are not.

    Example, block_size 4. A decodes its 6th token (position 5) and holds blocks 7 and 2. B starts
    with 4 cached tokens (block 9) and computes a chunk of 3 (positions 4, 5, 6) into block 3; its
    prompt is longer, so only A's row yields logits::

        token_ids    = [a5, b4, b5, b6]
        positions    = [ 5,  4,  5,  6]
        slot_mapping = [ 9, 12, 13, 14]     # 2*4+1, 3*4+0, 3*4+1, 3*4+2
        block_table  = [[7, 2], [9, 3]]
        seq_lens     = [ 6,  7]
        cu_seqlens_q = [ 0,  1,  4]
        logits_rows  = [ 0]
        rows_read    = [ 1, 0]

    Query row i of sequence s stands at absolute position
    ``seq_lens[s] - (cu_seqlens_q[s+1] - cu_seqlens_q[s]) + i`` and sees the keys 0 up to there.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    logits_rows: torch.Tensor
    attn_topk: torch.Tensor | None = None
    attn_report: torch.Tensor | None = None
    attn_reads: AttnReads | None = None
    rows_read: torch.Tensor | None = None
    compact_table: torch.Tensor | None = None
    history_window: int | None = None
    compactions: torch.Tensor | None = None
    history_budget: int | None = None
    summary_table: torch.Tensor | None = None
    summaries: torch.Tensor | None = None
    summary_mass: torch.Tensor | None = None
    history_mean: HistoryMean = "centre"
    recall_share: float | None = None
    recall_table: torch.Tensor | None = None
    recall_strides: torch.Tensor | None = None
    recall_report: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def turns_keys(self) -> bool:
        """Whether the step makes summaries of keys that are turned first."""
        return self.summaries is not None and self.history_mean == "centre"

    def read_rows(self) -> NDArray[np.int64]:
        """The rows of ``token_ids`` that ``rows_read`` stands for, ``[num_read]``."""
        assert self.rows_read is not None
        ends, counts = self.cu_seqlens_q[1:].numpy(force=True), self.rows_read.numpy(force=True)
        runs = [np.arange(end - count, end) for end, count in zip(ends, counts, strict=True)]
        return np.concatenate(runs, dtype=np.int64)

    @property
    def num_seqs(self) -> int:
        return self.seq_lens.shape[0]
